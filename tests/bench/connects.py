"""Measure connections to Services and pods: success, and the time of the first packet."""

import gc
import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pykubeproxy.lab.network import Namespace
from tests.bench import workload

# Close with a reset, which leaves no connection in TIME_WAIT.
_RESET = struct.pack("ii", 1, 0)
_BLOCK = 250
# Connect timeout in the kernel, a timeval of five seconds. Python's timeout would add to the measured time.
_PATIENCE = struct.pack("@ll", 5, 0)

Nanoseconds = list[int]


class Unreachable(RuntimeError):
    """A connection failed."""


class Pods:
    """Listens on the port of all pods, in both families."""

    def __init__(self) -> None:
        self._listeners = [_listener(family) for family in (socket.AF_INET, socket.AF_INET6)]

    def accept(self) -> None:
        """Accept one IPv4 connection and close it."""
        self._listeners[0].accept()[0].close()

    def drain(self) -> None:
        """Close all pending connections."""
        for listener in self._listeners:
            listener.setblocking(False)
            try:
                while True:
                    listener.accept()[0].close()
            except BlockingIOError:
                listener.setblocking(True)

    def close(self) -> None:
        """Close the listeners."""
        for listener in self._listeners:
            listener.close()


def _listener(family: socket.AddressFamily) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    if family == socket.AF_INET6:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("::" if family == socket.AF_INET6 else "0.0.0.0", workload.POD_PORT))
    listener.listen(512)
    listener.settimeout(None)
    return listener


def reaches(address: str) -> bool:
    """Return whether a Service accepts a connection at once from the calling thread's namespace."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        client.settimeout(0.3)
        try:
            client.connect((address, workload.SERVICE_PORT))
        except OSError:
            return False
    return True


def compare(
    pods: Pods, ways: Sequence[tuple[Namespace, Sequence[tuple[str, int]]]]
) -> tuple[Nanoseconds, ...]:
    """How long it takes to connect from each of some namespaces to each of as many addresses and ports.

    They take turns in blocks, on one processor, and both ends are this very thread: nobody has to be woken, so what is
    measured is the way of the packets. Raises Unreachable.
    """
    taken: tuple[Nanoseconds, ...] = tuple([] for _ in ways)
    with _undisturbed():
        for node, targets in ways:
            _connect(node, pods, targets[: _BLOCK // 2])  # warm up
        for at in range(0, len(ways[0][1]), _BLOCK):
            for (node, targets), nanoseconds in zip(ways, taken, strict=True):
                nanoseconds += _connect(node, pods, targets[at : at + _BLOCK])
    return taken


def _connect(node: Namespace, pods: Pods, targets: Sequence[tuple[str, int]]) -> Nanoseconds:
    taken = []
    clock = time.perf_counter_ns
    with node.entered():
        for target in targets:
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _PATIENCE)
                started = clock()
                try:
                    client.connect(target)
                except OSError as error:
                    raise Unreachable(f"{target[0]} cannot be connected to: {error.strerror}") from None
                taken.append(clock() - started)
                pods.accept()
    return taken


@contextmanager
def _undisturbed() -> Iterator[None]:
    processors = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(processors)})
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        os.sched_setaffinity(0, processors)
