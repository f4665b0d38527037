"""Follow packets over three nodes, through the rules that our renderer writes for each of them."""

import click
import msgspec
import pytest

from pykubeproxy.inspect.connection import Directory, Location, LocationKind, TracedDestination
from pykubeproxy.inspect.trace.conclusion import TraceVerdict
from pykubeproxy.inspect.trace.journey import MOST_READ, EndResult, TracedEnd, TracedWay
from pykubeproxy.inspect.trace.question import NowhereToStart
from pykubeproxy.inspect.trace.report import TraceReport
from pykubeproxy.objects import (
    Endpoint,
    EndpointPort,
    EndpointSlice,
    Family,
    Node,
    Protocol,
    Updated,
    family_of,
)
from pykubeproxy.objects.pods import Pod
from pykubeproxy.report.document import document
from pykubeproxy.report.text import text
from pykubeproxy.rules.ruleset import ChainKey
from pykubeproxy.services.ports import ANY_LOCAL, FrontendKind
from tests import cases, packet_model
from tests.fakes.three_nodes import OUTSIDE, ThreeNodes

POD1, POD3 = "10.244.1.5", "10.244.3.5"
CLUSTER_IP = TracedDestination("TCP", "10.96.1.1", 80, "ns1/web:http", FrontendKind.CLUSTER_IP)
BALANCER = TracedDestination("TCP", "198.51.100.5", 80, "ns1/web:http", FrontendKind.LOAD_BALANCER_IP)
FORWARD = ChainKey("filter", "FORWARD")
MARK = 0x4000


def node_port(address: str) -> TracedDestination:
    return TracedDestination("TCP", address, 30080, "ns1/web:http", FrontendKind.NODE_PORT)


def only(answer: TraceReport) -> tuple[TracedEnd, ...]:
    """Return the ends of an answer with one way."""
    (way,) = answer.ways
    return way.ends


def by_node(answer: TraceReport) -> dict[str | None, set[tuple[EndResult, str]]]:
    return {way.node: {(it.result, it.address) for it in way.ends} for way in answer.ways}


def plain(answer: TraceReport) -> str:
    return click.unstyle(text(answer.blocks(wide=False)))


def test_pod_reaches_endpoints_on_its_own_and_another_node() -> None:
    nodes = ThreeNodes("clusterip-three")
    answer = nodes.trace(POD1, CLUSTER_IP)
    assert answer.verdict is TraceVerdict.REACHED
    assert {(it.address, it.node): round(it.probability, 6) for it in only(answer)} == {
        ("10.244.1.11", "node1"): 0.333333,
        ("10.244.2.12", "node2"): 0.333333,
        ("10.244.3.13", "node3"): 0.333333,
    }
    assert {it.client for it in only(answer)} == {POD1}
    assert nodes.asked == ["node1", "node2", "node3"]


def test_of_many_nodes_with_endpoints_some_are_read() -> None:
    """The answer names all endpoints, and says which nodes it does not know."""
    nodes = ThreeNodes("clusterip-one")
    names = [f"worker{number:02}" for number in range(40)]
    nodes.nodes += [Node(name, (f"192.168.98.{number + 1}",)) for number, name in enumerate(names)]
    endpoints = tuple(Endpoint(f"10.245.0.{n + 101}", node_name=name) for n, name in enumerate(names))
    ports = (EndpointPort("http", Protocol.TCP, 8080),)
    nodes.cluster.apply(Updated(EndpointSlice("ns1", "web-1", "web", Family.IPV4, endpoints, ports)))
    answer = nodes.trace(POD1, CLUSTER_IP)
    assert nodes.asked == ["node1", *names[:MOST_READ]]
    assert len(only(answer)) == len(names)
    assert answer.verdict is TraceVerdict.LIKELY
    assert f"more than {MOST_READ} nodes come next" in answer.message
    assert "On worker00, worker01, worker02, worker03 and 16 more, after node1:" in plain(answer)


def test_hairpin_sees_an_address_of_its_node() -> None:
    answer = ThreeNodes("clusterip-one").trace("10.244.1.11", CLUSTER_IP)
    (outcome,) = only(answer)
    assert (outcome.address, outcome.masqueraded_on, outcome.client) == ("10.244.1.11", "node1", None)
    assert "masqueraded by node1" in plain(answer)


def test_pod_goes_to_the_node_whose_node_port_it_names() -> None:
    """Under policy Cluster, that node masquerades, and the endpoint sees neither the pod nor its node."""
    answer = ThreeNodes("nodeport").trace(POD1, node_port("192.168.99.30"))
    assert {(it.address, it.route, it.client) for it in only(answer)} == {
        ("10.244.1.11", ("node1", "node3", "node1"), "192.168.99.30"),
        ("10.244.2.12", ("node1", "node3", "node2"), "192.168.99.30"),
    }
    assert all(it.client_assumed and it.masqueraded_on == "node3" for it in only(answer))
    assert any("192.168.99.30 is assumed" in note for note in answer.notes)


def test_replies_that_bypass_the_node_of_the_node_port_are_named() -> None:
    """Under policy Local, a node sends pods of other nodes to any endpoint and keeps their address."""
    answer = ThreeNodes("nodeport-local").trace(POD3, node_port("192.168.99.10"))
    assert {(it.route[-1], it.client) for it in only(answer)} >= {("node1", POD3), ("node2", POD3)}
    (note,) = (it for it in answer.notes if "replies" in it)
    assert note == (
        f"Connections to endpoints on node2 fail: their replies to {POD3} do not pass node1, which replaced the"
        " destination and kept the source."
    )
    assert answer.verdict is TraceVerdict.PARTLY
    assert answer.message == (
        f"pod {POD3} reaches ns1/web:http with 50% of its connections; node1 translates the others, but replies bypass"
        " this node."
    )
    for case, source, destination in (
        ("nodeport", POD3, node_port("192.168.99.10")),
        ("nodeport", POD1, CLUSTER_IP),
        ("nodeport-local", POD3, node_port("192.168.99.30")),
    ):
        assert not any("replies" in it for it in ThreeNodes(case).trace(source, destination).notes)


def stale(*gone: str) -> ThreeNodes:
    """Return nodes whose rules still name these endpoints."""
    cluster = ThreeNodes("nodeport")
    for node in ("node1", "node3"):
        cluster.add_rules(node, FORWARD, family=Family.IPV4)  # keep the rules as they are
    slices = [it for one in cluster.cluster.services() for it in cluster.cluster.all_slices_of(one.key)]
    for slice_ in slices:
        kept = tuple(it for it in slice_.endpoints if it.address not in gone)
        cluster.cluster.apply(Updated(msgspec.structs.replace(slice_, endpoints=kept)))
    return cluster


def test_stale_node_that_sends_packets_to_a_pod_that_has_gone_is_named() -> None:
    answer = stale("10.244.2.12").trace(POD1, node_port("192.168.99.30"))
    note = "No EndpointSlice of ns1/web names 10.244.2.12; the rules of node3 may be out of date."
    assert note in answer.notes
    assert answer.next == "kubectl pykubeproxy diff --node node3"
    assert answer.message == (
        f"pod {POD1} reaches ns1/web:http with 50% of its connections; node3 sends the others to endpoints that have gone,"
        " or that belong to another Service."
    )


def test_a_redirect_by_another_program_makes_no_node_stale() -> None:
    cluster = ThreeNodes("nodeport")
    redirect = "-p tcp -j DNAT --to-destination 10.244.2.99:8080"
    cluster.add_rules("node1", ChainKey("nat", "PREROUTING"), redirect)
    answer = cluster.trace(POD1, CLUSTER_IP)
    assert not any("EndpointSlice" in it for it in answer.notes)
    assert "10.244.2.99" in plain(answer)
    assert "gone" not in answer.message


@pytest.mark.parametrize("pod_cidrs", [True, False])
def test_stale_node_that_knows_no_endpoint_of_today_does_not_reach_the_service(pod_cidrs: bool) -> None:
    cluster = stale("10.244.1.11", "10.244.2.12")
    if not pod_cidrs:
        cluster.nodes = [msgspec.structs.replace(it, pod_cidrs=()) for it in cluster.nodes]
    answer = cluster.trace("192.168.99.10", node_port("192.168.99.30"))
    assert document(answer)["verdict"] == "not-reached"
    assert answer.message == (
        "node1 does not reach ns1/web:http: node3 sends its packets to endpoints that have gone, or that belong to another"
        " Service."
    )


def test_stale_node_says_nothing_about_other_nodes() -> None:
    answer = stale("10.244.2.12").trace(OUTSIDE, node_port(ANY_LOCAL))
    assert answer.ways[0].others
    assert answer.message.endswith("that belong to another Service.")


def test_firewall_says_nothing_about_other_nodes() -> None:
    """Another node may have another firewall, or none."""
    nodes = ThreeNodes("nodeport")
    dropped = [nodes.trace(OUTSIDE, node_port(ANY_LOCAL))]
    nodes.add_rules("node1", FORWARD, f"-s {OUTSIDE} -j DROP")
    dropped.append(nodes.trace(OUTSIDE, node_port(ANY_LOCAL)))
    assert [answer.ways[0].names for answer in dropped] == [("node1", "node2", "node3")] * 2
    assert ["The same should happen" in answer.message for answer in dropped] == [True, False]
    assert ["(from EndpointSlices; " in plain(answer) for answer in dropped] == [True, False]
    assert all("also through node2 and node3" in plain(answer) for answer in dropped)


@pytest.mark.parametrize(
    ("options", "named"), [("-i eth0", True), ("-o eth0", True), ("-i lo", False), ("! -i lo -o eth+", True)]
)
def test_rules_for_unknown_interfaces_are_named(options: str, named: bool) -> None:
    """The routes of these nodes are unknown, so nobody knows whether the rule drops the packets."""
    nodes = ThreeNodes("nodeport")
    nodes.add_rules("node1", FORWARD, f"{options} -s {OUTSIDE} -j DROP")
    answer = nodes.trace(OUTSIDE, node_port("192.168.99.10"))
    note = "Assumed not to match: rules for interfaces of node1, which are not known, in filter FORWARD."
    assert (note in answer.notes) is named


def test_local_policy_keeps_the_client_and_answers_on_nodes_with_endpoints_only() -> None:
    answer = ThreeNodes("lb-local").trace(OUTSIDE, BALANCER)
    assert by_node(answer) == {
        "node1": {(EndResult.REACHED, "10.244.1.11")},
        "node2": {(EndResult.REACHED, "10.244.2.12")},
        "node3": {(EndResult.DROPPED, "198.51.100.5")},
    }
    assert answer.verdict is TraceVerdict.PARTLY
    assert answer.message == (
        f"{OUTSIDE} reaches ns1/web:http only through node1 and node2: node3 drops it (ns1/web:http has no local"
        " endpoints)."
    )
    assert {it.client for way in answer.ways for it in way.ends} == {OUTSIDE}


def test_nodes_that_must_drop_alike_are_read_once() -> None:
    nodes = ThreeNodes("lb-local-none")
    answer = nodes.trace(OUTSIDE, BALANCER)
    assert nodes.asked == ["node2", "node1"]
    assert [way.others for way in answer.ways] == [(), ("node3",)]
    assert "also through node3" in plain(answer)


def test_nodes_that_are_not_read_may_serve_too() -> None:
    nodes = ThreeNodes("lb-local")
    nodes.unread["node2"] = "runs kube-proxy in IPVS mode"
    unknown = "the rules of node2 are unknown (runs kube-proxy in IPVS mode)"
    answer = nodes.trace(OUTSIDE, BALANCER)
    assert answer.verdict is TraceVerdict.PARTLY
    assert answer.message == (
        f"{OUTSIDE} reaches ns1/web:http through node1: node3 drops it (ns1/web:http has no local endpoints); {unknown}."
    )
    others = [TracedWay("node1"), TracedWay("node2")]
    answer = nodes.trace(OUTSIDE, BALANCER, entrances=others)
    assert answer.verdict is TraceVerdict.LIKELY
    assert answer.message == f"{OUTSIDE} reaches ns1/web:http through node1; {unknown}."


def test_node_port_of_any_node_is_asked_at_each_of_them() -> None:
    answer = ThreeNodes("nodeport-local").trace(OUTSIDE, node_port(ANY_LOCAL))
    assert by_node(answer) == {
        "node1": {(EndResult.REACHED, "10.244.1.11")},
        "node2": {(EndResult.REACHED, "10.244.2.12")},
        "node3": {(EndResult.DROPPED, "192.168.99.30")},
    }


def test_load_balancer_address_inside_the_cluster_is_served_by_the_first_node() -> None:
    """Under policy Local too, without masquerading."""
    answer = ThreeNodes("lb-local").trace(POD3, BALANCER)
    assert {(it.address, it.route[0], it.client) for it in only(answer)} == {
        ("10.244.1.11", "node3", POD3),
        ("10.244.2.12", "node3", POD3),
    }


@pytest.mark.parametrize(
    ("source", "result"), [(OUTSIDE, EndResult.DROPPED), ("203.0.113.9", EndResult.REACHED)]
)
def test_source_ranges_of_load_balancers(source: str, result: EndResult) -> None:
    answer = ThreeNodes("lb-source-ranges").trace(source, BALANCER)
    assert {it.result for it in only(answer)} == {result}


def test_foreign_rule_on_the_node_of_an_endpoint_drops() -> None:
    nodes = ThreeNodes("clusterip-three")
    nodes.add_rules("node2", FORWARD, '-s 10.244.1.0/24 -m comment --comment "policy of shop" -j DROP')
    answer = nodes.trace(POD1, CLUSTER_IP)
    dropped = [it for it in only(answer) if it.result is EndResult.DROPPED]
    assert [(it.route, it.address) for it in dropped] == [(("node1", "node2"), "10.244.2.12")]
    assert answer.message == (
        "pod 10.244.1.5 reaches ns1/web:http with 66.7% of its connections; node2 drops the others (policy of shop)."
    )
    assert "filter FORWARD: dropped: policy of shop" in plain(answer)


def test_a_drop_behind_the_receiving_node_names_the_node_that_drops() -> None:
    nodes = ThreeNodes("nodeport")
    nodes.add_rules("node2", FORWARD, "-d 10.244.2.12/32 -j DROP")
    ways = [TracedWay("node1"), TracedWay("node3")]
    reply = nodes.trace(OUTSIDE, node_port(ANY_LOCAL), entrances=ways)
    assert reply.message == (
        f"{OUTSIDE} reaches ns1/web:http with some of its connections only: node2 drops it (filter FORWARD)."
    )


def test_masquerade_on_the_first_node_changes_what_the_second_one_matches() -> None:
    nodes = ThreeNodes("lb")
    nodes.add_rules("node2", FORWARD, "-s 192.168.99.10/32 -j DROP")
    answer = nodes.trace(OUTSIDE, BALANCER)
    assert {it.address: it.result for it in only(answer)} == {
        "10.244.1.11": EndResult.REACHED,
        "10.244.2.12": EndResult.DROPPED,
    }


def test_rule_with_an_ipset_is_named_as_an_assumption() -> None:
    nodes = ThreeNodes("clusterip-three")
    nodes.add_rules("node2", FORWARD, "-m set --match-set cali40s:abc src -j DROP")
    expected = "Assumed not to match: rules that trace cannot evaluate on node2, in filter FORWARD."
    assert nodes.trace(POD1, CLUSTER_IP).notes[0] == expected


def test_unread_node_of_an_endpoint_leaves_the_answer_likely() -> None:
    nodes = ThreeNodes("lb-local")
    nodes.unread["node2"] = "runs kube-proxy in IPVS mode"
    answer = nodes.trace(POD1, CLUSTER_IP)
    assert answer.verdict is TraceVerdict.LIKELY
    assert {it.result for it in only(answer)} == {EndResult.REACHED, EndResult.SENT}
    assert "the rules of node2 are unknown (runs kube-proxy in IPVS mode)" in answer.message


def test_unread_node_of_a_node_port_leaves_the_answer_likely() -> None:
    nodes = ThreeNodes("nodeport")
    nodes.unread["node3"] = "runs kube-proxy in nftables mode"
    answer = nodes.trace(POD1, node_port("192.168.99.30"))
    assert answer.verdict is TraceVerdict.LIKELY
    assert answer.message == (
        "pod 10.244.1.5 goes to node port 192.168.99.30:30080, on node3; the rules of node3 are unknown"
        " (runs kube-proxy in nftables mode)."
    )
    assert "no rule on" not in plain(answer)


def test_node_without_rules_for_the_service_is_named() -> None:
    """So shows a node whose proxy stopped."""
    answer = ThreeNodes("empty").trace(POD1, CLUSTER_IP)
    assert answer.verdict is TraceVerdict.NOT_REACHED
    assert answer.message.endswith("node1 has no rule for cluster IP 10.96.1.1:80.")
    assert answer.next == "kubectl pykubeproxy diff --node node1"


def test_plain_destinations() -> None:
    nodes = ThreeNodes("empty")
    assert (
        "directly, not through a Service"
        in nodes.trace(POD1, TracedDestination("TCP", "10.244.2.7", 80)).message
    )
    assert "outside the cluster" in nodes.trace(POD1, TracedDestination("UDP", "8.8.8.8", 53)).message
    (outcome,) = only(nodes.trace(OUTSIDE, TracedDestination("TCP", "10.244.2.7", 80)))
    assert outcome.route == ("node2",)


def test_nodes_that_send_a_packet_in_circles_end_the_journey() -> None:
    nodes = ThreeNodes("empty")
    prerouting = ChainKey("nat", "PREROUTING")
    for here, there in (("node1", "192.168.99.20"), ("node2", "192.168.99.10")):
        nodes.add_rules(here, prerouting, f"-p tcp -m tcp --dport 7 -j DNAT --to-destination {there}:7")
    (outcome,) = only(nodes.trace(POD1, TracedDestination("TCP", "10.9.9.9", 7)))
    assert outcome.result is EndResult.LOST


def test_source_without_node_is_an_error() -> None:
    pending = Location(LocationKind.POD, "10.244.9.9", "", "ns1/client")
    with pytest.raises(NowhereToStart, match="pod ns1/client"):
        ThreeNodes("empty").trace(pending, CLUSTER_IP)


def test_locations_prefer_pods_to_pod_cidrs_and_nodes_to_pods_on_the_host_network() -> None:
    nodes = ThreeNodes("empty").nodes
    pods = [
        Pod("ns1", "stray", ("10.244.1.7",), "node3"),
        Pod("ns1", "agent", ("192.168.99.20",), "node2", host_network=True),
    ]
    locations = Directory("", nodes=tuple(nodes), listed_pods=tuple(pods), complete=True)
    assert locations.find("10.244.1.7") == Location(LocationKind.POD, "10.244.1.7", "node3", "ns1/stray")
    assert locations.find("10.244.1.8") == Location(LocationKind.POD, "10.244.1.8", "node1", assumed=True)
    assert locations.find("192.168.99.20") == Location(LocationKind.NODE, "192.168.99.20", "node2")
    assert locations.find("8.8.8.8") == Location(LocationKind.OUTSIDE, "8.8.8.8")


def test_pods_detected_by_interface_come_in_by_it() -> None:
    answer = ThreeNodes("detect-bridge").trace(POD1, CLUSTER_IP)
    assert answer.ways[0].visits[0].interface == "cbr0"
    assert all(it.masqueraded_on is None for it in only(answer))


def walked(nodes: ThreeNodes, answer: TraceReport) -> dict[object, float]:
    """Return what the independent model says: endpoints with shares and whether they are masqueraded, or a verdict."""
    visit, source, to = answer.ways[0].visits[0], answer.source.address, answer.destination
    walker = packet_model.Walker(nodes.rules(visit.node, family_of(source)))
    packet = packet_model.Packet(source, to.address, "tcp", to.port, visit.interface or "eth0")
    found: dict[object, float] = {}
    for outcome, share in walker.walk(packet, "nat", "PREROUTING").items():
        result: object = outcome.verdict, bool(outcome.mark & MARK)
        if not outcome.verdict:
            (rejected,) = {it.verdict for it in walker.walk(packet, "filter", "FORWARD")}
            result = rejected
        found[result] = found.get(result, 0.0) + share
    return {result: round(share, 6) for result, share in found.items()}


# Without the case of 1000 endpoints.
RECORDED = [name for name in cases.NAMES if "random" not in name and name != "large-cluster"]


@pytest.mark.parametrize("case", RECORDED)
def test_journeys_to_cluster_ips_agree_with_the_packet_model(case: str) -> None:
    nodes = ThreeNodes(case)
    sources = {Family.IPV4: POD3, Family.IPV6: "fd00:10:244:3::5"}
    verdicts = {EndResult.DROPPED: "DROP", EndResult.REJECTED: "REJECT", EndResult.LEFT: ""}
    compared = 0
    for service in nodes.cluster.services():
        for address in service.cluster_ips:
            for port in (it for it in service.ports if it.protocol.value == "TCP"):
                source = sources[family_of(address)]
                found: dict[object, float] = {}
                answer = nodes.trace(source, TracedDestination("TCP", address, port.port))
                for it in only(answer):
                    host = f"[{it.address}]" if ":" in address else it.address
                    to = f"to {host}:{it.port}", it.masqueraded_on is not None
                    result = to if it.endpoint else verdicts[it.result]
                    found[result] = round(found.get(result, 0.0) + it.probability, 6)
                assert found == walked(nodes, answer)
                compared += 1
    assert compared
