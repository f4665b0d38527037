"""`pykubeproxy trace` by the names of pods, nodes and Services, wherever they are looked up."""

import copy
import json
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from click.testing import CliRunner, Result

from pykubeproxy.cli.trace import trace
from pykubeproxy.config import load
from pykubeproxy.inspect.connection import Unresolved, resolve
from pykubeproxy.inspect.targets import parse_destination, parse_source
from pykubeproxy.nodes import agent as running_agent
from pykubeproxy.nodes.directory import node_directory
from pykubeproxy.nodes.saved import saved_node
from pykubeproxy.objects import Family
from tests.cases import as_restore_input, load_case
from tests.fakes.canned import CannedServer, whole
from tests.fakes.http_client import free_port
from tests.fakes.process import agent
from tests.unit.agent.conftest import Serve, serve

__all__ = ["serve"]

CIDRS = "--cluster-cidr=10.244.0.0/16"
CLIENT = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "client", "namespace": "ns1"},
    "spec": {"nodeName": "node1", "containers": [{"name": "main", "ports": [{"containerPort": 8080}]}]},
    "status": {"phase": "Running", "podIPs": [{"ip": "10.244.1.99"}]},
}
NAMED = {"kind": "Pod", "name": "web-1"}


def objects() -> list[dict[str, object]]:
    """A load balancer at 10.96.1.1 with two pods, of which one has a name, and a client."""
    case = copy.deepcopy(load_case("lb-local"))  # all tests share the case
    for it in case["objects"]:
        if it["kind"] == "EndpointSlice" and it["metadata"]["namespace"] == "ns1":
            it["endpoints"][0]["targetRef"] = NAMED
    return [*case["objects"], case["node"], CLIENT]


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "objects.json"
    path.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects()}))
    return str(path)


@pytest.fixture
def rules(tmp_path: Path) -> str:
    path = tmp_path / "rules.txt"
    path.write_text(as_restore_input("lb-local", Family.IPV4))
    return str(path)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(trace, arguments)


def test_names_in_a_file(file: str) -> None:
    """The output has the names of both ends and of endpoints; the answer is that for the addresses."""
    result = invoke("pod/ns1/client", "svc/ns1/web:http", "-f", file, CIDRS)
    assert result.stdout.splitlines()[:6] == [
        "pod ns1/client goes to one of 2 endpoints of ns1/web:http, on node1 and node2;",
        "  the rules of node2 are unknown (not read; use `kubectl pykubeproxy trace`).",
        "  10.244.1.99 on node1 to cluster IP 10.96.1.1:80, TCP",
        "",
        "50%  10.244.1.11:8080 on node1 (ns1/web-1); sees client 10.244.1.99",
        "50%  10.244.2.12:8080 on node2; sees client 10.244.1.99",
    ]
    by_name = json.loads(invoke("pod/client", "web", "-n", "ns1", "-f", file, CIDRS, "-o", "json").stdout)
    by_address = json.loads(invoke("10.244.1.99", "10.96.1.1:80", "-f", file, CIDRS, "-o", "json").stdout)
    assert by_name == by_address
    assert (by_name["source"]["pod"], by_name["destination"]["service"]) == ("ns1/client", "ns1/web:http")
    assert [it["pod"] for it in by_name["ways"][0]["ends"]] == ["ns1/web-1", None]


def test_named_node_is_the_origin(file: str) -> None:
    """The packet starts on it, as from its address."""
    made = json.loads(invoke("node/node1", "web.ns1:80", "-f", file, CIDRS, "-o", "json").stdout)
    assert (made["source"]["kind"], made["ways"][0]["visits"][0]["steps"][0]["chain"]) == ("node", "OUTPUT")
    result = invoke("node/node1", "web.ns1:80", "-f", file, CIDRS, "--from", "outside")
    assert (result.exit_code, "remove --from outside" in result.stderr) == (2, True)


def test_a_client_outside_meets_the_load_balancer(file: str) -> None:
    found = invoke("203.0.113.77", "svc/ns1/web", "-f", file, CIDRS).stdout
    assert "to load balancer 198.51.100.5:80" in found
    found = invoke("203.0.113.77", "svc/ns1/web", "-f", file, CIDRS, "--from", "pod").stdout
    assert "to cluster IP 10.96.1.1:80" in found


def test_names_in_comments_of_rules(rules: str) -> None:
    """Rules alone name Services; the error about a pod says what else is needed."""
    found = invoke("10.244.1.99", "svc/ns1/web", "--rules", rules).stdout
    assert "10.244.1.99 to cluster IP 10.96.1.1:80" in found
    result = invoke("pod/ns1/client", "svc/ns1/web", "--rules", rules)
    assert result.exit_code == 2
    assert "rules do not name pods; add -f FILE with objects, or --kubeconfig" in result.stderr
    assert "did you mean svc/ns1/web?" in invoke("10.1.1.1", "svc/ns1/wep", "--rules", rules).stderr


def test_rules_and_names_from_two_files(rules: str, file: str) -> None:
    """With --rules, -f only gives names."""
    found = invoke("pod/ns1/client", "svc/ns1/web", "--rules", rules, "-f", file)
    assert "10.244.1.99 on node1 to" in found.stdout
    assert "10.244.1.11:8080 on node1 (ns1/web-1)" in found.stdout


class Server(CannedServer):
    """Lists objects by name, namespace and Service, and pods unless forbidden."""

    def __init__(self, items: Sequence[Mapping[str, object]], pods_forbidden: bool) -> None:
        super().__init__(self._list)
        self._items, self._pods_forbidden = items, pods_forbidden

    def _list(self, target: str, connection: socket.socket) -> None:
        url = urlsplit(target)
        *place, plural = url.path.split("/")
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        if plural == "pods" and self._pods_forbidden:
            connection.sendall(whole(b'{"message": "pods is forbidden"}', "403 Forbidden"))
            return
        kind = {"services": "Service", "endpointslices": "EndpointSlice", "nodes": "Node", "pods": "Pod"}[
            plural
        ]
        namespace = place[-1] if "namespaces" in place else ""
        found = [it for it in self._items if it["kind"] == kind and _matches(it, namespace, query)]
        body = {"kind": f"{kind}List", "metadata": {"resourceVersion": "1"}, "items": found}
        connection.sendall(whole(json.dumps(body).encode()))


def _matches(item: Mapping[str, object], namespace: str, query: Mapping[str, str]) -> bool:
    meta = json.loads(json.dumps(item["metadata"]))
    _, _, name = query.get("fieldSelector", "").partition("metadata.name=")
    _, _, service = query.get("labelSelector", "").partition("kubernetes.io/service-name=")
    return (
        namespace in ("", meta.get("namespace"))
        and name in ("", meta["name"])
        and service in ("", meta.get("labels", {}).get("kubernetes.io/service-name"))
    )


@pytest.fixture
def server() -> Iterator[Callable[[bool], Server]]:
    running: list[Server] = []

    def start(pods_forbidden: bool = False) -> Server:
        running.append(Server(objects(), pods_forbidden))
        running[-1].__enter__()
        return running[-1]

    yield start
    for it in running:
        it.__exit__(None, None, None)


def test_names_on_an_api_server(server: Callable[..., Server], rules: str) -> None:
    """Only what is named is requested."""
    running = server()
    result = invoke("pod/ns1/client", "svc/ns1/web", "--rules", rules, "--master", running.url)
    assert "10.244.1.99 on node1 to" in result.stdout
    assert "10.244.1.11:8080 on node1 (ns1/web-1)" in result.stdout
    assert sorted(urlsplit(it).path for it in running.requests) == [
        "/api/v1/namespaces/ns1/pods",
        "/api/v1/namespaces/ns1/services",
        "/api/v1/nodes",
        "/apis/discovery.k8s.io/v1/namespaces/ns1/endpointslices",
    ]
    assert all("metadata.name" in it or "service-name" in it for it in running.requests)


def test_pods_of_endpoint_slices_if_pods_are_forbidden(server: Callable[..., Server], rules: str) -> None:
    """An account that may not list pods still names those of Services."""
    options = ("svc/ns1/web", "--rules", rules, "--master", server(True).url)
    assert "10.244.1.11 on node1 to" in invoke("pod/ns1/web-1", *options).stdout
    said = invoke("pod/ns1/client", *options).stderr
    assert "this account may not list pods" in said
    assert "known: pod/ns1/web-1" in said


def test_similar_names_on_an_api_server(server: Callable[..., Server], rules: str) -> None:
    options = ("--rules", rules, "--master", server().url)
    assert "did you mean pod/ns1/client?" in invoke("pod/ns1/clientt", "svc/ns1/web", *options).stderr
    assert "did you mean svc/ns1/web?" in invoke("pod/ns1/client", "svc/ns2/web", *options).stderr
    assert "did you mean node/node1?" in invoke("node/node2", "svc/ns1/web", *options).stderr


def test_host_name_that_is_no_node_is_named(server: Callable[..., Server], rules: str) -> None:
    """It may be another name of the pod's own node, so the pod is not said to be elsewhere."""
    options = ("--rules", rules, "--master", server().url)
    said = invoke("pod/ns1/client", "svc/ns1/web", *options, "--hostname-override", "vm").stderr
    assert "there is no Node vm. If these are the rules of node1, add --hostname-override node1." in said
    assert invoke("pod/ns1/client", "svc/ns1/web", *options, "--hostname-override", "node1").stderr == ""


def test_file_may_have_pods_only(tmp_path: Path, rules: str) -> None:
    pods = tmp_path / "pods.json"
    pods.write_text(json.dumps({"kind": "List", "items": [it for it in objects() if it["kind"] == "Pod"]}))
    result = invoke("pod/ns1/client", "10.96.1.1:80", "--rules", rules, "-f", str(pods))
    assert "pod ns1/client goes to" in result.stdout


def test_plain_addresses_send_no_request(server: Callable[..., Server], rules: str) -> None:
    running = server()
    assert invoke("10.1.1.1", "10.96.1.1:80", "--rules", rules, "--master", running.url).exit_code == 0
    assert running.requests == []


def test_names_in_the_agent(serve: Serve, monkeypatch: pytest.MonkeyPatch, rules: str) -> None:
    """Live rules take the names from the agent on this node; it knows its Node, which has the node ports."""
    monkeypatch.setattr(running_agent, "DEFAULT_URL", agent(serve))
    source, destination = parse_source("10.42.1.1"), parse_destination("svc/ns/web")
    found = node_directory(
        load(None, {}).config, saved_node([rules], "auto"), (source, destination), live=True
    )
    connection = resolve(source, destination, found)
    assert (connection.destination.address, found.here) == ("10.96.0.10", "node1")
    with pytest.raises(
        Unresolved, match=r"the agent knows only its own Node; add --kubeconfig.*; known: node/node1"
    ):
        resolve(parse_source("node/other"), destination, found)


def test_without_an_agent_live_rules_name_services(monkeypatch: pytest.MonkeyPatch, rules: str) -> None:
    """On a node with kube-proxy there is none."""
    monkeypatch.setattr(running_agent, "DEFAULT_URL", f"http://127.0.0.1:{free_port()}")
    ends = parse_source("10.244.1.99"), parse_destination("svc/ns1/web")
    found = node_directory(load(None, {}).config, saved_node([rules], "auto"), ends, live=True)
    assert resolve(*ends, found).destination.address == "10.96.1.1"
