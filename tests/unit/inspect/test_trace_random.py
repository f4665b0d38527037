"""Trace random packets through the rules of random objects."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykubeproxy.inspect.packets.packet import NodeNetwork, Packet
from pykubeproxy.objects import Family, Kind, Listed
from pykubeproxy.rules.render import installed, render
from pykubeproxy.services.cluster import Cluster
from tests.packet_model import Packet as ModelPacket
from tests.packet_model import Walker
from tests.strategies import PODS
from tests.traces import PacketTrace, trace_packet
from tests.unit.rules.test_packets import CLIENT, NODE_IP, POD, World, worlds

pytestmark = pytest.mark.usefixtures("small_trees")

PRECISION = 1e-9


def traced(world: World, packet: Packet) -> PacketTrace:
    rules_context = world.rule_context()
    cluster = Cluster()
    cluster.apply(Listed(Kind.SERVICE, world.services))
    cluster.apply(Listed(Kind.ENDPOINT_SLICE, world.slices))
    host = NodeNetwork(frozenset({NODE_IP[world.family]}))
    packet = msgspec.structs.replace(packet, starts_here=host.is_local(packet.source))
    return trace_packet(installed(render(cluster, rules_context), rules_context.options), packet, host)


packets = st.tuples(
    st.sampled_from(["source pod", "endpoint", "node", "client"]),
    st.sampled_from(["cluster", "external", "balancer", "node"]),
    st.integers(0, 1),
    st.sampled_from(["tcp", "udp", "sctp"]),
    st.sampled_from([53, 80, 30053, 30080]),
)


def packet_for(world: World, choice: tuple[str, str, int, str, int]) -> Packet:
    sender, kind, number, protocol, port = choice
    family = world.family
    source = {
        "source pod": POD[family],
        "endpoint": PODS[family][0],
        "node": NODE_IP[family],
        "client": CLIENT[family],
    }[sender]
    service = world.services[number % len(world.services)]
    addresses = {
        "cluster": service.cluster_ips,
        "external": service.external_ips,
        "balancer": service.load_balancer_ips,
        "node": (NODE_IP[family],),
    }[kind]
    ipv6 = family is Family.IPV6
    destination = next((it for it in addresses if (":" in it) is ipv6), NODE_IP[family])
    return Packet(protocol, source, destination, port, received_by="" if sender == "node" else "eth0")


@settings(max_examples=200, deadline=None)
@given(world=worlds, choice=packets)
def test_trace_agrees_with_an_independent_evaluator(
    world: World, choice: tuple[str, str, int, str, int]
) -> None:
    """Destinations, shares and masquerading of table nat are equal."""
    packet = packet_for(world, choice)
    trace = traced(world, packet)
    assert abs(sum(end.probability for end in trace.ends) - 1) < PRECISION
    local = NODE_IP[world.family]
    model = ModelPacket(
        packet.source,
        packet.destination,
        packet.protocol,
        packet.port,
        interface=packet.received_by,
        local_source=packet.source == local,
        local_destination=packet.destination == local,
    )
    outcomes = Walker(world.rules()).walk(model, "nat", "OUTPUT" if packet.source == local else "PREROUTING")
    expected: dict[str, float] = {}
    for outcome, share in outcomes.items():
        if outcome.verdict.startswith("to "):
            to = outcome.verdict.removeprefix("to ")
            expected[to] = expected.get(to, 0.0) + share
    found = {
        f"[{it.address}]:{it.port}" if ":" in it.address else f"{it.address}:{it.port}": it.probability
        for it in trace.endpoints
    }
    assert found.keys() == expected.keys()
    assert all(abs(found[to] - expected[to]) < PRECISION for to in expected)
    if expected:
        marked = all(outcome.mark for outcome in outcomes if outcome.verdict)
        assert trace.masquerade is marked
