"""An HTTP/1.1 server on h11: limited threads, bytes and seconds per client; keep-alive, streams and TLS."""

from collections.abc import Callable, Mapping
from ipaddress import IPv4Address, IPv6Address

import msgspec

TEXT, HTML, JSON = "text/plain; charset=utf-8", "text/html; charset=utf-8", "application/json"

Send = Callable[[bytes], None]
#: Write a body piece by piece. The first argument sends a piece at once; the headers go with the first piece, which may
#: be empty. The second is the connection's file descriptor, which becomes readable when the client leaves.
Stream = Callable[[Send, int], None]


class Limits(msgspec.Struct, frozen=True):
    """Limits for clients. Seconds of None mean no limit."""

    connections: int = 32  # each has a thread
    head_bytes: int = 8192  # request line and headers
    headers: int = 64
    body_bytes: int = 0
    request_seconds: float = 5.0  # for the whole request; the first one counts from accepting the connection
    response_seconds: float | None = 5.0  # for each write
    idle_seconds: float | None = 30.0  # between two requests on a connection
    methods: tuple[str, ...] = ("GET", "HEAD")  # empty: any


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
