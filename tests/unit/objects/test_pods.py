"""Decode Pods of the API."""

import json

import pytest

from pykubeproxy.objects import EndpointPort, Protocol
from pykubeproxy.objects.pods import Container, Pod, decode_pod


def pod(spec: object = None, status: object = None, **metadata: object) -> bytes:
    meta = {"name": "web-1", "namespace": "shop", **metadata}
    return json.dumps({"metadata": meta, "spec": spec or {}, "status": status}).encode()


def test_addresses_node_and_ports() -> None:
    spec = {
        "nodeName": "n1",
        "containers": [
            {"name": "web", "ports": [{"name": "http", "containerPort": 8080}]},
            {"name": "sidecar", "ports": None},
        ],
    }
    ready = [{"type": "Ready", "status": "True"}]
    status = {"phase": "Running", "podIPs": [{"ip": "10.1.2.3"}, {"ip": "FD00::1"}], "conditions": ready}
    assert decode_pod(pod(spec, status)) == Pod(
        "shop",
        "web-1",
        ("10.1.2.3", "fd00::1"),
        "n1",
        phase="Running",
        ports=(EndpointPort("http", Protocol.TCP, 8080),),
        containers=(Container("web"), Container("sidecar")),
    )


def test_containers_and_how_they_run() -> None:
    containers = [
        {"name": "web", "image": "web:1", "command": ["web"], "args": ["--mode=x"]},
        {"name": "sidecar", "image": None},
    ]
    states = [
        {
            "name": "web",
            "ready": True,
            "restartCount": 3,
            "state": {"running": {"startedAt": "1970-01-01T00:01:00Z"}},
        },
        {"name": "sidecar", "state": {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}},
    ]
    status = {"phase": "Pending", "reason": "NodeLost", "containerStatuses": states}
    annotations = {"kubectl.kubernetes.io/default-container": "web"}
    found = decode_pod(
        pod(
            {"containers": containers},
            status,
            annotations=annotations,
            labels={"a": "b"},
            deletionTimestamp="x",
        )
    )
    assert found.containers == (
        Container("web", "web:1", ("web", "--mode=x"), ready=True, restarts=3, running_since=60.0),
        Container("sidecar", problem="ErrImagePull: no such image"),
    )
    assert (found.labels, found.default_container, found.reason) == ({"a": "b"}, "web", "NodeLost")
    assert found.deleting and not found.runs


def test_missing_fields() -> None:
    """A Pod without a node has no addresses; one without podIPs may have podIP."""
    found = decode_pod(pod())
    assert (found.addresses, found.node, found.ready, found.finished) == ((), "", False, False)
    assert decode_pod(pod({}, {"podIP": "10.1.2.3", "phase": "Failed"})).addresses == ("10.1.2.3",)
    assert decode_pod(pod({}, {"phase": "Failed"})).finished


def test_an_invalid_address_is_skipped() -> None:
    assert decode_pod(pod({}, {"podIPs": [{"ip": "x"}, {"ip": "10.1.2.3"}]})).addresses == ("10.1.2.3",)


@pytest.mark.parametrize(
    "raw",
    [
        b"{}",
        b"[" * 100_000,
        pod(name="$(reboot)"),
        pod({"containers": [{"ports": [{"containerPort": 1, "protocol": "ICMP"}]}]}),
        pod({"nodeName": 7}),
    ],
)
def test_unusable_pods_are_errors(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_pod(raw)
