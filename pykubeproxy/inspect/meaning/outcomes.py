"""What packets get, as values: outcomes with their clients and probabilities, changes, and older versions of rules."""

from collections.abc import Container, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

import msgspec

from pykubeproxy.inspect.packets.addresses import (
    Addresses,
    Range,
    contains,
    every_address,
    intersection,
    parse_addresses,
    subtract,
    union,
)
from pykubeproxy.inspect.packets.packet import DNAT, LOOPBACK, SNAT, NodeNetwork, Packet
from pykubeproxy.inspect.packets.walk import WalkEnd
from pykubeproxy.inspect.routes import PacketVerdict
from pykubeproxy.objects import address_and_port, family_of
from pykubeproxy.rules import names
from pykubeproxy.rules.ruleset import ChainKey, Ruleset

_PROXY_FIREWALL = ChainKey("filter", names.PROXY_FIREWALL)
_MARK_DROP = ChainKey("nat", "KUBE-MARK-DROP")
# Versions of kube-proxy give probabilities with 5 to 11 decimals; smaller differences are noise.
_NOISE = 2e-5


class Destination(NamedTuple):
    """An address and port that clients connect to; the protocol as Kubernetes writes it."""

    protocol: str
    address: str
    port: int


class PacketOrigin(NamedTuple):
    """Where packets start: on the node, or elsewhere, with the interface they come in by if a rule names it."""

    on_node: bool
    interface: str = ""


class PacketOutcome(msgspec.Struct, frozen=True):
    """What may happen to a packet.

    - `endpoint`: "ip:port" under DNAT
    - `masquerade`: the endpoint sees an address of the node
    - `accepted`: it reaches the endpoint even if the policy of FORWARD is DROP; None if that does not count
    - `affinity`: where a client's next connections go, and for how many seconds; usually the same endpoint
    """

    verdict: PacketVerdict
    endpoint: str = ""
    masquerade: bool = False
    accepted: bool | None = False
    affinity: tuple[tuple[str, int], ...] = ()


class ClientShare(NamedTuple):
    """Clients with addresses from first to last get an outcome with this probability."""

    clients: Range
    probability: float


# What packets from one origin to one destination get; parts are sorted, without overlaps.
PacketMeaning = Mapping[PacketOutcome, tuple[ClientShare, ...]]


class MeaningChange(msgspec.Struct, frozen=True):
    """Packets that get something else after than before."""

    title: str
    destination: Destination
    origin: PacketOrigin
    before: PacketMeaning
    after: PacketMeaning


def meaning_of(ends: Iterable[WalkEnd]) -> PacketMeaning:
    """Return what the packets of many clients get, from how they end."""
    found = list(ends)
    known: dict[str, set[tuple[str, int]]] = {}
    for end in found:
        if recalled := end.packet.recalled:
            known.setdefault(recalled.name, set()).add((_endpoint(end.packet), recalled.seconds))
    parts: dict[PacketOutcome, list[ClientShare]] = {}
    for end in found:
        if not end.packet.recalled:
            affinity = tuple(sorted(known.get(end.packet.remembered_in, ())))
            parts.setdefault(_outcome(end, affinity), []).extend(
                ClientShare(clients, end.probability) for clients in end.packet.clients
            )
    return {outcome: tuple(_sums(some)) for outcome, some in parts.items()}


def same_meaning(before: PacketMeaning, after: PacketMeaning) -> bool:
    """Return whether clients get the same."""
    for outcome in before.keys() | after.keys():
        removed = (ClientShare(clients, -probability) for clients, probability in before.get(outcome, ()))
        if any(_sums((*removed, *after.get(outcome, ())))):
            return False
    return True


def _outcome(end: WalkEnd, affinity: tuple[tuple[str, int], ...]) -> PacketOutcome:
    if end.verdict in (PacketVerdict.DROP, PacketVerdict.REJECT):
        return PacketOutcome(end.verdict)
    packet = end.packet
    return PacketOutcome(end.verdict, _endpoint(packet), SNAT in packet.states, packet.accepted, affinity)


def _endpoint(packet: Packet) -> str:
    return address_and_port(packet.destination, packet.port) if DNAT in packet.states else ""


def _sums(parts: Iterable[ClientShare]) -> Iterator[ClientShare]:
    """Yield parts without overlaps, sorted, with the sum of the probabilities; leave out those of about 0."""
    steps: dict[int, float] = {}
    for clients, probability in parts:
        steps[clients.first] = steps.get(clients.first, 0.0) + probability
        steps[clients.last + 1] = steps.get(clients.last + 1, 0.0) - probability
    first, total = 0, 0.0
    for at in sorted(steps):
        if abs(steps[at]) < _NOISE:
            continue
        if abs(total) > _NOISE:
            yield ClientShare(Range(first, at - 1), total)
        first, total = at, total + steps[at]


# The outcomes of a packet with their probabilities.
Chances = Mapping[PacketOutcome, float]


class ClientGroup(NamedTuple):
    """Clients, and what their packets get.

    `endpoints_only`: each of them is an endpoint of the service, which is masqueraded when it reaches itself.
    """

    clients: Addresses
    before: Chances
    after: Chances
    endpoints_only: bool


def differing_groups(change: MeaningChange) -> list[ClientGroup]:
    """Return the groups of clients that get something else after than before; the largest first."""
    groups: dict[tuple[frozenset[tuple[PacketOutcome, float]], ...], list[Range]] = {}
    for clients in _ranges(change):
        chances = tuple(
            frozenset(_chances(outcomes, clients).items()) for outcomes in (change.before, change.after)
        )
        if chances[0] != chances[1]:
            groups.setdefault(chances, []).append(clients)
    endpoints = endpoints_of(change)
    found = [
        ClientGroup(
            union([(client,) for client in clients]),
            dict(before),
            dict(after),
            not subtract(tuple(clients), endpoints),
        )
        for (before, after), clients in groups.items()
    ]
    return sorted(found, key=lambda group: -sum(last - first for first, last in group.clients))


def everyone(change: MeaningChange) -> Addresses:
    """Return all clients of the origin."""
    return union(
        (part.clients,)
        for meaning in (change.before, change.after)
        for parts in meaning.values()
        for part in parts
    )


def _ranges(change: MeaningChange) -> Iterator[Range]:
    """Yield ranges of clients between which nothing changes."""
    parts = [
        part.clients
        for meaning in (change.before, change.after)
        for some in meaning.values()
        for part in some
    ]
    known = union((part,) for part in parts)
    for first, following in pairwise(
        sorted({part.first for part in parts} | {part.last + 1 for part in parts})
    ):
        yield from intersection((Range(first, following - 1),), known)


def _chances(meaning: PacketMeaning, clients: Range) -> Chances:
    return {
        outcome: round(part.probability, 6)
        for outcome, parts in meaning.items()
        for part in parts
        if part.clients.first <= clients.first <= part.clients.last
    }


def endpoints_of(change: MeaningChange) -> Addresses:
    """Return the addresses of all endpoints."""
    outcomes = {outcome.endpoint for meaning in (change.before, change.after) for outcome in meaning}
    return union(parse_addresses(outcome.rpartition(":")[0].strip("[]")) for outcome in outcomes if outcome)


class OlderVersion(msgspec.Struct, frozen=True):
    """What rules of a version of kube-proxy do otherwise.

    - `marks_drops`: before 1.26, they mark packets to drop for the kubelet's KUBE-FIREWALL, which forwarded packets do
      not meet
    - `keeps_sources`: before 1.24, they do not masquerade local traffic to external IPs
    """

    marks_drops: bool
    keeps_sources: bool

    def explains(self, change: MeaningChange, network: NodeNetwork, cluster_ips: Container[str]) -> bool:
        """Return whether nothing but the version causes a change. `network` is the node's."""
        passes = self.marks_drops and not change.origin.on_node
        address = change.destination.address
        any_source = self.keeps_sources and address not in cluster_ips and not network.is_local(address)
        if not passes and not any_source:
            return False
        return same_meaning(
            *(_reduced(outcomes, passes, any_source) for outcomes in (change.before, change.after))
        )


class NftablesDesign(msgspec.Struct, frozen=True):
    """What kube-proxy does otherwise in nftables mode than in iptables mode, at ports of Services.

    See docs/differences.md.

    - `node_ports`: the addresses at which it serves node ports; None for all except those of loopback
    - `local_endpoints`: the endpoints on the node; others keep their source when they reach themselves through it
    - `cluster_ips`, `external`: the cluster IPs, and all other addresses of Services
    - `admitted`: by load balancer IP, the clients in `loadBalancerSourceRanges`
    """

    node_ports: frozenset[str] | None
    local_endpoints: frozenset[str]
    cluster_ips: frozenset[str]
    external: frozenset[str]
    admitted: Mapping[str, Addresses]

    def case(self, destination: Destination, own: bool) -> tuple[object, ...]:
        """Return what this says about a destination; `own` is whether it is an address of the node."""
        address = destination.address
        return (
            address in self.cluster_ips,
            self.admitted.get(address),
            own and address not in self.external and not self._serves_node_ports(address),
        )

    def explains(self, change: MeaningChange, own: bool) -> bool:
        """Return whether nothing but the mode causes a change. See `case` for `own`."""
        in_cluster, _, unserved = self.case(change.destination, own)
        before, after = (
            {outcome.verdict for outcome in outcomes} for outcomes in (change.before, change.after)
        )
        stopped = {PacketVerdict.REJECT, PacketVerdict.DROP}
        if before == {PacketVerdict.PASS} and unserved:
            return True
        if after == {PacketVerdict.PASS} and before <= stopped and change.origin.on_node and not in_cluster:
            return True
        return same_meaning(
            *(
                self._common(outcomes, change.destination.address)
                for outcomes in (change.before, change.after)
            )
        )

    def _serves_node_ports(self, address: str) -> bool:
        if self.node_ports is None:
            return not any(contains(network, address) for network in LOOPBACK)
        return address in self.node_ports

    def _common(self, meaning: PacketMeaning, address: str) -> PacketMeaning:
        """Return a meaning without what the modes do differently to some clients."""
        found: dict[PacketOutcome, list[ClientShare]] = {}
        for outcome, parts in meaning.items():
            usual = msgspec.structs.replace(outcome, accepted=None)
            special = usual
            clients: Addresses = ()
            endpoint = outcome.endpoint.rpartition(":")[0].strip("[]")
            if endpoint and endpoint not in self.local_endpoints:
                special = msgspec.structs.replace(usual, masquerade=False)
                clients = parse_addresses(endpoint)
            elif outcome.verdict is PacketVerdict.REJECT and address in self.admitted:
                special = PacketOutcome(PacketVerdict.DROP, accepted=None)
                clients = subtract(every_address(family_of(address)), self.admitted[address])
            for part in parts:
                for among, one in ((intersection, special), (subtract, usual)):
                    shares = (part._replace(clients=some) for some in among((part.clients,), clients))
                    found.setdefault(one, []).extend(shares)
        return {outcome: tuple(parts) for outcome, parts in found.items() if parts}


def older_version(rules: Ruleset) -> OlderVersion:
    """Return what rules do otherwise. The kubelet before 1.28 writes KUBE-MARK-DROP for newer versions, too."""
    if _PROXY_FIREWALL in rules.chains or _MARK_DROP not in rules.chains:
        return OlderVersion(marks_drops=False, keeps_sources=False)
    jump = f"-j {_MARK_DROP.chain}"
    return OlderVersion(
        marks_drops=any(rule.endswith(jump) for some in rules.chains.values() for rule in some),
        keeps_sources=not any(key.chain.startswith(names.EXTERNAL_PREFIX) for key in rules.chains),
    )


def _reduced(meaning: PacketMeaning, passes: bool, any_source: bool) -> PacketMeaning:
    """Return a meaning in which dropped packets pass, or in which masquerading does not count."""
    reduced: dict[PacketOutcome, list[ClientShare]] = {}
    for outcome, parts in meaning.items():
        if (passes and outcome.verdict is PacketVerdict.DROP) or outcome.verdict is PacketVerdict.PASS:
            same = PacketOutcome(PacketVerdict.PASS)
        elif any_source:
            same = msgspec.structs.replace(outcome, masquerade=False, accepted=None)
        else:
            same = outcome
        reduced.setdefault(same, []).extend(parts)
    return {outcome: tuple(parts) for outcome, parts in reduced.items()}
