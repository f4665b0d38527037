"""Compare what two states of a node's rules do with packets to services."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from pykubeproxy.inspect.meaning.addresses import (
    Addresses,
    Range,
    every_address,
    intersection,
    parse_addresses,
    subtract,
    union,
)
from pykubeproxy.inspect.meaning.signature import SharedSignatures, Signature, Signer
from pykubeproxy.inspect.meaning.translated import TranslatedRules
from pykubeproxy.inspect.meaning.walk import AFTER_DNAT, BEFORE_DNAT, Arrival, Flow, Rules
from pykubeproxy.inspect.routes import PacketVerdict, rejecting_rules, serving_rules
from pykubeproxy.inspect.trace.chains import Chains
from pykubeproxy.inspect.trace.packet import DNAT, LOOPBACK, SNAT, Host, Packet
from pykubeproxy.inspect.trace.walk import End
from pykubeproxy.objects import Family, Protocol, address_and_port, family_of
from pykubeproxy.rules.parse import parse_rule, parse_target
from pykubeproxy.rules.ruleset import BUILT_IN, Ruleset
from pykubeproxy.services.frontend import ANY_LOCAL

# Versions of kube-proxy give probabilities with 5 to 11 decimals; smaller differences are noise.
_NOISE = 2e-5
# How many destinations to remember whose two states have other signatures.
_MOST_KNOWN = 1 << 13
# How many chains, in all rulesets that are remembered for nodes with the same rules.
_MOST_CHAINS = 1 << 15
# Stands for the network of a node's pods: networks that no cluster uses (RFC 1112, RFC 6666).
LOCAL_NETWORK = {Family.IPV4: "240.0.0.0/30", Family.IPV6: "100::/126"}
# The chains to which a service proxy of any version jumps from built-in chains.
_ENTRY_CHAINS = frozenset(
    f"KUBE-{it}"
    for it in (
        "SERVICES",
        "EXTERNAL-SERVICES",
        "NODEPORTS",
        "POSTROUTING",
        "FORWARD",
        "PROXY-FIREWALL",
        "FIREWALL",
    )
)
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
    """Return the chains of a service proxy of any version, and its jumps in built-in chains.

    Other programs have chains with such names, too, for example the network policies of kube-router.
    """
    chains = {
        key: rules if key.chain not in BUILT_IN else tuple(it for it in rules if _is_jump(it))
        for key, rules in live.chains.items()
        if key.chain.startswith("KUBE-") or key.chain in BUILT_IN
    }
    return Ruleset(live.family, chains)


def with_source(ruleset: Ruleset, source: str, other: str) -> Ruleset:
    """Return the rules with another network where they have this one as source."""
    this, that = f"-s {source} ", f"-s {other} "
    chains = {
        key: tuple([it.replace(this, that) for it in rules]) if any(this in it for it in rules) else rules
        for key, rules in ruleset.chains.items()
    }
    return Ruleset(ruleset.family, chains, ruleset.policies)


def _is_jump(rule: str) -> bool:
    return parse_target(rule) in _ENTRY_CHAINS


class _Side:
    """The signatures of one of the two states, and what else is known about its rules.

    `frontends` are the destinations and their titles, with ANY_LOCAL as the address of node ports; `interfaces` those that
    rules name.
    """

    def __init__(self, ruleset: Ruleset, shared: SharedSignatures) -> None:
        self.ruleset = ruleset
        self.frontends = tuple(_frontends(ruleset))
        self.interfaces = frozenset(_interfaces(ruleset))
        self._signer = Signer(Chains(ruleset), shared)
        self._translated = TranslatedRules(ruleset)
        self._later: dict[tuple[tuple[bool, ...], int, str], list[Signature]] = {}
        self._known: dict[Packet, tuple[Signature, ...] | None] = {}

    def signature(self, packet: Packet) -> tuple[Signature, ...] | None:
        """Return signatures with numbers that are equal only if the same happens to packets; None if they cannot tell."""
        if packet not in self._known:
            self._known[packet] = self._sign(packet)
        return self._known[packet]

    def _sign(self, packet: Packet) -> tuple[Signature, ...] | None:
        first = [self._signer.sign(key, packet) for key in BEFORE_DNAT]
        bits, endpoints = 0, frozenset[str]()
        for it in first:
            bits |= it.bits
            endpoints |= it.endpoints
        later = [*self._sign_later(packet, bits)]
        for there in self._translated.elsewhere(packet, endpoints):
            later += self._sign_later(there, bits)
        if any(it.bits & ~bits or it.endpoints for it in later):
            return None
        return (*first, *later)

    def _sign_later(self, packet: Packet, bits: int) -> list[Signature]:
        """Return the signatures after DNAT; they are the same for destinations that meet the same rules."""
        met = self._translated.met(packet)
        if met is None:
            return [self._signer.sign(key, packet, bits) for key in AFTER_DNAT]
        case = (met, bits, packet.protocol)
        if (known := self._later.get(case)) is None:
            known = self._later[case] = [self._signer.sign(key, packet, bits) for key in AFTER_DNAT]
        return known


class MeaningComparison:
    """Compares two states of one node after the other, and remembers what rules mean: nodes share most of them."""

    def __init__(self) -> None:
        self._shared = SharedSignatures()
        self._known: dict[tuple[object, ...], tuple[MeaningChange, ...]] = {}
        # Many nodes have the same rules. The latest one is the last.
        self._sides: dict[tuple[object, ...], _Side] = {}

    def changes(
        self, before: Ruleset, after: Ruleset, host: Host, local_network: str = ""
    ) -> Iterator[MeaningChange]:
        """Yield what packets get instead, for all destinations that either state knows. Raises TooManyRules.

        With `local_network`, both states have LOCAL_NETWORK in its place, so that they are the same on many nodes. Among
        the clients of a change, the addresses of the node may be those of another node.
        """
        if self._shared.forget_many():
            self._sides.clear()
        own = union(
            parse_addresses(it) for it in (*host.addresses, *LOOPBACK) if family_of(it) is after.family
        )
        network = parse_addresses(local_network) if local_network else ()
        own_pods = intersection(own, network)
        old, new = self._side(before), self._side(after)
        origins = tuple(_origins(old, new))
        rules: tuple[Rules, ...] = ()
        for destination, title in _destinations((old, new), host).items():
            packet = Packet(destination.protocol.lower(), "", destination.address, destination.port)
            signatures = old.signature(packet), new.signature(packet)
            numbers = tuple([tuple([it.number for it in some]) if some else () for some in signatures])
            if numbers[0] and numbers[0] == numbers[1]:
                continue
            address = "" if destination.address in host.addresses else destination.address
            named = _named([it for some in signatures if some for it in some])
            case = (
                after.family,
                numbers,
                destination._replace(address=address),
                origins,
                _among(named, own),
                _among(named, network),
                own_pods,
            )
            known = self._known.get(case) if all(numbers) else None
            if known is None:
                rules = rules or tuple(_rules(it, local_network, host, own) for it in (before, after))
                known = tuple(_changes(title, destination, packet, origins, own, rules))
                if all(numbers):
                    self._remember(case, known)
            for change in known:
                yield msgspec.structs.replace(change, title=title, destination=destination)

    def _side(self, ruleset: Ruleset) -> _Side:
        """Return the signatures of a ruleset, those known if an equal one came lately."""
        chains, policies = frozenset(ruleset.chains.items()), frozenset(ruleset.policies.items())
        case = (ruleset.family, chains, policies)
        side = self._sides.pop(case) if case in self._sides else _Side(ruleset, self._shared)
        self._sides[case] = side
        number = sum(len(it.ruleset.chains) for it in self._sides.values())
        for oldest in [*self._sides][:-2]:
            if number <= _MOST_CHAINS:
                break
            number -= len(self._sides.pop(oldest).ruleset.chains)
        return side

    def _remember(self, case: tuple[object, ...], changes: tuple[MeaningChange, ...]) -> None:
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[case] = changes


def compare_meaning(before: Ruleset, after: Ruleset, host: Host) -> tuple[MeaningChange, ...]:
    """Compare for all destinations that either state knows. Raises TooManyRules."""
    return tuple(MeaningComparison().changes(before, after, host))


def _changes(
    title: str,
    destination: Destination,
    packet: Packet,
    origins: Iterable[Origin],
    own: Addresses,
    rules: Sequence[Rules],
) -> Iterator[MeaningChange]:
    for origin in origins:
        flow = _flow(packet, origin, family_of(destination.address), own)
        meanings = _meaning(rules[0].send(flow)), _meaning(rules[1].send(flow))
        if not same_meaning(*meanings):
            yield MeaningChange(title, destination, origin, *meanings)


def _rules(ruleset: Ruleset, local_network: str, host: Host, own: Addresses) -> Rules:
    """Return rules to send flows through, with the network of the node's pods."""
    if local_network:
        ruleset = with_source(ruleset, LOCAL_NETWORK[ruleset.family], local_network)
    return Rules(Chains(ruleset), host, own)


def _named(signatures: Iterable[Signature]) -> frozenset[str]:
    """Return the sources that rules name, and the addresses of endpoints."""
    named: set[str] = set()
    for it in signatures:
        named |= it.sources
        named.update(endpoint.rpartition(":")[0].strip("[]") for endpoint in it.endpoints)
    return frozenset(named)


def _among(named: Iterable[str], addresses: Addresses) -> frozenset[tuple[str, Addresses]]:
    """Return which parts of these addresses are named, and by which text."""
    found: set[tuple[str, Addresses]] = set()
    for text in named if addresses else ():
        try:
            among = intersection(parse_addresses(text), addresses)
        except ValueError:
            continue
        if among:
            found.add((text, among))
    return frozenset(found)


def _interfaces(ruleset: Ruleset) -> Iterator[str]:
    for rules in ruleset.chains.values():
        for rule in rules:
            if "-i " in rule:
                yield parse_rule(rule).options.get("-i", "").removeprefix("! ").removesuffix("+")


def _origins(*sides: _Side) -> list[Origin]:
    """Return the node, and all interfaces that rules name, "" for any other."""
    names = {"", *(name for side in sides for name in side.interfaces)}
    return [Origin(True), *(Origin(False, name) for name in sorted(names))]


def _frontends(ruleset: Ruleset) -> Iterator[tuple[Destination, str]]:
    for rule in (*serving_rules(ruleset), *rejecting_rules(ruleset)):
        if rule.protocol in _PROTOCOLS:
            yield Destination(rule.protocol, rule.frontend.address, rule.frontend.port), rule.title


def _destinations(sides: Iterable[_Side], host: Host) -> dict[Destination, str]:
    """Return the destinations with the titles of their service ports; node ports at each address of the node."""
    found: dict[Destination, str] = {}
    for side in sides:
        family = side.ruleset.family
        own = [it for it in (*sorted(host.addresses), _LOCALHOST) if family_of(it) is family]
        for destination, title in side.frontends:
            for address in own if destination.address == ANY_LOCAL else [destination.address]:
                found.setdefault(destination._replace(address=address), title)
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


def same_meaning(before: Meaning, after: Meaning) -> bool:
    """Return whether clients get the same."""
    for outcome in before.keys() | after.keys():
        removed = (Part(clients, -probability) for clients, probability in before.get(outcome, ()))
        if any(_sums((*removed, *after.get(outcome, ())))):
            return False
    return True
