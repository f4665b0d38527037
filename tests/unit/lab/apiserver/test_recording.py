"""The server's answers next to those recorded from a real one (recorded.txt), but for uids, times and versions."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pykubeproxy.lab.apiserver import ENDPOINT_SLICES, EVENTS, SERVICES, ApiServer, Store
from tests.unit.lab.apiserver.conftest import Client, Maker

BOTH_SELECTORS = (
    "labelSelector=%21service.kubernetes.io/service-proxy-name&fieldSelector=spec.clusterIP%21%3DNone"
)


class Recorded(NamedTuple):
    path: str
    code: int
    headers: str
    lines: list[Any]


def _recording() -> dict[str, Recorded]:
    found = {}
    for section in Path(__file__).with_name("recorded.txt").read_text().split("\n### ")[1:]:
        title, *lines = section.strip().splitlines()
        if not lines[0].startswith("> GET"):
            continue
        code, _, headers = lines[1].removeprefix("< ").partition(" ")
        bodies = [json.loads(line) for line in lines[2:] if line.startswith("{")]
        found[title] = Recorded(lines[0].removeprefix("> GET "), int(code), headers, bodies)
    return found


RECORDED = _recording()


def timeless(value: Any) -> Any:
    """A copy without what no two servers have in common."""
    value = copy.deepcopy(value)
    for item in [value, value.get("object", {}), *value.get("items", [])]:
        for field in ("resourceVersion", "uid", "creationTimestamp", "managedFields", "continue"):
            item.get("metadata", {}).pop(field, None)
    return value


def shortest(item: dict[str, Any]) -> dict[str, Any]:
    """A recorded object with less than its author can have written."""
    meta = {k: v for k, v in item["metadata"].items() if k in ("name", "namespace", "labels", "annotations")}
    spec = {k: v for k, v in item["spec"].items() if k in ("ports", "clusterIP")}
    if item["spec"]["type"] != "ClusterIP":
        spec["type"] = item["spec"]["type"]
    status = {"status": item["status"]} if item["status"]["loadBalancer"] else {}
    return {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": spec} | status


@pytest.fixture
def filled(server: ApiServer) -> ApiServer:
    recorded = RECORDED["list with both selectors, from the cache"]
    server.store.load(shortest(item) for item in recorded.lines[0]["items"])
    return server


def test_list_has_the_same_objects_in_the_same_order(filled: ApiServer, client: Client) -> None:
    """Defaults, order and the shape of a list are the real server's."""
    recorded = RECORDED["list with both selectors, from the cache"]
    assert timeless(client.get(recorded.path)) == timeless(recorded.lines[0])


def test_pages_are_cut_alike_and_bear_one_version(filled: ApiServer, client: Client) -> None:
    """The first and second page hold the same objects as recorded, and the version of the first."""
    first = client.get(RECORDED["first page"].path)
    assert timeless(first) == timeless(RECORDED["first page"].lines[0])
    token = first["metadata"]["continue"]
    second = client.get(f"/api/v1/services?{BOTH_SELECTORS}&limit=2&continue={token}")
    assert timeless(second) == timeless(RECORDED["second page"].lines[0])
    assert second["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]


def test_continue_token_is_the_recorded_one(client_of: Callable[[ApiServer], Client]) -> None:
    """At the recorded version the token is the same, byte for byte; the real server's own second one is understood."""
    with ApiServer(store=Store(first_version=80322)) as server:
        for item in RECORDED["list with both selectors, from the cache"].lines[0]["items"][:3]:
            server.store.create(shortest(item))
        client = client_of(server)
        first = client.get("/api/v1/services?limit=2")
        assert first["metadata"]["continue"] == RECORDED["first page"].lines[0]["metadata"]["continue"]
        token = RECORDED["second page"].lines[0]["metadata"]["continue"]
        assert client.names(f"/api/v1/services?continue={token}") == []


def test_watch_of_services_tells_the_same_story(filled: ApiServer, client: Client) -> None:
    """Created, changed, out of the selector and back, ExternalName, deleted: the recorded events, then bookmarks."""
    recorded = RECORDED[
        "watch: created, changed, leaves the selector by a label (DELETED), comes back (ADDED), becomes ExternalName, "
        "deleted; bookmarks; the server ends it after timeoutSeconds"
    ]
    store, before = filled.store, filled.store.version
    events = [line["object"] for line in recorded.lines]
    label = "service.kubernetes.io/service-proxy-name"
    store.create(shortest(events[0]))
    path = f"/api/v1/services?{BOTH_SELECTORS}&watch=true&allowWatchBookmarks=true"
    watch = client.watch(f"{path}&resourceVersion={before}&timeoutSeconds=1")
    seen = [next(watch)]
    store.merge_patch(SERVICES, "default", "a", {"metadata": {"labels": {label: "other"}}})
    store.merge_patch(SERVICES, "default", "a", {"metadata": {"labels": None}})
    store.create(shortest(events[3]))
    external = {"type": "ExternalName", "externalName": "example.com", "ports": None}
    store.merge_patch(SERVICES, "default", "ext", {"spec": external})
    store.delete(SERVICES, "default", "b")
    seen += watch
    assert [timeless(event) for event in seen] == [timeless(line) for line in recorded.lines[:-1]]
    versions = [int(event["object"]["metadata"]["resourceVersion"]) for event in seen[:-1]]
    assert versions == list(range(before + 1, before + 7))
    assert seen[-1]["object"]["metadata"]["resourceVersion"] == str(store.version)


def test_watch_of_slices_tells_the_same_story(server: ApiServer, client: Client) -> None:
    """Created, terminating, deleted: the recorded events, generations included."""
    recorded = RECORDED["EndpointSlice: created, terminating, deleted"]
    before = server.store.version
    first, second, _ = [line["object"] for line in recorded.lines]
    server.store.create(first)
    server.store.merge_patch(ENDPOINT_SLICES, "default", "c-1", {"endpoints": second["endpoints"]})
    server.store.delete(ENDPOINT_SLICES, "default", "c-1")
    path = recorded.path.replace("80363", str(before)).replace("timeoutSeconds=4", "timeoutSeconds=1")
    assert [timeless(event) for event in client.watch(path)] == [timeless(line) for line in recorded.lines]


@pytest.mark.parametrize(
    ("title", "first_version"),
    [
        ("watch from a version that is gone", 76307),
        ("watch from a version of the future: silence until the timeout", 80334),
        ("list at a version of the future", 80334),
        ("a broken continue token", 80334),
        ("watch with initial events, on a server whose store cannot serve it", 80334),
        ("watch without a version: synthetic ADDED first", 80334),
    ],
)
def test_refusals_and_silence_are_word_for_word(
    client_of: Callable[[ApiServer], Client], title: str, first_version: int
) -> None:
    """Status, headers and every byte of meaning agree with the recording."""
    recorded = RECORDED[title]
    with ApiServer(store=Store(first_version=first_version)) as server:
        for seconds in ("5", "4", "3"):
            path = recorded.path.replace(f"timeoutSeconds={seconds}", "timeoutSeconds=1")
            if path != recorded.path:
                break
        answer = client_of(server).ask("GET", path)
    assert answer.status == recorded.code
    assert [json.loads(line) for line in answer.text.splitlines()] == recorded.lines
    for header in filter(None, recorded.headers.split("; ")):
        name, value = header.rstrip(";").split(": ")
        assert answer.headers[name] == value


def test_one_node_by_field_selector(server: ApiServer, client: Client, node: Maker) -> None:
    """A node gets the recorded empty fields, and a field selector finds it alone."""
    recorded = RECORDED["one node by field selector"]
    item = recorded.lines[0]["items"][0]
    status = {"addresses": item["status"]["addresses"]}
    spec = {"podCIDRs": item["spec"]["podCIDRs"], "taints": item["spec"]["taints"]}
    server.store.create(node("node1", metadata=timeless(item)["metadata"], spec=spec, status=status))
    server.store.create(node("node2"))
    assert timeless(client.get(recorded.path)) == timeless(recorded.lines[0])


def test_wrong_token_is_refused_as_recorded(server: ApiServer, client: Client) -> None:
    """401 with the recorded Status; the right token is let in."""
    recorded = RECORDED["a wrong token"]
    server.token = "right"
    refused = client.ask("GET", recorded.path, Authorization="Bearer wrong")
    assert (refused.status, refused.json) == (recorded.code, recorded.lines[0])
    assert client.ask("GET", recorded.path, Authorization="Bearer right").status == 200


@pytest.mark.parametrize(
    ("path", "selectors"),
    [
        ("/api/v1/services", BOTH_SELECTORS),
        ("/apis/discovery.k8s.io/v1/endpointslices", "labelSelector=%21service.kubernetes.io%2Fheadless"),
        ("/api/v1/nodes", "fieldSelector=metadata.name%3Dnode1"),
        ("/apis/networking.k8s.io/v1/servicecidrs", ""),
    ],
)
def test_what_kube_proxy_asks_in_turn(
    filled: ApiServer, client: Client, node: Maker, endpoint_slice: Maker, path: str, selectors: Any
) -> None:
    """A watch with initial events is refused, then a list and a watch from its version, which stays silent, are served."""
    filled.store.load([node("node1"), endpoint_slice("a", "10.0.0.1")])
    common = f"{path}?allowWatchBookmarks=true&watch=true&timeoutSeconds=1&{selectors}"
    (error,) = client.watch(f"{common}&resourceVersionMatch=NotOlderThan&sendInitialEvents=true")
    assert error["type"] == "ERROR"
    listed = client.get(f"{path}?limit=500&resourceVersion=0&{selectors}")
    version = listed["metadata"]["resourceVersion"]
    assert bool(listed["items"]) is ("servicecidrs" not in path)
    assert list(client.watch(f"{common}&resourceVersion={version}")) == []


def test_kube_proxy_posts_events(filled: ApiServer, client: Client) -> None:
    """An Event in JSON is taken and can be read back."""
    path = "/apis/events.k8s.io/v1/namespaces/default/events"
    event = {
        "kind": "Event",
        "apiVersion": "events.k8s.io/v1",
        "metadata": {"name": "node1.18a", "namespace": "default"},
        "eventTime": "2026-11-20T23:41:20.123456Z",
        "reportingController": "kube-proxy",
        "reportingInstance": "kube-proxy-node1",
        "action": "StartKubeProxy",
        "reason": "Starting",
        "regarding": {"kind": "Node", "name": "node1"},
        "type": "Normal",
        "deprecatedFirstTimestamp": None,
    }
    assert client.ask("POST", path, event).status == 201
    (stored,) = filled.store.list(EVENTS)
    assert (stored["reason"], stored["regarding"]["name"]) == ("Starting", "node1")
