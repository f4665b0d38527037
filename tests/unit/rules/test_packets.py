"""Walk random packets through rules of random objects and compare with independently computed expectations."""

from collections import Counter
from collections.abc import Iterable
from ipaddress import ip_address, ip_network
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykubeproxy.config import load
from pykubeproxy.objects import Endpoint, EndpointSlice, Family, Kind, Listed, Node, Port, Service, family_of
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.context import KernelFacts, RuleContext, rule_context
from pykubeproxy.rules.render import render
from pykubeproxy.rules.ruleset import Ruleset
from pykubeproxy.services.cluster import Cluster
from tests.packet_model import Packet, Walker
from tests.settings import HEADER
from tests.strategies import NAMES, NODE, ZONE, services, slices

NODE_IP = {Family.IPV4: "192.168.99.10", Family.IPV6: "fd00:99::10"}
POD = {Family.IPV4: "10.244.1.77", Family.IPV6: "fd00:10:244:1::77"}
OTHER_POD = {Family.IPV4: "10.244.2.77", Family.IPV6: "fd00:10:244:2::77"}
CLIENT = {Family.IPV4: "203.0.113.9", Family.IPV6: "2001:db8:9::9"}
NODE_OBJECT = Node(NODE, tuple(NODE_IP.values()), ("10.244.1.0/24", "fd00:10:244:1::/64"), ZONE)
BIT = 9

DETECTION: dict[str, dict[str, object]] = {
    "cluster": {"clusterCIDR": "10.244.0.0/16,fd00:10:244::/56"},
    "node": {"detectLocalMode": "NodeCIDR"},
    "bridge": {"detectLocalMode": "BridgeInterface", "detectLocal": {"bridgeInterface": "cbr0"}},
    "prefix": {"detectLocalMode": "InterfaceNamePrefix", "detectLocal": {"interfaceNamePrefix": "veth"}},
    "none": {},
}


class Sender(NamedTuple):
    """The sender of a packet: a pod of this node, a remote pod, the node itself or an outside client."""

    kind: str
    address: str
    interface: str

    def is_local(self, detection: str) -> bool | None:
        """Return whether the sender counts as local traffic, None if the node cannot tell."""
        if detection == "none":
            return None
        if detection == "cluster":
            return self.kind in ("pod", "other pod")
        return self.kind == "pod"


def senders(family: Family, bridge: str) -> list[Sender]:
    return [
        Sender("pod", POD[family], bridge),
        Sender("other pod", OTHER_POD[family], "eth0"),
        Sender("node", NODE_IP[family], ""),
        Sender("client", CLIENT[family], "eth0"),
    ]


pytestmark = pytest.mark.usefixtures("small_trees")


class World(NamedTuple):
    """Objects and settings of one family."""

    services: tuple[Service, ...]
    slices: tuple[EndpointSlice, ...]
    family: Family
    detection: str
    masquerade_all: bool
    dispatch: str

    def rule_context(self) -> RuleContext:
        document = {
            **HEADER,
            "iptables": {"masqueradeAll": self.masquerade_all, "masqueradeBit": BIT},
            **DETECTION[self.detection],
            "pykubeproxy": {"dispatch": self.dispatch},
        }
        return rule_context(load(document, {}).config, NODE, NODE_OBJECT, KernelFacts(), self.family)

    def rules(self) -> Ruleset:
        cluster = Cluster()
        cluster.apply(Listed(Kind.SERVICE, self.services))
        cluster.apply(Listed(Kind.ENDPOINT_SLICE, self.slices))
        ruleset = render(cluster, self.rule_context())
        return Ruleset(self.family, {**ruleset.chains, **skeleton.JUMPS, skeleton.KUBELET_FIREWALL: ()})


worlds = st.builds(
    World,
    services=st.lists(services(NAMES[:2]), min_size=1, max_size=2, unique_by=lambda it: it.name).map(tuple),
    slices=st.lists(slices(NAMES[:2]), max_size=3, unique_by=lambda it: it.name).map(tuple),
    family=st.sampled_from(Family),
    detection=st.sampled_from(sorted(DETECTION)),
    masquerade_all=st.booleans(),
    dispatch=st.sampled_from(["flat", "tree"]),
)


def endpoints_of(world: World, service: Service, port: Port) -> dict[str, Endpoint]:
    """Return the endpoints of a service port by address and port, duplicates resolved like kube-proxy."""
    endpoints: dict[str, Endpoint] = {}
    for slice_ in sorted(world.slices, key=lambda it: it.name):
        if slice_.service != service.name or slice_.family is not world.family:
            continue
        for number in [p.port for p in slice_.ports if (p.name, p.protocol) == (port.name, port.protocol)]:
            for endpoint in slice_.endpoints:
                host = f"[{endpoint.address}]" if ":" in endpoint.address else endpoint.address
                if f"{host}:{number}" not in endpoints or not endpoint.terminating:
                    endpoints[f"{host}:{number}"] = endpoint
    return endpoints


def in_use(endpoints: dict[str, Endpoint], *, here: bool) -> set[str]:
    """Return the endpoints in use on this node only, or anywhere by their hints."""
    candidates = {t: e for t, e in endpoints.items() if e.node_name == NODE or not here}
    ready = {target: e for target, e in candidates.items() if e.ready}
    if not ready:
        return {target for target, e in candidates.items() if e.serving and e.terminating}
    if here:
        return set(ready)
    by_node = {target for target, e in ready.items() if NODE in e.node_hints}
    if by_node and all(e.node_hints for e in ready.values()):
        return by_node
    by_zone = {target for target, e in ready.items() if ZONE in e.zone_hints}
    if by_zone and all(e.zone_hints for e in ready.values()):
        return by_zone
    return set(ready)


class Expectation(NamedTuple):
    """The endpoints that share the packets, whether they see the node's address, or the rejection."""

    targets: frozenset[str]
    masqueraded: bool = False
    rejection: str = ""


def internal(world: World, service: Service, endpoints: dict[str, Endpoint], sender: Sender) -> Expectation:
    """Return the expectation for a packet to the cluster IP."""
    targets = in_use(endpoints, here=service.internal_local)
    if not targets:
        return Expectation(frozenset(), rejection="DROP" if in_use(endpoints, here=False) else "REJECT")
    return Expectation(frozenset(targets), world.masquerade_all or sender.is_local(world.detection) is False)


def external(world: World, service: Service, endpoints: dict[str, Endpoint], sender: Sender) -> Expectation:
    """Return the expectation for a packet to a node port or an external IP."""
    anywhere = in_use(endpoints, here=False)
    local_policy = service.external_local and (service.type != "ClusterIP" or bool(service.external_ips))
    if not anywhere:
        # Packets of the node itself do not traverse the chain that rejects these.
        return Expectation(frozenset(), rejection="" if sender.kind == "node" else "REJECT")
    if not local_policy:
        return Expectation(frozenset(anywhere), masqueraded=True)
    if sender.is_local(world.detection):
        return Expectation(frozenset(anywhere))
    if sender.kind == "node":
        return Expectation(frozenset(anywhere), masqueraded=True)
    here = in_use(endpoints, here=True)
    return Expectation(frozenset(here), rejection="" if here else "DROP")


def balanced(world: World, service: Service, endpoints: dict[str, Endpoint], sender: Sender) -> Expectation:
    """Return the expectation for a packet to a load balancer IP, which may have source ranges, valid or not."""
    ranges = [it for it in service.source_ranges if family_of(it) is world.family]
    open_to_all = any(it.endswith("/0") for it in ranges) or not (ranges or service.rejected)
    if open_to_all or not in_use(endpoints, here=False):
        return external(world, service, endpoints, sender)
    allowed = [sender.address]
    if sender.address in service.load_balancer_ips:
        # The node owns the load balancer IP: its own address decides.
        allowed = [NODE_IP[world.family]]
    if any(ip_address(address) in ip_network(it) for it in ranges for address in allowed):
        return external(world, service, endpoints, sender)
    return Expectation(frozenset(), rejection="DROP")


def check(walker: Walker, world: World, packet: Packet, expectation: Expectation) -> None:
    """Walk one packet and compare its outcome with the expectation."""
    from_node = packet.local_source
    nat_outcomes = walker.walk(packet, "nat", "OUTPUT" if from_node else "PREROUTING")
    reached = {
        outcome.verdict.removeprefix("to "): share
        for outcome, share in nat_outcomes.items()
        if outcome.verdict
    }
    assert set(reached) == expectation.targets, packet
    hook = "OUTPUT" if from_node else "INPUT" if packet.local_destination else "FORWARD"
    if not reached:
        rejected = walker.walk(packet, "filter", hook)
        assert {outcome.verdict for outcome in rejected} == {expectation.rejection}, packet
        return
    for share in reached.values():
        assert abs(share - 1 / len(reached)) < 1e-9, packet
    assert {outcome.mark for outcome in nat_outcomes} == {1 << BIT if expectation.masqueraded else 0}, packet
    for target in reached:
        host, _, number = target.rpartition(":")
        onward = Packet(
            packet.source,
            host.strip("[]"),
            packet.protocol,
            int(number),
            local_source=from_node,
            states=frozenset({"NEW", "DNAT"}),
        )
        after = walker.walk(onward, "filter", "OUTPUT" if from_node else "FORWARD")
        assert {outcome.verdict for outcome in after} <= {"", "ACCEPT"}, onward


def of_family(family: Family, addresses: Iterable[str]) -> list[str]:
    return [it for it in addresses if family_of(it) is family]


@settings(max_examples=250, deadline=None)
@given(worlds)
def test_every_packet_reaches_its_endpoints_with_equal_shares(world: World) -> None:
    """Holds for all senders, kinds of addresses and states of endpoints."""
    walker = Walker(world.rules())
    claims = Counter(
        claim
        for it in world.services
        if of_family(world.family, it.cluster_ips)
        for port in it.ports
        for claim in ((it.name, port.protocol, port.port), ("", port.protocol, port.node_port))
    )
    for service in sorted(world.services, key=lambda it: it.name):
        if not of_family(world.family, service.cluster_ips):
            continue
        for port in sorted(service.ports, key=lambda it: (it.name, it.protocol.value)):
            endpoints = endpoints_of(world, service, port)
            protocol = port.protocol.value.lower()
            for sender in senders(world.family, "cbr0" if world.detection == "bridge" else "veth1"):

                def packet(
                    to: str,
                    number: int,
                    local: bool = False,
                    sender: Sender = sender,
                    protocol: str = protocol,
                ) -> Packet:
                    own = sender.kind == "node"
                    return Packet(sender.address, to, protocol, number, sender.interface, own, local)

                # If two ports claim the same number, either may get it.
                if claims[service.name, port.protocol, port.port] == 1:
                    for address in of_family(world.family, service.cluster_ips)[:1]:
                        check(
                            walker,
                            world,
                            packet(address, port.port),
                            internal(world, service, endpoints, sender),
                        )
                    for address in of_family(world.family, service.external_ips):
                        check(
                            walker,
                            world,
                            packet(address, port.port),
                            external(world, service, endpoints, sender),
                        )
                    for address in of_family(world.family, service.load_balancer_ips):
                        check(
                            walker,
                            world,
                            packet(address, port.port),
                            balanced(world, service, endpoints, sender),
                        )
                        node_as_balancer = Sender("node", address, "")
                        to = packet(address, port.port, sender=node_as_balancer)
                        check(walker, world, to, balanced(world, service, endpoints, node_as_balancer))
                if port.node_port and claims["", port.protocol, port.node_port] == 1:
                    to = packet(NODE_IP[world.family], port.node_port, local=True)
                    check(walker, world, to, external(world, service, endpoints, sender))
