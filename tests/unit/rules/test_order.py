"""The order of rules: what a packet can tell apart is a difference, and nothing else is."""

import random
from collections.abc import Iterator, Sequence
from itertools import permutations, product

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykubeproxy.config import load
from pykubeproxy.objects import EndpointSlice, Family, Kind, Listed, Node, Service
from pykubeproxy.rules import order as order_module
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.context import KernelFacts, rule_context
from pykubeproxy.rules.difference import difference
from pykubeproxy.rules.order import aligned
from pykubeproxy.rules.render import render
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from pykubeproxy.services.cluster import Cluster
from tests import strategies
from tests.objects import service, slice_of
from tests.packet_model import Outcomes, Packet, Walker

A, B = "-d 10.96.0.1/32 -p tcp -m tcp --dport 80", "-d 10.96.0.2/32 -p tcp -m tcp --dport 80"
NODE = {"192.168.99.10", "127.0.0.1"}
LAST = "-m addrtype --dst-type LOCAL -j KUBE-NODEPORTS"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (f"{A} -j KUBE-SVC-A", f"{B} -j KUBE-SVC-B"),
        (f"{A} -j KUBE-SVC-A", "-d 10.96.0.1/32 -p tcp -m tcp --dport 81 -j KUBE-SVC-B"),
        (f"{A} -j KUBE-SVC-A", "-d 10.96.0.1/32 -p udp -m udp --dport 80 -j KUBE-SVC-B"),
        ("-p tcp -m tcp --dport 80 -j KUBE-EXT-A", "-p tcp -m tcp --dport 81 -j KUBE-EXT-B"),
        ("-p tcp -m tcp --dport 1:99 -j KUBE-SVC-A", "-p tcp -m tcp --dport 100:199 -j KUBE-SVC-B"),
        ("-d 10.0.0.0/9 -j KUBE-SVC-A", "-d 10.128.0.0/9 -j KUBE-SVC-B"),
        ("-s 10.0.0.0/9 -j KUBE-SVC-A", "-s 10.128.0.0/9 -j KUBE-SVC-B"),
        ("-d 192.0.2.1/32 -j KUBE-NODEPORTS", "-d 192.0.2.2/32 -j KUBE-NODEPORTS"),
        (f"{A} -j REJECT --reject-with icmp-port-unreachable", f"{B} -j DROP"),
        ("-s 10.0.0.0/8 -j KUBE-EXT-A", "-s 10.1.0.0/16 -j KUBE-EXT-A"),
        ('-m comment --comment "a" -j DROP', '-m comment --comment "b" -j DROP'),
        (
            "-d 127.0.0.0/8 -p tcp -m tcp --dport 80 -m nfacct --nfacct-name n -j KUBE-EXT-A",
            "-p tcp -m tcp --dport 81 -j KUBE-EXT-B",
        ),
    ],
)
def test_rules_may_change_places_if_no_packet_can_tell(one: str, other: str) -> None:
    """No packet matches both, or both do the same to it."""
    assert aligned((one, other), (other, one)) == (other, one)
    assert aligned((other, one), (one, other)) == (one, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (f"{A} -j KUBE-EXT-A", f'{A} -m comment --comment "of another Service" -j KUBE-EXT-B'),
        (f"{A} -j KUBE-SVC-A", LAST),
        (f"{A} -j DROP", f"{A} -j REJECT --reject-with icmp-port-unreachable"),
        ("! -s 10.244.0.0/16 -j KUBE-MARK-MASQ", f"{A} -j KUBE-SVC-A"),
        ("! -d 10.96.0.1/32 -j KUBE-SVC-A", f"{B} -j KUBE-SVC-B"),
        (f"{A} -j KUBE-SVC-A", "-p tcp -m tcp ! --dport 81 -j KUBE-SVC-B"),
        ("-p all -j KUBE-SVC-A", f"{A} -j KUBE-SVC-B"),
        ("-d 10.96.0.0/12 -j KUBE-SVC-A", f"{A} -j KUBE-SVC-B"),
        ("-d 10.96.0.1/255.0.0.255 -j KUBE-SVC-A", f"{A} -j KUBE-SVC-B"),
        ("-p tcp -m tcp --dport 1:99 -j KUBE-SVC-A", f"{A} -j KUBE-SVC-B"),
        ("-m statistic --mode random --probability 0.5 -j KUBE-SEP-A", "-j KUBE-SEP-B"),
        ("-m recent --name a --rcheck -j KUBE-SEP-A", f"{A} -j KUBE-SEP-A"),
        ("-m mark --mark 0x1/0x1 -j MARK --set-xmark 0x2/0x2", "-j MARK --set-xmark 0x1/0x1"),
        ("-m mark --mark 0x1/0x1 -j KUBE-A", "-m mark --mark 0x2/0x2 -j KUBE-A"),
        (
            "-d 127.0.0.0/8 -p tcp -m tcp --dport 80 -m nfacct --nfacct-name n -j KUBE-EXT-A",
            "-p tcp -m tcp --dport 80 -j KUBE-EXT-A",
        ),
    ],
)
def test_rules_keep_their_order_if_a_packet_may_tell(one: str, other: str) -> None:
    """A packet may match both, or a rule has a match whose effects are unknown."""
    assert aligned((one, other), (other, one)) == (one, other)
    assert aligned((other, one), (one, other)) == (other, one)


def test_rules_that_only_one_side_has_stay_near_the_rule_before_them() -> None:
    """So a list of differences shows them alone, not rules that only change places."""
    a, b, c, gone = (f"-d 10.96.0.{n}/32 -j KUBE-SVC-{n}" for n in range(4))
    assert aligned((c, gone, a, b), (a, b, c)) == (a, b, c, gone)
    assert aligned((c, b), (a, b, c)) == (b, c)
    assert aligned((a, a, b), (b, a, a)) == (b, a, a)


# A chain in which a packet meets many of the rules, and every packet that they tell apart.
MATCHES = tuple(
    " ".join(filter(None, words))
    for words in product(
        ("", "-s 10.0.0.1/32"),
        ("", "-d 10.96.0.1/32", "-d 10.96.0.2/32", "-d 10.96.0.0/30", "! -d 10.96.0.1/32"),
        ("", "-p tcp -m tcp --dport 80", "-p udp -m udp --dport 80", "-p tcp -m tcp --dport 79:80"),
        ("", "-m addrtype --dst-type LOCAL", "-m mark --mark 0x1/0x1"),
    )
)
TARGETS = ("DROP", "ACCEPT", "RETURN", "MARK --set-xmark 0x1/0x1", "MARK --set-xmark 0x2/0x0", "MARKING")
PACKETS = tuple(
    Packet(source, destination, protocol, port, local_destination=local)
    for source in ("10.0.0.1", "10.0.0.2")
    for destination in ("10.96.0.1", "10.96.0.2", "10.96.0.3")
    for protocol in ("tcp", "udp")
    for port in (79, 80)
    for local in (False, True)
)
chains_of_rules = st.lists(
    st.builds("{} -j {}".format, st.sampled_from(MATCHES), st.sampled_from(TARGETS)), min_size=2, max_size=5
)


def outcomes(rules: Sequence[str]) -> list[Outcomes]:
    walker = Walker(
        Ruleset(
            Family.IPV4,
            {
                ChainKey("nat", "TESTED"): tuple(rules),
                ChainKey("nat", "MARKING"): ("-m mark --mark 0x1/0x1 -j DROP", "-j MARK --set-xmark 0x1/0x1"),
            },
        )
    )
    return [walker.walk(packet, "nat", "TESTED") for packet in PACKETS]


@settings(deadline=None, max_examples=300)
@given(chains_of_rules, st.randoms(use_true_random=False))
def test_alignment_changes_nothing_for_any_packet(rules: list[str], rng: random.Random) -> None:
    """So an order that matters is always found."""
    like = rng.sample(rules, len(rules))
    found = aligned(rules, like)
    assert sorted(found) == sorted(rules)
    assert outcomes(found) == outcomes(rules)
    if outcomes(like) != outcomes(rules):
        assert found != tuple(like)


def test_every_order_is_reached_that_single_swaps_allow() -> None:
    """For five rules, all orders are compared with those that swaps of two neighbours reach."""
    rules: tuple[str, ...] = (
        f"{A} -j KUBE-SVC-A",
        f"{B} -j KUBE-SVC-B",
        LAST,
        f"{A} -j DROP",
        f"{B} -j KUBE-SVC-B -m comment",
    )
    reached, waiting = {rules}, [rules]
    while waiting:
        order = waiting.pop()
        for at in range(len(order) - 1):
            one, other = order[at : at + 2]
            if aligned((one, other), (other, one)) == (other, one):
                swapped = (*order[:at], other, one, *order[at + 2 :])
                if swapped not in reached:
                    reached.add(swapped)
                    waiting.append(swapped)
    assert 1 < len(reached) < 120
    assert {order for order in permutations(rules) if aligned(rules, order) == order} == reached


def rendered(
    services: Sequence[Service], slices: Sequence[EndpointSlice], *flags: tuple[str, str]
) -> Ruleset:
    cluster = Cluster()
    cluster.apply(Listed(Kind.SERVICE, tuple(services)))
    cluster.apply(Listed(Kind.ENDPOINT_SLICE, tuple(slices)))
    config = load(None, {"dispatch": "flat", **dict(flags)}).config
    facts = KernelFacts(addresses=("127.0.0.1", "192.168.99.10"), nfacct=True)
    return render(cluster, rule_context(config, "node1", Node("node1"), facts, Family.IPV4))


def shuffled(ruleset: Ruleset, rng: random.Random) -> Ruleset:
    """Return the rules with those of the shared chains in random order."""
    chains = {
        key: tuple(rng.sample(rules, len(rules))) if key in skeleton.SHARED else rules
        for key, rules in ruleset.chains.items()
    }
    return Ruleset(ruleset.family, chains)


def by_service(ruleset: Ruleset, rng: random.Random) -> Ruleset:
    """Return the rules as kube-proxy may write them: services in any order, and the node-port jumps last."""
    chains = dict(ruleset.chains)
    for key in skeleton.SHARED:
        groups: dict[str, list[str]] = {}
        for rule in chains[key]:
            name = (
                "last"
                if "this must be the last rule" in rule
                else rule.partition('--comment "')[2].split()[0]
            )
            groups.setdefault(name, []).append(rule)
        last = groups.pop("last", [])
        names = rng.sample(sorted(groups), len(groups))
        chains[key] = (*(rule for name in names for rule in groups[name]), *rng.sample(last, len(last)))
    return Ruleset(ruleset.family, chains)


services = st.lists(strategies.services(), min_size=2, max_size=3, unique_by=lambda it: it.name)
slices = st.lists(strategies.slices(), max_size=4, unique_by=lambda it: it.name)
# Services may have an external IP in common, which may also be the node's.
addresses = st.lists(st.sampled_from(["192.0.2.1", "192.168.99.10", "10.96.0.2"]), max_size=2).map(tuple)


@settings(deadline=None, max_examples=100)
@given(services, slices, st.lists(addresses, min_size=3, max_size=3), st.randoms(use_true_random=False))
def test_an_order_of_services_that_matters_is_found(
    some: list[Service], of_some: list[EndpointSlice], shared: list[tuple[str, ...]], rng: random.Random
) -> None:
    """If two orders do not differ, every packet gets the same."""
    some = [msgspec.structs.replace(it, external_ips=ips) for it, ips in zip(some, shared, strict=False)]
    rules = rendered(some, of_some)
    other = shuffled(rules, rng)
    found = {it.key for it in difference(other, rules)}
    walkers = [Walker(it) for it in (rules, other)]
    destinations = {ip for it in some for ip in (*it.cluster_ips, *it.external_ips, *it.load_balancer_ips)}
    ports = {number for it in some for port in it.ports for number in (port.port, port.node_port)} | {32000}
    for destination, protocol, port, source, shared_chain in product(
        sorted({it for it in destinations if "." in it} | NODE),
        ("tcp", "udp", "sctp"),
        sorted(ports - {0}),
        ("10.244.1.77", "203.0.113.9"),
        set(skeleton.SHARED) - {skeleton.NAT_NODEPORTS},
    ):
        packet = Packet(source, destination, protocol, port, local_destination=destination in NODE)
        below = {skeleton.NAT_NODEPORTS} if shared_chain == skeleton.NAT_SERVICES else set()
        if not {shared_chain, *below} & found:
            one, two = (walker.walk(packet, *shared_chain) for walker in walkers)
            assert one == two


@settings(deadline=None, max_examples=80)
@given(
    services, slices, st.randoms(use_true_random=False), st.sampled_from(["", "127.0.0.0/8,192.168.0.0/16"])
)
def test_the_order_between_services_is_no_difference(
    some: list[Service], of_some: list[EndpointSlice], rng: random.Random, node_ports: str
) -> None:
    """As long as no two of them have the same address and port."""
    unique = [
        msgspec.structs.replace(
            it,
            ports=tuple(
                msgspec.structs.replace(port, node_port=port.node_port and 30000 + 100 * number + place)
                for place, port in enumerate(it.ports)
            ),
            health_check_node_port=it.health_check_node_port and 32000 + number,
        )
        for number, it in enumerate(some)
    ]
    rules = rendered(unique, of_some, *([("nodeport-addresses", node_ports)] if node_ports else []))
    assert difference(by_service(rules, rng), rules) == ()


def test_few_of_thousands_of_rules_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their number does not grow with the square of that of the rules: only the last rule may match what others match."""
    compared: list[tuple[int, int]] = []
    candidates = order_module._candidates

    def counted(keys: Sequence[tuple[str, str, str]]) -> Iterator[tuple[int, int]]:
        compared.extend(candidates(keys))
        return iter(compared)

    monkeypatch.setattr(order_module, "_candidates", counted)
    rules = [
        f'-d 10.{n >> 16}.{n >> 8 & 255}.{n & 255}/32 -p tcp -m comment --comment "a/b cluster IP" -m tcp --dport 80'
        f" -j KUBE-SVC-{n}"
        for n in range(20_000)
    ]
    like = (*random.Random(1).sample(rules, len(rules)), LAST)
    assert aligned((*rules, LAST), like) == like
    assert len(compared) == len(rules)


def test_other_services_are_not_shown_beside_a_new_one() -> None:
    """Where kube-proxy's order differs, only rules that are new or gone differ."""
    some = [service(f"s{n}", cluster_ip=f"10.96.0.{n}") for n in range(1, 20)]
    pods = [slice_of(f"10.244.1.{n}", service=f"s{n}") for n in range(1, 21)]
    before = by_service(rendered(some, pods), random.Random(1))
    after = rendered([*some, service("s20", cluster_ip="10.96.0.20")], pods)
    (changed,) = (it for it in difference(before, after) if it.key == skeleton.NAT_SERVICES)
    assert changed.before == tuple(rule for rule in changed.after or () if "ns/s20" not in rule)
