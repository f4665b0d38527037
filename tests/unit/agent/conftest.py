"""A server of the agent's on a free port."""

from collections.abc import Callable, Iterator

import pytest

from pykubeproxy.agent import http
from pykubeproxy.agent.http_server import CONNECTIONS, Server

Serve = Callable[..., int]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serve a page on 127.0.0.1, or where told; gives the port."""
    servers: list[Server] = []

    def start(page: http.Page, connections: int = CONNECTIONS, host: str = "127.0.0.1") -> int:
        server = Server("test", connections)
        servers.append(server)
        server.listen(host, 0, page)
        ((_, port),) = server.addresses()
        return port

    yield start
    for server in servers:
        server.close()
