"""The Tables from which kubectl prints its columns."""

from collections.abc import Mapping
from typing import Any

import pytest

from pykubeproxy.lab.apiserver import ENDPOINT_SLICES, NODES, PODS
from pykubeproxy.lab.apiserver.resources import SERVICES, Resource
from pykubeproxy.lab.apiserver.tables import age, table
from tests.unit.lab.apiserver.conftest import Client, Maker

ACCEPT = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"
RUNNING = {
    "phase": "Running",
    "podIP": "10.244.1.2",
    "containerStatuses": [{"ready": True, "restartCount": 0}],
}
CONTAINERS = {"containers": [{"name": "a"}], "nodeName": "node1"}


def cells(resource: Resource, item: Mapping[str, Any]) -> dict[str, Any]:
    """Return the cells of an object, by column."""
    meta = {"name": "x", "creationTimestamp": "2026-01-01T00:00:00Z", **item.get("metadata", {})}
    found = table(resource, [{"spec": {}, **item, "metadata": meta}], {})
    names = [column["name"] for column in found["columnDefinitions"]]
    return dict(zip(names, found["rows"][0]["cells"], strict=True))


@pytest.mark.parametrize(
    ("resource", "item", "expected"),
    [
        (
            PODS,
            {"spec": CONTAINERS, "status": RUNNING},
            {"Ready": "1/1", "Status": "Running", "IP": "10.244.1.2"},
        ),
        (PODS, {"spec": CONTAINERS}, {"Ready": "0/1", "Status": "Pending", "IP": "<none>", "Node": "node1"}),
        (PODS, {"metadata": {"deletionTimestamp": "now"}, "status": RUNNING}, {"Status": "Terminating"}),
        (
            SERVICES,
            {
                "spec": {
                    "type": "NodePort",
                    "clusterIP": "10.96.0.1",
                    "ports": [{"port": 80, "nodePort": 30080, "protocol": "TCP"}],
                }
            },
            {
                "Type": "NodePort",
                "Cluster-IP": "10.96.0.1",
                "External-IP": "<none>",
                "Port(s)": "80:30080/TCP",
                "Selector": "<none>",
            },
        ),
        (
            SERVICES,
            {"spec": {"type": "LoadBalancer", "selector": {"app": "web"}}},
            {"External-IP": "<pending>", "Selector": "app=web"},
        ),
        (
            ENDPOINT_SLICES,
            {
                "addressType": "IPv4",
                "ports": [{"port": 8080}],
                "endpoints": [{"addresses": [f"10.0.0.{n}"]} for n in range(5)],
            },
            {"Ports": "8080", "Endpoints": "10.0.0.0,10.0.0.1,10.0.0.2 + 2 more..."},
        ),
        (ENDPOINT_SLICES, {"addressType": "IPv4"}, {"Ports": "<unset>", "Endpoints": "<unset>"}),
        (NODES, {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}, {"Status": "Ready"}),
        (NODES, {"spec": {"unschedulable": True}}, {"Status": "Unknown,SchedulingDisabled"}),
    ],
)
def test_columns(resource: Resource, item: Mapping[str, Any], expected: dict[str, str]) -> None:
    found = cells(resource, item)
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(5, "5s"), (119, "119s"), (130, "2m10s"), (3600, "60m"), (4 * 3600, "4h"), (3 * 86400, "3d")],
)
def test_ages_as_kubectl_shows_them(seconds: int, shown: str) -> None:
    assert age(seconds) == shown


def test_lists_objects_and_watches_come_as_tables(client: Client, service: Maker) -> None:
    client.ask("POST", "/api/v1/namespaces/default/services", service("web"))
    path = "/api/v1/namespaces/default/services"
    listed = client.ask("GET", path, Accept=ACCEPT).json
    single = client.ask("GET", f"{path}/web?includeObject=Object", Accept=ACCEPT).json
    assert (listed["kind"], listed["rows"][0]["object"]["kind"]) == ("Table", "PartialObjectMetadata")
    assert single["rows"][0]["object"]["kind"] == "Service"
    response = client.pool.request(
        "GET", f"{client.server.url}{path}?watch=1&timeoutSeconds=1", headers={"Accept": ACCEPT}
    )
    assert b'"type":"ADDED","object":{"kind":"Table"' in response.data


@pytest.mark.parametrize(
    ("path", "instead"),
    [
        ("/api/v1/namespaces/default/pods/web-1/log", "lab status"),
        ("/apis/apps/v1/namespaces/default/deployments/web/scale", "lab scale"),
        ("/apis/apps/v1/daemonsets", "kubectl delete pod"),
    ],
)
def test_what_a_lab_lacks_names_what_does_the_same(client: Client, path: str, instead: str) -> None:
    refused = client.ask("GET", path)
    assert refused.status == 405
    assert instead in refused.json["message"]
