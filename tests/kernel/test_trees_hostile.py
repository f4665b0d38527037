"""Trees of addresses that another tenant chose: the kernel takes them, and packets find their way."""

import functools
from collections.abc import Iterator
from ipaddress import ip_address

import pytest

from pykubeproxy.inspect.packets.packet import NodeNetwork, Packet
from pykubeproxy.kernel import Backend, Iptables
from pykubeproxy.objects import EndpointPort, Event, Family, Kind, Listed, Port, Protocol, Service, Updated
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.iptables_save import parse_target
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from tests.fakes.synced import SyncedFamily, flags_context
from tests.hostile import nested_addresses
from tests.kernel.node_network import CLIENT, PODS, LinkedNode, PacketSpec, send_all
from tests.objects import service, slice_of
from tests.traces import trace_packet

pytestmark = pytest.mark.root

VICTIM = {Family.IPV4: "10.96.9.9", Family.IPV6: "fd00:10:96::909"}
# Spread over all digits: a tree by digits would have a level for each.
NESTED = {family: nested_addresses(address, copies=16) for family, address in VICTIM.items()}
NODE_PORTS = sorted({30000 ^ (1 << bit) ^ n for bit in range(14) for n in range(20)} - {0})


def victims(family: Family) -> Iterator[Service]:
    base = ip_address(VICTIM[family])
    for n in range(250):
        yield service(f"v{n}", cluster_ip=str(base + n))


def hostile(family: Family) -> list[Service]:
    """Services with nested addresses and node ports, and one whose packets pass as many chains as possible."""
    base = ip_address(VICTIM[family])
    source = "2001:db8::/32" if family is Family.IPV6 else "203.0.113.0/24"
    ports = tuple(Port(f"p{port}", Protocol.TCP, port, port) for port in NODE_PORTS)
    return [
        service("nested", cluster_ip=str(base + 251), external_ips=NESTED[family][1::2]),
        service("numbers", cluster_ip=str(base + 252), type="NodePort", ports=ports),
        service(
            "deep",
            cluster_ip=str(base + 253),
            type="LoadBalancer",
            load_balancer_ips=NESTED[family][::2],
            source_ranges=(source,),
        ),
    ]


def world(family: Family) -> Iterator[Event]:
    services = (*victims(family), *hostile(family))
    pod1, pod2 = PODS["pod1"][family], PODS["pod2"][family]
    many = [str(ip_address(pod2) + n) for n in range(20, 200)]
    endpoints = {"deep": many, "nested": [pod2], "numbers": [pod2]}
    yield Listed(Kind.SERVICE, services)
    slices = (slice_of(*endpoints.get(service.name, [pod1]), service=service.name) for service in services)
    yield Listed(Kind.ENDPOINT_SLICE, tuple(slices))


def test_packets_find_victims_and_nested_addresses(
    network: LinkedNode, node_tables: Iptables, backend: Backend, family: Family
) -> None:
    """Real packets reach their endpoints, and trace visits few rules."""
    SyncedFamily(*world(family), live=node_tables).sync()
    own = [victim.cluster_ips[0] for victim in victims(family)]
    # Some nested addresses are cluster IPs of victims, which keep their packets.
    nested = [address for address in NESTED[family][1::2] if address not in own]
    client = CLIENT[family]
    packets = {PacketSpec("client", client, to, 80, "tcp"): False for to in (*own[::10], *nested)}
    results = send_all(network, packets)
    assert {packet.destination: result.split()[0] for packet, result in results.items()} == {
        **dict.fromkeys(own[::10], "pod1"),
        **dict.fromkeys(nested, "pod2"),
    }
    ruleset = node_tables.save()
    deep = NESTED[family][::2][0]
    for to, count in ((VICTIM[family], 1), (nested[-1], 1), (deep, 180)):
        trace = trace_packet(ruleset, Packet("tcp", client, to, 80), NodeNetwork(frozenset()))
        assert len(trace.endpoints) == count
        way = [step.chain for step in trace.steps if step.table == "nat" and step.matched]
        assert len(way) <= 14 or count > 1


def test_any_change_of_the_tree_is_written_in_any_blocks(iptables: Iptables, backend: Backend) -> None:
    """Each block may hold only some chains of the new tree."""
    family = iptables.family
    context = flags_context(family, False, dispatch="tree")
    chains_per_block = 5 if backend is Backend.NFT else None
    synced = SyncedFamily(*world(family), context=context, chains_per_block=chains_per_block, live=iptables)
    base = ip_address(VICTIM[family])
    ends = (str(base), str(base + 200), str(type(base)(int(base) // 3)))
    for near in ends:
        for step, copies in ((4, 17), (1, 3), (4, 1)):
            changed = service(
                "nested", cluster_ip=str(base + 251), external_ips=nested_addresses(near, step, copies)
            )
            assert not synced.sync(Updated(changed)).quarantined
    synced.restart()
    assert not synced.sync().wrote
    assert iptables.has_chain(skeleton.NAT_SERVICES)


def check_tree(synced: SyncedFamily) -> None:
    """Write all, and expect that nothing is rejected, and that a second full sync has nothing to write."""
    report = synced.sync()
    assert not (report.rejected_tree or report.quarantined)
    while synced.tables.waiting:
        synced.turn()
    synced.tables.distrust()
    report = synced.sync()
    assert not (report.wrote or report.rejected_tree or report.quarantined)


def deepest(ruleset: Ruleset, start: ChainKey) -> int:
    """The most jumps in a row."""

    @functools.cache
    def below(key: ChainKey) -> int:
        targets = {ChainKey(key.table, parse_target(text)) for text in ruleset.chains[key]}
        return max((1 + below(target) for target in targets if target in ruleset.chains), default=0)

    return below(start)


def test_many_ports_at_nested_addresses_make_no_tree_too_deep(
    network: LinkedNode, node_tables: Iptables, backend: Backend, family: Family
) -> None:
    """Of two Services with the same ports, the first one gets the packets, at each of thirty addresses."""
    addresses = NESTED[family][:: len(NESTED[family]) // 30][:30]
    synced = SyncedFamily(*world(family), live=node_tables)
    numbers = (*range(20_001, 20_261), 25_000)
    ports = tuple(Port(f"p{n}", Protocol.TCP, n) for n in numbers)
    targets = tuple(EndpointPort(port.name, Protocol.TCP, 8080) for port in ports)
    base = ip_address(VICTIM[family])
    for index, pod in enumerate(("pod1", "pod2")):
        name = f"wide{index}"
        wide = service(name, cluster_ip=str(base + 254 + index), external_ips=addresses, ports=ports)
        synced.apply(Updated(wide), Updated(slice_of(PODS[pod][family], service=name, ports=targets)))
    check_tree(synced)
    client = CLIENT[family]
    packets = {
        PacketSpec("client", client, to, port, "tcp"): False
        for to in addresses[::9]
        for port in numbers[::130]
    }
    results = send_all(network, packets)
    assert {result.split()[0] for result in results.values()} == {"pod1"}
    assert 10 <= deepest(node_tables.save(), ChainKey("nat", "PREROUTING")) <= 13


def test_rejected_addresses_and_ports_make_no_tree_too_deep(iptables: Iptables, backend: Backend) -> None:
    """In table filter, trees of ports stand below the tree of addresses. No Service has endpoints."""
    family = iptables.family
    ports = tuple(Port(f"p{port}", Protocol.TCP, port) for port in NODE_PORTS)
    wide = service("wide", cluster_ip=VICTIM[family], external_ips=NESTED[family][::20], ports=ports)
    services = (*list(victims(family))[1:], *hostile(family), wide)
    check_tree(SyncedFamily(Listed(Kind.SERVICE, services), live=iptables))
    trace = trace_packet(
        iptables.save(),
        Packet("tcp", CLIENT[family], wide.external_ips[-1], NODE_PORTS[-1]),
        NodeNetwork(frozenset()),
    )
    way = [step for step in trace.steps if step.table == "filter" and step.matched]
    assert "REJECT" in way[-1].rule
    assert 4 <= len(way) <= 14
