"""Compare what two states of a node's rules do with packets to services."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from pykubeproxy.inspect.meaning.addresses import (
    Addresses,
    Range,
    every_address,
    parse_addresses,
    subtract,
    union,
)
from pykubeproxy.inspect.meaning.signature import Numbers, Signer
from pykubeproxy.inspect.meaning.walk import HOOKS, Arrival, Flow, Rules
from pykubeproxy.inspect.routes import PacketVerdict, rejecting_rules, serving_rules
from pykubeproxy.inspect.trace.chains import Chains
from pykubeproxy.inspect.trace.packet import DNAT, LOOPBACK, SNAT, Host, Packet
from pykubeproxy.inspect.trace.walk import End
from pykubeproxy.objects import Family, Protocol, address_and_port, family_of
from pykubeproxy.rules.parse import parse_rule
from pykubeproxy.rules.ruleset import BUILT_IN, Ruleset
from pykubeproxy.services.frontend import ANY_LOCAL

# iptables keeps probabilities in 31 bits; smaller differences are noise.
_NOISE = 1e-6
_LOCALHOST = "127.0.0.1"
_PROTOCOLS = frozenset(it.value for it in Protocol)


class Destination(NamedTuple):
    """An address and port that clients connect to; the protocol as Kubernetes writes it."""

    protocol: str
    address: str
    port: int


class Origin(NamedTuple):
    """Where packets start: on the node, or elsewhere, with the interface they come in by if a rule names it."""

    on_node: bool
    interface: str = ""


class Outcome(msgspec.Struct, frozen=True):
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


class Part(NamedTuple):
    """Clients with addresses from first to last get an outcome with this probability."""

    clients: Range
    probability: float


# What packets from one origin to one destination get; parts are sorted, without overlaps.
Meaning = Mapping[Outcome, tuple[Part, ...]]


class MeaningChange(msgspec.Struct, frozen=True):
    """Packets that get something else after than before."""

    title: str
    destination: Destination
    origin: Origin
    before: Meaning
    after: Meaning


def proxy_part(live: Ruleset) -> Ruleset:
    """Return the chains of a service proxy of any version, and its jumps in built-in chains."""
    chains = {
        key: rules if key.chain not in BUILT_IN else tuple(it for it in rules if _is_jump(it))
        for key, rules in live.chains.items()
        if key.chain.startswith("KUBE-") or key.chain in BUILT_IN
    }
    return Ruleset(live.family, chains)


def _is_jump(rule: str) -> bool:
    return parse_rule(rule).target.startswith("KUBE-")


class _Side:
    """One of the two states."""

    def __init__(self, ruleset: Ruleset, host: Host, own: Addresses, numbers: Numbers) -> None:
        chains = Chains(ruleset)
        self._signer = Signer(chains, host, numbers)
        self._named = chains.named_in_long_chains("filter")
        self.rules = Rules(chains, host, own)

    def signature(self, packet: Packet) -> tuple[int, ...] | None:
        """Return numbers that are equal only if the same happens to packets; None if they cannot tell."""
        signatures = [self._signer.sign(key, packet) for key in HOOKS]
        for endpoint in frozenset[str]().union(*(endpoints for _, endpoints in signatures)):
            address, _, port = endpoint.rpartition(":")
            if address.strip("[]") in self._named[0] or port in self._named[1]:
                return None
        return tuple(number for number, _ in signatures)


def compare_meaning(before: Ruleset, after: Ruleset, host: Host) -> tuple[MeaningChange, ...]:
    """Compare for all destinations that either state knows."""
    return tuple(_changes(before, after, host))


def _changes(before: Ruleset, after: Ruleset, host: Host) -> Iterator[MeaningChange]:
    numbers: Numbers = {}
    origins = _origins(before, after)
    own = union(parse_addresses(it) for it in (*host.addresses, *LOOPBACK) if family_of(it) is after.family)
    old, new = _Side(before, host, own, numbers), _Side(after, host, own, numbers)
    for destination, title in _destinations((before, after), host).items():
        packet = Packet(destination.protocol.lower(), "", destination.address, destination.port)
        signature = old.signature(packet)
        if signature is not None and signature == new.signature(packet):
            continue
        for origin in origins:
            flow = _flow(packet, origin, after.family, own)
            meanings = _meaning(old.rules.send(flow)), _meaning(new.rules.send(flow))
            if not _same(*meanings):
                yield MeaningChange(title, destination, origin, *meanings)


def _origins(*rulesets: Ruleset) -> list[Origin]:
    """Return the node, and all interfaces that rules name, "" for any other."""
    names = {
        parse_rule(rule).options.get("-i", "").removeprefix("! ").removesuffix("+")
        for ruleset in rulesets
        for rules in ruleset.chains.values()
        for rule in rules
        if "-i " in rule
    }
    return [Origin(True), *(Origin(False, name) for name in sorted({"", *names}))]


def _destinations(rulesets: Iterable[Ruleset], host: Host) -> dict[Destination, str]:
    """Return the destinations with the titles of their service ports; node ports at each address of the node."""
    found: dict[Destination, str] = {}
    for ruleset in rulesets:
        own = [it for it in (*sorted(host.addresses), _LOCALHOST) if family_of(it) is ruleset.family]
        for rule in (*serving_rules(ruleset), *rejecting_rules(ruleset)):
            if rule.protocol not in _PROTOCOLS:
                continue
            address, port = rule.frontend.address, rule.frontend.port
            for each in own if address == ANY_LOCAL else [address]:
                found.setdefault(Destination(rule.protocol, each, port), rule.title)
    return found


def _flow(packet: Packet, origin: Origin, family: Family, own: Addresses) -> Flow:
    """Return the packets of all clients of an origin."""
    sent = msgspec.structs.replace(packet, starts_here=origin.on_node, received_by=origin.interface)
    return Flow(sent, own if origin.on_node else subtract(every_address(family), own))


def _meaning(arrivals: Iterable[Arrival]) -> Meaning:
    arrived = list(arrivals)
    known: dict[str, set[tuple[str, int]]] = {}
    for flow in (it.flow for it in arrived):
        if flow.recalled:
            known.setdefault(flow.recalled.name, set()).add((_endpoint(flow.packet), flow.recalled.seconds))
    parts: dict[Outcome, list[Part]] = {}
    for flow, end in ((it.flow, it.end) for it in arrived if not it.flow.recalled):
        affinity = tuple(sorted(known.get(flow.remembered_in, ())))
        parts.setdefault(_outcome(flow, end, affinity), []).extend(
            Part(clients, flow.probability) for clients in flow.clients
        )
    return {outcome: tuple(_sums(some)) for outcome, some in parts.items()}


def _outcome(flow: Flow, end: End, affinity: tuple[tuple[str, int], ...]) -> Outcome:
    if end is End.DROP:
        return Outcome(PacketVerdict.DROP)
    if end is End.REJECT:
        return Outcome(PacketVerdict.REJECT)
    endpoint = _endpoint(flow.packet)
    verdict = PacketVerdict.DNAT if endpoint else PacketVerdict.PASS
    return Outcome(verdict, endpoint, SNAT in flow.packet.states, flow.accepted, affinity)


def _endpoint(packet: Packet) -> str:
    return address_and_port(packet.destination, packet.port) if DNAT in packet.states else ""


def _sums(parts: Iterable[Part]) -> Iterator[Part]:
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
            yield Part(Range(first, at - 1), total)
        first, total = at, total + steps[at]


def _same(before: Meaning, after: Meaning) -> bool:
    for outcome in before.keys() | after.keys():
        removed = (Part(clients, -probability) for clients, probability in before.get(outcome, ()))
        if any(_sums((*removed, *after.get(outcome, ())))):
            return False
    return True
