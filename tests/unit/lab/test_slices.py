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
    service = {**SERVICE, "spec": {**SERVICE["spec"], "publishNotReadyAddresses": publish}}
    conditions = dict(zip(("ready", "serving", "terminating"), expected, strict=True))
    for slice_ in slices(service, [pod(status)], {}):
        assert [endpoint["conditions"] for endpoint in slice_["endpoints"]] == [conditions]


def test_endpoint_fields() -> None:
    """An endpoint has address, node, zone and pod; the slice has the target port."""
    ipv4, ipv6 = slices(SERVICE, [pod(PodState(answering=True)), pod(PodState(), app="other")], {})
    assert ipv4["addressType"] == "IPv4"
    assert ipv4["metadata"]["labels"]["kubernetes.io/service-name"] == "web"
    assert ipv4["ports"] == [{"name": "http", "protocol": "TCP", "port": 8080}]
    (endpoint,) = ipv4["endpoints"]
    assert endpoint["addresses"] == ["10.244.1.2"]
    assert (endpoint["nodeName"], endpoint["zone"]) == ("node1", "zone-a")
    assert endpoint["targetRef"]["name"] == "web-1"
    assert ipv6["endpoints"][0]["addresses"] == ["fd00:10:244:1::2"]


@pytest.mark.parametrize(
    ("namespace", "labels", "count"),
    [
        ("default", {"app": "web", "more": "x"}, 1),
        ("default", {"app": "other"}, 0),
        ("default", {}, 0),
        ("other", {"app": "web"}, 0),
    ],
)
def test_endpoints_follow_the_labels_of_pods(namespace: str, labels: dict[str, str], count: int) -> None:
    """Those of the Pod object, in the namespace of the Service."""
    service = {**SERVICE, "metadata": {"namespace": namespace, "name": "web"}}
    for slice_ in slices(service, [pod(PodState(answering=True))], {"web-1": labels}):
        assert len(slice_["endpoints"]) == count
