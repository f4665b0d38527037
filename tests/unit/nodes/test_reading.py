"""Reading the tables of nodes through their proxies' pods, whose images hold little."""

from collections.abc import Callable

import pytest

from pykubeproxy.inspect.flows import FlowTable, RememberedClient
from pykubeproxy.inspect.node import NodeState, Question, ReadError, UnknownNode
from pykubeproxy.nodes.cluster import ClusterNodes, NodeAccess
from pykubeproxy.objects import Family, Node
from pykubeproxy.rules.skeleton import NAT_SERVICES
from pykubeproxy.sources import Client
from tests.cases import FIREWALLD, nft_list
from tests.fakes.faulty_apiserver import Order
from tests.fakes.remote_nodes import AGENT, KUBELET_ONLY, SERVING, RemoteNodes, saved

Read = Callable[..., dict[str, NodeState | UnknownNode]]
IPVS = "*nat\n:KUBE-SERVICES - [0:0]\n[0:0] -A KUBE-SERVICES -m set --match-set KUBE-CLUSTER-IP dst,dst -j ACCEPT\nCOMMIT\n"


def tables(outcome: NodeState | UnknownNode) -> dict[Family, str]:
    """Return the backend of each family that was read."""
    assert isinstance(outcome, NodeState), outcome
    return {family: it.backend for family, it in outcome.rules.items()}


def reason(outcome: NodeState | UnknownNode, *, by_design: bool = False) -> str:
    assert isinstance(outcome, UnknownNode)
    assert outcome.by_design is by_design
    return outcome.reason


def test_both_families_of_the_nft_backend(cluster: RemoteNodes, read: Read) -> None:
    """Only two programs run: legacy is empty, as iptables-nft-save would say otherwise."""
    cluster.pod("p1", "n1")
    cluster.saves("p1", "nft", SERVING, KUBELET_ONLY)
    outcome = read()["n1"]
    assert tables(outcome) == {Family.IPV4: "nft", Family.IPV6: "nft"}
    assert isinstance(outcome, NodeState)
    assert (outcome.origin.pod, outcome.origin.proxy, outcome.other_backend) == (
        "kube-system/p1",
        "kube-proxy v1.35.1",
        "",
    )
    assert outcome.node.addresses
    assert NAT_SERVICES in outcome.rules[Family.IPV4].ruleset.chains


@pytest.mark.parametrize(
    ("tables_of", "backend"),
    [({"nft": KUBELET_ONLY, "legacy": SERVING}, "legacy"), ({"": SERVING}, "nft")],
)
def test_backend_that_serves(
    cluster: RemoteNodes, read: Read, tables_of: dict[str, str], backend: str
) -> None:
    """An image may have programs of a single backend."""
    cluster.pod("p1", "n1")
    for name, text in tables_of.items():
        cluster.saves("p1", name, text)
    assert tables(read()["n1"]) == {Family.IPV4: backend}


@pytest.mark.parametrize(
    ("tables_of", "by_design", "expected"),
    [
        ({}, False, "the image of pod kube-system/p1 has no iptables-save; use --debug-image IMAGE"),
        ({"nft": "*nat\nfoo\nCOMMIT\n"}, False, "iptables-nft-save in pod kube-system/p1, line 3"),
        (
            {"nft": KUBELET_ONLY, "legacy": ""},
            False,
            "no service-proxy rules; run `kubectl logs -n kube-system p1`",
        ),
        ({"nft": IPVS}, True, "runs kube-proxy v1.35.1 in IPVS mode"),
    ],
)
def test_node_without_rules_to_read(
    cluster: RemoteNodes, read: Read, tables_of: dict[str, str], by_design: bool, expected: str
) -> None:
    cluster.pod("p1", "n1")
    for name, text in tables_of.items():
        cluster.saves("p1", name, text)
    assert expected in reason(read()["n1"], by_design=by_design)


def test_node_without_a_pod_names_images_that_it_holds(cluster: RemoteNodes, read: Read) -> None:
    """As with k3s, whose proxy is part of its agent. No pod is created."""
    images = (
        "rancher/mirrored-pause:3.6",
        "docker.io/flannel/flannel:v0.27",
        "r.example/calico/node:v3.30",
        "a/iptables:1",
    )
    cluster.node("n1", images=images)
    cluster.node("n2", images=("rancher/mirrored-pause:3.6",))
    outcomes = read()
    assert reason(outcomes["n1"]).endswith(
        "; the node holds r.example/calico/node:v3.30 and docker.io/flannel/flannel:v0.27"
    )
    assert reason(outcomes["n2"]).endswith("or save a bundle on the node")
    assert cluster.debug_pods() == []


def test_rules_in_both_backends(cluster: RemoteNodes, read: Read) -> None:
    """The warning of iptables-nft-save on standard error is the sign to look."""
    cluster.pod("p1", "n1")
    cluster.saves("p1", "nft", SERVING)
    warning = "# Warning: iptables-legacy tables present, use iptables-legacy-save to see them\n"
    cluster.program("p1", "iptables-nft-save", saved("iptables-nft-save", SERVING), errors=warning)
    cluster.saves("p1", "legacy", SERVING)
    outcome = read()["n1"]
    assert isinstance(outcome, NodeState)
    assert (tables(outcome), outcome.other_backend) == ({Family.IPV4: "nft"}, "legacy")


def test_node_in_nftables_mode(cluster: RemoteNodes, read: Read) -> None:
    """It has rules for questions that can use them; kubelet's tables of iptables come from iptables-save."""
    cluster.pod("p1", "n1")
    cluster.saves("p1", "nft", KUBELET_ONLY, KUBELET_ONLY)
    cluster.nft("p1", "table ip nat\ntable ip kube-proxy\n", nft_list("nodeport"))
    assert "in nftables mode" in reason(read()["n1"], by_design=True)
    outcome = read(nftables=True)["n1"]
    assert isinstance(outcome, NodeState)
    found = outcome.rules[Family.IPV4]
    assert found.nftables
    assert (found.backend, found.nftables.tables()) == ("nft", ("ip kube-proxy",))


def test_tables_beside_those_of_iptables(cluster: RemoteNodes, read: Read) -> None:
    cluster.pod("p1", "n1")
    cluster.saves("p1", "nft", SERVING)
    without = read(nftables=True)["n1"]
    assert isinstance(without, NodeState)
    assert list(without.remarks) == ["tables of nftables could not be read: the image of its pod has no nft"]
    cluster.nft("p1", "table inet firewalld\n", FIREWALLD.read_text())
    outcome = read(nftables=True)["n1"]
    assert isinstance(outcome, NodeState)
    nftables = outcome.rules[Family.IPV4].nftables
    assert nftables
    assert nftables.tables() == ("inet firewalld",)
    assert not outcome.remarks
    cluster.nft("p1", "table inet firewalld\n", "{")
    assert "nft in pod kube-system/p1: Input data was truncated" in reason(read(nftables=True)["n1"])


def test_node_without_ipv6(cluster: RemoteNodes, read: Read) -> None:
    cluster.pod("p1", "n1")
    cluster.saves("p1", "nft", SERVING)
    cluster.program("p1", "ip6tables-nft-save", errors="Protocol not supported", code=1)
    outcome = read()["n1"]
    assert tables(outcome) == {Family.IPV4: "nft"}
    assert isinstance(outcome, NodeState)
    assert list(outcome.remarks) == [
        "IPv6 rules could not be read: ip6tables-nft-save exited with status 1: Protocol not supported"
    ]
    assert outcome.complete, "the node has no IPv6 address"


def test_windows_node(cluster: RemoteNodes, read: Read) -> None:
    """It runs no debug pod."""
    cluster.node("n1", os="windows")
    cluster.pod("p1", "n2", {"k8s-app": "kube-proxy"})
    cluster.node("n3", os="linux")
    cluster.saves("debug", "nft", SERVING)
    cluster.saves("p1", "nft", SERVING)
    outcome = read(debug_image="image:1")
    assert reason(outcome["n1"], by_design=True) == "runs Windows, whose proxies write no iptables rules"
    assert tables(outcome["n3"])


def test_program_that_fails(cluster: RemoteNodes, read: Read) -> None:
    cluster.pod("p1", "n1")
    for name in ("iptables-nft-save", "ip6tables-nft-save"):
        cluster.program("p1", name, errors="Permission denied (you must be root)\n", code=4)
    expected = (
        "cannot read the rules in pod kube-system/p1: iptables-nft-save exited with status 4: Permission denied"
        " (you must be root)"
    )
    assert reason(read()["n1"]) == expected


@pytest.mark.parametrize("mode", ["ipvs", "nftables"])
def test_mode_on_the_command_line(cluster: RemoteNodes, read: Read, mode: str) -> None:
    """No program has to run to see it."""
    cluster.pod("p1", "n1", arguments=("--config=/c", f"--proxy-mode={mode}"))
    outcome = read()["n1"]
    assert reason(outcome, by_design=True).lower() == f"runs kube-proxy v1.35.1 in {mode} mode"
    assert isinstance(outcome, UnknownNode) and outcome.mode == mode
    assert (outcome.proxy, outcome.pod) == ("kube-proxy v1.35.1", "kube-system/p1")


def test_nftables_mode_by_its_tables(cluster: RemoteNodes, read: Read) -> None:
    cluster.pod("p1", "n1")
    cluster.saves("p1", "nft", KUBELET_ONLY)
    cluster.saves("p1", "legacy", "")
    cluster.program("p1", "nft", "table ip mangle\ntable ip kube-proxy\n")
    assert reason(read()["n1"], by_design=True) == "runs kube-proxy v1.35.1 in nftables mode"


def test_node_of_another_proxy(cluster: RemoteNodes, read: Read) -> None:
    cluster.pod("cilium-1", "n1", {"k8s-app": "cilium"})
    cluster.pod("p2", "n2")
    cluster.pod("cilium-2", "n2", {"k8s-app": "cilium"})
    cluster.saves("p2", "nft", SERVING)
    outcome = read()
    assert reason(outcome["n1"], by_design=True) == "runs Cilium and no kube-proxy"
    assert tables(outcome["n2"]) == {Family.IPV4: "nft"}


def test_node_without_a_pod(cluster: RemoteNodes, read: Read) -> None:
    cluster.node("n1")
    told = reason(read()["n1"])
    assert all(it in told for it in ("k3s", "--debug-image", "--pod-selector", "bundle"))


def test_pod_that_does_not_run(cluster: RemoteNodes, read: Read) -> None:
    cluster.pod("p1", "n1", phase="Pending", ready=False, waiting="ImagePullBackOff")
    expected = "pod kube-system/p1 is Pending (ImagePullBackOff: no such image); use --debug-image IMAGE"
    assert reason(read()["n1"]).startswith(expected)


def test_pod_that_is_not_ready_is_asked(cluster: RemoteNodes, read: Read) -> None:
    """The rules of a proxy that hangs are those to look at."""
    cluster.pod("p1", "n1", ready=False)
    cluster.saves("p1", "nft", SERVING)
    assert tables(read()["n1"]) == {Family.IPV4: "nft"}


def test_pods_of_all_kinds_and_namespaces(cluster: RemoteNodes, read: Read) -> None:
    cluster.pod("p1", "n1", {"component": "kube-proxy"})
    cluster.pod("p2", "n2", AGENT, container="agent", image="pykubeproxy:0.1.0")
    cluster.pod("p3", "n3", {"app": "mine"}, namespace="net", container="other")
    for pod in ("p1", "p2", "p3"):
        cluster.saves(pod, "nft", SERVING)
    found = {name: it.origin.proxy for name, it in read().items() if isinstance(it, NodeState)}
    assert found == {"n1": "kube-proxy v1.35.1", "n2": "pykubeproxy 0.1.0"}
    nodes = read(pod_selector="app=mine", pod_namespace="net").items()
    found = {name: it.origin.proxy for name, it in nodes if isinstance(it, NodeState)}
    assert found == {"n3": "other v1.35.1"}


def test_permission_for_kube_system_only(cluster: RemoteNodes, read: Read) -> None:
    cluster.pod("p1", "n1")
    cluster.saves("p1", "nft", SERVING)
    cluster.api.faults.apply(Order(do="error", path="/api/v1/pods", status=403, times=100))
    assert tables(read()["n1"]) == {Family.IPV4: "nft"}
    cluster.api.faults.apply(Order(do="error", path="/pods", status=403, times=100))
    with pytest.raises(ReadError, match=r"cannot list the pods of proxies: get and list of pods .*rbac.yaml"):
        read()


def test_failures_cost_their_own_node_only(cluster: RemoteNodes, read: Read) -> None:
    for number in (1, 2, 3):
        cluster.pod(f"p{number}", f"n{number}")
        cluster.saves(f"p{number}", "nft", SERVING)
    cluster.api.faults.apply(Order(do="error", path="/pods/p1/exec", status=403, times=100))
    cluster.api.faults.apply(Order(do="truncate", path="/pods/p2/exec", times=100))
    outcome = read()
    assert "exec into pod kube-system/p1 is not permitted" in reason(outcome["n1"])
    assert "broke" in reason(outcome["n2"])
    assert tables(outcome["n3"]) == {Family.IPV4: "nft"}


def test_debug_pod_serves_a_node_without_a_pod(cluster: RemoteNodes, read: Read) -> None:
    """It is gone when the node has been read."""
    cluster.node("n1")
    cluster.saves("debug", "nft", SERVING)
    outcome = read(debug_image="debug:1")["n1"]
    assert tables(outcome) == {Family.IPV4: "nft"}
    assert isinstance(outcome, NodeState) and outcome.origin.proxy == "a proxy without a pod"
    assert cluster.debug_pods() == []


def test_debug_pod_serves_where_the_image_lacks_programs(cluster: RemoteNodes, read: Read) -> None:
    cluster.pod("p1", "n1")
    cluster.saves("debug", "nft", SERVING)
    outcome = read(debug_image="debug:1")["n1"]
    assert isinstance(outcome, NodeState) and outcome.origin.proxy == "kube-proxy v1.35.1"
    assert outcome.origin.pod.startswith("kube-system/pykubeproxy-debug-")


def test_debug_pod_is_not_used_without_need(cluster: RemoteNodes, read: Read) -> None:
    cluster.pod("p1", "n1")
    cluster.saves("p1", "nft", SERVING)
    outcome = read(debug_image="debug:1")["n1"]
    assert isinstance(outcome, NodeState) and outcome.origin.pod == "kube-system/p1"


def test_caller_that_stops_waits_for_no_command(cluster: RemoteNodes, client: Client) -> None:
    """As on Ctrl-C, while a command hangs."""
    for number in (1, 2):
        cluster.pod(f"p{number}", f"n{number}")
        cluster.saves(f"p{number}", "nft", SERVING)
    cluster.api.faults.apply(Order(do="stall", path="/pods/p2/exec"))
    nodes = ClusterNodes(NodeAccess(client, at_once=2), [Node("n1"), Node("n2")]).nodes(Question())
    assert next(iter(nodes)).node.name == "n1"
    nodes.close()  # type: ignore[attr-defined]  # returns, although the other command never ends


def test_colours_in_what_a_node_says_are_no_styles(cluster: RemoteNodes, read: Read) -> None:
    cluster.pod("p1", "n1", image="kube-proxy:v1\x1b[31m")
    cluster.saves("p1", "nft", SERVING)
    cluster.pod("p2", "n2", phase="Pending", waiting="Bad\x1b[8m\nNODE")
    outcome = read()
    assert isinstance(outcome["n1"], NodeState)
    assert "\x1b" not in str(outcome["n1"])
    assert "(Bad [8m NODE: no such image)" in reason(outcome["n2"])


FLOW = "tcp 6 300 ESTABLISHED src=10.1.0.1 dst=10.96.0.1 sport=4000 dport=80 src=10.244.0.5 dst=10.1.0.1 sport=8080 dport=4000"


def flows_of(outcome: NodeState | UnknownNode) -> FlowTable:
    assert isinstance(outcome, NodeState)
    assert outcome.flows is not None
    return outcome.flows


@pytest.mark.parametrize("program", ["pykubeproxy", "conntrack", "cat"])
def test_flows_are_read_by_what_a_pod_has(cluster: RemoteNodes, read: Read, program: str) -> None:
    """Ours print affinity lists, too; for others, these cannot be read without grep."""
    cluster.pod("p1", "n1")
    cluster.saves("p1", "nft", SERVING)
    cluster.program("p1", program, f"{FLOW}\n")
    found = flows_of(read(flows=True)["n1"])
    assert {flow.translated_to for flow in found.flows} == {"10.244.0.5:8080"}
    assert found.unread == ""
    assert found.unread_lists == (
        "" if program == "pykubeproxy" else "the image of pod kube-system/p1 has no grep"
    )
    cluster.program(
        "p1", "grep", "/proc/net/xt_recent/KUBE-SEP-A:src=10.1.0.1 ttl: 64 last_seen: 4 oldest_pkt: 1 4\n"
    )
    if program != "pykubeproxy":
        assert flows_of(read(flows=True)["n1"]).remembered == (
            RememberedClient("KUBE-SEP-A", "10.1.0.1", None),
        )


def test_flows_that_no_program_prints_cost_only_themselves(cluster: RemoteNodes, read: Read) -> None:
    """An agent of ours that is too old has no such command; a pod may lack the permission."""
    cluster.pod("p1", "n1")
    cluster.saves("p1", "nft", SERVING)
    cluster.program("p1", "pykubeproxy", errors="No such command 'flows'", code=2)
    found = flows_of(read(flows=True)["n1"])
    assert found.unread == (
        "the image of pod kube-system/p1 has no cat; use --debug-image IMAGE with pykubeproxy or conntrack"
    )
    cluster.program("p1", "cat", errors="cat: /proc/net/nf_conntrack: Permission denied", code=1)
    assert "Permission denied" in flows_of(read(flows=True)["n1"]).unread
    assert read()["n1"].flows is None  # type: ignore[union-attr]
