"""Compare what rules do with packets: another form is no difference, another result always is."""

import random
import re
from collections import Counter
from collections.abc import Iterator
from ipaddress import ip_address
from typing import Any

import msgspec
import pytest

from pykubeproxy.config import Dispatch
from pykubeproxy.inspect.limit import TooManyRules
from pykubeproxy.inspect.meaning.comparison import proxy_part
from pykubeproxy.inspect.meaning.fingerprints import Fingerprints, SharedNumbers
from pykubeproxy.inspect.meaning.outcomes import MeaningChange
from pykubeproxy.inspect.packets.addresses import parse_addresses, render_range
from pykubeproxy.inspect.packets.iptables import IptablesRules
from pykubeproxy.inspect.packets.packet import NodeNetwork
from pykubeproxy.inspect.packets.packet import Packet as SentPacket
from pykubeproxy.objects import Family
from pykubeproxy.rules.context import KernelFacts, rule_context
from pykubeproxy.rules.render import installed, render
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from tests.cases import ADDRESSES, NAMES, cluster_of, config_of, expected, load_case, node_of
from tests.packet_model import Outcome, Outcomes, Packet, Walker
from tests.traces import compare_meaning

NODE = NodeNetwork(frozenset(ADDRESSES))
RICH = [name for name in NAMES if name.startswith("random-")]


def rules_of(name: str, family: Family, dispatch: Dispatch) -> Ruleset:
    """Return the tables of a case's node as pykubeproxy writes them."""
    case = load_case(name)
    config = msgspec.structs.replace(config_of(case), dispatch=dispatch)
    node = node_of(case)
    context = rule_context(config, node.name, node, KernelFacts(addresses=ADDRESSES), family)
    return installed(render(cluster_of(case), context), context.options)


def recorded(name: str, family: Family) -> Ruleset:
    """Return the tables of a case's node as kube-proxy wrote them."""
    return proxy_part(expected(load_case(name), family))


@pytest.mark.parametrize("name", NAMES)
def test_rules_of_kube_proxy_mean_the_same_as_ours_in_a_tree(name: str) -> None:
    for family in Family:
        assert compare_meaning(recorded(name, family), rules_of(name, family, Dispatch.TREE), NODE) == ()


def padded(ruleset: Ruleset) -> Ruleset:
    """Return the same rules after one in every chain that no packet matches, so that no chain has the same rules."""
    never = "-m mark --mark 0x1/0x1 -j ACCEPT"
    return Ruleset(ruleset.family, {key: (never, *rules) for key, rules in ruleset.chains.items()})


@pytest.mark.parametrize("name", RICH[::5])
def test_rules_without_effect_change_nothing(name: str) -> None:
    for family in Family:
        rules = recorded(name, family)
        assert compare_meaning(rules, padded(rules), NODE) == ()


def test_unreadable_rules_match_nothing() -> None:
    """Files may hold anything."""
    rules = recorded(RICH[0], Family.IPV4)
    for broken in (
        "-d nonsense/32 -j DROP",
        "-s 1.2.3.4-x -j DROP",
        "-m tcp --dport x:y -j DROP",
        "-m recent --rcheck --seconds x -j DROP",
    ):
        chains = {key: (broken, *some) for key, some in rules.chains.items()}
        assert compare_meaning(rules, Ruleset(rules.family, chains), NODE) == ()
    key = ChainKey("nat", "KUBE-SERVICES")
    of_icmp = "-d 10.96.0.99/32 -p icmp -m icmp --dport 7 -j KUBE-MARK-MASQ"
    chains = {**rules.chains, key: (of_icmp, *rules.chains[key])}
    assert compare_meaning(rules, Ruleset(rules.family, chains), NODE) == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10.0.0.0/255.255.255.0", ["10.0.0.0/24"]),
        ("10.0.7.0/255.0.255.255", [f"10.{it}.7.0" for it in range(256)]),
        ("10.1.0.8/255.254.255.248", ["10.0.0.8/29", "10.1.0.8/29"]),
        ("fd00::8/ffff:ffff:ffff:ffff:ffff:ffff:ffff:fffd", ["fd00::8", "fd00::a"]),
        ("10.0.0.0/0.0.0.0", ["0.0.0.0/0"]),
    ],
)
def test_masks_may_have_gaps(text: str, expected: list[str]) -> None:
    family = Family.IPV6 if ":" in text else Family.IPV4
    assert [render_range(family, it) for it in parse_addresses(text)] == expected


def test_a_mask_with_very_many_gaps_is_no_answer() -> None:
    with pytest.raises(TooManyRules, match=r"10\.0\.0\.1/0\.0\.0\.1 has too many gaps"):
        parse_addresses("10.0.0.1/0.0.0.1")


@pytest.mark.parametrize("module", ["socket", "rpfilter"])
def test_a_module_without_options_is_a_condition(module: str) -> None:
    """Rules behind it count, and a rule without the module means something else."""
    rules = recorded("clusterip-three", Family.IPV4)
    key = next(it for it in rules.chains if it.chain.startswith("KUBE-SVC-"))

    def behind(*some: str) -> Ruleset:
        return Ruleset(rules.family, {**rules.chains, key: some})

    guarded = (f"-m {module} -j RETURN", *rules.chains[key])
    assert compare_meaning(behind(*guarded), behind("-j RETURN", *rules.chains[key]), NODE)
    assert compare_meaning(behind(*guarded), behind(guarded[0]), NODE)
    assert compare_meaning(behind(*guarded), rules, NODE) == ()


@pytest.mark.parametrize(
    ("guard", "leaves"),
    [
        ("-m mark ! --mark 0x10/0x10", True),
        ("-m mark ! --mark 0x0/0x10", False),
        ("-m mark --mark 0x10/0x10", False),
        ("-m conntrack --ctstate ESTABLISHED -m mark ! --mark 0x10/0x10", False),
        ("-s 10.244.0.0/16 -m mark ! --mark 0x10/0x10", False),
        ("-p udp -m mark ! --mark 0x10/0x10", False),
    ],
)
def test_packets_without_a_bit_leave_where_it_is_missing(guard: str, leaves: bool) -> None:
    """No rule of this case sets the bit, so rules behind it count only if other packets come there."""
    rules, key = recorded("nodeport", Family.IPV4), ChainKey("filter", "KUBE-FORWARD")

    def behind(*more: str) -> Ruleset:
        return Ruleset(rules.family, {**rules.chains, key: (f"{guard} -j RETURN", *more)})

    changes = compare_meaning(behind(), behind("-j DROP"), NODE)
    assert bool(changes) is not leaves
    shared, packet = SharedNumbers(), SentPacket("tcp", "", "10.96.1.1", 80)
    numbers = {Fingerprints(IptablesRules(one), shared).of(packet) for one in (behind(), behind("-j DROP"))}
    assert (len(numbers) == 1) is leaves


def test_a_goto_returns_further_than_a_jump() -> None:
    """After `-g`, packets skip the rest of the chain that was jumped to, not of the one above it."""
    to = "-d 10.96.0.10/32 -p tcp -m tcp --dport 80"
    endpoint = "-p tcp -m tcp -j DNAT --to-destination 10.244.1.5:80"

    def rules(**chains: tuple[str, ...]) -> Ruleset:
        named = {ChainKey("nat", f"KUBE-{name}"): some for name, some in chains.items()}
        start = {ChainKey("nat", "PREROUTING"): ("-j KUBE-SERVICES",)}
        return Ruleset(Family.IPV4, {**start, ChainKey("nat", "KUBE-NONE"): (), **named})

    jumped = rules(
        SERVICES=(f"{to} -j KUBE-SVC-X",),
        **{"SVC-X": ("-j KUBE-SVC-Y", endpoint), "SVC-Y": ("-g KUBE-NONE",)},
    )
    went = rules(SERVICES=(f"{to} -j KUBE-SVC-X",), **{"SVC-X": ("-g KUBE-NONE", endpoint)})
    assert compare_meaning(jumped, went, NODE)


def test_packets_of_the_node_to_itself_meet_the_rules_for_input() -> None:
    """They come in again by lo after they left, so a rejected node port is rejected for the node, too."""
    rules = recorded("no-endpoints", Family.IPV4)
    key = ChainKey("filter", "KUBE-EXTERNAL-SERVICES")
    kept = tuple(it for it in rules.chains[key] if "--dst-type LOCAL" not in it)
    assert kept != rules.chains[key]
    changes = compare_meaning(rules, Ruleset(rules.family, {**rules.chains, key: kept}), NODE)
    assert any(it.origin.on_node and it.destination.port == 30080 for it in changes)


def mutated(rules: Ruleset, chance: random.Random) -> Ruleset | None:
    """Return the ruleset with one rule of table nat changed; None if that rule cannot be changed so."""
    keys = [key for key, some in rules.chains.items() if some and key.table == "nat" and "KUBE" in key.chain]
    key = chance.choice(keys)
    some = list(rules.chains[key])
    at, other = chance.randrange(len(some)), chance.randrange(len(some))
    match chance.choice(("delete", "swap", "share", "port", "source")):
        case "delete":
            del some[at]
        case "swap":
            some[at], some[other] = some[other], some[at]
        case "share":
            some[at] = re.sub(
                r"--probability 0\.(\d)", lambda it: f"--probability 0.{9 - int(it[1])}", some[at]
            )
        case "port":
            some[at] = re.sub(r":(\d+)$", lambda it: f":{int(it[1]) + 1}", some[at])
        case _:
            some[at] = some[at].removeprefix("! ") if some[at].startswith("! -s") else f"! {some[at]}"
            if "-s" not in some[at][:4]:
                return None
    return (
        None
        if tuple(some) == rules.chains[key]
        else Ruleset(rules.family, {**rules.chains, key: tuple(some)})
    )


def packets(*rulesets: Ruleset) -> Iterator[Packet]:
    """Yield packets to all destinations of rules, from all sources that rules name and from elsewhere."""
    family = rulesets[0].family
    own = [it for it in ADDRESSES if (":" in it) is (family is Family.IPV6)]
    text = "\n".join(rule for one in rulesets for rules in one.chains.values() for rule in rules)
    sources = {match.partition("/")[0] for match in re.findall(r"-s (\S+)", text)}
    sources |= (
        {"203.0.113.250", "10.244.7.7"} if family is Family.IPV4 else {"2001:db8:ff::1", "fd00:10:244:7::7"}
    )
    found = set(re.findall(r"-d (\S+?)/(?:32|128) -p (\w+) .*--dport (\d+)", text))
    found |= {(it, *port) for it in own for port in re.findall(r"-p (\w+) .*--dport (3\d{4})", text)}
    for address, protocol, port in sorted(found):
        for source in sorted({*sources, *own}):
            if source not in own and ip_address(source).is_loopback:
                continue
            yield Packet(
                source,
                address,
                protocol,
                int(port),
                local_source=source in own,
                local_destination=address in own,
            )


def outcomes(walker: Walker, packet: Packet) -> Outcomes:
    """Return what table nat does with a packet, and whether that masquerades it.

    Packets from elsewhere to the node itself do not pass POSTROUTING, so their mark has no effect.
    """
    found = walker.walk(packet, "nat", "OUTPUT" if packet.local_source else "PREROUTING")
    reduced: Any = Counter()
    for outcome, probability in found.items():
        stays = outcome.verdict.removeprefix("to ").rpartition(":")[0].strip("[]") in ADDRESSES
        mark = 0 if stays and not packet.local_source else outcome.mark
        reduced[Outcome(outcome.verdict, mark)] += probability
    return reduced


def concerns(change: MeaningChange, packet: Packet) -> bool:
    """Return whether a change is about such a packet."""
    if (change.destination.address, change.destination.port) != (packet.destination, packet.port):
        return False
    source = int(ip_address(packet.source))
    return change.origin.on_node is packet.local_source and any(
        part.clients.first <= source <= part.clients.last
        for meaning in (change.before, change.after)
        for parts in meaning.values()
        for part in parts
    )


@pytest.mark.parametrize("name", RICH[::8])
def test_a_mutation_is_found_if_and_only_if_a_packet_notices(name: str) -> None:
    chance = random.Random(name)
    noticed = 0
    for family in Family:
        rules = recorded(name, family)
        for _ in range(12):
            mutant = mutated(rules, chance)
            if mutant is None:
                continue
            old, new = Walker(rules), Walker(mutant)
            differing = [
                it for it in packets(rules, mutant) if not same(outcomes(old, it), outcomes(new, it))
            ]
            changes = compare_meaning(rules, mutant, NODE)
            for packet in differing:
                assert any(concerns(it, packet) for it in changes), packet
            assert bool(changes) >= bool(differing)
            noticed += bool(differing)
    assert noticed


def same(some: Outcomes, others: Outcomes) -> bool:
    return all(abs(some.get(it, 0.0) - others.get(it, 0.0)) < 1e-6 for it in {*some, *others})
