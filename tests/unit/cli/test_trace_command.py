"""`pykubeproxy trace`: packets by address, and by the names of pods, nodes and Services, wherever they are looked up."""

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pykubeproxy.cli.trace import trace
from pykubeproxy.config import load
from pykubeproxy.http import Handler, Request, Response
from pykubeproxy.inspect.connection import Unresolved, resolve
from pykubeproxy.inspect.targets import parse_destination, parse_source
from pykubeproxy.lab.apiserver import ApiServer
from pykubeproxy.nodes import agent as running_agent
from pykubeproxy.nodes.directory import node_directory
from pykubeproxy.nodes.saved import saved_node
from pykubeproxy.objects import Family
from tests.cases import as_restore_input, load_case
from tests.fakes.http_client import free_port
from tests.fakes.process import agent
from tests.unit.agent.conftest import Serve, serve

__all__ = ["serve"]

CIDRS = "--cluster-cidr=10.244.0.0/16"
OUTSIDE, HERE = "203.0.113.77", "192.168.99.10"
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


def document(*arguments: str) -> dict[str, Any]:
    result = invoke(*arguments, "-o", "json")
    assert result.exit_code == 0, result.output
    made: dict[str, Any] = json.loads(result.stdout)
    return made


def ends_of(made: dict[str, Any]) -> list[tuple[str, int, float, str | None]]:
    """Return the endpoints with their shares, and where packets to them are masqueraded."""
    (way,) = made["ways"]
    return [
        (it["address"], it["port"], it["probability"], it["masqueradedOn"])
        for it in way["ends"]
        if it["endpoint"]
    ]


def first_chain(made: dict[str, Any]) -> str:
    return str(made["ways"][0]["visits"][0]["steps"][0]["chain"])


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


class Server:
    """An API server with the objects. `requests` are the paths and queries that it gets; pods may be forbidden."""

    def __init__(self, stack: ExitStack, pods_forbidden: bool) -> None:
        self.requests: list[str] = []
        self._pods_forbidden = pods_forbidden
        api = stack.enter_context(ApiServer(middleware=self._middleware))
        api.store.load(objects(), verbatim=True)
        self.url = api.url

    def _middleware(self, handler: Handler) -> Handler:
        def recorded(request: Request) -> Response:
            self.requests.append(f"{request.path}?{request.query}")
            if self._pods_forbidden and request.path.endswith("/pods"):
                return Response(b'{"message": "pods is forbidden"}', status=403)
            return handler(request)

        return recorded


@pytest.fixture
def server() -> Iterator[Callable[..., Server]]:
    with ExitStack() as stack:
        yield lambda pods_forbidden=False: Server(stack, pods_forbidden)


def test_names_on_an_api_server(server: Callable[..., Server], rules: str) -> None:
    """Only what is named is requested."""
    running = server()
    result = invoke("pod/ns1/client", "svc/ns1/web", "--rules", rules, "--master", running.url)
    assert "10.244.1.99 on node1 to" in result.stdout
    assert "10.244.1.11:8080 on node1 (ns1/web-1)" in result.stdout
    assert sorted(it.partition("?")[0] for it in running.requests) == [
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


def test_picture(file: str) -> None:
    """Print an SVG document."""
    result = invoke(OUTSIDE, "10.96.1.1:80", "-f", file, CIDRS, "-o", "svg")
    assert result.exit_code == 0
    assert result.stdout.startswith("<svg ")
    assert result.stdout.endswith("</svg>\n")
    assert ">10.244.2.12:8080 on node2;" in result.stdout


def test_protocol(file: str) -> None:
    """A Service does not match another protocol at the same port."""
    made = document("10.244.1.11", "10.96.1.1:80", "--proto", "udp", "-f", file, CIDRS)
    assert made["message"].endswith("Service ns1/web has no port 80/UDP.")
    assert ends_of(made) == []


@pytest.mark.parametrize(
    ("source", "options", "chain"),
    [
        (OUTSIDE, (), "PREROUTING"),
        (HERE, (), "OUTPUT"),
        ("127.0.0.1", (), "OUTPUT"),
        (OUTSIDE, ("--from", "node"), "OUTPUT"),
        (HERE, ("--from", "outside"), "PREROUTING"),
        (HERE, ("--from", "pod"), "PREROUTING"),
        (HERE, ("--in-interface", "eth0"), "PREROUTING"),
    ],
)
def test_origin(file: str, source: str, options: tuple[str, ...], chain: str) -> None:
    """A local source starts on the node, any other source outside, unless options say otherwise."""
    made = document(source, f"{HERE}:30080", "-f", file, CIDRS, *options)
    assert first_chain(made) == chain


def test_node_address(file: str) -> None:
    """Node ports are served at --node-address."""
    there = ("--node-address", "10.9.9.9/24", "-f", file, CIDRS)
    assert ends_of(document(OUTSIDE, "10.9.9.9:30080", *there))
    assert not ends_of(document(OUTSIDE, "10.9.9.9:30080", "-f", file, CIDRS))


@pytest.mark.parametrize(
    ("options", "masquerade"),
    [
        ((), True),
        (("--from", "pod"), False),
        (("--in-interface", "cbr0"), False),
        (("--in-interface", "eth0", "--from", "pod"), True),
    ],
)
def test_pods_detected_by_interface(file: str, options: tuple[str, ...], masquerade: bool) -> None:
    """If the configuration detects pods by interface, --from pod uses that interface."""
    bridge = ("--detect-local-mode", "BridgeInterface", "--pod-bridge-interface", "cbr0")
    made = document(OUTSIDE, "10.96.1.1:80", "-f", file, *bridge, *options)
    assert {bool(it[3]) for it in ends_of(made)} == {masquerade}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("10.1.1.1", "10.96.1.1"), '"10.96.1.1" has no port; use 10.96.1.1:PORT'),
        (("10.1.1.1", "10.96.1.1:80", "--from", "node", "--in-interface", "eth0"), "remove --in-interface"),
    ],
)
def test_invalid_arguments(file: str, arguments: tuple[str, ...], message: str) -> None:
    result = invoke(*arguments, "-f", file)
    assert result.exit_code == 2
    assert message in result.stderr


def test_no_such_file() -> None:
    """An unreadable file is a one-line error."""
    result = invoke("10.1.1.1", "10.96.1.1:80", "-f", "/nowhere.yaml")
    assert result.exit_code == 2
    assert result.stderr == "Error: cannot read manifests /nowhere.yaml: No such file or directory\n"
