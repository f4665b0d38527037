"""Connections from a network namespace, counted by the pod that answered or by the kind of failure."""

import contextlib
import errno
import http.client
import itertools
import json
import os
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from pykubeproxy.lab.network import Namespace
from pykubeproxy.objects import address_and_port

# Use source ports in turn, between the lab's listening ports and those of trace --live, whose probes would meet entries in
# TIME_WAIT. A port from which a Service was tried before its rules existed fails for two minutes: conntrack keeps the
# untranslated connection.
_PORTS = itertools.cycle(range(11000, 20000))
_REQUEST = b"GET / HTTP/1.1\r\nHost: lab\r\nConnection: close\r\n\r\n"
_KINDS = {
    errno.ECONNREFUSED: "refused",
    errno.ECONNRESET: "reset",
    errno.EPIPE: "reset",
    errno.ENETUNREACH: "unreachable",
    errno.EHOSTUNREACH: "unreachable",
}


class ProbeTarget(NamedTuple):
    """An address and port to connect to."""

    address: str
    port: int

    def __str__(self) -> str:
        return address_and_port(self.address, self.port)


@dataclass
class ProbeResult:
    """The results of a number of connections.

    `pods` counts answers by pod, `clients` by the client address that the pod reported, `real_ips` by the
    X-Real-IP header it received; `errors` counts failures by kind: "refused", "timed out", "unreachable",
    "reset", "closed" (without an answer), "http 502" and the like. `slowest` is in seconds.
    """

    pods: Counter[str] = field(default_factory=Counter)
    clients: Counter[str] = field(default_factory=Counter)
    real_ips: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0

    @property
    def failed(self) -> int:
        """The number of connections without an answer."""
        return self.errors.total()

    @property
    def total(self) -> int:
        return self.pods.total() + self.failed

    def __add__(self, other: "ProbeResult") -> "ProbeResult":
        return ProbeResult(
            self.pods + other.pods,
            self.clients + other.clients,
            self.real_ips + other.real_ips,
            self.errors + other.errors,
            max(self.slowest, other.slowest),
        )

    def __str__(self) -> str:
        answers = [f"{pod} {count}" for pod, count in sorted(self.pods.items())]
        failures = [f"{count} {kind}" for kind, count in sorted(self.errors.items())]
        return ", ".join(answers + failures) or "nothing"

    def count(self, probe: Callable[[], dict[str, str]]) -> None:
        started = time.monotonic()
        try:
            answer = probe()
        except ProbeError as error:
            self.errors[str(error)] += 1
        else:
            self.pods[answer["pod"]] += 1
            self.clients[answer["client"]] += 1
            if answer["real_ip"]:
                self.real_ips[answer["real_ip"]] += 1
        self.slowest = max(self.slowest, time.monotonic() - started)


class ProbeError(Exception):
    """A connection without an answer; the text is the kind of failure."""


class Prober:
    """Opens connections from a namespace; `source` selects one of its addresses, `timeout` is in seconds."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace

    def tcp(
        self, target: ProbeTarget, count: int = 1, *, source: str = "", timeout: float = 1.0
    ) -> ProbeResult:
        """Open TCP connections one after the other, with one HTTP request on each."""
        return self._probe(lambda: probe_tcp(target, source, timeout), count)

    def requests(self, target: ProbeTarget, count: int, *, timeout: float = 1.0) -> ProbeResult:
        """Send HTTP requests one after the other on one TCP connection."""
        with self._namespace.entered():
            connection = http.client.HTTPConnection(*target, timeout, source_address=("", next(_PORTS)))
            with contextlib.closing(connection):
                return _counted(lambda: _request(connection), count)

    def udp(self, target: ProbeTarget, count: int = 1, *, timeout: float = 1.0) -> ProbeResult:
        """Send datagrams one after the other, each from a new socket."""
        return self._probe(lambda: probe_udp(target, timeout), count)

    def _probe(self, probe: Callable[[], dict[str, str]], count: int) -> ProbeResult:
        with self._namespace.entered():
            return _counted(probe, count)

    def stream(self, target: ProbeTarget, *, pause: float = 0.005) -> "Stream":
        """Open TCP connections in a thread, `pause` seconds apart, until stopped."""
        return Stream(self._namespace, target, pause)


def _counted(probe: Callable[[], dict[str, str]], count: int) -> ProbeResult:
    result = ProbeResult()
    for _ in range(count):
        result.count(probe)
    return result


class Stream(threading.Thread):
    """A continuous stream of new TCP connections."""

    def __init__(self, namespace: Namespace, target: ProbeTarget, pause: float) -> None:
        super().__init__(daemon=True)
        self._namespace, self._target, self._pause = namespace, target, pause
        self._result = ProbeResult()
        self._ended = threading.Event()
        self.start()

    def run(self) -> None:
        with self._namespace.entered():
            while not self._ended.wait(self._pause):
                self._result.count(lambda: probe_tcp(self._target, "", 1.0))

    def stop(self) -> ProbeResult:
        self._ended.set()
        self.join()
        return self._result


def probe_tcp(target: ProbeTarget, source: str, timeout: float) -> dict[str, str]:
    """Send one request on a new connection and return the pod's answer; raises ProbeError."""
    answer = b""
    with _probe_socket(target, socket.SOCK_STREAM, source, timeout) as connection:
        _connect(connection, target, timeout)
        connection.sendall(_REQUEST)
        while piece := connection.recv(4096):
            answer += piece
    head, _, body = answer.partition(b"\r\n\r\n")
    if not head:
        raise ProbeError("closed")
    status = head.split(b" ", 2)[1].decode()
    if status != "200":
        raise ProbeError(f"HTTP {status}")
    return _decoded(body)


def _request(connection: http.client.HTTPConnection) -> dict[str, str]:
    """Send a request on an open connection and return the pod's answer; raises ProbeError."""
    try:
        connection.request("GET", "/")
        return _decoded(connection.getresponse().read())
    except (OSError, http.client.HTTPException) as error:
        raise ProbeError(str(error)) from None


def probe_udp(target: ProbeTarget, timeout: float) -> dict[str, str]:
    """Send one datagram and return the pod's answer; raises ProbeError."""
    with _probe_socket(target, socket.SOCK_DGRAM, "", timeout) as connection:
        connection.connect(target)
        # A REJECT on the sender's own node fails send(); recv() then returns the ICMP error.
        with contextlib.suppress(PermissionError):
            connection.send(b"?")
        return _decoded(connection.recv(4096))


def _connect(connection: socket.socket, target: ProbeTarget, timeout: float) -> None:
    """Connect; raises OSError, TimeoutError after `timeout` seconds.

    On one machine an ICMP error often arrives inside connect(). The kernel keeps it as a soft error and would
    return it a second later, after the next SYN; SO_ERROR returns it at once.
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


def _bind(connection: socket.socket, source: str) -> None:
    """Bind to the next free port; the source "" is any address."""
    while True:
        try:
            return connection.bind((source, next(_PORTS)))
        except OSError as error:  # other programs use ports, too
            if error.errno != errno.EADDRINUSE:
                raise


@contextlib.contextmanager
def _probe_socket(target: ProbeTarget, kind: int, source: str, timeout: float) -> Iterator[socket.socket]:
    """Open a socket; raises ProbeError for an OSError inside."""
    with socket.socket(socket.AF_INET6 if ":" in target.address else socket.AF_INET, kind) as result:
        result.settimeout(timeout)
        result.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _bind(result, source)
        try:
            yield result
        except TimeoutError:
            raise ProbeError("timed out") from None
        except OSError as error:
            raise ProbeError(_KINDS.get(error.errno or 0, (error.strerror or "error").lower())) from None


def _decoded(body: bytes) -> dict[str, str]:
    try:
        return dict(json.loads(body))
    except ValueError:
        raise ProbeError("garbled") from None
