"""A server of the agent's on a free port, and a reconcile loop without a kernel."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pykubeproxy import http
from pykubeproxy.agent import loop as loop_module
from pykubeproxy.http.server import Server
from tests.fakes.loop import Loop

Serve = Callable[..., int]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serve a handler on 127.0.0.1 or another host; return the port."""
    servers: list[Server] = []

    def start(handler: http.Handler, host: str = "127.0.0.1", **limits: Any) -> int:
        server = Server("test", http.Limits(**limits))
        servers.append(server)
        server.listen(host, 0, handler)
        ((_, port),) = server.addresses()
        return port

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the machine's nftables tables and settings alone."""
    monkeypatch.setattr(loop_module, "remove_leftovers", lambda *_: False)
    monkeypatch.setattr(loop_module, "route_loopback", lambda _: None)


@pytest.fixture
def loop() -> Loop:
    return Loop()
