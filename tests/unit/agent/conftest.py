"""A server of the agent's on a free port."""

from collections.abc import Callable, Iterator

import pytest

from pykubeproxy.agent import http

Serve = Callable[..., int]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serve a page on 127.0.0.1, or where told; gives the port."""
    servers: list[http.Server] = []

    def start(page: http.Page, connections: int = http.CONNECTIONS, host: str = "127.0.0.1") -> int:
        server = http.Server("test", connections)
        servers.append(server)
        server.listen(host, 0, page)
        ((_, port),) = server.addresses()
        return port

    yield start
    for server in servers:
        server.close()
