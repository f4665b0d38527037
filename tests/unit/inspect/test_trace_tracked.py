"""trace --conntrack: the flows between two ends that nodes track, and what is wrong with them."""

from collections.abc import Collection, Mapping, Sequence

import msgspec

from pykubeproxy.inspect.connection import LocationKind, resolve
from pykubeproxy.inspect.flows import FlowProblem, FlowTable, parse_flow_table
from pykubeproxy.inspect.node import NodeState, UnknownNode
from pykubeproxy.inspect.targets import parse_destination, parse_source
from pykubeproxy.inspect.trace.journey import TracedWay, receivers
from pykubeproxy.inspect.trace.question import trace_in_cluster
from pykubeproxy.inspect.trace.report import TraceReport
from pykubeproxy.inspect.trace.tracked import NodeFlows
from pykubeproxy.report.text import text
from tests.fakes.three_nodes import ThreeNodes

CLIENT, VIP = "10.244.1.99", "10.96.1.1"
ENDPOINT, GONE = "10.244.2.12", "10.244.2.99"


def entry(
    source: str = f"{CLIENT} 4000",
    destination: str = f"{VIP} 80",
    endpoint: str = f"{ENDPOINT} 8080",
    seen: str = "",
    state: str = "ESTABLISHED",
    protocol: str = "tcp",
) -> str:
    """Return a line of /proc/net/nf_conntrack; ends are "IP PORT"."""
    (src, sport), (dst, dport), (by, from_port) = source.split(), destination.split(), endpoint.split()
    to, to_port = (seen or source).split()
    unreplied = "[UNREPLIED] " if state == "SYN_SENT" else ""
    return (
        f"ipv4 2 {protocol} 6 300 {state} src={src} dst={dst} sport={sport} dport={dport} {unreplied}"
        f"src={by} dst={to} sport={from_port} dport={to_port} mark=0"
    )


class TrackingNodes(ThreeNodes):
    """Three nodes with flows."""

    def __init__(self, case: str = "clusterip-three", **flows: FlowTable) -> None:
        super().__init__(case)
        self.flows = flows

    def read(self, names: Collection[str]) -> Mapping[str, NodeState | UnknownNode]:
        return {
            name: msgspec.structs.replace(state, flows=self.flows.get(name, FlowTable()))
            if isinstance(state, NodeState)
            else state
            for name, state in super().read(names).items()
        }

    def traced(self, source: str = CLIENT, destination: str = f"{VIP}:80") -> TraceReport:
        directory = msgspec.structs.replace(self.directory, services=tuple(self.cluster.services()))
        ends = resolve(parse_source(source, ""), parse_destination(destination, ""), directory)
        entrances: Sequence[TracedWay] = ()
        if ends.client.kind is LocationKind.OUTSIDE and ends.name and ends.destination.kind:
            entrances = receivers([self.explained("ns1/web")], ends.name, ends.family, ends.destination.kind)
        return trace_in_cluster(ends, directory, entrances, self.read, with_flows=True)


def on(report: TraceReport, node: str) -> NodeFlows:
    return next(found for found in report.tracked or () if found.node == node)


def test_a_connection_that_stays_on_a_removed_endpoint_is_stale() -> None:
    """It comes before the connection to a current endpoint; others' flows do not count."""
    lines = (
        entry(),
        entry(source=f"{CLIENT} 4001", endpoint=f"{GONE} 8080"),
        entry(source=f"{CLIENT} 4002", endpoint=f"{GONE} 8080", state="TIME_WAIT"),
        entry(source="10.244.1.98 4000", endpoint=f"{GONE} 8080"),
        entry(destination="10.96.1.2 80", endpoint=f"{GONE} 8080"),
        entry(protocol="udp"),
    )
    report = TrackingNodes(node1=parse_flow_table("\n".join(lines))).traced()
    found = on(report, "node1").flows
    assert [(flow.endpoint, flow.state, flow.problem) for flow in found] == [
        (f"{GONE}:8080", "ESTABLISHED", FlowProblem.STALE),
        (f"{ENDPOINT}:8080", "ESTABLISHED", None),
        (f"{GONE}:8080", "TIME_WAIT", None),
    ]
    shown = text(report.blocks(wide=False), 200)
    assert f"to {GONE}:8080, ESTABLISHED, stale: this endpoint no longer serves, from {CLIENT}:4001" in shown
    assert "restart the client" in shown


def test_a_flow_is_followed_to_the_next_node_by_its_addresses_after_nat() -> None:
    """The node of the endpoint sees a masqueraded source; a flow of another client of that node is left out."""
    first = entry(seen="192.168.99.10 50000")
    second = entry(source="192.168.99.10 50000", destination=f"{ENDPOINT} 8080", state="SYN_SENT")
    other = entry(source="192.168.99.10 50001", destination=f"{ENDPOINT} 8080")
    nodes = TrackingNodes(node1=parse_flow_table(first), node2=parse_flow_table(f"{second}\n{other}"))
    report = nodes.traced()
    (there,) = on(report, "node2").flows
    assert (there.source, there.state, there.problem) == (
        "192.168.99.10:50000",
        "SYN_SENT",
        FlowProblem.UNANSWERED,
    )
    (here,) = on(report, "node1").flows
    assert here.client == "192.168.99.10:50000"


def test_all_nodes_that_may_receive_a_connection_are_read() -> None:
    """A client outside uses node2, which passes the connection to node1 with its own address."""
    client = "203.0.113.77 4000"
    frontend, inside, node = "198.51.100.5 80", "10.244.1.11 8080", "192.168.99.20 50000"
    nodes = TrackingNodes(
        "lb",
        node1=parse_flow_table(entry(node, inside, inside)),
        node2=parse_flow_table(entry(client, frontend, inside, node)),
    )
    report = nodes.traced("203.0.113.77", "198.51.100.5:80")
    assert [flow.client for flow in on(report, "node2").flows] == ["192.168.99.20:50000"]
    assert [flow.source for flow in on(report, "node1").flows] == ["192.168.99.20:50000"]


def test_a_node_without_flows_does_not_hide_those_of_the_next() -> None:
    """Then a flow from the client to an endpoint counts without the one from which it came."""
    here = parse_flow_table(entry(destination=f"{ENDPOINT} 8080"))
    nodes = TrackingNodes(node1=FlowTable(unread="no conntrack"), node2=here)
    assert [flow.source for flow in on(nodes.traced(), "node2").flows] == [f"{CLIENT}:4000"]
    nodes.flows["node1"] = FlowTable()
    assert on(nodes.traced(), "node2").flows == ()


def test_a_connection_to_a_service_without_endpoints_is_stale() -> None:
    """No endpoint serves, so the one of the connection does not."""
    nodes = TrackingNodes("no-endpoints", node1=parse_flow_table(entry()))
    assert [flow.problem for flow in on(nodes.traced(), "node1").flows] == [FlowProblem.STALE]


def test_a_flow_without_nat_is_named() -> None:
    """A client may have begun before the node had rules."""
    report = TrackingNodes(node1=parse_flow_table(entry(endpoint=f"{VIP} 80"))).traced()
    assert [flow.problem for flow in on(report, "node1").flows] == [FlowProblem.NOT_TRANSLATED]


def test_session_affinity_of_the_client_is_named_while_it_lasts() -> None:
    """The kernel keeps a client for longer than the timeout, 10800 s."""
    nodes = TrackingNodes("affinity")
    steps = [
        step for way in nodes.traced().ways for visit in way.visits for step in visit.steps if step.affinity
    ]
    lists = [step.rule.split("--name ")[1].split()[0] for step in steps]
    endpoint = {
        step.chain: step.to for way in nodes.traced().ways for visit in way.visits for step in visit.steps
    }
    lines = f"{lists[0]}: src={CLIENT} age=800\n{lists[0]}: src=10.244.1.98 age=1\n{lists[1]}: src={CLIENT} age=10801"
    nodes.flows = {"node1": parse_flow_table(lines)}
    (held,) = on(nodes.traced(), "node1").affinity
    assert (held.client, held.endpoint, held.seconds_left) == (CLIENT, endpoint[lists[0]], 10000)


def test_a_table_that_cannot_be_read_costs_only_its_own_section() -> None:
    """The reason is shown, and the static answer stays."""
    report = TrackingNodes(node1=FlowTable(unread="only root can read conntrack")).traced()
    assert on(report, "node1").unread == "only root can read conntrack"
    shown = text(report.blocks(wide=False), 200)
    assert "node1: unknown: only root can read conntrack" in shown
    assert report.message in shown
