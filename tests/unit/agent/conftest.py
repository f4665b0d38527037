"""A server of the agent's on a free port."""

from collections.abc import Callable, Iterator

import pytest

from pykubeproxy import http
from pykubeproxy.http.server import Server

Serve = Callable[..., int]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serve a handler on 127.0.0.1 or another host; return the port."""
    servers: list[Server] = []

    def start(handler: http.Handler, host: str = "127.0.0.1", **limits: float) -> int:
        server = Server("test", http.Limits(**limits))
        servers.append(server)
        server.listen(host, 0, handler)
        ((_, port),) = server.addresses()
        return port

    yield start
    for server in servers:
        server.close()
