"""kubectl pykubeproxy trace and explain: objects from an API server, rules of three nodes that are stood in for."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pykubeproxy.cli.kubectl import plugin
from pykubeproxy.inspect.node import NodeState, Question, UnknownNode
from pykubeproxy.lab.apiserver import ApiServer
from pykubeproxy.nodes.cluster import ClusterNodes
from pykubeproxy.objects import Node
from tests.cases import load_case
from tests.fakes.three_nodes import OUTSIDE, ThreeNodes

CASE = "lb-local"


def node(found: Node) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": found.name},
        "spec": {"podCIDR": found.pod_cidrs[0], "podCIDRs": [found.pod_cidrs[0]]},
        "status": {"addresses": [{"type": "InternalIP", "address": found.addresses[0]}]},
    }


def pod(name: str, node_name: str, *addresses: str, host_network: bool = False) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "ns1"},
        "spec": {
            "nodeName": node_name,
            "hostNetwork": host_network,
            "containers": [{"name": "main", "image": "shop"}],
        },
        "status": {
            "phase": "Running",
            "podIP": addresses[0],
            "podIPs": [{"ip": address} for address in addresses],
        },
    }


PODS = [
    pod("client", "node3", "10.244.3.9"),
    pod("stray", "node3", "172.20.0.9"),
    pod("agent", "node2", "192.168.99.20", host_network=True),
]


class Cluster:
    """An API server with the objects of a case, and stand-ins for reading nodes."""

    def __init__(self, kubeconfig: str) -> None:
        self.kubeconfig = kubeconfig
        self.nodes = ThreeNodes(CASE)

    def states(self, source: ClusterNodes, question: Question) -> Iterator[NodeState | UnknownNode]:
        for node in source.wanted:
            if not question.nodes or node.name in question.nodes:
                yield from self.nodes.read([node.name]).values()

    def run(self, *arguments: str) -> Result:
        return CliRunner().invoke(plugin, [*arguments, "--kubeconfig", self.kubeconfig, "-n", "ns1"])


@pytest.fixture(scope="module")
def kubeconfig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    objects = [it for it in load_case(CASE)["objects"] if it["metadata"]["namespace"] == "ns1"]
    with ApiServer() as server:
        server.store.load([*map(node, ThreeNodes(CASE).nodes), *PODS, *objects], verbatim=True)
        yield str(server.kubeconfig(tmp_path_factory.mktemp("kubeconfig") / "config"))


@pytest.fixture
def cluster(kubeconfig: str, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    found = Cluster(kubeconfig)
    monkeypatch.setattr(ClusterNodes, "nodes", lambda source, question: found.states(source, question))
    return found


def first_line(result: Result) -> str:
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.split("\n\n")[0].split("\n  ")[:-1])


def test_pod_reaches_a_service_by_name(cluster: Cluster) -> None:
    result = cluster.run("trace", "pod/client", "svc/web:http")
    assert first_line(result) == (
        "pod ns1/client reaches one of 2 endpoints of ns1/web:http, on node1 and node2."
    )
    assert cluster.nodes.asked == ["node3", "node1", "node2"]


def test_client_outside_gets_the_answer_of_each_node(cluster: Cluster) -> None:
    result = cluster.run("trace", OUTSIDE, "web.ns1", "-o", "json")
    made = json.loads(result.stdout)
    assert made["verdict"] == "partly"
    assert {way["node"]: way["ends"][0]["result"] for way in made["ways"]} == {
        "node1": "reached",
        "node2": "reached",
        "node3": "dropped",
    }


def test_named_node_receives_the_connection(cluster: Cluster) -> None:
    result = cluster.run("trace", OUTSIDE, "svc/web", "--via-node", "node3")
    assert first_line(result) == (
        f"{OUTSIDE} does not reach ns1/web:http: node3 drops its packets (ns1/web:http has no local endpoints)."
    )
    assert cluster.nodes.asked == ["node3"]
    assert "Next: kubectl pykubeproxy explain ns1/web --node node3" in result.stdout


def test_address_of_a_pod_is_found_in_its_status(cluster: Cluster) -> None:
    """The podCIDRs do not contain it, so otherwise it would count as an address outside."""
    result = cluster.run("trace", "172.20.0.9", "10.96.1.1:80")
    assert "pod ns1/stray reaches one of 2 endpoints of ns1/web:http" in first_line(result)


def test_pod_on_the_host_network_acts_as_its_node(cluster: Cluster) -> None:
    result = cluster.run("trace", "pod/agent", "svc/web:http", "-o", "json")
    made = json.loads(result.stdout)
    assert (made["source"]["kind"], made["source"]["node"], made["source"]["pod"]) == (
        "node",
        "node2",
        "ns1/agent",
    )
    assert {it["masqueradedOn"] for it in made["ways"][0]["ends"]} == {"node2"}


def test_port_that_no_service_has_is_named(cluster: Cluster) -> None:
    result = cluster.run("trace", "pod/client", "10.96.1.1:81")
    assert "does not reach 10.96.1.1:81: Service ns1/web has no port 81/TCP." in first_line(result)


def test_unreadable_first_node_is_no_answer(cluster: Cluster) -> None:
    cluster.nodes.unread["node3"] = "runs kube-proxy v1.35.1 in IPVS mode"
    result = cluster.run("trace", "pod/client", "svc/web")
    assert result.exit_code == 2
    shown = " ".join(result.stdout.split())
    assert shown.count("runs kube-proxy v1.35.1 in IPVS mode") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("pod/clint", "svc/web"),
            "there is no pod/ns1/clint on the API server; did you mean pod/ns1/client",
        ),
        (("pod/client", "svc/wep"), "did you mean svc/ns1/web?"),
        (("pod/client", "svc/web:http", "--via-node", "node9"), "--via-node: there is no node node9"),
        (("svc/web", "svc/web"), "which sends nothing"),
    ],
)
def test_mistakes_name_the_next_step(cluster: Cluster, arguments: tuple[str, ...], message: str) -> None:
    result = cluster.run("trace", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert cluster.nodes.asked == []


def test_steps_show_the_rules_on_each_node(cluster: Cluster) -> None:
    result = cluster.run("trace", "pod/client", "svc/web:http", "--steps")
    assert "  nat KUBE-SERVICES\n    yes  -d 10.96.1.1/32 -p tcp" in result.stdout


def test_explain_reads_no_rules_without_a_node(cluster: Cluster) -> None:
    result = cluster.run("explain", "web")
    assert result.exit_code == 0, result.output
    assert "On every node (3):" in result.stdout
    shown = " ".join(result.stdout.split())
    assert "On node3, zone unknown: dropped: all usable endpoints are on other nodes" in shown
    assert cluster.nodes.asked == []


def test_explain_says_whether_the_rules_of_a_node_agree(cluster: Cluster) -> None:
    assert "The rules of node1 agree." in cluster.run("explain", "ns1/web:http", "--node", "node1").stdout
    cluster.nodes = ThreeNodes("empty")
    result = cluster.run("explain", "svc/web", "--node", "node1", "-o", "json")
    assert json.loads(result.stdout)["rules"] == [
        {
            "node": "node1",
            "agree": False,
            "differences": ["ns1/web:http TCP IPv4: the rules do not have it."],
            "unread": None,
        }
    ]


def test_explain_names_a_node_in_another_mode(cluster: Cluster) -> None:
    cluster.nodes.unread["node2"] = "runs kube-proxy v1.35.1 in nftables mode"
    result = cluster.run("explain", "web", "--node", "node2")
    assert result.exit_code == 0
    assert "The rules of node2 are unknown: runs kube-proxy v1.35.1 in nftables mode" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("wep",), "there is no svc/ns1/wep on the API server; did you mean svc/ns1/web?"),
        (("web:https",), 'Service ns1/web has no port "https"; it has 80 (http)'),
        (("web", "--node", "node9"), "there is no node node9; run `kubectl get nodes`"),
    ],
)
def test_explain_of_something_unknown_fails(
    cluster: Cluster, arguments: tuple[str, ...], message: str
) -> None:
    result = cluster.run("explain", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
