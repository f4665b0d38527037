"""HTTP/1.1 over TCP or TLS, a thread for each connection: reads requests, writes answers, can close all at once."""

import socket
import ssl
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import BinaryIO
from urllib.parse import unquote

from pykubeproxy.lab.apiserver.errors import ApiError, bad_request
from pykubeproxy.lab.apiserver.exchange import JSON, Request, Response, Stream, refusal

LARGEST_BODY = 3 * 1024 * 1024  # bytes, as the real server has it
_LONGEST_LINE = 64 * 1024
_CLOSING_SECONDS = 2.0

Answer = Callable[[Request], Response | Stream]


class Listener:
    """Listens on an address and serves connections until it is closed. Raises OSError if the address is taken."""

    def __init__(self, address: str, port: int, answer: Answer, tls: ssl.SSLContext | None) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, port), family=family, backlog=128)
        self.port: int = self._socket.getsockname()[1]
        self._answer = answer
        self._tls = tls
        self._closing = False
        self._changed = threading.Condition()
        self._open: set[socket.socket] = set()
        self._thread = threading.Thread(target=self._accept, name="apiserver", daemon=True)
        self._thread.start()

    def drop(self) -> None:
        """Close all connections there are; new ones are welcome."""
        with self._changed:
            for connection in self._open:
                with suppress(OSError):  # the client was faster
                    socket.socket.shutdown(connection, socket.SHUT_RDWR)  # TLS has no say in it

    def close(self) -> None:
        """Stop listening and close all connections."""
        self._closing = True
        self._socket.shutdown(socket.SHUT_RDWR)  # makes accept return
        self._thread.join()
        self._socket.close()
        self.drop()
        with self._changed:
            self._changed.wait_for(lambda: not self._open, _CLOSING_SECONDS)

    def _accept(self) -> None:
        while not self._closing:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                time.sleep(0.01)  # closing, or out of file descriptors
                continue
            if self._tls:
                connection = self._tls.wrap_socket(
                    connection, server_side=True, do_handshake_on_connect=False
                )
            with self._changed:
                self._open.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="apiserver", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if isinstance(connection, ssl.SSLSocket):
                connection.do_handshake()
            with connection.makefile("rb") as incoming:
                while _exchange(connection, incoming, self._answer):
                    pass
        except OSError:
            pass  # the client has left, or does not like the certificate
        finally:
            with self._changed:
                self._open.discard(connection)
                self._changed.notify_all()
            connection.close()


def _exchange(connection: socket.socket, incoming: BinaryIO, answer: Answer) -> bool:
    """One request and its answer. Returns whether the connection can be used for another."""
    try:
        read = _read(connection, incoming)
    except ApiError as error:
        connection.sendall(_whole(refusal(error), close=True))
        return False
    if read is None:
        return False
    request, close = read
    try:
        result = answer(request)
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        result = refusal(ApiError(500, f"Internal error occurred: {error}"))
    if isinstance(result, Stream):
        chunks = _Chunks(connection, close)
        result.run(chunks.send, connection.fileno())
        chunks.end()
    else:
        connection.sendall(_whole(result, close, without_body=request.method == "HEAD"))
    return not close


class _Chunks:
    """A chunked body. The headers go out with the first piece, which may be empty."""

    def __init__(self, connection: socket.socket, close: bool) -> None:
        self._connection = connection
        self._head = _head(200, {"Content-Type": JSON, "Transfer-Encoding": "chunked"}, close)

    def send(self, data: bytes) -> None:
        """Send a piece at once."""
        head, self._head = self._head, b""
        self._connection.sendall(head + (_chunk(data) if data else b""))

    def end(self) -> None:
        """Send the piece that says there are no more."""
        self._connection.sendall(self._head + _chunk(b""))


def _read(connection: socket.socket, incoming: BinaryIO) -> tuple[Request, bool] | None:
    """The next request, and whether it is to be the last; None at the end. Raises ApiError if it is no request."""
    line = incoming.readline(_LONGEST_LINE)
    if not line:
        return None
    words = line.decode("latin-1").split()
    if len(words) != 3 or words[2] != "HTTP/1.1":
        raise bad_request("this is an HTTP/1.1 server")
    headers = _read_headers(incoming)
    if "transfer-encoding" in headers:
        raise ApiError(411, "send the body with a Content-Length", reason="LengthRequired")
    length = headers.get("content-length", "0")
    if not (length.isascii() and length.isdigit()):
        raise bad_request("Content-Length must be a number")
    if int(length) > LARGEST_BODY:
        raise ApiError(413, f"the body of a request must not be larger than {LARGEST_BODY} bytes")
    if headers.get("expect", "").lower() == "100-continue":
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    path, _, query = words[1].partition("?")
    request = Request(
        method=words[0],
        path=unquote(path),
        query=query,
        accept=headers.get("accept", ""),
        content_type=headers.get("content-type", ""),
        authorization=headers.get("authorization", ""),
        user_agent=headers.get("user-agent", ""),
        body=incoming.read(int(length)),
    )
    return request, headers.get("connection", "").lower() == "close"


def _read_headers(incoming: BinaryIO) -> dict[str, str]:
    """The header lines up to the empty one, names in lower case; of a repeated one, such as Accept, all values."""
    headers: dict[str, str] = {}
    for _ in range(100):
        line = incoming.readline(_LONGEST_LINE).decode("latin-1").strip()
        if not line:
            return headers
        name, _, value = line.partition(":")
        name, value = name.strip().lower(), value.strip()
        headers[name] = f"{headers[name]},{value}" if name in headers else value
    raise bad_request("too many headers")


def _head(code: int, headers: dict[str, str], close: bool) -> bytes:
    phrase = HTTPStatus(code).phrase if code in _CODES else ""
    lines: Sequence[str] = [
        f"HTTP/1.1 {code} {phrase}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join([*lines, *(["Connection: close"] if close else []), "", ""]).encode("latin-1")


def _whole(response: Response, close: bool, without_body: bool = False) -> bytes:
    headers = {"Content-Type": response.content_type, "Content-Length": str(len(response.body))}
    head = _head(response.code, headers | dict(response.headers), close)
    return head if without_body else head + response.body


def _chunk(data: bytes) -> bytes:
    """A piece of a chunked body; the empty one ends it."""
    return b"%x\r\n%b\r\n" % (len(data), data)


_CODES = frozenset(status.value for status in HTTPStatus)
