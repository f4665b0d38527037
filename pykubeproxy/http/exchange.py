"""Requests and responses on one connection. h11 holds the protocol state; this module adds sockets and limits."""

import re
import socket
import time
from collections.abc import Callable
from email.utils import formatdate
from http import HTTPStatus
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any
from urllib.parse import urlsplit

import h11
import msgspec

from pykubeproxy.http import Handler, Limits, Request, Response

# Limits for reading from a client after an error response. Closing a socket with unread data sends a reset, which may
# overtake the response.
_LINGER_SECONDS, _LINGER_BYTES = 0.5, 1 << 18
_READ_BYTES = 1 << 16
# A bare CR or LF, or a folded header: h11 accepts them, but a proxy in front may read them differently.
_AMBIGUOUS_LINE = re.compile(rb"\r(?!\n)|(?<!\r)\n|\r\n[ \t]")


def serve(
    connection: socket.socket, handler: Handler, limits: Limits, on_request: Callable[[], None]
) -> None:
    """Answer requests until the client leaves or breaks a rule. Call `on_request` before each but the first.

    Raises OSError if the client is gone or too slow. Sends a 500 if the handler raises, and passes its exception on.
    """
    exchange = _Exchange(connection, limits)
    while exchange.answer(handler):
        exchange.wait()
        on_request()


def plain_address(host: str) -> IPv4Address | IPv6Address:
    """Return the address of a client, an IPv4-mapped one as IPv4."""
    address = ip_address(host)
    return (isinstance(address, IPv6Address) and address.ipv4_mapped) or address


def _peer_address(connection: socket.socket) -> IPv4Address | IPv6Address | None:
    """Return the client's address, None on a unix socket. Raises OSError if the client is gone."""
    name = connection.getpeername()
    return plain_address(name[0]) if isinstance(name, tuple) else None


class _HttpError(Exception):
    def __init__(self, status: int, reason: str = "") -> None:
        super().__init__(reason)
        body = ": ".join(filter(None, (f"{status} {HTTPStatus(status).phrase.lower()}", reason)))
        self.response = Response(f"{body}\n".encode(), status=status, headers=(("Connection", "close"),))


class _Exchange:
    """The h11 state of a connection, driven by its socket."""

    def __init__(self, connection: socket.socket, limits: Limits) -> None:
        self._socket = connection
        self._peer = _peer_address(connection)
        self._limits = limits
        self._protocol = h11.Connection(h11.SERVER, max_incomplete_event_size=limits.head_bytes)
        self._deadline = time.monotonic() + limits.request_seconds
        self._head_only = False  # the request is a HEAD: its response has no body
        self._ignores_body = False  # the request has a body that is not read

    def answer(self, handler: Handler) -> bool:
        """Answer one request. Return False if the connection cannot be used for another."""
        try:
            request = self._request()
        except _HttpError as error:
            self._send(error.response)
            self._linger()
            return False
        if request is None:
            return False
        try:
            response = handler(request)
        except Exception:
            self._send(_HttpError(500).response)
            raise
        if response.upgrade is not None:
            response.upgrade(self._socket, self._protocol.trailing_data[0])
            return False
        self._send(response)
        if self._ignores_body:
            self._linger()
            return False
        return self._protocol.our_state is h11.DONE and self._protocol.their_state is h11.DONE

    def wait(self) -> None:
        """Wait for the next request. Raises TimeoutError if none begins in time."""
        self._protocol.start_next_cycle()
        if not self._protocol.trailing_data[0]:
            self._socket.settimeout(self._limits.idle_seconds)
            self._protocol.receive_data(self._socket.recv(_READ_BYTES))
        self._deadline = time.monotonic() + self._limits.request_seconds

    def _request(self) -> Request | None:
        """Read the next request; None if the client closes the connection instead."""
        received = bytearray(self._protocol.trailing_data[0])
        event = self._event(received)
        if not isinstance(event, h11.Request):
            return None
        self._head_only = event.method == b"HEAD"
        head = bytes(received[: len(received) - len(self._protocol.trailing_data[0])])
        request = msgspec.structs.replace(_checked(event, head, self._limits), peer=self._peer)
        self._ignores_body = _has_body(request) and not self._limits.body_bytes
        if self._ignores_body:
            return request
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
                raise _HttpError(error.error_status_hint) from error
            if event is not h11.NEED_DATA:
                return event
            self._socket.settimeout(max(self._deadline - time.monotonic(), 0.001))
            try:
                data = self._socket.recv(_READ_BYTES)
            except TimeoutError:
                raise _HttpError(408) from None
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
        if self._ignores_body:
            headers.append(("Connection", "close"))
        if response.stream is None:
            headers.append(("Content-Length", str(len(response.body))))
        reason = HTTPStatus(response.status).phrase.encode()
        head = h11.Response(status_code=response.status, headers=headers, reason=reason)
        pending = [self._protocol.send(head)]

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
    """Return a request without its body. Raises _HttpError if it is ambiguous, not allowed or too large."""
    if len(head) > limits.head_bytes or len(event.headers) > limits.headers:
        raise _HttpError(431)
    if _AMBIGUOUS_LINE.search(head):
        raise _HttpError(400, "malformed line end")
    if event.http_version not in (b"1.0", b"1.1"):
        raise _HttpError(505)
    method = event.method.decode()
    if method == "CONNECT":
        raise _HttpError(405)
    headers: dict[str, str] = {}
    for raw_name, raw_value in event.headers:
        name, value = raw_name.decode(), raw_value.decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    if limits.body_bytes and int(headers.get("content-length", "0")) > limits.body_bytes:
        raise _too_large(limits)
    path, query = _split(event.target.decode())
    return Request(path, query, method, headers)


def _has_body(request: Request) -> bool:
    return "transfer-encoding" in request.headers or int(request.headers.get("content-length", "0")) > 0


def _split(target: str) -> tuple[str, str]:
    """Return path and query of a request target in origin or absolute form (RFC 9112, 3.2)."""
    before, _, query = target.partition("?")
    try:
        path = before if before.startswith("/") else urlsplit(before).path
    except ValueError:
        path = ""
    if not path.startswith("/"):
        raise _HttpError(400, "malformed path")
    return path, query


def _too_large(limits: Limits) -> _HttpError:
    return _HttpError(413, f"at most {limits.body_bytes} bytes are accepted")
