"""The reverse proxy: which endpoints it uses, in which order, and what it logs."""

import time
from typing import Any

import pytest

from pykubeproxy.lab.workloads import Proxy
from tests.fakes.waiting import eventually


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


def apply(proxy: Proxy, *events: tuple[str, dict[str, Any]]) -> None:
    """Apply watch events, each once the one before has taken effect."""
    for kind, object_ in events:
        proxy.slice_changed(kind, object_)
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("before_ready", "expected"), [(False, {"10.0.0.1:8080"}), (True, {"10.0.0.1:8080", "10.0.0.2:8080"})]
)
def test_endpoints_by_condition(before_ready: bool, expected: set[str]) -> None:
    """An ingress controller uses ready endpoints; a load balancer with readiness gates also uses unready ones."""
    proxy = Proxy("default/web", before_ready=before_ready)
    apply(proxy, ("ADDED", slice_(("10.0.0.1", READY), ("10.0.0.2", UNREADY), ("10.0.0.3", TERMINATING))))
    assert {proxy.next() for _ in range(10)} == expected


def test_delay_postpones_a_change() -> None:
    """A change takes effect after the delay."""
    proxy = Proxy("default/web", delay=0.2)
    apply(proxy, ("ADDED", slice_(("10.0.0.1", READY))))
    assert proxy.next() is None
    eventually(lambda: proxy.next() == "10.0.0.1:8080")


def test_late_timer_does_not_undo_a_newer_change() -> None:
    """Of two changes whose timers fire in the wrong order, the newer one stays."""
    proxy = Proxy("default/web")
    proxy._rotate(2, ["10.0.0.2:8080"])
    proxy._rotate(1, ["10.0.0.1:8080"])
    assert proxy.next() == "10.0.0.2:8080"


def test_deleted_slice_removes_its_endpoints() -> None:
    """The endpoints of a deleted slice leave the rotation."""
    proxy, one = Proxy("default/web"), slice_(("10.0.0.1", READY))
    apply(proxy, ("ADDED", one), ("DELETED", one))
    assert proxy.next() is None
