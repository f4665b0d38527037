"""Compare what two states of a node's rules do with packets to services."""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from pykubeproxy.inspect.meaning.addresses import (
    Addresses,
    every_address,
    intersection,
    parse_addresses,
    subtract,
    union,
)
from pykubeproxy.inspect.meaning.outcomes import (
    Destination,
    MeaningChange,
    Origin,
    meaning_of,
    same_meaning,
)
from pykubeproxy.inspect.meaning.side import Side
from pykubeproxy.inspect.meaning.signature import SharedSignatures, Signature
from pykubeproxy.inspect.meaning.walk import Flow, Rules
from pykubeproxy.inspect.trace.chains import Chains
from pykubeproxy.inspect.trace.packet import LOOPBACK, Host, Packet
from pykubeproxy.objects import Family, family_of
from pykubeproxy.rules.parse import parse_target
from pykubeproxy.rules.ruleset import BUILT_IN, Ruleset
from pykubeproxy.services.frontend import ANY_LOCAL

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


class MeaningComparison:
    """Compares two states of one node after the other, and remembers what rules mean: nodes share most of them."""

    def __init__(self) -> None:
        self._shared = SharedSignatures()
        self._known: dict[tuple[object, ...], tuple[MeaningChange, ...]] = {}
        # Many nodes have the same rules. The latest one is the last.
        self._sides: dict[tuple[object, ...], Side] = {}

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

    def _side(self, ruleset: Ruleset) -> Side:
        """Return the signatures of a ruleset, those known if an equal one came lately."""
        chains, policies = frozenset(ruleset.chains.items()), frozenset(ruleset.policies.items())
        case = (ruleset.family, chains, policies)
        side = self._sides.pop(case) if case in self._sides else Side(ruleset, self._shared)
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
        meanings = meaning_of(rules[0].send(flow)), meaning_of(rules[1].send(flow))
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


def _origins(*sides: Side) -> list[Origin]:
    """Return the node, and all interfaces that rules name, "" for any other."""
    names = {"", *(name for side in sides for name in side.interfaces)}
    return [Origin(True), *(Origin(False, name) for name in sorted(names))]


def _destinations(sides: Iterable[Side], host: Host) -> dict[Destination, str]:
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
