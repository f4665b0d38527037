"""Rules of kube-proxy in nftables mode are compared by meaning, and only changes that packets notice are found."""

import json
import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec
import pytest

from pykubeproxy.inspect.diff.comparison import NodeComparison
from pykubeproxy.inspect.diff.report import NodeResult, NodeVerdict
from pykubeproxy.inspect.dump.nftables import nft_frontends
from pykubeproxy.inspect.meaning.fingerprints import SharedNumbers
from pykubeproxy.inspect.meaning.nft_fingerprints import NftFingerprints
from pykubeproxy.inspect.node import NodeRules, NodeState, Origin
from pykubeproxy.inspect.packets.packet import NodeNetwork
from pykubeproxy.inspect.packets.packet import Packet as ManyClients
from pykubeproxy.objects import Family, family_of
from pykubeproxy.rules.nft_list import NftRuleset, SetKey
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from pykubeproxy.services.ports import ANY_LOCAL
from tests.cases import ADDRESSES, NAMES, cluster_of, load_case, nft_tables, node_of
from tests.nft_model import Model, Packet

# These hold settings, which are inferred from the rules, or do not concern ports of Services.
SETTINGS = ("nodeport-ips", "services", "cluster-ips-check")
CLIENTS = {
    Family.IPV4: ("10.244.1.5", "10.244.2.99", "203.0.113.7", "192.0.2.7", "198.51.100.200", "192.168.99.10"),
    Family.IPV6: ("fd00:10:244:1::5", "fd00:10:244:2::99", "2001:db8::7", "2001:db8:1::9", "fd00:99::10"),
}
MUTATIONS = 3


@cache
def comparison(name: str) -> NodeComparison:
    return NodeComparison(cluster_of(load_case(name)), with_clients=True)


def compared(name: str, *rulesets: NftRuleset) -> NodeResult:
    rules = {one.family: NodeRules(Ruleset(one.family, {}), nftables=one) for one in rulesets if one.chains}
    network = NodeNetwork(frozenset(ADDRESSES))
    return comparison(name).compare(
        NodeState(node_of(load_case(name)), Origin("", proxy="kube-proxy v1.36.2"), rules, network)
    )


@pytest.mark.parametrize("name", NAMES)
def test_rules_of_nftables_mode_mean_what_objects_say(name: str) -> None:
    result = compared(name, *(nft_tables(name, family) for family in Family))
    assert (result.wrong, result.verdict) == ((), NodeVerdict.FOLLOWS)
    assert result.settings["mode"] == "nftables"


def test_settings_are_those_that_iptables_mode_shows() -> None:
    shown = {name: compared(name, nft_tables(name, Family.IPV4)).settings for name in NAMES}
    assert shown["affinity"] == {
        "mode": "nftables",
        "masqueradeAll": "false",
        "masqueradeBit": "14",
        "nodePortAddresses": "primary",
        "detectLocal": "10.244.0.0/16",
    }
    assert shown["masquerade-all"]["masqueradeAll"] == "true"
    assert shown["detect-bridge"]["detectLocal"] == "interface cbr0"
    assert shown["detect-node-cidr"]["detectLocal"] == "podCIDR of the Node"


def mutated(rules: NftRuleset, chance: random.Random) -> NftRuleset:
    """Return the rules with one element or rule deleted, an element that leads elsewhere, or another weight."""
    sets = {key: one for key, one in rules.sets.items() if one.elements and key.name not in SETTINGS}
    chains = {key: one for key, one in rules.chains.items() if one.rules and key.chain not in SETTINGS}
    if sets and chance.random() < 0.6:
        key = chance.choice(sorted(sets))
        elements: list[Any] = list(sets[key].elements)
        at = chance.randrange(len(elements))
        if chance.random() < 0.5 and isinstance(elements[at], list):
            other = chance.choice(elements)
            elements[at] = [elements[at][0], chance.choice([{"drop": None}, other[1]])]
        else:
            del elements[at]
        changed = msgspec.structs.replace(sets[key], json=json.dumps(elements).encode())
        return msgspec.structs.replace(rules, sets={**rules.sets, key: changed})
    place = chance.choice(sorted(chains))
    some = list(chains[place].rules)
    at = chance.randrange(len(some))
    if b'"numgen"' in some[at].json:
        text = some[at].json.decode()
        weights = json.loads(text)
        heavier(weights)
        some[at] = msgspec.structs.replace(some[at], json=json.dumps(weights).encode())
    elif b'"@affinity-' not in some[at].json or not any(b'"mod": 1,' in one.json for one in some):
        del some[at]  # with one endpoint, nobody notices a missing affinity
    chain = msgspec.structs.replace(chains[place], rules=tuple(some))
    return msgspec.structs.replace(rules, chains={**rules.chains, place: chain})


def heavier(value: Any) -> None:
    """Let the first endpoint of a map come twice."""
    match value:
        case {"key": {"numgen": numgen}, "data": {"set": elements}}:
            elements.append([numgen["mod"], elements[0][1]])
            numgen["mod"] += 1
        case dict():
            for one in value.values():
                heavier(one)
        case list():
            for one in value:
                heavier(one)


def packets(*rulesets: NftRuleset) -> Iterator[Packet]:
    """Yield packets to each frontend from each kind of client, its endpoints among them."""
    family = rulesets[0].family
    own = [address for address in ADDRESSES if family_of(address) is family]
    frontends = {one for rules in rulesets for one in nft_frontends(rules)}
    for one in sorted(frontends, key=str):
        addresses = own if one.frontend.address == ANY_LOCAL else [one.frontend.address]
        for address in addresses:
            first = Packet("", address, one.protocol.lower(), one.frontend.port)
            reached = set[str]()
            for rules in rulesets:
                probe = msgspec.structs.replace(first, source=CLIENTS[family][1])
                verdicts = Model(rules, ADDRESSES).outcomes(probe)
                reached |= {end.verdict.split()[1] for end in verdicts if end.verdict.startswith("to ")}
            for source in (*CLIENTS[family], *sorted(reached)):
                for interface in ("eth0", "cbr0"):
                    yield msgspec.structs.replace(first, source=source, interface=interface)
            for key, known in rulesets[0].sets.items():
                if known.timeout:
                    remembered = frozenset({f"@{key.name}"})
                    for source in (CLIENTS[family][0], CLIENTS[family][-1]):
                        yield msgspec.structs.replace(first, source=source, remembered=remembered)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "large-cluster"][::2])
def test_a_mutation_is_found_if_and_only_if_a_packet_notices(name: str) -> None:
    chance = random.Random(name)
    for _ in range(MUTATIONS):
        family = chance.choice([one for one in Family if nft_tables(name, one).chains])
        rules = nft_tables(name, family)
        other = mutated(rules, chance)
        noticed = [one for one in packets(rules, other) if not same(rules, other, one)]
        result = compared(name, other)
        if result.settings == compared(name, rules).settings:
            assert bool(result.wrong) == bool(noticed), (family, noticed[:1], difference(rules, other))


def same(rules: NftRuleset, other: NftRuleset, packet: Packet) -> bool:
    """Return whether a packet gets the same: REJECT or DROP is one for addresses with `loadBalancerSourceRanges`."""
    one, another = (Model(each, ADDRESSES).outcomes(packet) for each in (rules, other))
    (limited,) = (known.json for key, known in rules.sets.items() if key.name == "firewall-ips")
    stopped = {outcome.verdict for outcome in (*one, *another)} <= {"drop", "reject"}
    return one == another or (stopped and f'"{packet.destination}"'.encode() in limited)


def difference(rules: NftRuleset, other: NftRuleset) -> list[ChainKey | SetKey]:
    return [
        *(key for key, one in rules.chains.items() if other.chains[key] != one),
        *(key for key, one in rules.sets.items() if other.sets[key] != one),
    ]


def test_numbers_tell_rules_apart() -> None:
    """Equal numbers are for equal rules alone: of the destination, of its endpoints, or of their ports."""
    name = "nodeport"
    rules = nft_tables(name, Family.IPV4)
    (frontend,) = {one.frontend for one in nft_frontends(rules) if one.frontend.port == 80}
    shared = SharedNumbers()

    def number(other: NftRuleset) -> tuple[int, ...] | None:
        to = ManyClients("tcp", "", frontend.address, frontend.port)
        return NftFingerprints(other, shared).of(to)

    def with_element(name: str, element: Any) -> NftRuleset:
        key = SetKey("ip kube-proxy", name)
        changed = json.dumps([*rules.sets[key].elements, element]).encode()
        known = msgspec.structs.replace(rules.sets[key], json=changed)
        return msgspec.structs.replace(rules, sets={**rules.sets, key: known})

    def concat(*parts: object) -> dict[str, object]:
        return {"concat": parts}

    assert number(rules) == number(nft_tables(name, Family.IPV4))
    drop = {"drop": None}
    assert number(rules) == number(
        with_element("no-endpoint-services", [concat("10.9.9.9", "tcp", 80), drop])
    )
    for others, element in (
        ("no-endpoint-services", [concat("10.244.1.11", "tcp", 8080), drop]),
        ("no-endpoint-nodeports", [concat("tcp", 8080), drop]),
        ("hairpin-connections", concat("10.244.2.12", "10.244.2.12", "tcp", 8080)),
        ("cluster-ips", {"prefix": {"addr": "10.96.0.0", "len": 12}}),
    ):
        assert number(rules) != number(with_element(others, element)), others
