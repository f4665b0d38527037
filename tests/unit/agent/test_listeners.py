"""Where the health and metrics pages are served."""

import msgspec
import pytest

from pykubeproxy import http
from pykubeproxy.agent.observe import listeners
from pykubeproxy.agent.observe.listeners import Listeners
from pykubeproxy.config import Address, load

CONFIG = load(None, {}).config


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("0.0.0.0", [""]),
        ("::", [""]),
        ("192.0.2.1", ["192.0.2.1", "127.0.0.1"]),
        ("fd00::1", ["fd00::1", "127.0.0.1"]),
        ("::1", ["::1", "127.0.0.1"]),
        ("127.0.0.1", ["127.0.0.1"]),
        ("127.0.0.2", ["127.0.0.2", "127.0.0.1"]),
    ],
)
@pytest.mark.parametrize("name", ["health", "metrics"])
def test_each_page_is_served_on_127_0_0_1_too(
    name: str, host: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet's probes go there, on IPv6-only nodes too; an empty host means all addresses of both families."""
    opened: list[tuple[str, int, bytes]] = []

    class Server:
        def __init__(self, name: str) -> None:
            pass

        def listen(self, host: str, port: int, page: http.Handler) -> None:
            opened.append((host, port, page(http.Request("/")).body))

    monkeypatch.setattr(listeners, "Server", Server)
    addresses = {"health_address": None, "metrics_address": None, f"{name}_address": Address(host, 10000)}
    config = msgspec.structs.replace(CONFIG, **addresses)
    pages = {it: lambda _, it=it: http.Response(it.encode()) for it in ("health", "metrics")}
    Listeners(hard_fail=True).open(config, pages["health"], pages["metrics"])
    assert opened == [(it, 10000, name.encode()) for it in expected]
