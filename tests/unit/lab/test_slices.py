"""The EndpointSlices of the lab's pods."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from pykubeproxy.lab.network import SITES
from pykubeproxy.lab.pods import LabPod, PodState, slices

SERVICE: dict[str, Any] = {
    "metadata": {"namespace": "default", "name": "web"},
    "spec": {
        "selector": {"app": "web"},
        "ipFamilies": ["IPv4", "IPv6"],
        "ports": [{"name": "http", "port": 80, "protocol": "TCP", "targetPort": 8080}],
    },
}


def pod(status: PodState, app: str = "web") -> LabPod:
    addresses = ("10.244.1.2", "fd00:10:244:1::2")
    return cast(
        "LabPod",
        SimpleNamespace(name="web-1", app=app, site=SITES["node1"], addresses=addresses, status=status),
    )


def conditions(status: PodState, **spec: object) -> dict[str, bool] | None:
    """The conditions of the endpoint, equal in both families; None without an endpoint."""
    service = {**SERVICE, "spec": {**SERVICE["spec"], **spec}}
    ipv4, ipv6 = slices(service, [pod(status)])
    assert [endpoint["conditions"] for endpoint in ipv4["endpoints"]] == [
        endpoint["conditions"] for endpoint in ipv6["endpoints"]
    ]
    return ipv4["endpoints"][0]["conditions"] if ipv4["endpoints"] else None


@pytest.mark.parametrize(
    ("status", "publish", "expected"),
    [
        (PodState(answering=True), False, (True, True, False)),
        (PodState(answering=False), False, (False, False, False)),
        (PodState(answering=True, gates=frozenset({"outside"})), False, (False, False, False)),
        (PodState(answering=True, terminating=True), False, (False, True, True)),
        (PodState(answering=False, terminating=True), False, (False, False, True)),
        (PodState(answering=False), True, (True, False, False)),
        (PodState(answering=True, terminating=True), True, (True, True, True)),
    ],
)
def test_conditions_follow_status(status: PodState, publish: bool, expected: tuple[bool, bool, bool]) -> None:
    """Ready, serving and terminating are set as by the EndpointSlice controller."""
    actual = conditions(status, publishNotReadyAddresses=publish)
    assert actual == dict(zip(("ready", "serving", "terminating"), expected, strict=True))


def test_ended_pod_has_no_endpoint() -> None:
    """A pod whose process has ended has no endpoint."""
    assert conditions(PodState(running=False, answering=True)) is None


def test_endpoint_fields() -> None:
    """An endpoint has address, node, zone and pod; the slice has the target port."""
    ipv4, ipv6 = slices(SERVICE, [pod(PodState(answering=True)), pod(PodState(), app="other")])
    assert ipv4["addressType"] == "IPv4"
    assert ipv4["metadata"]["labels"]["kubernetes.io/service-name"] == "web"
    assert ipv4["ports"] == [{"name": "http", "protocol": "TCP", "port": 8080}]
    (endpoint,) = ipv4["endpoints"]
    assert endpoint["addresses"] == ["10.244.1.2"]
    assert (endpoint["nodeName"], endpoint["zone"]) == ("node1", "zone-a")
    assert endpoint["targetRef"]["name"] == "web-1"
    assert ipv6["endpoints"][0]["addresses"] == ["fd00:10:244:1::2"]


def test_service_without_selector_has_no_slices() -> None:
    """Others write the slices of a Service without a selector."""
    assert slices({**SERVICE, "spec": {**SERVICE["spec"], "selector": None}}, [pod(PodState())]) == []


def test_headless_service_is_labelled() -> None:
    """The slices of a headless Service have the label that proxies skip."""
    ipv4, _ = slices({**SERVICE, "spec": {**SERVICE["spec"], "clusterIP": "None"}}, [])
    assert "service.kubernetes.io/headless" in ipv4["metadata"]["labels"]
