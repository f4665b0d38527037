"""Pods: their fields and selectors, their deletion, and those that clients create on a node."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pykubeproxy.lab.apiserver import NODES, ApiServer, Sandbox
from pykubeproxy.lab.apiserver.kubelet import PUBLISHED
from tests.unit.lab.apiserver.conftest import Client, Maker

PATH = "/api/v1/namespaces/kube-system/pods"
CONTAINERS = [{"name": "debug", "image": "pykubeproxy:0.1.0", "command": ["sleep", "60"]}]


@pytest.fixture
def cluster(node: Maker) -> Iterator[Any]:
    """A server whose node n1 runs pods."""
    with ApiServer(runtime=lambda _: Sandbox()) as running:
        addresses = [
            {"type": "InternalIP", "address": "10.0.0.1"},
            {"type": "Hostname", "address": "n1"},
        ]
        running.store.create(node("n1", status={"addresses": addresses}))
        yield running


def debug_pod(name: str = "debug", annotations: Any = None, **spec: Any) -> Any:
    body = {"nodeName": "n1", "hostNetwork": True, "containers": CONTAINERS} | spec
    return {"metadata": {"name": name, "annotations": annotations}, "spec": body}


def until(client: Client, path: str, event: Any, phase: str = "") -> Any:
    """The pod in the first such event of a watch."""
    for found in client.watch(f"{path}?watch=1&timeoutSeconds=10"):
        if found["type"] == event or found["object"]["status"].get("phase") == phase:
            return found["object"]
    raise AssertionError("the watch ended")


def test_a_pod_on_a_node_runs_and_has_its_addresses(
    cluster: Any, client_of: Callable[[ApiServer], Client]
) -> None:
    client = client_of(cluster)
    created = client.ask("POST", PATH, debug_pod() | {"status": {"phase": "Failed"}})
    assert (created.status, created.json["status"]) == (201, {"phase": "Pending"})
    assert created.json["spec"]["restartPolicy"] == "Always"
    status = until(client, PATH, "", "Running")["status"]
    assert (status["podIP"], status["podIPs"]) == ("10.0.0.1", [{"ip": "10.0.0.1"}])
    assert {condition["type"]: condition["status"] for condition in status["conditions"]}["Ready"] == "True"
    assert status["containerStatuses"][0]["ready"]


def test_a_deleted_pod_is_marked_until_its_kubelet_confirms(
    cluster: Any, client_of: Callable[[ApiServer], Client]
) -> None:
    """A client sees a deletionTimestamp first; the kubelet removes the pod."""
    client = client_of(cluster)
    client.ask("POST", PATH, debug_pod())
    until(client, PATH, "", "Running")
    deleted = client.ask("DELETE", f"{PATH}/debug", {"gracePeriodSeconds": 5})
    assert deleted.json["metadata"]["deletionGracePeriodSeconds"] == 5
    assert "deletionTimestamp" in deleted.json["metadata"]
    version = deleted.json["metadata"]["resourceVersion"]
    path = f"{PATH}?watch=1&timeoutSeconds=10&resourceVersion={version}"
    assert next(client.watch(path))["type"] == "DELETED"
    assert client.names(PATH) == []


@pytest.mark.parametrize("how", [{"body": {"gracePeriodSeconds": 0}}, {"query": "?gracePeriodSeconds=0"}])
def test_a_pod_goes_at_once_without_grace(client: Client, server: ApiServer, how: Any) -> None:
    """Also without a kubelet, as on a node that is down."""
    client.ask("POST", PATH, debug_pod())
    assert "deletionTimestamp" in client.ask("DELETE", f"{PATH}/debug").json["metadata"]
    status = {"phase": "Running"}
    assert client.ask("PATCH", f"{PATH}/debug/status", {"status": status}).json["status"] == status
    client.ask("DELETE", f"{PATH}/debug{how.get('query', '')}", how.get("body"))
    assert client.names(PATH) == []


def test_a_pod_that_no_node_runs_goes_at_once(client: Client) -> None:
    client.ask("POST", PATH, debug_pod(nodeName=None))
    client.ask("DELETE", f"{PATH}/debug")
    assert client.names(PATH) == []


@pytest.mark.parametrize(
    "pod",
    [
        debug_pod(nodeName="other"),
        debug_pod(nodeName=None),
        debug_pod(hostNetwork=False),
        debug_pod(annotations={PUBLISHED: "true"}),
    ],
)
def test_pods_that_no_kubelet_runs_stay_pending(
    cluster: Any, client_of: Callable[[ApiServer], Client], pod: Maker
) -> None:
    """The kubelet has seen them when it runs the next one."""
    client = client_of(cluster)
    client.ask("POST", PATH, pod)
    client.ask("POST", PATH, debug_pod("next"))
    until(client, PATH, "", "Running")
    assert client.get(f"{PATH}/debug")["status"]["phase"] == "Pending"


def test_pods_from_before_the_start_run_too(cluster: Any, client_of: Callable[[ApiServer], Client]) -> None:
    cluster.stop()
    cluster.store.create(debug_pod() | {"apiVersion": "v1", "kind": "Pod"})
    cluster.start()
    assert until(client_of(cluster), "/api/v1/pods", "", "Running")["metadata"]["name"] == "debug"


@pytest.mark.parametrize(
    ("selector", "names"),
    [
        ("spec.nodeName=n1", ["a"]),
        ("spec.nodeName!=n1,status.phase=Pending", ["b"]),
        ("spec.hostNetwork=true", ["b"]),
        ("spec.hostNetwork=false", ["a"]),
        ("status.podIP=10.244.1.2", ["a"]),
        ("metadata.namespace=default", ["a"]),
        ("status.phase=Succeeded", []),
    ],
)
def test_field_selectors(
    server: ApiServer, client: Client, pod: Maker, selector: str, names: list[str]
) -> None:
    server.store.create(pod("a", status={"phase": "Running", "podIP": "10.244.1.2"}))
    client.ask("POST", PATH, debug_pod("b", nodeName="n2"))
    assert client.names(f"/api/v1/pods?fieldSelector={selector}") == names


@pytest.mark.parametrize(
    ("spec", "code", "message"),
    [
        ({"containers": []}, 422, "spec.containers: Required value"),
        ({"containers": [{"name": "A", "image": "x"}]}, 422, "spec.containers[0].name"),
        ({"containers": [{"name": "a"}]}, 422, "spec.containers[0].image: Required value"),
        ({"initContainers": CONTAINERS}, 422, 'spec.containers[0].name: Duplicate value: "debug"'),
        ({"containers": "none"}, 400, "spec.containers"),
        ({"hostNetwork": "yes"}, 400, "spec.hostNetwork"),
    ],
)
def test_invalid_pods_are_refused(client: Client, spec: Any, code: int, message: str) -> None:
    answer = client.ask("POST", PATH, debug_pod(**spec))
    assert (answer.status, message in answer.json["message"]) == (code, True), answer.text


def test_grace_must_be_a_number(client: Client) -> None:
    client.ask("POST", PATH, debug_pod())
    assert client.ask("DELETE", f"{PATH}/debug", {"gracePeriodSeconds": "soon"}).status == 400


def test_exec_is_a_subresource_of_pods_only(client: Client, server: ApiServer, node: Maker) -> None:
    """Discovery lists it, as kubectl auth can-i looks it up."""
    server.store.create(node("n1"))
    entries = {entry["name"]: entry for entry in client.get("/api/v1")["resources"]}
    assert entries["pods/exec"]["kind"] == "PodExecOptions"
    assert "nodes/exec" not in entries
    assert client.ask("GET", "/api/v1/nodes/n1/exec").status == 404
    assert server.store.list(NODES)
