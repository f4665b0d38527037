"""Rules of nftables for packets: expressions, sets, maps, verdicts and effects."""

import json

import msgspec
import pytest

from pykubeproxy.inspect.packets.addresses import Range
from pykubeproxy.inspect.packets.iptables import IptablesRules
from pykubeproxy.inspect.packets.nftables import NftRules
from pykubeproxy.inspect.packets.packet import DNAT, UNTRACKED, NodeNetwork, NodeRoute, Packet
from pykubeproxy.inspect.packets.rule_set import NOT_KNOWN
from pykubeproxy.inspect.packets.walk import NodeTrace, walk
from pykubeproxy.inspect.routes import PacketVerdict
from pykubeproxy.objects import Family
from pykubeproxy.rules.iptables_save import parse
from pykubeproxy.rules.nft_list import Json, NftRuleset, read_nft_lists

HOST = NodeNetwork(
    frozenset({"192.168.99.10"}), (NodeRoute("0.0.0.0/0", "eth0"), NodeRoute("10.244.1.0/24", "cni0"))
)
COMING = Packet("tcp", "203.0.113.9", "10.96.0.10", 80)
LEAVING = Packet("tcp", "192.168.99.10", "10.96.0.10", 80, starts_here=True)
DROP: Json = {"drop": None}
SADDR: Json = {"payload": {"protocol": "ip", "field": "saddr"}}
DADDR: Json = {"payload": {"protocol": "ip", "field": "daddr"}}
DPORT: Json = {"payload": {"protocol": "th", "field": "dport"}}
L4PROTO: Json = {"meta": {"key": "l4proto"}}
MARK: Json = {"meta": {"key": "mark"}}


def is_(left: Json, right: Json, op: str = "==") -> Json:
    return {"match": {"op": op, "left": left, "right": right}}


def tables(*items: Json, family: Family = Family.IPV4) -> NftRuleset:
    """Return tables with these sets and maps, and these base chains, each a list of rules."""
    return read_nft_lists(
        [json.dumps({"nftables": [{"table": {"family": "inet", "name": "fw"}}, *items]})], "test"
    )[family]


def chain(
    name: str, *rules: Json, hook: str = "", kind: str = "filter", prio: int = 0, policy: str = "accept"
) -> list[Json]:
    base: dict[str, Json] = {"type": kind, "hook": hook, "prio": prio, "policy": policy} if hook else {}
    place = {"family": "inet", "table": "fw"}
    return [
        {"chain": {**place, "name": name, **base}},
        *({"rule": {**place, "chain": name, "expr": rule}} for rule in rules),
    ]


def set_(name: str, *elements: Json, kind: str = "set", **options: Json) -> Json:
    return {kind: {"family": "inet", "table": "fw", "name": name, "elem": elements, **options}}


def traced(ruleset: NftRuleset, packet: Packet = COMING, network: NodeNetwork = HOST) -> NodeTrace:
    return walk([NftRules(ruleset)], packet, network, record=True)


def verdicts(trace: NodeTrace) -> dict[str, float]:
    found: dict[str, float] = {}
    for end in trace.ends:
        found[end.verdict.value] = round(found.get(end.verdict.value, 0) + end.probability, 6)
    return found


def drops(condition: Json, packet: Packet = COMING, *others: Json) -> bool:
    """Return whether a rule with a condition and `drop` drops a packet."""
    hook = "output" if packet.starts_here else "forward"
    found = verdicts(traced(tables(*others, *chain("in", [condition, DROP], hook=hook)), packet))
    assert found in ({"drop": 1.0}, {"pass": 1.0})
    return found == {"drop": 1.0}


BLOCKED = set_(
    "blocked", {"prefix": {"addr": "203.0.113.0", "len": 24}}, {"elem": {"val": "192.0.2.1", "expires": 5}}
)
PORTS = set_("ports", {"concat": [{"prefix": {"addr": "10.0.0.0", "len": 8}}, "tcp", {"range": [80, 90]}]})


@pytest.mark.parametrize(
    ("condition", "met"),
    [
        (is_(SADDR, "203.0.113.9"), True),
        (is_(SADDR, {"prefix": {"addr": "203.0.113.0", "len": 28}}, "!="), False),
        (is_(SADDR, {"range": ["203.0.113.1", "203.0.113.8"]}), False),
        (is_(SADDR, "@blocked"), True),
        (is_(SADDR, "@blocked", "!="), False),
        (is_(SADDR, {"set": ["192.0.2.1", {"prefix": {"addr": "203.0.112.0", "len": 23}}]}), True),
        (is_({"payload": {"protocol": "ip6", "field": "saddr"}}, "::1", "!="), False),
        (is_({"concat": [DADDR, L4PROTO, DPORT]}, "@ports"), True),
        (is_({"concat": [SADDR, L4PROTO, DPORT]}, "@ports"), False),
        (is_(DPORT, {"set": [22, {"range": [70, 79]}]}, "!="), True),
        (is_(DPORT, 80, ">="), True),
        (is_(DPORT, 80, ">"), False),
        (is_({"payload": {"protocol": "udp", "field": "dport"}}, 80, "!="), False),
        (is_({"payload": {"protocol": "th", "field": "sport"}}, 1, "!="), False),
        (is_({"payload": {"protocol": "ip", "field": "protocol"}}, {"set": ["icmp", "igmp"]}, "!="), True),
        (is_({"&": [{"payload": {"protocol": "tcp", "field": "flags"}}, ["fin", "syn"]]}, "syn"), True),
        (is_({"meta": {"key": "iifname"}}, "eth*"), True),
        (is_({"meta": {"key": "oifname"}}, {"set": ["cni*", "lo"]}), False),
        (is_({"meta": {"key": "nfproto"}}, "ipv6"), False),
        (is_({"ct": {"key": "state"}}, ["new", "untracked"], "in"), True),
        (is_({"ct": {"key": "state"}}, {"set": ["established", "related"]}), False),
        (is_({"ct": {"key": "status"}}, "dnat", "in"), False),
        (is_({"ct": {"key": "direction"}}, "original"), True),
        (is_({"&": [MARK, 0xFF]}, 0x10, "!="), True),
        (is_({"fib": {"result": "type", "flags": ["daddr"]}}, "local", "!="), True),
        (is_({"fib": {"result": "oif", "flags": ["saddr", "iif"]}}, False), False),
        (is_({"meta": {"key": "skuid"}}, 0), False),
        ({"limit": {"rate": 5, "per": "second"}}, True),
        ({"limit": {"rate": 5, "per": "second", "inv": True}}, False),
        ({"set": {"op": "add", "elem": SADDR, "set": "@blocked", "stmt": [{"limit": {"rate": 5, "per": "second", "inv": True}}]}}, False),
        ({"counter": {"packets": 1, "bytes": 2}}, True),
        ({"xt": {"type": "match", "name": "bpf"}}, False),
    ],
)  # fmt: skip
def test_conditions(condition: Json, met: bool) -> None:
    """A field that a packet does not have matches no value, nor any other."""
    assert drops(condition, COMING, BLOCKED, PORTS) is met


def test_what_cannot_be_evaluated_is_named() -> None:
    """It does not match. Nothing is said of a rule for another destination."""
    unknown = is_({"payload": {"protocol": "ip", "field": "ttl"}}, 5, "<")
    trace = traced(tables(*chain("in", [unknown, DROP], [unknown, is_(DPORT, 81), DROP], hook="forward")))
    (step,) = trace.steps
    assert (step.table, step.chain, step.rule, step.matched) == ("inet fw", "in", "ip ttl < 5 drop", False)
    assert step.reason == f"{NOT_KNOWN} ip ttl and assumes no match"
    word = is_({"ct": {"key": "state"}}, {"set": ["new", "later"]})
    assert (
        traced(tables(*chain("in", [word, DROP], hook="forward")))
        .steps[0]
        .reason.startswith(f"{NOT_KNOWN} later")
    )
    sent = traced(tables(*chain("in", [is_({"meta": {"key": "skuid"}}, 0), DROP], hook="output")), LEAVING)
    assert sent.steps[0].reason.startswith(NOT_KNOWN)


def test_accept_ends_one_base_chain_and_drop_all() -> None:
    ruleset = tables(
        *chain("last", [DROP], hook="forward", prio=10),
        *chain("first", [{"accept": None}], [DROP], hook="forward", prio=-5),
        *chain("middle", hook="forward", policy="drop"),
    )
    trace = traced(ruleset)
    assert [(step.chain, step.rule) for step in trace.steps] == [
        ("first", "accept"),
        ("middle", "policy DROP"),
    ]
    assert trace.ends[0].step == trace.steps[-1]


def test_chains_of_both_kinds_are_in_the_order_of_priorities() -> None:
    saved = parse(
        Family.IPV4,
        "*filter\n-A FORWARD -m comment --comment x\nCOMMIT\n*mangle\n-A FORWARD -j MARK --or-mark 0x1\nCOMMIT\n",
    )
    chains = [
        part
        for name, prio in (("before", -1), ("after", 1), ("mangle", -149))
        for part in chain(name, [{"counter": None}], hook="forward", prio=prio)
    ]
    trace = walk([IptablesRules(saved), NftRules(tables(*chains))], COMING, HOST, record=True)
    assert [f"{step.table} {step.chain}" for step in trace.steps] == [
        "mangle FORWARD", "inet fw mangle", "inet fw before", "filter FORWARD", "inet fw after",
    ]  # fmt: skip


def test_the_first_translation_at_a_hook_counts() -> None:
    """Chains that translate stand at one place of a hook, whatever their priority."""
    saved = parse(Family.IPV4, "*nat\n-A PREROUTING -j DNAT --to-destination 10.244.1.2:8080\nCOMMIT\n")
    late = tables(
        *chain("nat", [{"dnat": {"addr": "10.244.1.1"}}], hook="prerouting", kind="nat", prio=-90),
        *chain("filter", [is_(DADDR, "10.244.1.2"), DROP], hook="prerouting", prio=-95),
    )
    trace = walk([NftRules(late), IptablesRules(saved)], COMING, HOST)
    assert [end.step and end.step.chain for end in trace.ends] == [None]
    assert trace.ends[0].packet.destination == "10.244.1.2"


MAP = set_(
    "backends",
    [80, {"concat": ["10.244.1.1", 8080]}],
    [{"range": [81, 89]}, {"concat": ["10.244.1.2", 81]}],
    kind="map",
)


@pytest.mark.parametrize(
    ("translation", "ends"),
    [
        ({"dnat": {"addr": "10.244.1.1", "port": 8080}}, {"10.244.1.1:8080": 1}),
        ({"dnat": {"addr": {"range": ["10.244.1.1", "10.244.1.9"]}}}, {"10.244.1.1:80": 1}),
        ({"dnat": {"addr": {"map": {"key": DPORT, "data": "@backends"}}}}, {"10.244.1.1:8080": 1}),
        ({"dnat": {"addr": {"map": {"key": DPORT, "data": {"set": [[81, "10.244.1.1"]]}}}}}, {}),
        (
            {"dnat": {"addr": {"map": {"key": {"numgen": {"mode": "random", "mod": 10, "offset": 0}},
             "data": {"set": [[{"range": [0, 6]}, "10.244.1.1"], [{"range": [7, 8]}, "10.244.1.2"]]}}}}},
            {"10.244.1.1:80": 0.7, "10.244.1.2:80": 0.2},
        ),
        (
            {"dnat": {"addr": {"map": {"key": {"jhash": {"mod": 2, "expr": SADDR}},
             "data": {"set": [[0, "10.244.1.1"], [1, "10.244.1.2"]]}}}}},
            {"10.244.1.1:80": 0.5, "10.244.1.2:80": 0.5},
        ),
        ({"redirect": {"port": 8080}}, {"192.168.99.10:8080": 1}),
    ],
)  # fmt: skip
def test_destinations(translation: Json, ends: dict[str, float]) -> None:
    """Of a range, the first counts."""
    trace = traced(tables(MAP, *chain("nat", [translation], hook="prerouting", kind="nat", prio=-100)))
    found = {
        f"{end.packet.destination}:{end.packet.port}": round(end.probability, 6)
        for end in trace.ends
        if DNAT in end.packet.states
    }
    assert found == ends


def test_verdict_maps_go_to_chains() -> None:
    services = set_(
        "services",
        [{"concat": ["10.96.0.10", "tcp", 80]}, {"goto": {"target": "web"}}],
        ["*", {"return": None}],
        kind="map",
    )
    key = {"concat": [DADDR, L4PROTO, DPORT]}
    ruleset = tables(
        services,
        *chain("in", [{"jump": {"target": "all"}}], [DROP], hook="forward"),
        *chain("all", [{"vmap": {"key": key, "data": "@services"}}], [{"reject": {"type": "tcp reset"}}]),
        *chain("web", [{"mangle": {"key": MARK, "value": {"|": [MARK, 0x4000]}}}]),
    )
    trace = traced(ruleset)
    assert [step.chain for step in trace.steps] == ["in", "all", "web", "in"]
    assert (
        trace.steps[1].reason == "its destination, protocol and port 10.96.0.10 . tcp . 80 are in @services"
    )
    assert trace.ends[0].packet.mark == 0x4000
    assert verdicts(traced(ruleset, msgspec.structs.replace(COMING, port=81))) == {"drop": 1}


def test_marks_are_kept_when_a_later_condition_fails() -> None:
    """The connection's mark too; untracked packets have none, and are not translated."""
    restored = {"mangle": {"key": MARK, "value": {"ct": {"key": "mark"}}}}
    ruleset = tables(
        *chain(
            "pre",
            [{"mangle": {"key": {"ct": {"key": "mark"}}, "value": 5}}, is_(DPORT, 81), DROP],
            [restored],
            [{"notrack": None}],
            [restored, DROP],
            hook="prerouting",
            prio=-300,
        ),
        *chain("nat", [{"masquerade": None}], hook="postrouting", kind="nat", prio=100),
    )
    (end,) = traced(ruleset).ends
    assert (end.verdict, end.packet.mark, end.packet.states) == (PacketVerdict.PASS, 5, (UNTRACKED,))


def test_many_clients_are_split_by_the_addresses_that_sets_name() -> None:
    clients = msgspec.structs.replace(COMING, source="", clients=(Range(0, (1 << 32) - 1),))
    own = is_({"fib": {"result": "type", "flags": ["saddr"]}}, "local")
    trace = traced(
        tables(
            BLOCKED, *chain("in", [is_(SADDR, "@blocked"), DROP], [own, {"reject": None}], hook="forward")
        ),
        clients,
    )
    sizes = {
        end.verdict.value: sum(last - first + 1 for first, last in end.packet.clients) for end in trace.ends
    }
    assert sizes["drop"] == 257
    assert sizes["reject"] == 1 + (1 << 24)
    assert sum(sizes.values()) == 1 << 32


def test_affinity_has_known_clients_and_new_ones() -> None:
    ruleset = tables(
        set_("known", timeout=60, flags=["timeout"]),
        *chain(
            "in",
            [is_(SADDR, "@known"), {"accept": None}],
            [{"set": {"op": "update", "elem": SADDR, "set": "@known"}}],
            hook="forward",
        ),
    )
    clients = msgspec.structs.replace(COMING, source="", clients=(Range(0, 9),))
    ends = [end.packet for end in traced(ruleset, clients).ends]
    assert sorted((one.recalled.seconds if one.recalled else 0, one.remembered_in) for one in ends) == [
        (0, "inet fw @known"),
        (60, ""),
    ]
    assert [(step.matched, step.affinity) for step in traced(ruleset).steps] == [(False, 60), (True, 0)]


def test_tables_of_other_families_and_kinds_are_left_out() -> None:
    """Those of iptables come from iptables-save; what packets may meet in a bridge is named."""
    other: Json = {
        "family": "ip",
        "table": "filter",
        "name": "INPUT",
        "type": "filter",
        "hook": "input",
        "prio": 0,
    }
    bridge: Json = {
        "family": "bridge",
        "table": "b",
        "name": "f",
        "type": "filter",
        "hook": "forward",
        "prio": 0,
    }
    six: Json = {"family": "ip6", "table": "six", "name": "in", "type": "filter", "hook": "input", "prio": 0}
    items: list[Json] = [{"chain": one} for one in (other, bridge, six)]
    ruleset = tables(*items)
    assert (ruleset.tables(), ruleset.iptables) == ((), ("filter",))
    assert ruleset.not_evaluated == ("chain f of table bridge b at hook forward",)
    assert tables(*items, family=Family.IPV6).tables() == ("ip6 six",)
