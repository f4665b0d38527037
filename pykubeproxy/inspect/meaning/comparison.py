"""Compare what two states of a node's rules do with packets to services."""

from collections.abc import Iterable, Iterator
from typing import Protocol, TypeAlias

import msgspec

from pykubeproxy.inspect.dump.nftables import nft_frontends
from pykubeproxy.inspect.limit import RuleLimit
from pykubeproxy.inspect.meaning.fingerprints import Fingerprints, SharedNumbers
from pykubeproxy.inspect.meaning.nft_fingerprints import NftFingerprints
from pykubeproxy.inspect.meaning.outcomes import (
    Destination,
    MeaningChange,
    NftablesDesign,
    PacketOrigin,
    meaning_of,
    same_meaning,
)
from pykubeproxy.inspect.packets.addresses import (
    Addresses,
    every_address,
    intersection,
    parse_addresses,
    subtract,
)
from pykubeproxy.inspect.packets.iptables import IptablesRules
from pykubeproxy.inspect.packets.nftables import NftRules
from pykubeproxy.inspect.packets.packet import NodeNetwork, Packet
from pykubeproxy.inspect.packets.rule_set import RuleSet
from pykubeproxy.inspect.packets.walk import walk
from pykubeproxy.inspect.routes import FrontendRule, rejecting_rules, serving_rules
from pykubeproxy.objects import Family, family_of
from pykubeproxy.objects import Protocol as ServiceProtocol
from pykubeproxy.rules.iptables_save import parse_rule, parse_target
from pykubeproxy.rules.names import NFT_TABLES
from pykubeproxy.rules.nft_list import NftRuleset, incoming_interfaces
from pykubeproxy.rules.ruleset import BUILT_IN, Ruleset
from pykubeproxy.services.ports import ANY_LOCAL

# How many destinations to remember whose two states have other numbers.
_MOST_KNOWN = 1 << 15
# How many chains, in all rulesets that are remembered for nodes with the same rules.
_MOST_CHAINS = 1 << 15
# Stands for the network of a node's pods: networks that no cluster uses (RFC 1112, RFC 6666).
LOCAL_NETWORK = {Family.IPV4: "240.0.0.0/30", Family.IPV6: "100::/126"}
# The chains to which a service proxy of any version jumps from built-in chains.
_ENTRY_CHAINS = frozenset(
    f"KUBE-{chain}"
    for chain in (
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
_PROTOCOLS = frozenset(protocol.value for protocol in ServiceProtocol)
# Packets to a service with 1000 endpoints visit fewer rules, each endpoint's those of later hooks.
_MOST_RULES, _LEAST_RULES, _TIMES = 1_000_000, 20_000, 200

# The rules of one family that a proxy wrote.
ProxyRules: TypeAlias = Ruleset | NftRuleset


def proxy_part(live: Ruleset) -> Ruleset:
    """Return the chains of a service proxy of any version, and its jumps in built-in chains.

    Other programs have chains with such names, too, for example the network policies of kube-router.
    """
    chains = {
        key: rules if key.chain not in BUILT_IN else tuple(rule for rule in rules if _is_jump(rule))
        for key, rules in live.chains.items()
        if key.chain.startswith("KUBE-") or key.chain in BUILT_IN
    }
    return Ruleset(live.family, chains)


def nft_proxy_part(live: NftRuleset) -> NftRuleset:
    """Return the table of a kube-proxy in nftables mode."""
    return msgspec.structs.replace(
        live,
        chains={key: chain for key, chain in live.chains.items() if key.table in NFT_TABLES},
        sets={key: one for key, one in live.sets.items() if key.table in NFT_TABLES},
    )


def with_source(ruleset: Ruleset, source: str, other: str) -> Ruleset:
    """Return the rules with another network where they have this one as source."""
    this, that = f"-s {source} ", f"-s {other} "
    chains = {
        key: tuple([rule.replace(this, that) for rule in rules])
        if any(this in rule for rule in rules)
        else rules
        for key, rules in ruleset.chains.items()
    }
    return Ruleset(ruleset.family, chains, ruleset.policies)


def _is_jump(rule: str) -> bool:
    return parse_target(rule) in _ENTRY_CHAINS


class _Numbering(Protocol):
    """The numbers of rules, see Fingerprints."""

    def of(self, packet: Packet) -> tuple[int, ...] | None: ...


class _ComparedState:
    """One of the two states: its destinations, and the numbers of its rules.

    `frontends` are the destinations and their titles, with ANY_LOCAL as the address of node ports; `interfaces` those that
    rules name.
    """

    def __init__(self, ruleset: ProxyRules, shared: SharedNumbers) -> None:
        self.ruleset = ruleset
        self.fingerprints: _Numbering
        if isinstance(ruleset, NftRuleset):
            rules: Iterable[FrontendRule] = nft_frontends(ruleset)
            self.fingerprints = NftFingerprints(ruleset, shared)
        else:
            rules = (*serving_rules(ruleset), *rejecting_rules(ruleset))
            self.fingerprints = Fingerprints(IptablesRules(ruleset), shared)
        self.frontends = tuple(_frontends(rules))
        self.interfaces = frozenset(_interfaces(ruleset))


class MeaningComparison:
    """Compares two states of one node after the other, and remembers what rules mean: nodes share most of them."""

    def __init__(self) -> None:
        self._shared = SharedNumbers()
        self._known: dict[tuple[object, ...], tuple[MeaningChange, ...]] = {}
        # Many nodes have the same rules. The latest one is the last.
        self._states: dict[tuple[object, ...], _ComparedState] = {}

    def changes(
        self,
        before: ProxyRules,
        after: Ruleset,
        network: NodeNetwork,
        local_network: str = "",
        design: NftablesDesign | None = None,
    ) -> Iterator[MeaningChange]:
        """Yield what packets get instead, for all destinations that either state knows. Raises TooManyRules.

        `design` is for rules of nftables, to leave out what it explains.

        With `local_network`, both states have LOCAL_NETWORK in its place, so that they are the same on many nodes. Among
        the clients of a change, the addresses of the node may be those of another node.
        """
        if self._shared.forget_many():
            self._states.clear()
            self._known.clear()
        own = network.own_addresses(after.family)
        pods = parse_addresses(local_network) if local_network else ()
        own_pods = intersection(own, pods)
        old, new = self._state(before), self._state(after)
        origins = tuple(_origins(old, new))
        rules: tuple[RuleSet, ...] = ()
        for destination, title in _destinations((old, new), network).items():
            packet = Packet(destination.protocol.lower(), "", destination.address, destination.port)
            numbers = (old.fingerprints.of(packet), new.fingerprints.of(packet))
            if numbers[0] and numbers[0] == numbers[1]:
                continue
            address = "" if destination.address in network.addresses else destination.address
            is_own = network.is_local(destination.address)
            named = self._shared.named((*(numbers[0] or ()), *(numbers[1] or ()))).addresses
            case = (
                after.family,
                numbers,
                destination._replace(address=address),
                origins,
                _among(named, own),
                _among(named, pods),
                own_pods,
                design and (design.case(destination, is_own), design.local_endpoints & named),
            )
            known = self._known.get(case) if all(numbers) else None
            if known is None:
                rules = rules or tuple(_rules(ruleset, local_network) for ruleset in (before, after))
                every = _changes(title, destination, packet, origins, network, rules)
                known = tuple(one for one in every if not (design and design.explains(one, is_own)))
                if all(numbers):
                    self._remember(case, known)
            for change in known:
                yield msgspec.structs.replace(change, title=title, destination=destination)

    def _state(self, ruleset: ProxyRules) -> _ComparedState:
        """Return the state with these rules, a known one if equal rules came lately.

        Each node has other sets of nftables, such as that of its own endpoints.
        """
        if isinstance(ruleset, NftRuleset):
            return _ComparedState(ruleset, self._shared)
        case = (ruleset.family, frozenset(ruleset.chains.items()), frozenset(ruleset.policies.items()))
        state = self._states.pop(case, None) or _ComparedState(ruleset, self._shared)
        self._states[case] = state
        while len(self._states) > 2 and self._number_of_chains() > _MOST_CHAINS:
            del self._states[next(iter(self._states))]
        return state

    def _number_of_chains(self) -> int:
        return sum(len(state.ruleset.chains) for state in self._states.values())

    def _remember(self, case: tuple[object, ...], changes: tuple[MeaningChange, ...]) -> None:
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[case] = changes


def _changes(
    title: str,
    destination: Destination,
    packet: Packet,
    origins: Iterable[PacketOrigin],
    network: NodeNetwork,
    rules: Iterable[RuleSet],
) -> Iterator[MeaningChange]:
    family = family_of(destination.address)
    own = network.own_addresses(family)
    for origin in origins:
        clients = own if origin.on_node else subtract(every_address(family), own)
        sent = msgspec.structs.replace(
            packet, starts_here=origin.on_node, received_by=origin.interface, clients=clients
        )
        before, after = (
            meaning_of(walk([rule], sent, network, limit=RuleLimit(_MOST_RULES, _LEAST_RULES, _TIMES)).ends)
            for rule in rules
        )
        if not same_meaning(before, after):
            yield MeaningChange(title, destination, origin, before, after)


def _rules(ruleset: ProxyRules, local_network: str) -> RuleSet:
    """Return rules for packets, with the network of the node's pods."""
    if isinstance(ruleset, NftRuleset):
        return NftRules(ruleset)
    if local_network:
        ruleset = with_source(ruleset, LOCAL_NETWORK[ruleset.family], local_network)
    return IptablesRules(ruleset)


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


def _origins(*states: _ComparedState) -> list[PacketOrigin]:
    """Return the node, and all interfaces that rules name, "" for any other."""
    names = {"", *(name for state in states for name in state.interfaces)}
    return [PacketOrigin(True), *(PacketOrigin(False, name) for name in sorted(names))]


def _destinations(states: Iterable[_ComparedState], network: NodeNetwork) -> dict[Destination, str]:
    """Return the destinations with the titles of their service ports; node ports at each address of the node."""
    found: dict[Destination, str] = {}
    for state in states:
        family = state.ruleset.family
        own = [
            address for address in (*sorted(network.addresses), _LOCALHOST) if family_of(address) is family
        ]
        for destination, title in state.frontends:
            for address in own if destination.address == ANY_LOCAL else [destination.address]:
                found.setdefault(destination._replace(address=address), title)
    return found


def _interfaces(ruleset: ProxyRules) -> Iterator[str]:
    if isinstance(ruleset, NftRuleset):
        for chain in ruleset.chains.values():
            for one in chain.rules:
                if b'"iifname"' in one.json:
                    yield from incoming_interfaces(one)
        return
    for rules in ruleset.chains.values():
        for rule in rules:
            if "-i " in rule:
                yield parse_rule(rule).options.get("-i", "").removeprefix("! ").removesuffix("+")


def _frontends(rules: Iterable[FrontendRule]) -> Iterator[tuple[Destination, str]]:
    for rule in rules:
        if rule.protocol in _PROTOCOLS:
            yield Destination(rule.protocol, rule.frontend.address, rule.frontend.port), rule.title
