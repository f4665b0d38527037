"""Real connections from inside a namespace, counted by the pod that answered or by how they failed.

The calling thread enters the namespace and opens the sockets itself, so six hundred connections cost a
fraction of a second.
"""

import contextlib
import errno
import itertools
import json
import os
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from pykubeproxy.lab.namespaces import Namespace

# Source ports in turn, between those that programs of the lab listen on and the node ports. The kernel would soon
# choose one again, and one from which a Service was tried before there were rules leads past it for two minutes:
# connection tracking remembers that the first packet was not rewritten.
_PORTS = itertools.cycle(range(11000, 29999))

REQUEST = b"GET / HTTP/1.1\r\nHost: lab\r\nConnection: close\r\n\r\n"


class Target(NamedTuple):
    """Where to connect to."""

    address: str
    port: int

    def __str__(self) -> str:
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


@dataclass
class Seen:
    """What a number of connections saw.

    `pods` counts answers by pod, `clients` by the client address the pod saw, `real_ips` by the
    X-Real-IP header it was sent; `errors` counts failures by kind: "refused", "timeout", "unreachable",
    "reset", "closed" (without an answer), "http 502" and the like. `slowest` is in seconds.
    """

    pods: Counter[str] = field(default_factory=Counter)
    clients: Counter[str] = field(default_factory=Counter)
    real_ips: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0

    @property
    def failed(self) -> int:
        """Connections without an answer."""
        return self.errors.total()

    @property
    def total(self) -> int:
        """All connections."""
        return self.pods.total() + self.failed

    def __add__(self, other: "Seen") -> "Seen":
        return Seen(
            self.pods + other.pods,
            self.clients + other.clients,
            self.real_ips + other.real_ips,
            self.errors + other.errors,
            max(self.slowest, other.slowest),
        )

    def __str__(self) -> str:
        parts = [f"{pod} {count}" for pod, count in sorted(self.pods.items())]
        parts += [f"{kind} {count}" for kind, count in sorted(self.errors.items())]
        return ", ".join(parts) or "nothing"


class Failed(Exception):
    """A connection that brought no answer; the text is the kind."""


class Prober:
    """Opens connections from a namespace; `source` is an own address to open them from, `port` likewise."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace

    def tcp(
        self, target: Target, count: int = 1, *, source: str = "", port: int = 0, timeout: float = 1.0
    ) -> Seen:
        """That many new TCP connections one after the other, an HTTP request on each."""
        return self._probe(lambda: http_once(target, source, port, timeout), count)

    def udp(
        self, target: Target, count: int = 1, *, source: str = "", port: int = 0, timeout: float = 1.0
    ) -> Seen:
        """That many datagrams, each from a new socket; with `port` all of them from that source port."""
        return self._probe(lambda: datagram_once(target, source, port, timeout), count)

    def _probe(self, once: Callable[[], dict[str, str]], count: int) -> Seen:
        seen = Seen()
        with self._namespace.entered():
            for _ in range(count):
                _count(once, seen)
        return seen

    def stream(self, target: Target, *, pause: float = 0.005, timeout: float = 1.0) -> "Stream":
        """New TCP connections without end, `pause` seconds between them, until told to stop."""
        return Stream(self._namespace, target, pause, timeout)


class Stream:
    """A constant stream of new connections, made by a thread of its own."""

    def __init__(self, namespace: Namespace, target: Target, pause: float, timeout: float) -> None:
        self._seen = Seen()
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(namespace, target, pause, timeout), daemon=True
        )
        self._thread.start()

    def _run(self, namespace: Namespace, target: Target, pause: float, timeout: float) -> None:
        with namespace.entered():
            while not self._stop.wait(pause):
                _count(lambda: http_once(target, "", 0, timeout), self._seen)

    def stop(self) -> Seen:
        """End it and return what was seen."""
        self._stop.set()
        self._thread.join()
        return self._seen


def _count(once: Callable[[], dict[str, str]], seen: Seen) -> None:
    started = time.monotonic()
    try:
        answer = once()
    except Failed as failure:
        seen.errors[str(failure)] += 1
    else:
        seen.pods[answer["pod"]] += 1
        seen.clients[answer["client"]] += 1
        if answer["real_ip"]:
            seen.real_ips[answer["real_ip"]] += 1
    seen.slowest = max(seen.slowest, time.monotonic() - started)


def http_once(target: Target, source: str, port: int, timeout: float) -> dict[str, str]:
    """One connection, one request; returns the pod's answer or raises Failed."""
    with _socket(target, socket.SOCK_STREAM, source, port, timeout) as connection:
        try:
            _connect(connection, target, timeout)
            connection.sendall(REQUEST)
            answer = b""
            while piece := connection.recv(4096):
                answer += piece
        except OSError as error:
            raise Failed(_kind(error)) from None
    head, _, body = answer.partition(b"\r\n\r\n")
    if not head:
        raise Failed("closed")
    status = head.split(b" ", 2)[1].decode()
    if status != "200":
        raise Failed(f"http {status}")
    return _decoded(body)


def _connect(connection: socket.socket, target: Target, timeout: float) -> None:
    """Connect; raises OSError, TimeoutError after `timeout` seconds.

    Everything here happens on one machine, so an ICMP error often arrives while the kernel is still inside
    connect(). It then keeps the error as a "soft" one and would tell of it a second later, after the next
    SYN; SO_ERROR tells now.
    """
    connection.setblocking(False)
    error = connection.connect_ex(target)
    if error == errno.EINPROGRESS:
        error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if not error:
            if not select.select([], [connection], [], timeout)[1]:
                raise TimeoutError
            error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error:
        raise OSError(error, os.strerror(error))
    connection.settimeout(timeout)


def datagram_once(target: Target, source: str, port: int, timeout: float) -> dict[str, str]:
    """One datagram and its answer; raises Failed."""
    with _socket(target, socket.SOCK_DGRAM, source, port, timeout) as connection:
        try:
            connection.connect(target)
            # A REJECT on the sender's own node fails send() itself; recv() then tells what came back.
            with contextlib.suppress(PermissionError):
                connection.send(b"?")
            return _decoded(connection.recv(4096))
        except OSError as error:
            raise Failed(_kind(error)) from None


def _socket(target: Target, kind: int, source: str, port: int, timeout: float) -> socket.socket:
    ipv6 = ":" in target.address
    opened = socket.socket(socket.AF_INET6 if ipv6 else socket.AF_INET, kind)
    opened.settimeout(timeout)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    opened.bind((source, port or next(_PORTS)))  # "" is any address
    return opened


def _decoded(body: bytes) -> dict[str, str]:
    try:
        return dict(json.loads(body))
    except ValueError:
        raise Failed("garbled") from None


def _kind(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return "reset"
    return (
        "unreachable"
        if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH)
        else (error.strerror or "error").lower()
    )
