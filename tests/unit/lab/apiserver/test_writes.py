"""Creating, replacing, patching and deleting over HTTP."""

from typing import Any

import pytest

from pykubeproxy.lab.apiserver import SERVICES, ApiServer
from tests.unit.lab.apiserver.conftest import Client, Maker

PATH = "/api/v1/namespaces/default/services"
SLICES = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"


def test_life_of_a_service(client: Client, service: Maker) -> None:
    """201 on creation, then get, replace, patch, delete; gone after that."""
    created = client.ask("POST", PATH, service("web"))
    assert created.status == 201
    assert client.get(f"{PATH}/web") == created.json
    created.json["spec"]["ports"][0]["port"] = 81
    replaced = client.ask("PUT", f"{PATH}/web", created.json | {"spec": created.json["spec"] | {"x": 1}})
    assert replaced.status == 200
    assert int(replaced.json["metadata"]["resourceVersion"]) > int(
        created.json["metadata"]["resourceVersion"]
    )
    patched = client.ask("PATCH", f"{PATH}/web", {"spec": {"x": None, "selector": {"app": "web"}}})
    assert patched.json["spec"]["selector"] == {"app": "web"}
    assert "x" not in patched.json["spec"]
    assert patched.json["metadata"]["uid"] == created.json["metadata"]["uid"]
    deleted = client.ask("DELETE", f"{PATH}/web")
    assert (deleted.status, deleted.json["metadata"]["name"]) == (200, "web")
    gone = client.ask("GET", f"{PATH}/web")
    assert gone.status == 404
    assert gone.json == {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": 'services "web" not found',
        "reason": "NotFound",
        "details": {"name": "web", "kind": "services"},
        "code": 404,
    }


def test_names_in_groups_are_qualified(client: Client, endpoint_slice: Maker) -> None:
    """Messages and details name the group, and a deleted slice is answered with a Status."""
    client.ask("POST", SLICES, endpoint_slice("web", "10.0.0.1"))
    again = client.ask("POST", SLICES, endpoint_slice("web", "10.0.0.1"))
    assert (again.status, again.json["reason"]) == (409, "AlreadyExists")
    assert again.json["message"] == 'endpointslices.discovery.k8s.io "web" already exists'
    assert again.json["details"]["group"] == "discovery.k8s.io"
    assert client.ask("DELETE", f"{SLICES}/web").json["status"] == "Success"


def test_stale_copies_are_refused(server: ApiServer, client: Client, service: Maker) -> None:
    """A replacement or patch with an old resourceVersion, or another uid, is a 409 and changes nothing."""
    stale = client.ask("POST", PATH, service("web")).json
    server.store.merge_patch(SERVICES, "default", "web", {"metadata": {"labels": {"a": "b"}}})
    now = server.store.version
    answers = [
        client.ask("PUT", f"{PATH}/web", stale),
        client.ask("PATCH", f"{PATH}/web", {"metadata": {"resourceVersion": "1"}}),
        client.ask("PUT", f"{PATH}/web", service("web") | {"metadata": {"name": "web", "uid": "other"}}),
        client.ask("DELETE", f"{PATH}/web", {"preconditions": {"resourceVersion": "1"}}),
    ]
    assert [(answer.status, answer.json["reason"]) for answer in answers] == [(409, "Conflict")] * 4
    assert server.store.version == now
    assert (
        client.ask("PUT", f"{PATH}/web", service("web")).status == 200
    )  # without a version it is unconditional


def test_writing_the_same_again_changes_nothing(server: ApiServer, client: Client, service: Maker) -> None:
    """No new version and no event, as on a real server."""
    created = client.ask("POST", PATH, service("web")).json
    assert client.ask("PUT", f"{PATH}/web", created).json == created
    assert client.ask("PATCH", f"{PATH}/web", {"spec": {"type": "ClusterIP"}}).json == created
    assert str(server.store.version) == created["metadata"]["resourceVersion"]


def test_status_has_a_path_of_its_own(client: Client, service: Maker, node: Maker) -> None:
    """The object's own path leaves the status alone, the status path leaves all else alone; a node brings its own."""
    ingress = {"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}]}}
    body = service("web", type="LoadBalancer") | {"status": ingress}
    created = client.ask("POST", PATH, body).json
    assert created["status"] == {"loadBalancer": {}}
    patched = client.ask(
        "PATCH", f"{PATH}/web/status", {"status": ingress, "spec": {"type": "NodePort"}}
    ).json
    assert patched["status"]["loadBalancer"]["ingress"] == [{"ip": "192.0.2.1", "ipMode": "VIP"}]
    assert patched["spec"] == created["spec"]
    assert client.ask("PUT", f"{PATH}/web", created | {"metadata": {}}).json["status"] == patched["status"]
    addresses = {"addresses": [{"type": "InternalIP", "address": "192.0.2.9"}]}
    assert client.ask("POST", "/api/v1/nodes", node("n", status=addresses)).json["status"]["addresses"]


def test_generated_names(client: Client) -> None:
    """Events are posted with a generateName."""
    event = {"metadata": {"generateName": "n."}, "reason": "Starting", "type": "Normal", "note": "hello"}
    path = "/apis/events.k8s.io/v1/namespaces/default/events"
    names = {client.ask("POST", path, event).json["metadata"]["name"] for _ in range(5)}
    assert len(names) == 5
    assert all(name.startswith("n.") for name in names)
    assert len(client.names(f"{path}?fieldSelector=reason%3DStarting")) == 5


@pytest.mark.parametrize("kind", ["application/apply-patch+yaml", "application/json", ""])
def test_other_patches_are_415(client: Client, service: Maker, kind: str) -> None:
    """Only merge patches are served."""
    client.ask("POST", PATH, service("web"))
    answer = client.ask("PATCH", f"{PATH}/web", {}, Content_Type=kind)
    assert (answer.status, answer.json["reason"]) == (415, "UnsupportedMediaType")


def test_protobuf_is_never_spoken(client: Client) -> None:
    """Neither sent (406, unless JSON will do as well) nor understood (415)."""
    protobuf = "application/vnd.kubernetes.protobuf"
    assert client.ask("GET", PATH, Accept=protobuf).status == 406
    assert client.ask("GET", PATH, Accept="application/json;as=Table;v=v1;g=meta.k8s.io").status == 406
    both = client.ask("GET", PATH, Accept=f"{protobuf}, application/json")
    assert (both.status, both.headers["Content-Type"]) == (200, "application/json")
    assert client.ask("POST", PATH, b"k8s\0", Content_Type=protobuf).status == 415


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("GET", "/api/v1/configmaps", 404),
        ("GET", "/apis/apps/v1/controllerrevisions", 404),
        ("GET", "/nonsense", 404),
        ("GET", "/api/v1/services/web", 404),
        ("GET", "/api/v1/namespaces/default/nodes", 404),
        ("GET", f"{PATH}/web/scale", 404),
        ("POST", "/api/v1/services", 405),
        ("DELETE", PATH, 405),
        ("PATCH", "/api/v1/services", 405),
        ("DELETE", f"{PATH}/web/status", 405),
        ("POST", "/version", 405),
        ("DELETE", f"{PATH}/web?dryRun=All", 400),
    ],
)
def test_paths_that_lead_nowhere(client: Client, method: str, path: str, code: int) -> None:
    """404 for what is not served, 405 for what is, but not so; each with a Status."""
    answer = client.ask(method, path)
    assert (answer.status, answer.json["code"], answer.json["kind"]) == (code, code, "Status")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b'"\xff"', 400),
        ({"kind": "Pod"}, 400),
        ({"apiVersion": "apps/v1"}, 400),
        ({"metadata": []}, 422),
        ({"metadata": "x"}, 400),
        ({"metadata": {"name": "web", "namespace": "other"}}, 400),
        ({"metadata": {"name": "web", "labels": {"a": 1}}}, 400),
        ({"metadata": {"name": "web"}, "spec": {"ports": "80"}}, 400),
        ({"metadata": {"name": "web"}, "spec": {"ports": [{"port": "80"}]}}, 400),
        ({"metadata": {}, "spec": {"ports": [{"port": 80}]}}, 422),
        ({"metadata": {"name": "Web_1"}, "spec": {"ports": [{"port": 80}]}}, 422),
        ({"metadata": {"name": "web"}, "spec": {}}, 422),
        ({"metadata": {"name": "web"}, "spec": {"ports": [{"port": 0}]}}, 422),
        ({"metadata": {"name": "web"}, "spec": {"ports": [{"port": 80, "protocol": "ICMP"}]}}, 422),
        ({"metadata": {"name": "web"}, "spec": {"ports": [{"port": 80}, {"port": 81}]}}, 422),
        ({"metadata": {"name": "web"}, "spec": {"ports": [{"port": 80, "nodePort": 30001}]}}, 422),
        ({"metadata": {"name": "web"}, "spec": {"type": "ExternalName"}}, 422),
    ],
)
def test_invalid_objects_are_refused(server: ApiServer, client: Client, body: Any, code: int) -> None:
    """They are refused with a Status and nothing is stored."""
    answer = client.ask("POST", PATH, body)
    assert (answer.status, answer.json["code"]) == (code, code)
    assert server.store.list(SERVICES) == []


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"addressType": "IPv5"}, 422),
        ({"addressType": "IPv6"}, 422),
        ({"endpoints": [{"addresses": []}]}, 422),
        ({"endpoints": [{"addresses": ["10.0.0.256"]}]}, 422),
        ({"endpoints": [{"addresses": "10.0.0.1"}]}, 400),
        ({"ports": [{"port": 70000}]}, 422),
        ({"ports": [{"protocol": "ICMP", "port": 1}]}, 422),
    ],
)
def test_invalid_slices_are_refused(client: Client, endpoint_slice: Maker, change: Any, code: int) -> None:
    """Addresses must be of the slice's type, ports must be ports."""
    assert client.ask("POST", SLICES, endpoint_slice("web", "10.0.0.1") | change).status == code


def test_verbatim_objects_are_not_checked(server: ApiServer, client: Client) -> None:
    """In-process, what no server would let through can be shown to clients all the same."""
    strange = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"}, "spec": {"ports": "80"}}
    server.store.create(strange, verbatim=True)
    assert client.get(f"{PATH}/web")["spec"] == {"ports": "80"}


def test_name_in_the_path_counts(client: Client, service: Maker) -> None:
    """A replacement may leave its name out, but not have another."""
    client.ask("POST", PATH, service("web"))
    assert client.ask("PUT", f"{PATH}/web", service("other")).status == 400
    assert client.ask("PUT", f"{PATH}/missing", service("missing")).status == 404


def test_namespaces(client: Client, service: Maker) -> None:
    """Objects need a namespace, which takes them along when it is deleted."""
    for name in ("default", "shop"):
        client.ask("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        client.ask("POST", PATH.replace("default", name), service("web", name))
    missing = client.ask("POST", PATH.replace("default", "other"), service("web", "other"))
    assert (missing.status, missing.json["message"]) == (404, 'namespaces "other" not found')
    assert client.ask("DELETE", "/api/v1/namespaces/shop").status == 200
    assert client.names("/api/v1/services") == ["web"]
    kept = client.ask("DELETE", "/api/v1/namespaces/default")
    assert (kept.status, kept.json["reason"], client.names("/api/v1/services")) == (403, "Forbidden", ["web"])
