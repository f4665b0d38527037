"""An API server with faults, and a log of its requests."""

import os
import select
import socket
import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Literal
from urllib.parse import unquote

import msgspec

from pykubeproxy.http import JSON, Handler, Request, Response, Send, Stream
from pykubeproxy.lab.apiserver import ApiError, ApiServer
from pykubeproxy.lab.apiserver.__main__ import main
from pykubeproxy.lab.apiserver.server import locate, verb_of
from tests.fakes.disturbed_exec import disturbed, drop
from tests.fakes.waiting import PATIENCE


class Entry(msgspec.Struct, frozen=True):
    """One request. The resource is the plural with its group, such as endpointslices.discovery.k8s.io, or ""."""

    verb: str
    resource: str
    path: str
    query: str
    user_agent: str


class RequestLog:
    """Counts all requests by verb and resource, and keeps the latest 10,000."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._entries: deque[Entry] = deque(maxlen=10_000)
        self._counts: Counter[tuple[str, str]] = Counter()

    def record(self, entry: Entry) -> None:
        """Add a request."""
        with self._changed:
            self._entries.append(entry)
            self._counts[entry.verb, entry.resource] += 1
            self._changed.notify_all()

    def entries(self, verb: str = "", resource: str = "") -> list[Entry]:
        """Return the latest requests, oldest first, all or of one verb or resource."""
        with self._changed:
            return [e for e in self._entries if verb in ("", e.verb) and resource in ("", e.resource)]

    def count(self, verb: str = "", resource: str = "") -> int:
        """Return the number of requests, all or of one verb or resource."""
        with self._changed:
            return self._count(verb, resource)

    def wait(self, count: int, verb: str = "", resource: str = "") -> None:
        """Wait for a number of requests. Raise TimeoutError if they do not come in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._count(verb, resource) >= count, PATIENCE):
                kind = f"{verb} {resource}".strip() or "any"
                raise TimeoutError(
                    f"{self._count(verb, resource)} requests ({kind}) after {PATIENCE} s, not {count}"
                )

    def clear(self) -> None:
        """Reset log and counts."""
        with self._changed:
            self._entries.clear()
            self._counts.clear()

    def _count(self, verb: str, resource: str) -> int:
        return sum(n for (v, r), n in self._counts.items() if verb in ("", v) and resource in ("", r))


DRIP_SECONDS = 0.05
POLL_SECONDS = 0.02


_AtOnce = Literal["drop", "release", "end-watches", "compact", "clear"]
_OfRequests = Literal["hang", "error", "delay", "truncate", "stall", "drip", "echo"]


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fault; also the JSON that POST /_lab/faults takes.

    drop: close all connections. hang: do not answer requests until release. error: answer with a status. delay: answer
    some seconds late. truncate: end the JSON in the middle (of the last event, on a watch), in a response that is
    complete HTTP; of an exec, drop its connection at its first output. stall: an exec whose output stops there, until
    release. drip: a response that never ends, with a blank now and then. echo: a watch on which each event comes again
    after the one that follows it. end-watches: end running watches as if they timed out. compact: drop the history, so
    that old versions get a 410. clear: everything back to normal.
    """

    do: _AtOnce | _OfRequests
    verb: str = ""  # only requests with this verb, such as list or watch
    path: str = ""  # only requests whose path contains this
    times: int | None = None  # number of requests; by default 1 for error and truncate, else until cleared
    seconds: float = 0.0  # delay
    status: int = 500
    retry_after: int | None = None  # seconds, for error


class Watches:
    """The watches of a server, which can be ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[_Watch] = set()

    @property
    def running(self) -> int:
        """Return the number of watches."""
        return len(self._running)

    def end(self) -> None:
        """End all running watches as if they timed out."""
        with self._lock:
            for watch in self._running:
                watch.end()

    def wrap(self, stream: Stream) -> Stream:
        """Return a watch stream that can be ended."""

        def wrapped(send: Send, client: int) -> None:
            watch = _Watch(client)

            def noted(data: bytes) -> None:
                if not data:  # the headers: from now on the client gets every event
                    with self._lock:
                        self._running.add(watch)
                send(data)

            try:
                stream(noted, watch.fileno())
            except _Truncated:
                pass
            finally:
                with self._lock:
                    self._running.discard(watch)
                watch.close()

        return wrapped


class _Watch:
    """A descriptor that becomes readable when the client leaves or the watch must end."""

    def __init__(self, client: int) -> None:
        self._poll = select.epoll()
        self._end = os.eventfd(0)
        self._poll.register(client, select.EPOLLIN)
        self._poll.register(self._end, select.EPOLLIN)

    def fileno(self) -> int:
        return self._poll.fileno()

    def end(self) -> None:
        os.eventfd_write(self._end, 1)

    def close(self) -> None:
        self._poll.close()
        os.close(self._end)


class Faults:
    """The faults of one server. All matching orders apply, the oldest first."""

    def __init__(self, server: "FaultyApiServer") -> None:
        self._server = server
        self._lock = threading.Lock()
        self._pending: list[_Pending] = []
        self._released = threading.Event()

    def drop_connections(self) -> None:
        self._server.drop_connections()

    def hang(self, *, verb: str = "", path: str = "") -> None:
        self.apply(Order("hang", verb, path))

    def release(self) -> None:
        """End `hang` and answer the waiting requests."""
        with self._lock:
            self._pending = [pending for pending in self._pending if pending.order.do != "hang"]
            self._released.set()
            self._released = threading.Event()

    def fail(
        self, status: int, times: int = 1, *, verb: str = "", path: str = "", retry_after: int | None = None
    ) -> None:
        """Answer the next matching requests with an HTTP status, and a Retry-After in seconds if given.

        kubectl repeats a refused exec over SPDY: refuse it twice.
        """
        self.apply(Order("error", verb, path, times, status=status, retry_after=retry_after))

    def delay(self, seconds: float, *, verb: str = "") -> None:
        self.apply(Order("delay", verb, seconds=seconds))

    def truncate(self, times: int = 1, *, verb: str = "", path: str = "") -> None:
        self.apply(Order("truncate", verb, path, times))

    def stall(self, times: int) -> None:
        self.apply(Order("stall", path="/exec", times=times))

    def drip(self, *, verb: str) -> None:
        self.apply(Order("drip", verb))

    def echo(self) -> None:
        self.apply(Order("echo", "watch"))

    def end_watches(self) -> None:
        self._server.watches.end()

    def compact(self) -> None:
        self._server.store.compact()

    def clear(self) -> None:
        """Remove all faults."""
        self.release()
        with self._lock:
            self._pending.clear()

    def apply(self, order: Order) -> None:
        """Execute an order. Orders about requests stay until used up or cleared."""
        at_once: dict[str, Callable[[], None]] = {
            "drop": self.drop_connections,
            "release": self.release,
            "end-watches": self.end_watches,
            "compact": self.compact,
            "clear": self.clear,
        }
        if order.do in at_once:
            at_once[order.do]()
            return
        with self._lock:
            self._pending.append(_Pending(order))

    def take(self, verb: str, path: str) -> list[Order]:
        """Return the orders for a request and count it. Waits for delays and hangs."""
        with self._lock:
            matching = [pending for pending in self._pending if pending.applies(verb, path)]
            self._pending = [pending for pending in self._pending if pending.left != 0]
            released = self._released
        for pending in matching:
            pending.wait(released)
        return [pending.order for pending in matching]

    def release_waiter(self) -> Callable[[socket.socket], None]:
        """Return a function that waits for the next `release`; it raises ConnectionResetError if the client leaves."""
        with self._lock:
            released = self._released

        def wait(connection: socket.socket) -> None:
            poll = select.poll()
            poll.register(connection, select.POLLRDHUP)
            while not released.wait(POLL_SECONDS):
                if poll.poll(0):
                    raise ConnectionResetError

        return wait

    def drip_stream(self, send: Send, _: int) -> None:
        """Send an endless body; return after `clear`."""
        with self._lock:
            released = self._released
        send(b"{")
        while not released.wait(DRIP_SECONDS):
            send(b" ")


class _Pending:
    """An order about requests, with its remaining number of requests."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.left = order.times
        if order.times is None and order.do in ("error", "truncate"):
            self.left = 1

    def applies(self, verb: str, path: str) -> bool:
        """Return whether the order matches a request, and count it if so."""
        if self.order.verb not in ("", verb) or self.order.path not in path or self.left == 0:
            return False
        if self.left is not None:
            self.left -= 1
        return True

    def wait(self, released: threading.Event) -> None:
        """Delay a request as ordered."""
        if self.order.do == "delay":
            released.wait(self.order.seconds)
        elif self.order.do == "hang":
            released.wait()


class FaultyApiServer(ApiServer):
    """An API server that logs `requests`, counts `watches.running` and has `faults`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.requests = RequestLog()
        self.watches = Watches()
        self.faults = Faults(self)
        super().__init__(*arguments, middleware=self._middleware, **options)

    def stop(self) -> None:
        """Stop, and clear all faults."""
        self.faults.clear()
        super().stop()

    def _middleware(self, handler: Handler) -> Handler:
        return lambda request: self._handle(request, handler)

    def _handle(self, request: Request, handler: Handler) -> Response:
        if (request.method, request.path) == ("POST", "/_lab/faults"):
            return self._order(request)
        target, path = locate(request.path), unquote(request.path)
        verb = verb_of(request, target)
        resource = target.resource.qualified if target else ""
        agent = request.headers.get("user-agent", "")
        self.requests.record(Entry(verb, resource, path, request.query, agent))
        orders = {order.do: order for order in reversed(self.faults.take(verb, path))}
        if order := orders.get("error"):
            return _error(order)
        if target is None:
            return handler(request)
        if "drip" in orders:
            return Response(content_type=JSON, stream=self.faults.drip_stream)
        response = handler(request)
        if response.upgrade is not None:
            if "truncate" in orders:
                return disturbed(response.upgrade, drop)
            if "stall" in orders:
                return disturbed(response.upgrade, self.faults.release_waiter())
            return response
        if response.stream is None:
            kept = len(response.body) // 2 if "truncate" in orders else None
            return msgspec.structs.replace(response, body=response.body[:kept])
        stream = response.stream
        if "echo" in orders:
            stream = _wrapped(stream, _EchoingSend)
        if "truncate" in orders:
            stream = _wrapped(stream, _TruncatedSend)
        return msgspec.structs.replace(response, stream=self.watches.wrap(stream))

    def _order(self, request: Request) -> Response:
        try:
            self.faults.apply(msgspec.json.decode(request.body, type=Order))
        except msgspec.DecodeError as error:
            return ApiError(400, f"not an order for a fault: {error}").response()
        return Response(b"{}", JSON)


def _error(order: Order) -> Response:
    details = None if order.retry_after is None else {"retryAfterSeconds": order.retry_after}
    return ApiError(order.status, "this error was ordered", details=details).response()


def _wrapped(stream: Stream, wrapper: Callable[[Send], Send]) -> Stream:
    return lambda send, client: stream(wrapper(send), client)


class _Truncated(Exception):
    """Ends a response on purpose."""


class _TruncatedSend:
    """Sends all but the second half of the last line, then ends the watch."""

    def __init__(self, send: Send) -> None:
        self._send = send

    def __call__(self, data: bytes) -> None:
        last = len(data) - (data.rfind(b"\n", 0, -1) + 1)
        self._send(data[: len(data) - last // 2])
        if data:
            raise _Truncated


class _EchoingSend:
    """Sends every line again after the line that follows it."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._last = b""

    def __call__(self, data: bytes) -> None:
        sent = []
        for line in data.splitlines(keepends=True):
            sent += [line, self._last]
            self._last = line
        self._send(b"".join(sent))


if __name__ == "__main__":
    main(FaultyApiServer)
