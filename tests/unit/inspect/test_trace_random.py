"""Trace random packets through the rules of random objects."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykubeproxy.inspect.dump.model import PacketVerdict
from pykubeproxy.inspect.packets.packet import NodeNetwork, Packet
from pykubeproxy.objects import Family, Kind, Listed
from pykubeproxy.rules.render import installed, render
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.endpoints import ResolvedEndpoint
from pykubeproxy.services.selection import resolve_ports
from tests.packet_model import Packet as ModelPacket
from tests.packet_model import Walker
from tests.strategies import PODS
from tests.traces import PacketTrace, trace_packet
from tests.unit.rules.test_packets import CLIENT, NODE_IP, POD, World, worlds

pytestmark = pytest.mark.usefixtures("small_trees")

PRECISION = 1e-9


def host_of(family: Family) -> NodeNetwork:
    return NodeNetwork(frozenset({NODE_IP[family]}))


def traced(world: World, packet: Packet) -> PacketTrace:
    rules_context = world.rule_context()
    cluster = Cluster()
    cluster.apply(Listed(Kind.SERVICE, world.services))
    cluster.apply(Listed(Kind.ENDPOINT_SLICE, world.slices))
    host = host_of(world.family)
    packet = msgspec.structs.replace(packet, starts_here=host.is_local(packet.source))
    return trace_packet(installed(render(cluster, rules_context), rules_context.options), packet, host)


def targets(backends: tuple[ResolvedEndpoint, ...]) -> dict[tuple[str, int], float]:
    return {(backend.endpoint.address, backend.port): 1 / len(backends) for backend in backends}


@settings(max_examples=120, deadline=None)
@given(world=worlds, outside=st.booleans())
def test_cluster_ips_reach_selected_endpoints_equally(world: World, outside: bool) -> None:
    """Without endpoints the packet is rejected, or dropped under policy Local."""
    cluster = Cluster()
    cluster.apply(Listed(Kind.SERVICE, world.services))
    cluster.apply(Listed(Kind.ENDPOINT_SLICE, world.slices))
    source = (CLIENT if outside else POD)[world.family]
    for service in world.services:
        for item in resolve_ports(cluster, service.key, world.family, world.rule_context().node):
            port, selection = item.port, item.selection
            trace = traced(world, Packet(port.protocol.value.lower(), source, port.cluster_ip, port.port))
            chosen = selection.local if port.internal_local else selection.cluster
            found = {(it.address, it.port): it.probability for it in trace.endpoints}
            assert found.keys() == targets(chosen).keys()
            assert all(abs(found[key] - 1 / len(chosen)) < PRECISION for key in found)
            rejection_ = PacketVerdict.DROP if selection.any_usable else PacketVerdict.REJECT
            assert trace.verdict is (PacketVerdict.DNAT if chosen else rejection_)


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


@settings(max_examples=100, deadline=None)
@given(world=worlds, choice=packets)
def test_probabilities_add_up_to_one(world: World, choice: tuple[str, str, int, str, int]) -> None:
    """A rejection names an existing rule."""
    trace = traced(world, packet_for(world, choice))
    rejected = sum(rejection.probability for rejection in trace.rejections)
    total = rejected + sum(endpoint.probability for endpoint in trace.endpoints)
    assert abs(total - (0 if trace.verdict is PacketVerdict.PASS else 1)) < PRECISION
    if trace.verdict in (PacketVerdict.DROP, PacketVerdict.REJECT):
        (rejection,) = trace.rejections
        assert rejection.verdict is trace.verdict
        assert rejection.step
        assert f"-j {trace.verdict.name}" in rejection.step.rule
        assert rejection.step in trace.steps
