"""HTTP/1.1 for pages that are made in memory: one request and its answer, bounded in all a client can make it spend.

GET and HEAD are answered, one request a connection, and no request body is taken. `pages` turns a table of paths into
what a server answers with.
"""

import http
import socket
import time
from collections.abc import Callable, Mapping
from email.utils import formatdate
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

TEXT, HTML, JSON = "text/plain; charset=utf-8", "text/html; charset=utf-8", "application/json"

# All headers together and the request line, in bytes; and how many headers.
LONGEST_HEAD = 8192
MOST_HEADERS = 64
# From accepting a connection to having its request, and for sending the answer, each in seconds.
REQUEST_SECONDS = 5.0
ANSWER_SECONDS = 5.0
# How long, and how much of it, a refused client is listened to, so that it gets to read why: closing a socket with
# unread data on it makes the kernel send a reset, which may overtake the answer.
_LINGER_SECONDS, _LINGER_BYTES = 0.5, 1 << 18
# What no header's value may hold, and headers of which a second one could mean something else to a proxy in between.
_CONTROL = frozenset("\r\n\0")
_ONCE = ("host", "content-length", "transfer-encoding")


class Answer(msgspec.Struct, frozen=True):
    """What a page answers with; Content-Length and the like are added when it is sent."""

    body: bytes
    content_type: str = TEXT
    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()


class Request(NamedTuple):
    """What a page is told of a request: the path without the query, the query, and the header Accept."""

    path: str
    query: str = ""
    accept: str = ""


Page = Callable[[Request], Answer]


def text(body: str) -> Answer:
    """A page of text."""
    return Answer(body.encode())


def pages(table: Mapping[str, Callable[[], Answer]]) -> Page:
    """Choose the page by its exact path; 404 for any other."""

    def page(request: Request) -> Answer:
        make = table.get(request.path)
        return make() if make else Answer(b"404 page not found\n", status=404)

    return page


class _Refused(Exception):
    """A request that gets an error without any page being asked."""

    def __init__(self, status: int, why: str, headers: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(why)
        self.answer = Answer(f"{why}\n".encode(), status=status, headers=headers)


def exchange(connection: socket.socket, page: Page) -> None:
    """One request and its answer. Raises OSError when the client leaves or is too slow, and what the page raises."""
    try:
        method, request = _request(_read_head(connection))
    except _Refused as refused:
        _send(connection, refused.answer, with_body=True)
        _linger(connection)
        return
    try:
        answer = page(request)
    except Exception:
        _send(connection, Answer(b"500 internal server error\n", status=500), with_body=method == "GET")
        raise
    _send(connection, answer, with_body=method == "GET")


def _read_head(connection: socket.socket) -> bytes:
    """The request up to the empty line after its headers. Raises OSError if it does not come in time."""
    deadline = time.monotonic() + REQUEST_SECONDS
    head = bytearray()
    while (end := head.find(b"\r\n\r\n")) < 0:
        if len(head) > LONGEST_HEAD:
            raise _Refused(431, "431 request header fields too large")
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            piece = connection.recv(4096)
        except TimeoutError:
            raise _Refused(408, "408 request timeout") from None
        if not piece:
            raise ConnectionResetError
        head += piece
    if end > LONGEST_HEAD:
        raise _Refused(431, "431 request header fields too large")
    return bytes(head[:end])


def _request(head: bytes) -> tuple[str, Request]:
    """The method of a request that is to be answered, and what its page needs to know."""
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not all(words) or not words[2].startswith("HTTP/"):
        raise _Refused(400, "400 bad request: this is no HTTP request line")
    method, target, version = words
    if version not in ("HTTP/1.0", "HTTP/1.1"):
        raise _Refused(505, "505 HTTP version not supported")
    headers = _headers(lines)
    if version == "HTTP/1.1" and "host" not in headers:
        raise _Refused(400, "400 bad request: missing required Host header")
    if method not in ("GET", "HEAD"):
        raise _Refused(405, "405 method not allowed", (("Allow", "GET, HEAD"),))
    if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
        raise _Refused(413, "413 request body too large: none is taken")
    return method, Request(_path(target), target.partition("?")[2], headers.get("accept", ""))


def _headers(lines: list[str]) -> dict[str, str]:
    """Values by name in lower case. What is doubtful about where a header ends, or which counts, is refused (RFC 9112)."""
    if len(lines) > MOST_HEADERS:
        raise _Refused(431, "431 request header fields too large")
    found: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        name = name.lower()
        if not colon or not name or any(c <= " " for c in name) or not _CONTROL.isdisjoint(value):
            raise _Refused(400, "400 bad request: malformed header")
        if name in _ONCE and name in found:
            raise _Refused(400, f"400 bad request: more than one header {name.title()}")
        found[name] = value.strip()
    return found


def _path(target: str) -> str:
    """The path without query, of either form that a request may name it in (RFC 9112, 3.2)."""
    try:
        path = target.partition("?")[0] if target.startswith("/") else urlsplit(target).path
    except ValueError:
        path = ""
    if not path.startswith("/") or any(not "!" <= c <= "~" for c in path):
        raise _Refused(400, "400 bad request: malformed path")
    return path


def _send(connection: socket.socket, answer: Answer, with_body: bool) -> None:
    headers = {
        "Content-Type": answer.content_type,
        "X-Content-Type-Options": "nosniff",
        **dict(answer.headers),
        "Content-Length": str(len(answer.body)),
        "Date": formatdate(usegmt=True),
        "Connection": "close",
    }
    status = http.HTTPStatus(answer.status)
    lines = [f"HTTP/1.1 {status.value} {status.phrase}", *(f"{n}: {v}" for n, v in headers.items()), "", ""]
    connection.settimeout(ANSWER_SECONDS)
    body = answer.body if with_body else b""
    connection.sendall("\r\n".join(lines).encode("latin-1"), socket.MSG_MORE if body else 0)
    connection.sendall(body)


def _linger(connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_WR)
    deadline, left = time.monotonic() + _LINGER_SECONDS, _LINGER_BYTES
    while left > 0 and (seconds := deadline - time.monotonic()) > 0:
        connection.settimeout(seconds)
        piece = connection.recv(min(left, 1 << 16))
        if not piece:
            return
        left -= len(piece)
