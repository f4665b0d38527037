"""The dispatch tree: each number finds its rules in few steps, and changes stay local."""

from collections.abc import Mapping
from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykubeproxy.config import Dispatch
from pykubeproxy.objects import Family
from pykubeproxy.rules.dispatch import LEVELS, Area, Branch, Tree, build_tree, shared_chain
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from pykubeproxy.rules.skeleton import (
    FILTER_EXTERNAL,
    FILTER_FIREWALL,
    FILTER_NODEPORTS,
    FILTER_SERVICES,
    NAT_NODEPORTS,
    NAT_SERVICES,
)
from pykubeproxy.rules.text import host, rule
from tests.hostile import nested, nested_addresses
from tests.packet_model import Packet, Walker

WIDTH = 16
numbers = st.sets(st.one_of(st.integers(0, 2**WIDTH - 1), st.integers(30000, 30300)), max_size=200)


def branch(area: Area) -> Branch:
    prefix = area.prefix
    name = f"{prefix.bits:x}/{prefix.length}{area.suffix}".replace(" ", "_")
    return Branch(name, f"from {prefix.bits} to {prefix.last} go {name}", f"note {name}")


def grown(of: set[int], width: int = WIDTH) -> Tree:
    return build_tree({number: (f"take {number}",) for number in of}, width, branch)


class Paths:
    """The paths of packets through a tree, whose rules are parsed once."""

    def __init__(self, tree: Tree) -> None:
        self._chains = {name: [self._parsed(text) for text in rules] for name, rules in tree.chains}
        self._root = [self._parsed(text) for text in tree.root]
        self._levels: dict[str, int] = {}

    @staticmethod
    def _parsed(text: str) -> tuple[str, int, int, str]:
        """Return a rule, the numbers that it jumps for, and where; others jump for none."""
        words = text.split()
        return (text, int(words[1]), int(words[3]), words[5]) if words[0] == "from" else (text, 1, 0, "")

    def met(self, number: int) -> list[str]:
        """Return the rules that a packet for a number meets until one takes it."""
        taken = f"take {number}"
        seen: list[str] = []

        def walk(rules: list[tuple[str, int, int, str]]) -> bool:
            for text, first, last, target in rules:
                seen.append(text)
                if text == taken or (first <= number <= last and walk(self._chains[target])):
                    return True
            return False

        walk(self._root)
        return seen

    def levels(self) -> int:
        """Return the most jumps on any path."""
        return self._below(self._root)

    def _below(self, rules: list[tuple[str, int, int, str]]) -> int:
        for _, _, _, target in rules:
            if target and target not in self._levels:
                self._levels[target] = 1 + self._below(self._chains[target])
        return max((self._levels[target] for _, _, _, target in rules if target), default=0)


def hostile(width: int) -> st.SearchStrategy[set[int]]:
    """Mixtures of nested prefixes, dense runs, equal distances and random numbers, close to few places."""
    size = 1 << width
    places = st.sampled_from([0, size - 1, size // 3, 0xFD00 << width - 16, 0xFD01 << width - 16])
    return st.lists(
        st.one_of(
            st.builds(nested, places, st.just(width), st.sampled_from([1, 2, 4]), st.integers(1, 40)),
            st.builds(
                lambda place, count: {(place + n) % size for n in range(count)}, places, st.integers(0, 400)
            ),
            st.builds(lambda shift: {(n << shift) % size for n in range(300)}, st.integers(0, width - 1)),
            st.sets(st.integers(0, size - 1), max_size=100),
        ),
        min_size=1,
        max_size=4,
    ).map(lambda sets: set().union(*sets))


widths = st.sampled_from([16, 32, 128])


@settings(max_examples=150)
@given(widths.flatmap(lambda width: st.tuples(st.just(width), hostile(width))))
def test_hostile_numbers_make_no_deep_tree_and_no_long_path(made: tuple[int, set[int]]) -> None:
    """For any numbers, levels are limited, and each number visits few rules on each level."""
    width, present = made
    tree = grown(present, width)
    paths = Paths(tree)
    assert paths.levels() <= LEVELS
    for number in present:
        path = paths.met(number)
        assert path[-1] == f"take {number}"
        assert len(path) <= 17 * LEVELS
    # As many rules as numbers and chains: no number is in two chains.
    assert sum(map(len, [tree.root, *(rules for _, rules in tree.chains)])) == len(present) + 2 * len(
        tree.chains
    )


@settings(max_examples=120)
@given(widths.flatmap(lambda width: st.tuples(st.just(width), hostile(width), hostile(width))))
def test_any_mixture_of_two_trees_finds_every_number(made: tuple[int, set[int], set[int]]) -> None:
    """While a new tree is written chain by chain, each packet finds the numbers that stay, within the levels."""
    width, first, second = made
    common = {*sorted(first)[::2]}
    old, new = grown(common | first, width), grown(common | second, width)
    stay = sorted(common)[:: max(1, len(common) // 50)]
    chains = {**dict(old.chains), **dict(new.chains)}
    for root in (old.root, new.root):
        mixture = Paths(Tree(root, tuple(chains.items())))
        assert mixture.levels() <= LEVELS
        assert all(mixture.met(number)[-1] == f"take {number}" for number in stay)


def arranged(key: ChainKey, rules: tuple[str, ...], form: Dispatch = Dispatch.TREE) -> Tree:
    """Return the entries of one Service in a shared chain."""
    return shared_chain(key, [((key, rules),)], (), form)


def chains_of(key: ChainKey, tree: Tree) -> dict[ChainKey, tuple[str, ...]]:
    return {key: tree.root, **{ChainKey(key.table, name): texts for name, texts in tree.chains}}


def rules_of(key: ChainKey, width: int, present: list[int]) -> tuple[str, ...]:
    """Entries of up to three ports or protocols for each number; some are for the same port."""
    texts: list[str] = []
    for index, number in enumerate(present):
        for port in (80, 81, 80)[: index % 4 or 1]:
            target = f"KUBE-SVC-{len(texts) % 97}"
            if key == NAT_SERVICES:
                address = str((IPv4Address if width == 32 else IPv6Address)(number))
                text = rule(
                    f"-m tcp --dport {port}", destination=host(address), protocol="tcp", target=target
                )
            else:
                protocol = "udp" if port == 81 else "tcp"
                text = rule(f"-m {protocol} --dport {number}", protocol=protocol, target=target)
            texts.append(text)
    return tuple(texts)


@settings(max_examples=25)
@given(
    st.sampled_from([(NAT_SERVICES, 32), (NAT_SERVICES, 128), (NAT_NODEPORTS, 16)]).flatmap(
        lambda kind: st.tuples(st.just(kind), hostile(kind[1]))
    )
)
def test_a_packet_finds_the_same_rule_as_in_a_flat_chain(
    made: tuple[tuple[ChainKey, int], set[int]],
) -> None:
    """Of several rules for one address and port, it is the first; other ports and addresses find none."""
    (key, width), present = made
    rules = rules_of(key, width, sorted(present))
    own = {
        ChainKey("nat", f"KUBE-SVC-{n}"): (f"-p tcp -j DNAT --to-destination 10.0.0.1:{n}",)
        for n in range(97)
    }
    family = Family.IPV6 if width == 128 else Family.IPV4
    walkers = []
    for dispatch in (Dispatch.FLAT, Dispatch.TREE):
        chains = chains_of(key, arranged(key, rules, dispatch))
        walkers.append(Walker(Ruleset(family, {**own, **chains})))
    some = sorted(present)[:: len(present) // 5 + 1]
    for number in {near for it in some for near in (it, it ^ 1)}:
        address = str((IPv6Address if width == 128 else IPv4Address)(number))
        for port in (80, 82) if key == NAT_SERVICES else (number,):
            for protocol in ("tcp", "udp"):
                packet = Packet("192.0.2.9" if width < 128 else "2001:db8::9", address, protocol, port)
                flat, found = (walker.walk(packet, *key) for walker in walkers)
                assert found == flat


@pytest.mark.parametrize("key", [NAT_SERVICES, FILTER_SERVICES, FILTER_EXTERNAL, FILTER_FIREWALL])
def test_thousands_of_ports_at_an_address_are_in_the_way_of_no_other_packet(key: ChainKey) -> None:
    """Nor is the port itself behind all others: a tenant may choose the address of somebody else's pod as external IP."""
    ports = range(1, 20_000)
    rules = tuple(
        rule(f"-m tcp --dport {n}", destination=f"192.0.2.{a}/32", protocol="tcp", target="DROP")
        for a in range(1, 4)
        for n in ports
    )
    tree = arranged(key, rules, Dispatch.AUTO)
    walker = Walker(Ruleset(Family.IPV4, chains_of(key, tree)))
    walker.walk(Packet("192.0.2.9", "10.244.1.5", "tcp", 80), *key)
    assert walker.visited <= 20
    for packet in (Packet("192.0.2.9", "192.0.2.2", "tcp", port) for port in (1, 15_000, 19_999, 50_000)):
        walker.walk(packet, *key)
        assert walker.visited <= 320
    changed = arranged(key, rules[:-1], Dispatch.AUTO)
    assert len(dict(tree.chains).items() - dict(changed.chains).items()) == 1


# A packet visits at most seventeen rules on each level: six and a leaf of the addresses with few ports, three of those with
# many, and two below. And a leaf of ports for each protocol, and the rules of its own port.
MOST_VISITED = 17 * (LEVELS + 3 + 2) + 256 + 3 * 256
NESTED = nested_addresses("192.0.2.1", copies=2)[::4]
PORTS = st.dictionaries(
    st.sampled_from(NESTED),
    st.tuples(st.sampled_from([1, 20, 257, 1200]), st.sampled_from([1, 3])),
    max_size=4,
)


def entries_of(key: ChainKey, ports: dict[str, tuple[int, int]]) -> tuple[str, ...]:
    """Rules of the first or of scattered ports of each address, so many for each port; each has a target of its own."""
    return tuple(
        rule(
            f"-m {protocol} --dport {number * (1 if same == 1 else 41) % 65536}",
            destination=host(address),
            protocol=protocol,
            target=("DROP", "REJECT", "ACCEPT")[(number + copy) % 3],
        )
        for address, (count, same) in ports.items()
        for number in range(1, count + 1)
        for protocol in ("udp" if number % 5 else "sctp",)
        for copy in range(same)
    )


def depth(chains: Mapping[ChainKey, tuple[str, ...]], key: ChainKey) -> int:
    """The most jumps on any path below a chain."""
    targets = {ChainKey(key.table, text.rsplit(" ", 1)[1]) for text in chains[key] if "-j KUBE-" in text}
    return max((1 + depth(chains, target) for target in targets), default=0)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([NAT_SERVICES, FILTER_EXTERNAL]), PORTS, PORTS, st.data())
def test_addresses_with_many_ports_while_they_change(
    key: ChainKey,
    before: dict[str, tuple[int, int]],
    after: dict[str, tuple[int, int]],
    data: st.DataObject,
) -> None:
    """Chain by chain, the tables stay within the levels, and each packet finds the same rule as in a flat chain."""
    few = {f"10.96.{n // 250}.{n % 250}": (1, 1) for n in range(40)}
    before, after = few | before, few | after
    old, new = (arranged(key, entries_of(key, it)) for it in (before, after))
    assert len(dict(new.chains)) == len(new.chains)
    written = data.draw(st.integers(0, len(new.chains)))
    states = [
        {**dict(old.chains), **dict(new.chains[:written]), key.chain: old.root},
        {**dict(old.chains), **dict(new.chains), key.chain: new.root},
        {**dict(new.chains), key.chain: new.root},
    ]
    same = {address: before[address] for address in before if before[address] == after.get(address)}
    addresses = st.sampled_from(sorted({*same, *after}))
    wanted = [(data.draw(addresses), data.draw(st.integers(0, 1300))) for _ in range(8)]
    flat = {key: entries_of(key, after)}
    for number, state in enumerate(states):
        chains = {ChainKey(key.table, name): texts for name, texts in state.items()}
        assert depth(chains, key) <= LEVELS
        walker, plain = Walker(Ruleset(Family.IPV4, chains)), Walker(Ruleset(Family.IPV4, flat))
        for address, port in wanted:
            if number < 2 and address not in same:
                continue
            packet = Packet("198.18.0.9", address, "sctp" if port % 5 == 0 else "udp", port)
            assert walker.walk(packet, *key) == plain.walk(packet, *key)
            if number == 2:
                assert walker.visited <= MOST_VISITED + 3


def test_many_addresses_with_many_ports() -> None:
    """Each costs packets to the others no more than a branch, and those to few ports nothing."""
    heavy = {f"198.18.{n}.{n * 7 % 256}": (257, 1) for n in range(200)}
    few = {f"10.96.0.{n}": (1, 1) for n in range(1, 250)}
    alone, made = (arranged(NAT_SERVICES, entries_of(NAT_SERVICES, it)) for it in (few, few | heavy))
    assert made.root[: len(alone.root)] == alone.root
    assert {*alone.chains} <= {*made.chains}
    chains = chains_of(NAT_SERVICES, made)
    assert depth(chains, NAT_SERVICES) <= LEVELS
    walker = Walker(Ruleset(Family.IPV4, chains))
    for address in heavy:
        walker.walk(Packet("203.0.113.9", address, "udp", 60_000), *NAT_SERVICES)
        assert walker.visited <= 17 * 3 + 258


@pytest.mark.parametrize("same", [2, 16])
def test_ports_that_many_services_claim_delay_no_other_port(same: int) -> None:
    """A port has a chain of its own while there are several rules for it; one rule less changes few chains."""
    rules = entries_of(NAT_SERVICES, {"192.0.2.9": (1500, same)})
    made, changed = (arranged(NAT_SERVICES, it) for it in (rules, rules[:-1]))
    assert len(dict(made.chains).items() - dict(changed.chains).items()) <= 2
    walker = Walker(Ruleset(Family.IPV4, chains_of(NAT_SERVICES, made)))
    for port in (1, 41 * 7, 41 * 1499, 65_000):
        walker.walk(Packet("203.0.113.9", "192.0.2.9", "udp", port), *NAT_SERVICES)
        assert walker.visited <= 320


def test_many_health_check_node_ports_are_dispatched_by_tree() -> None:
    """Each packet to this node visits the chain."""
    rules = tuple(rule(f"-m tcp --dport {n}", protocol="tcp", target="ACCEPT") for n in range(30000, 32000))
    assert len(arranged(FILTER_NODEPORTS, rules, Dispatch.AUTO).root) <= 16
    flat = arranged(FILTER_NODEPORTS, rules, Dispatch.FLAT)
    assert flat == Tree(rules, ())


def test_few_rejected_ports_stay_in_a_flat_chain() -> None:
    rules = tuple(
        rule("-m tcp --dport 80", destination=f"10.96.0.{n}/32", protocol="tcp", target="DROP")
        for n in range(1, 201)
    )
    assert arranged(FILTER_SERVICES, rules, Dispatch.AUTO) == Tree(rules, ())


def test_a_chain_that_moves_up_and_grows_deeper_has_another_name() -> None:
    """Else the levels above its old place and those below its new one would add up during an update."""
    base = 0x20010DB8 << 96

    def spine(digits: range) -> set[int]:
        return {base ^ (1 << (124 - 4 * digit)) ^ n for digit in digits for n in range(16)} | {base, base + 1}

    old, new = grown(spine(range(5)), 128), grown(spine(range(4, 9)), 128)
    assert (Paths(old).levels(), Paths(new).levels()) == (5, 5)
    assert Paths(Tree(old.root, (*old.chains, *new.chains))).levels() == 5


def test_numbers_elsewhere_do_not_lengthen_a_path() -> None:
    """Nor do nested prefixes around the number itself."""
    width, own = 128, 0xFD00_0010_0096 << 80
    usual = {own + n for n in range(1000)}
    victim = own + 500
    before = len(Paths(grown(usual, width)).met(victim))
    for base in (0x20010DB8 << 96, own, victim):
        for copies in (7, 16):
            attacked = grown(usual | nested(base, width, 4, copies), width)
            assert len(Paths(attacked).met(victim)) <= before + 20


def test_number_with_many_rules_has_a_chain_of_its_own() -> None:
    """Other numbers of the leaf do not visit them."""
    entries: dict[int, tuple[str, ...]] = {number: (f"take {number}",) for number in range(5)}
    entries[2] = tuple(f"port {n}" for n in range(1000))
    made = build_tree(entries, WIDTH, branch)
    assert (len(made.root), [len(rules) for _, rules in made.chains]) == (5, [1001])


def test_many_ports_of_one_address_are_dispatched_by_tree() -> None:
    """They are not in the way of the other addresses."""
    ports = [rule(f"-m tcp --dport {n}", destination="10.96.0.1/32", protocol="tcp") for n in range(1, 1100)]
    other = rule("-m tcp --dport 80", destination="10.96.0.2/32", protocol="tcp")
    assert len(arranged(NAT_SERVICES, (*ports[:900], other), Dispatch.AUTO).root) == 901
    made = arranged(NAT_SERVICES, (*ports, other), Dispatch.AUTO)
    assert made.root[0] == other
    assert len(made.root) == 2


def test_evenly_spread_numbers_need_few_visits() -> None:
    """30,000 services cost about as many visits as 30 rules."""
    width = 20
    spread = {(number * 2654435761) % 2**width for number in range(30_000)}
    tree = build_tree({number: (f"take {number}",) for number in spread}, width, branch)
    paths = Paths(tree)
    visits = [len(paths.met(number)) for number in list(spread)[:500]]
    assert sum(visits) / len(visits) < 40


@given(numbers, st.integers(0, 2**WIDTH - 1))
def test_each_chain_comes_after_those_it_jumps_to(present: set[int], _: int) -> None:
    """Chains can be written in order, and their names are unique."""
    tree = grown(present)
    written: set[str] = set()
    for name, rules in (*tree.chains, ("root", tree.root)):
        assert name not in written
        assert {rule.split()[5] for rule in rules if rule.startswith("from")} <= written
        written.add(name)


def test_new_number_changes_one_leaf() -> None:
    """Among 1000 evenly spread numbers a new one leaves all other chains alone."""
    spread = {number * 61 for number in range(1000)}
    before, after = grown(spread), grown(spread | {30001})
    changed = dict(before.chains).items() ^ dict(after.chains).items()
    assert len({name for name, _ in changed}) == 1
    assert before.root == after.root
