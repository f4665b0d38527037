"""The small reverse proxy: whom it takes, in what turn, and what it logs."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from pykubeproxy.lab.ingress import Proxy


def slice_(*endpoints: tuple[str, dict[str, bool]]) -> dict[str, Any]:
    return {
        "metadata": {"name": "web-ipv4"},
        "addressType": "IPv4",
        "ports": [{"port": 8080}],
        "endpoints": [
            {"addresses": [address], "conditions": conditions, "targetRef": {"name": f"pod-{address[-1]}"}}
            for address, conditions in endpoints
        ],
    }


READY = {"ready": True, "serving": True, "terminating": False}
UNREADY = {"ready": False, "serving": False, "terminating": False}
TERMINATING = {"ready": False, "serving": True, "terminating": True}


def after(proxy: Proxy, *changes: Callable[[], None], seconds: float = 0.0) -> Proxy:
    """The proxy after these changes and a while."""

    async def run() -> None:
        for change in changes:
            change()
        await asyncio.sleep(seconds)

    asyncio.run(run())
    return proxy


def test_round_robin() -> None:
    """Of 100 requests three endpoints get 34, 33 and 33."""
    proxy = Proxy("default/web", 0, before_ready=False)
    three = slice_(("10.0.0.1", READY), ("10.0.0.2", READY), ("10.0.0.3", READY))
    after(proxy, lambda: proxy.slice_changed("ADDED", three))
    asked = [proxy.next() for _ in range(100)]
    assert sorted(asked.count(address) for address in set(asked)) == [33, 33, 34]


@pytest.mark.parametrize(
    ("before_ready", "expected"), [(False, {"10.0.0.1:8080"}), (True, {"10.0.0.1:8080", "10.0.0.2:8080"})]
)
def test_whom_it_takes(before_ready: bool, expected: set[str]) -> None:
    """An ingress controller takes what is ready; a balancer that readiness waits for takes it before."""
    proxy = Proxy("default/web", 0, before_ready)
    three = slice_(("10.0.0.1", READY), ("10.0.0.2", UNREADY), ("10.0.0.3", TERMINATING))
    after(proxy, lambda: proxy.slice_changed("ADDED", three))
    assert {proxy.next() for _ in range(10)} == expected


def test_delay() -> None:
    """With a delay a change takes effect late, not at once."""
    proxy = Proxy("default/web", 0.05, before_ready=False)
    one = slice_(("10.0.0.1", READY))
    after(proxy, lambda: proxy.slice_changed("ADDED", one))
    assert proxy.next() is None
    proxy = Proxy("default/web", 0.05, before_ready=False)
    after(proxy, lambda: proxy.slice_changed("ADDED", one), seconds=0.1)
    assert proxy.next() == "10.0.0.1:8080"


def test_log_names_old_and_new(capsys: pytest.CaptureFixture[str]) -> None:
    """A replaced endpoint is logged with the address that went and the one that came."""
    proxy = Proxy("default/web", 0, before_ready=False)
    after(
        proxy,
        lambda: proxy.slice_changed("ADDED", slice_(("10.0.0.1", READY))),
        lambda: proxy.slice_changed("MODIFIED", slice_(("10.0.0.2", READY))),
    )
    log = capsys.readouterr().err
    assert "gone 10.0.0.1:8080 (pod-1); new 10.0.0.2:8080 (pod-2)" in log


def test_deleted_slice() -> None:
    """With its slice an endpoint goes."""
    proxy = Proxy("default/web", 0, before_ready=False)
    one = slice_(("10.0.0.1", READY))
    after(proxy, lambda: proxy.slice_changed("ADDED", one), lambda: proxy.slice_changed("DELETED", one))
    assert proxy.next() is None
