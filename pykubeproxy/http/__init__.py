"""An HTTP/1.1 server on h11: limited threads, bytes and seconds per client; keep-alive, streams and TLS."""

import posixpath
import re
import socket
from collections.abc import Callable, Mapping
from html import escape
from ipaddress import IPv4Address, IPv6Address

import msgspec

TEXT, HTML, JSON = "text/plain; charset=utf-8", "text/html; charset=utf-8", "application/json"

Send = Callable[[bytes], None]
#: Write a body piece by piece. The first argument sends a piece at once; the headers go with the first piece, which may
#: be empty. The second is the connection's file descriptor, which becomes readable when the client leaves.
Stream = Callable[[Send, int], None]
#: Speak another protocol on the connection until it ends, the 101 response included. The second argument is what the
#: client has sent behind its request.
Upgrade = Callable[[socket.socket, bytes], None]


_NEVER = re.compile(r"q=0(\.0*)?")


class Limits(msgspec.Struct, frozen=True):
    """Limits for clients. Seconds of None mean no limit."""

    connections: int = 32  # each has a thread
    head_bytes: int = 8192  # request line and headers
    headers: int = 64
    body_bytes: int = 0  # 0: the server ignores bodies, and closes the connection after the response
    request_seconds: float = 5.0  # for the whole request; the first one counts from accepting the connection
    response_seconds: float | None = 5.0  # for each write
    # Between two requests on a connection. More than the usual minute between two scrapes: a client may send the next
    # request while the server closes the connection.
    idle_seconds: float | None = 75.0


class Request(msgspec.Struct, frozen=True):
    """A request. The path is as sent, neither decoded nor normalized; header names are in lower case.

    `peer` is the client's address, an IPv4-mapped one as IPv4; None if it has none.
    """

    path: str
    query: str = ""
    method: str = "GET"
    headers: Mapping[str, str] = {}
    body: bytes = b""
    peer: IPv4Address | IPv6Address | None = None


class Response(msgspec.Struct, frozen=True):
    """A response, with `body` or a `stream` that writes it. The server adds Content-Length, Date and the like.

    With `upgrade` the server sends nothing itself.
    """

    body: bytes = b""
    content_type: str = TEXT
    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()
    stream: Stream | None = None
    upgrade: Upgrade | None = None


Handler = Callable[[Request], Response]


def text(body: str) -> Response:
    """Return a response of plain text."""
    return Response(body.encode())


def accepts(header: str, name: str) -> bool:
    """Return whether a header Accept or Accept-Encoding names this media type or coding, with a weight other than 0.

    A wildcard names nothing. Neither does an entry with further parameters: "as=Table" asks for other content.
    """
    for entry in header.lower().split(","):
        named, *parameters = (part.strip() for part in entry.split(";"))
        if named == name:
            return all(
                parameter.startswith(("q=", "charset=")) and not _NEVER.fullmatch(parameter)
                for parameter in parameters
            )
    return False


def router(routes: Mapping[str, Handler]) -> Handler:
    """Return a handler that chooses by exact path and answers 404 to any other."""

    def handle(request: Request) -> Response:
        route = routes.get(request.path)
        return route(request) if route else Response(b"404 page not found\n", status=404)

    return handle


def redirecting(handler: Handler) -> Handler:
    """Return a handler that redirects paths with empty, "." or ".." parts, as Go's servers do."""

    def handle(request: Request) -> Response:
        path = _cleaned(request.path)
        if path == request.path:
            return handler(request)
        target = f"{path}?{request.query}" if request.query else path
        body = f'<a href="{escape(target)}">Moved Permanently</a>.\n\n'
        return Response(body.encode(), HTML, 301, (("Location", target),))

    return handle


def _cleaned(path: str) -> str:
    """Return the path without empty, "." and ".." parts; it keeps a slash at its end."""
    cleaned = posixpath.normpath("/" + path.lstrip("/"))
    return cleaned + "/" if path.endswith("/") and cleaned != "/" else cleaned
