"""An HTTP/1.1 server on h11: bounded threads, bytes and seconds per client; keep-alive, streams and TLS."""

from pykubeproxy.http.exchange import (
    HTML,
    JSON,
    TEXT,
    Handler,
    Limits,
    Request,
    Response,
    Send,
    Stream,
    router,
    serve,
    text,
)
from pykubeproxy.http.server import Server

__all__ = [
    "HTML",
    "JSON",
    "TEXT",
    "Handler",
    "Limits",
    "Request",
    "Response",
    "Send",
    "Server",
    "Stream",
    "router",
    "serve",
    "text",
]
