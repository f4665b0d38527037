"""Open new connections without pause, many at a time, and print the results as lines of JSON.

Usage: client.py FILE, with a JSON document of the routes. On SIGTERM it ends, after the connections under way. Runs as a
script in the namespace of a client.

A new connection succeeds if the pod's greeting arrives and no SYN was sent twice; a datagram succeeds if it is answered.
Each route also keeps a connection open and sends a message every TICK. An answer that takes longer than SUSPECT seconds
is reported at once, for the packet capture. After TIMEOUT seconds it counts as a failure.
"""

import errno
import itertools
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from collections import Counter, deque
from contextlib import suppress
from pathlib import Path
from typing import Any

SUSPECT, TIMEOUT = 0.9, 4.0  # seconds; a SYN is sent again after one second
TICK = 0.05  # seconds between two messages on a held connection, and between two reports
# Source ports: neither listening ports nor node ports.
PORTS = (*range(11000, 29999), *range(33000, 60999))
# Seconds until a source port is used again on a route: conntrack keeps a closed connection for 10 s, and a new one from
# the same port may take its translation instead of passing the rules.
REST = 12.0
HELD_SOURCES = 100  # reserved on each route for its held connections

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with RST, so that nothing stays in TIME_WAIT
_TCP_INFO_SIZE, _TOTAL_RETRANS = 104, 100
_KINDS = {
    errno.ECONNREFUSED: "refused",
    errno.ECONNRESET: "reset",
    errno.ENETUNREACH: "unreachable",
    errno.EHOSTUNREACH: "unreachable",
}

Source = tuple[str, int]


class Route:
    """A target and the sources from which it is tried, one after the other."""

    def __init__(self, document: dict[str, Any], ports: tuple[int, ...]) -> None:
        self.name: str = document["name"]
        self.target: tuple[str, int] = (document["address"], document["port"])
        self.datagrams: bool = document["datagrams"]
        self.affine: bool = document["affine"]
        self.pod_of: dict[str, str] = {}
        ends = [(address, port) for port in ports for address in document["sources"]]
        self.held_sources = itertools.cycle(ends[:HELD_SOURCES])
        self._sources = itertools.cycle(ends[HELD_SOURCES:])
        self._used: deque[float] = deque([-REST] * (len(ends) - HELD_SOURCES))

    def next_source(self, now: float) -> Source | None:
        """Return the next source; None if all were used a moment ago."""
        if now - self._used[0] < REST:
            return None
        self._used.popleft()
        self._used.append(now)
        return next(self._sources)

    def bound(self, source: Source) -> socket.socket:
        """Return a new non-blocking socket. Raises OSError if another program uses the port."""
        family = socket.AF_INET6 if ":" in source[0] else socket.AF_INET
        made = socket.socket(family, socket.SOCK_DGRAM if self.datagrams else socket.SOCK_STREAM)
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if not self.datagrams:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        try:
            made.bind(source)
        except OSError:
            made.close()
            raise
        return made

    def connected(self, source: Source) -> tuple[socket.socket, str]:
        """Return a connection and the pod that greeted; waits for both. Raises OSError."""
        made = self.bound(source)
        made.settimeout(TIMEOUT)
        made.connect(self.target)
        pod = made.recv(64).decode().strip()
        made.setblocking(False)
        return made, pod


class Flow:
    """A connection or datagram under way, or a held connection; `begun` is when it or its last message was sent."""

    __slots__ = ("answered", "begun", "connection", "held", "route", "source", "suspected")

    def __init__(self, route: Route, connection: socket.socket, source: Source, *, held: bool) -> None:
        self.route, self.connection, self.source, self.held = route, connection, source, held
        self.begun = time.monotonic()
        self.answered = held
        self.suspected = False

    def describe(self) -> dict[str, object]:
        ends = {"source": self.source, "target": self.route.target}
        return {"route": self.route.name, **ends, "seconds": round(time.monotonic() - self.begun, 3)}


class Client:
    """Opens connections on all routes in turn, at most `at_once` at a time and `rate` a second."""

    def __init__(self, document: dict[str, Any]) -> None:
        given = document["routes"]
        step = len(PORTS) // len(given)
        # Each route has its own ports: two connections to one pod may not differ by their target only.
        self._routes = [Route(item, PORTS[n * step : (n + 1) * step]) for n, item in enumerate(given)]
        self._at_once: int = document["at_once"]
        self._rate: float = document["rate"]
        self._poll = select.epoll()
        self._flows: dict[int, Flow] = {}
        self._counts: Counter[str] = Counter()
        self._under_way = 0  # new connections
        self._stopping = False
        signal.signal(signal.SIGTERM, self._stop)

    def _stop(self, *_: object) -> None:
        self._stopping = True

    def run(self) -> None:
        """Open connections until SIGTERM."""
        for route in self._routes:
            if route.affine:
                self._learn_pods(route)
            if not route.datagrams:
                self._hold(route)
        _print(ready=True)
        turn = itertools.cycle(self._routes)
        ticked = refilled = time.monotonic()
        allowed = 1.0
        while not self._stopping or self._under_way:
            now = time.monotonic()
            allowed, refilled = min(allowed + (now - refilled) * self._rate, self._at_once), now
            while allowed >= 1 and self._under_way < self._at_once and not self._stopping:
                allowed -= 1
                self._open(next(turn))
            for descriptor, _ in self._poll.poll(0.005):
                if flow := self._flows.get(descriptor):
                    self._received(flow)
            if time.monotonic() - ticked >= TICK:
                ticked = time.monotonic()
                self._tick(ticked)
        _print(counts=self._counts)

    def _learn_pods(self, route: Route) -> None:
        """Open one connection from each address, so that affinity knows it."""
        while (source := route.next_source(time.monotonic())) and source[0] not in route.pod_of:
            connection, route.pod_of[source[0]] = route.connected(source)
            connection.close()

    def _hold(self, route: Route) -> None:
        source = next(route.held_sources)
        connection, _ = route.connected(source)
        self._add(Flow(route, connection, source, held=True))

    def _open(self, route: Route) -> None:
        source = route.next_source(time.monotonic())
        if source is None:
            return
        try:
            connection = route.bound(source)
        except OSError:
            return
        flow = Flow(route, connection, source, held=False)
        self._add(flow)
        error = connection.connect_ex(route.target)
        if error not in (0, errno.EINPROGRESS):
            self._end(flow, _kind(error))
        elif route.datagrams:
            self._send(flow)

    def _add(self, flow: Flow) -> None:
        self._flows[flow.connection.fileno()] = flow
        self._under_way += not flow.held
        self._poll.register(flow.connection, select.EPOLLIN)

    def _send(self, flow: Flow) -> None:
        try:
            flow.connection.send(b"x")
        except OSError as error:
            self._end(flow, _kind(error.errno))

    def _received(self, flow: Flow) -> None:
        try:
            received = flow.connection.recv(64).decode().strip()
        except BlockingIOError:
            # An ICMP error ends a connection attempt late; SO_ERROR has it at once.
            if error := flow.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self._end(flow, _kind(error))
        except OSError as error:
            self._end(flow, _kind(error.errno))
        else:
            if flow.held:
                self._answered(flow, received)
            else:
                self._end(flow, _fault(flow, received))

    def _answered(self, flow: Flow, received: str) -> None:
        if not received:
            self._end(flow, "closed")
            return
        self._counts[f"held {flow.route.name}"] += 1
        flow.answered, flow.suspected = True, False

    def _end(self, flow: Flow, failure: str) -> None:
        """Close a connection, and count it; replace a held one."""
        del self._flows[flow.connection.fileno()]
        flow.connection.close()
        self._under_way -= not flow.held
        if failure:
            _print(failure=f"held connection {failure}" if flow.held else failure, **flow.describe())
        else:
            self._counts[flow.route.name] += 1
            self._counts[f"slow {flow.route.name}"] += flow.suspected
        if flow.held:
            with suppress(OSError):  # new connections fail too, and show why
                self._hold(flow.route)

    def _tick(self, now: float) -> None:
        """Look for late answers, send on held connections, and report counts."""
        for flow in list(self._flows.values()):
            if flow.held and flow.answered:
                flow.begun, flow.answered = now, False
                self._send(flow)
            elif now - flow.begun > TIMEOUT:
                self._end(flow, "timeout")
            elif now - flow.begun > SUSPECT and not flow.suspected:
                flow.suspected = True
                _print(late=True, **flow.describe())
        _print(counts=self._counts)
        self._counts.clear()


def _fault(flow: Flow, pod: str) -> str:
    """Return what is wrong with an answer, or ""."""
    if not pod:
        return "closed"
    if flow.route.affine and (before := flow.route.pod_of[flow.source[0]]) != pod:
        return f"{pod} instead of {before}"
    if not flow.route.datagrams and (count := _retransmissions(flow.connection)):
        return f"SYN retransmitted {count} times"
    return ""


def _retransmissions(connection: socket.socket) -> int:
    """Return how many segments this side has retransmitted; it sends none but the SYN."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_SIZE)
    return int(struct.unpack_from("I", info, _TOTAL_RETRANS)[0])


def _kind(error: int | None) -> str:
    return _KINDS.get(error or 0, os.strerror(error or 0).lower())


def _print(**document: object) -> None:
    sys.stdout.write(f"{json.dumps(document)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    Client(json.loads(Path(sys.argv[1]).read_text())).run()
