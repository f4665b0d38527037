"""Connect to Services: which ones answer, through which endpoint, and how long the first packet takes."""

import gc
import os
import select
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pykubeproxy.lab.network import Namespace
from tests.bench import workload

# Close with a reset, which leaves no connection in TIME_WAIT.
_RESET = struct.pack("ii", 1, 0)
# As many connections at a time as the backlog of the pods holds.
_BATCH = 250
_SECONDS = 0.3
# Connections before those that count, so that the processor has the code in its cache.
_WARM_UP = 100
# Connect timeout in the kernel, a timeval of five seconds. Python's timeout would add to the measured time.
_PATIENCE = struct.pack("@ll", 5, 0)


class Unreachable(RuntimeError):
    """A connection failed."""


class Pods:
    """Listens on the port of all pods, in both families."""

    def __init__(self) -> None:
        self._listeners = [_listener(family) for family in (socket.AF_INET, socket.AF_INET6)]

    def accept(self) -> None:
        """Accept one IPv4 connection and close it."""
        self._listeners[0].accept()[0].close()

    def drain(self) -> set[str]:
        """Close all pending connections. Return the addresses of their pods."""
        addresses = set()
        for listener in self._listeners:
            listener.setblocking(False)
            try:
                while True:
                    with listener.accept()[0] as accepted:
                        addresses.add(accepted.getsockname()[0])
            except BlockingIOError:
                listener.setblocking(True)
        return addresses

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
        client.settimeout(_SECONDS)
        try:
            client.connect((address, workload.SERVICE_PORT))
        except OSError:
            return False
    return True


def batches(addresses: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield the addresses in parts for `unanswered`."""
    for at in range(0, len(addresses), _BATCH):
        yield addresses[at : at + _BATCH]


def unanswered(pods: Pods, addresses: Sequence[str]) -> list[str]:
    """Connect to all these IPv4 Services at once, and return those that do not accept it."""
    waiting: dict[int, tuple[socket.socket, str]] = {}
    failed = []
    with select.epoll() as poll:
        for address in addresses:
            client = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            client.connect_ex((address, workload.SERVICE_PORT))
            poll.register(client, select.EPOLLOUT)
            waiting[client.fileno()] = client, address
        deadline = time.monotonic() + _SECONDS
        while waiting and (left := deadline - time.monotonic()) > 0:
            for number, _ in poll.poll(left):
                client, address = waiting.pop(number)
                with client:
                    if client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                        failed.append(address)
        for client, address in waiting.values():
            client.close()
            failed.append(address)
    pods.drain()
    return failed


def first_packets(node: Namespace, pods: Pods, services: Sequence[str]) -> list[float]:
    """Return the microseconds of a TCP connect to each of these Services. Raise Unreachable.

    Both ends are this thread, on one processor: no process has to be woken, so this is the time of the packets.
    """
    taken = []
    clock = time.perf_counter_ns
    with _undisturbed(), node.entered():
        for address in [*services[-_WARM_UP:], *services]:
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _PATIENCE)
                started = clock()
                try:
                    client.connect((address, workload.SERVICE_PORT))
                except OSError as error:
                    raise Unreachable(f"{address} cannot be connected to: {error.strerror}") from None
                taken.append((clock() - started) / 1000)
                pods.accept()
    return taken[len(taken) - len(services) :]


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
