"""Requests and responses on one connection. h11 holds the protocol state; this module adds sockets and limits."""

import re
import socket
import time
from collections.abc import Callable, Mapping
from email.utils import formatdate
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import h11
import msgspec

TEXT, HTML, JSON = "text/plain; charset=utf-8", "text/html; charset=utf-8", "application/json"

# Time and bytes to read from a refused client. Closing a socket with unread data sends a reset, which may overtake
# the response.
_LINGER_SECONDS, _LINGER_BYTES = 0.5, 1 << 18
_READ_BYTES = 1 << 16
# h11 accepts these, proxies in front of us may read them differently: a bare CR or LF, and a folded header.
_AMBIGUOUS_LINE = re.compile(rb"\r(?!\n)|(?<!\r)\n|\r\n[ \t]")

Send = Callable[[bytes], None]
#: Writes a body piece by piece and returns at its end. Gets a function that sends a piece at once (the headers go
#: with the first one, which may be empty), and the connection's file descriptor, readable when the client leaves.
Stream = Callable[[Send, int], None]


class Limits(msgspec.Struct, frozen=True):
    """What clients may use. Seconds of None mean no limit."""

    connections: int = 32  # each has a thread
    head_bytes: int = 8192  # request line and headers
    headers: int = 64
    body_bytes: int = 0
    request_seconds: float = 5.0  # for the whole request; the first one counts from accepting the connection
    response_seconds: float | None = 5.0  # for each write
    idle_seconds: float | None = 30.0  # between two requests on a connection
    methods: tuple[str, ...] = ("GET", "HEAD")  # empty: any


class Request(msgspec.Struct, frozen=True):
    """A request. The path is as sent, neither decoded nor normalized; header names are in lower case."""

    path: str
    query: str = ""
    method: str = "GET"
    headers: Mapping[str, str] = {}
    body: bytes = b""

    @property
    def accept(self) -> str:
        """The header Accept."""
        return self.headers.get("accept", "")


class Response(msgspec.Struct, frozen=True):
    """A response, with `body` or a `stream` that writes it. The server adds Content-Length, Date and the like."""

    body: bytes = b""
    content_type: str = TEXT
    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()
    stream: Stream | None = None


Handler = Callable[[Request], Response]


def text(body: str) -> Response:
    """Return a response of plain text."""
    return Response(body.encode())


def router(routes: Mapping[str, Callable[[], Response]]) -> Handler:
    """Return a handler that chooses by exact path and answers 404 to any other."""

    def handle(request: Request) -> Response:
        respond = routes.get(request.path)
        return respond() if respond else Response(b"404 page not found\n", status=404)

    return handle


def serve(
    connection: socket.socket, handler: Handler, limits: Limits, on_request: Callable[[], None]
) -> None:
    """Answer requests until the client leaves or breaks a rule. Call `on_request` before each but the first.

    Raise OSError if the client is gone or too slow, and what the handler raises, after sending a 500.
    """
    exchange = _Exchange(connection, limits)
    while exchange.answer(handler) and exchange.wait():
        on_request()


class _Refused(Exception):
    """The request gets an error response and does not reach the handler."""

    def __init__(self, status: int, reason: str = "", headers: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(reason)
        phrase = f"{status} {HTTPStatus(status).phrase.lower()}"
        body = f"{phrase}: {reason}\n" if reason else f"{phrase}\n"
        self.response = Response(body.encode(), status=status, headers=(*headers, ("Connection", "close")))


class _Exchange:
    """The h11 state of a connection, driven by its socket."""

    def __init__(self, connection: socket.socket, limits: Limits) -> None:
        self._socket = connection
        self._limits = limits
        self._protocol = h11.Connection(h11.SERVER, max_incomplete_event_size=limits.head_bytes)
        self._deadline = time.monotonic() + limits.request_seconds
        self._head_only = False  # the response has no body, as HEAD wants it

    def answer(self, handler: Handler) -> bool:
        """Answer one request. Return False if the connection cannot be used for another."""
        try:
            request = self._request()
        except _Refused as refused:
            self._send(refused.response)
            self._linger()
            return False
        if request is None:
            return False
        try:
            response = handler(request)
        except Exception:
            self._send(_Refused(500).response)
            raise
        self._send(response)
        return self._protocol.our_state is h11.DONE and self._protocol.their_state is h11.DONE

    def wait(self) -> bool:
        """Wait for the next request. Return True; raise TimeoutError if none begins in time."""
        self._protocol.start_next_cycle()
        if not self._protocol.trailing_data[0]:
            self._socket.settimeout(self._limits.idle_seconds)
            self._protocol.receive_data(self._socket.recv(_READ_BYTES))
        self._deadline = time.monotonic() + self._limits.request_seconds
        return True

    def _request(self) -> Request | None:
        """Read the next request; None if the client closes the connection instead."""
        received = bytearray(self._protocol.trailing_data[0])
        event = self._event(received)
        if not isinstance(event, h11.Request):
            return None
        self._head_only = event.method == b"HEAD"
        head = bytes(received[: len(received) - len(self._protocol.trailing_data[0])])
        request = _checked(event, head, self._limits)
        if self._protocol.they_are_waiting_for_100_continue:
            go_on = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            self._write(self._protocol.send(go_on) or b"")
        body = bytearray()
        while isinstance(event := self._event(), h11.Data):
            body += event.data
            if len(body) > self._limits.body_bytes:
                raise _too_large(self._limits)
        return msgspec.structs.replace(request, body=bytes(body))

    def _event(self, received: bytearray | None = None) -> Any:
        """Return h11's next event and append what is read for it to `received`."""
        while True:
            try:
                event = self._protocol.next_event()
            except h11.RemoteProtocolError as error:
                raise _Refused(error.error_status_hint) from error
            if event is not h11.NEED_DATA:
                return event
            self._socket.settimeout(max(self._deadline - time.monotonic(), 0.001))
            try:
                data = self._socket.recv(_READ_BYTES)
            except TimeoutError:
                raise _Refused(408) from None
            if received is not None:
                received += data
            self._protocol.receive_data(data)

    def _send(self, response: Response) -> None:
        headers = [
            ("Content-Type", response.content_type),
            ("X-Content-Type-Options", "nosniff"),
            *response.headers,
            ("Date", formatdate(usegmt=True)),
        ]
        if response.stream is None:
            headers.append(("Content-Length", str(len(response.body))))
        reason = HTTPStatus(response.status).phrase.encode()
        pending = [
            self._protocol.send(h11.Response(status_code=response.status, headers=headers, reason=reason))
        ]

        def send(data: bytes) -> None:
            pending.append(self._protocol.send(h11.Data(data=data)))
            self._write(*pending)
            pending.clear()

        if response.stream is not None and not self._head_only:
            response.stream(send, self._socket.fileno())
        elif not self._head_only:
            pending.append(self._protocol.send(h11.Data(data=response.body)))
        self._write(*pending, self._protocol.send(h11.EndOfMessage()))

    def _write(self, *pieces: bytes | None) -> None:
        self._socket.settimeout(self._limits.response_seconds)
        self._socket.sendall(b"".join([piece for piece in pieces if piece]))

    def _linger(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)
        deadline, left = time.monotonic() + _LINGER_SECONDS, _LINGER_BYTES
        while left > 0 and (seconds := deadline - time.monotonic()) > 0:
            self._socket.settimeout(seconds)
            data = self._socket.recv(min(left, _READ_BYTES))
            if not data:
                return
            left -= len(data)


def _checked(event: h11.Request, head: bytes, limits: Limits) -> Request:
    """Return a request without its body. Raise _Refused for one that is ambiguous, not allowed or too large."""
    if len(head) > limits.head_bytes or len(event.headers) > limits.headers:
        raise _Refused(431)
    if _AMBIGUOUS_LINE.search(head):
        raise _Refused(400, "malformed line end")
    if event.http_version not in (b"1.0", b"1.1"):
        raise _Refused(505)
    method = event.method.decode()
    if limits.methods and method not in limits.methods:
        raise _Refused(405, headers=(("Allow", ", ".join(limits.methods)),))
    headers: dict[str, str] = {}
    for raw_name, raw_value in event.headers:
        name, value = raw_name.decode(), raw_value.decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    if int(headers.get("content-length", "0")) > limits.body_bytes:
        raise _too_large(limits)
    path, query = _split(event.target.decode())
    return Request(path, query, method, headers)


def _split(target: str) -> tuple[str, str]:
    """Return path and query of a request target in origin or absolute form (RFC 9112, 3.2)."""
    before, _, query = target.partition("?")
    try:
        path = before if before.startswith("/") else urlsplit(before).path
    except ValueError:
        path = ""
    if not path.startswith("/"):
        raise _Refused(400, "malformed path")
    return path, query


def _too_large(limits: Limits) -> _Refused:
    return _Refused(413, f"at most {limits.body_bytes} bytes are accepted")
