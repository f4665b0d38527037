"""The pods of a lab as objects of its API server."""

import queue
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, cast

import pytest
import yaml

from pykubeproxy.lab.api import Api, ApiFailure, Object
from pykubeproxy.lab.apiserver import ENDPOINT_SLICES, PODS, Store
from pykubeproxy.lab.apiserver.resources import ApiError as Refused
from pykubeproxy.lab.network import SITES
from pykubeproxy.lab.pods import PublishedObject, Publisher, proxy_pod
from tests.fakes.waiting import PATIENCE, eventually
from tests.unit.manifests.overlays import MANIFESTS, daemon_set

NODE = SITES["node1"]
STARTED = "2026-01-01T00:00:00Z"


class FakeApi:
    """Carries out requests on a store, and counts writes."""

    def __init__(self) -> None:
        self.store = Store()
        self.writes = 0
        self.down = False

    def call(self, method: str, path: str, body: Object) -> None:
        if self.down:
            raise ApiFailure(500, "down")
        self.writes += 1
        try:
            if method == "POST":
                self.store.create(body, part="spec")
            else:
                self.store.replace(body, part="status" if body["kind"] == "Pod" else "spec")
        except Refused as error:
            raise ApiFailure(error.code, str(error)) from error

    def items(self, path: str) -> list[Object]:
        return self.store.list(PODS if path.endswith("pods") else ENDPOINT_SLICES)

    def delete(self, path: str) -> None:
        path, _, grace = path.partition("?gracePeriodSeconds=")
        *_, namespace, plural, name = path.split("/")
        with suppress(Refused):
            resource = PODS if plural == "pods" else ENDPOINT_SLICES
            self.store.delete(resource, namespace, name, grace=int(grace))

    def pods(self) -> dict[str, Any]:
        return {pod["metadata"]["name"]: pod for pod in self.store.list(PODS)}


@pytest.fixture
def api() -> FakeApi:
    return FakeApi()


@pytest.fixture
def desired() -> list[PublishedObject]:
    return [proxy_pod(NODE, STARTED, alive=True)]


@pytest.fixture
def publisher(api: FakeApi, desired: list[PublishedObject]) -> Iterator[Publisher]:
    made = Publisher(cast("Api", api), lambda: list(desired))
    yield made
    made.stop()


def ready(pod: Object) -> str:
    (status,) = (
        condition["status"] for condition in pod["status"]["conditions"] if condition["type"] == "Ready"
    )
    return str(status)


def test_proxy_pods_are_those_of_our_manifests() -> None:
    """Labels, containers and the default container, so that what finds them in the lab finds them in a cluster."""
    pod = proxy_pod(NODE, STARTED, alive=True).body
    template = daemon_set()["spec"]["template"]
    base = yaml.safe_load((MANIFESTS / "base/kustomization.yaml").read_text())
    assert pod["metadata"]["namespace"] == base["namespace"]
    assert pod["metadata"]["labels"] == base["labels"][0]["pairs"]
    key = "kubectl.kubernetes.io/default-container"
    assert pod["metadata"]["annotations"][key] == template["metadata"]["annotations"][key]
    assert pod["spec"]["hostNetwork"] is template["spec"]["hostNetwork"]
    for group in ("containers", "initContainers"):
        names = [container["name"] for container in template["spec"][group]]
        assert [container["name"] for container in pod["spec"][group]] == names
    (image,) = base["images"]
    assert pod["spec"]["containers"][0]["image"] == f"{image['name']}:{image['newTag']}"


def test_pod_of_a_stopped_proxy_runs_but_is_not_ready() -> None:
    stopped = proxy_pod(NODE, STARTED, alive=False).body
    assert (stopped["status"]["phase"], ready(stopped)) == ("Running", "False")


def test_pods_are_written_when_they_change(
    api: FakeApi, desired: list[PublishedObject], publisher: Publisher
) -> None:
    publisher.publish()
    assert ready(api.pods()["pykubeproxy-node1"]) == "True"
    written = api.writes
    publisher.publish()
    assert api.writes == written
    desired[:] = [proxy_pod(NODE, STARTED, alive=False)]
    publisher.publish()
    assert ready(api.pods()["pykubeproxy-node1"]) == "False"


def test_terminating_pods_are_marked_and_then_removed(
    api: FakeApi, desired: list[PublishedObject], publisher: Publisher
) -> None:
    publisher.publish()
    desired[:] = [desired[0]._replace(terminating=True)]
    publisher.publish()
    assert "deletionTimestamp" in api.pods()["pykubeproxy-node1"]["metadata"]
    desired.clear()
    publisher.publish()
    assert api.pods() == {}


def test_a_failed_write_is_repeated(api: FakeApi, publisher: Publisher) -> None:
    api.down = True
    with pytest.raises(ApiFailure):
        publisher.publish()
    api.down = False
    publisher.publish()
    assert list(api.pods()) == ["pykubeproxy-node1"]


@pytest.mark.parametrize("grace", [0, 30])
def test_the_pod_of_a_proxy_that_a_client_deleted_returns(
    api: FakeApi, desired: list[PublishedObject], grace: int
) -> None:
    deleted: queue.SimpleQueue[str] = queue.SimpleQueue()
    publisher = Publisher(cast("Api", api), lambda: list(desired), lambda pod: deleted.put(pod.name))
    try:
        publisher.publish()
        before = api.pods()["pykubeproxy-node1"]["metadata"]["uid"]
        api.store.delete(PODS, "kube-system", "pykubeproxy-node1", grace=grace)
        assert deleted.get(timeout=PATIENCE) == "pykubeproxy-node1"
        publisher.publish()
        assert api.pods()["pykubeproxy-node1"]["metadata"]["uid"] != before
    finally:
        publisher.stop()
    assert deleted.empty()


def test_a_slice_that_a_client_deleted_returns(
    api: FakeApi, desired: list[PublishedObject], publisher: Publisher
) -> None:
    meta = {"name": "web-ipv4", "namespace": "default"}
    body = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "addressType": "IPv4",
        "endpoints": [],
    }
    desired[:] = [PublishedObject({**body, "metadata": meta})]
    publisher.publish()
    api.store.delete(ENDPOINT_SLICES, "default", "web-ipv4")
    eventually(lambda: bool(api.store.list(ENDPOINT_SLICES)))


def test_a_pod_that_a_client_removed_at_once_is_not_written_again(
    api: FakeApi, desired: list[PublishedObject]
) -> None:
    """However its status changes until its process has ended."""
    body = proxy_pod(NODE, STARTED, alive=True).body
    own = {**body, "spec": {**body["spec"], "hostNetwork": False}}
    desired[:] = [PublishedObject(own)]
    deleted: queue.SimpleQueue[str] = queue.SimpleQueue()
    publisher = Publisher(cast("Api", api), lambda: list(desired), lambda pod: deleted.put(pod.name))
    try:
        publisher.publish()
        api.store.delete(PODS, "kube-system", "pykubeproxy-node1", grace=0)
        desired[:] = [PublishedObject({**own, "status": {"phase": "Succeeded"}})]
        publisher.publish()
        assert api.pods() == {}
        assert deleted.get(timeout=PATIENCE) == "pykubeproxy-node1"
    finally:
        publisher.stop()


def test_nothing_is_written_after_the_end(api: FakeApi, publisher: Publisher) -> None:
    publisher.stop()
    publisher.publish()
    assert api.writes == 0
