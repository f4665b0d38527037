"""kube-proxy's recorded rules do the same with packets in iptables and nftables mode, but for what the docs list."""

from collections import defaultdict
from collections.abc import Iterator
from functools import cache

import pytest

from pykubeproxy.inspect.packets.iptables import IptablesRules
from pykubeproxy.inspect.packets.nftables import NftRules
from pykubeproxy.inspect.packets.packet import DNAT, SNAT, Packet
from pykubeproxy.inspect.packets.rule_set import NOT_KNOWN, RuleSet
from pykubeproxy.inspect.packets.walk import walk
from pykubeproxy.inspect.routes import PacketVerdict, rejecting_rules, serving_rules
from pykubeproxy.objects import Family, family_of
from pykubeproxy.rules.ruleset import Ruleset
from pykubeproxy.services.ports import ANY_LOCAL, FrontendKind
from tests.cases import ADDRESSES, NAMES, NETWORK, expected, load_case, nft_tables

# A pod of this node, one of another, two clients from outside, and the node itself by two of its addresses.
SOURCES = {
    Family.IPV4: ("10.244.1.5", "10.244.2.99", "203.0.113.7", "192.0.2.7", "192.168.99.10", "127.0.0.1"),
    Family.IPV6: (
        "fd00:10:244:1::5",
        "fd00:10:244:2::99",
        "2001:db8::7",
        "2001:db8:1::7",
        "fd00:99::10",
        "::1",
    ),
}
PRIMARY = ("192.168.99.10", "fd00:99::10")
UNALLOCATED = {Family.IPV4: "10.96.255.254", Family.IPV6: "fd00:10:96::ffff:fffe"}
MOST_PACKETS = 60
PASSES, REJECTED, DROPPED = "passes", "is rejected", "is dropped"

# What may happen to a packet, with probabilities.
Result = dict[str, float]


def result(rules: RuleSet, packet: Packet) -> Result:
    found: dict[str, float] = defaultdict(float)
    traced = walk([rules], packet, NETWORK, record=True)
    assert not [step for step in traced.steps if NOT_KNOWN in step.reason]
    for end in traced.ends:
        if end.verdict is PacketVerdict.REJECT:
            text = REJECTED
        elif end.verdict is PacketVerdict.DROP:
            text = DROPPED
        else:
            text = f"to {end.packet.destination}:{end.packet.port}" if DNAT in end.packet.states else PASSES
            text += " masqueraded" if SNAT in end.packet.states else ""
        found[text] += end.probability
    return {text: round(probability, 6) for text, probability in found.items()}


def difference(kind: FrontendKind | None, packet: Packet, iptables: Result, nftables: Result) -> str:
    """Return the key in docs/differences.md of a difference between the modes, "" for one that it does not list."""
    own = NETWORK.is_local(packet.source)
    if kind is None:
        return "other ports" if iptables == {PASSES: 1} and nftables.keys() <= {REJECTED, DROPPED} else ""
    if kind is FrontendKind.NODE_PORT and packet.destination not in PRIMARY:
        return "primary addresses" if nftables == {PASSES: 1} else ""
    if kind in (FrontendKind.EXTERNAL_IP, FrontendKind.LOAD_BALANCER_IP):
        if own and iptables == {PASSES: 1} and nftables.keys() <= {REJECTED, DROPPED}:
            return "from the node"
        if (iptables, nftables) == ({REJECTED: 1}, {DROPPED: 1}):
            return "source ranges first"
    hairpin = f":{packet.source}:" in "".join(f":{text.removeprefix('to ')}" for text in iptables)
    if hairpin and {text.removesuffix(" masqueraded") for text in iptables} == nftables.keys():
        return "hairpin elsewhere"
    return ""


def packets(rules: Ruleset) -> Iterator[tuple[FrontendKind | None, Packet]]:
    """Yield packets to all frontends of a recorded case, from all kinds of clients, and to places beside them."""
    family = rules.family
    own = [address for address in (*ADDRESSES, "127.0.0.1") if family_of(address) is family]
    frontends = [*serving_rules(rules), *rejecting_rules(rules)]
    kinds = {(it.frontend.address, it.frontend.kind) for it in frontends}
    cluster_ips = {address for address, kind in kinds if kind is FrontendKind.CLUSTER_IP}
    for it in frontends:
        addresses = own if it.frontend.address == ANY_LOCAL else [it.frontend.address]
        for address in addresses:
            for source in sources(rules, it.protocol.lower(), address, it.frontend.port):
                yield it.frontend.kind, packet(it.protocol, source, address, it.frontend.port)
    for address in [*sorted(cluster_ips)[:1], UNALLOCATED[family]]:
        for source in SOURCES[family]:
            yield None, packet("tcp", source, address, 9)


def sources(rules: Ruleset, protocol: str, address: str, port: int) -> tuple[str, ...]:
    """Return the clients, with an endpoint that may reach itself."""
    usual = SOURCES[rules.family]
    reached = walk([IptablesRules(rules)], packet(protocol, usual[2], address, port), NETWORK).ends
    endpoints = sorted(end.packet.destination for end in reached if DNAT in end.packet.states)
    return (*usual, *endpoints[:1])


def packet(protocol: str, source: str, address: str, port: int) -> Packet:
    return Packet(protocol.lower(), source, address, port, starts_here=NETWORK.is_local(source))


@cache
def compared(name: str) -> dict[str, int]:
    """Compare a case; return how often each listed difference comes."""
    found: dict[str, int] = defaultdict(int)
    for family in Family:
        nft, saved = nft_tables(name, family), expected(load_case(name), family)
        every = list(packets(saved)) if nft.chains else []
        for kind, one in every[:: len(every) // MOST_PACKETS + 1]:
            iptables, nftables = result(IptablesRules(saved), one), result(NftRules(nft), one)
            why = "" if iptables == nftables else difference(kind, one, iptables, nftables)
            assert why or iptables == nftables, (kind, one, iptables, nftables)
            found[why] += 1
    return found


@pytest.mark.parametrize("name", NAMES)
def test_both_modes_do_the_same_with_packets(name: str) -> None:
    compared(name)


def test_each_listed_difference_occurs() -> None:
    listed = {
        "",
        "other ports",
        "primary addresses",
        "from the node",
        "source ranges first",
        "hairpin elsewhere",
    }
    assert {why for name in NAMES for why in compared(name)} == listed
