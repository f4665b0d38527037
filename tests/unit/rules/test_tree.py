"""The dispatch tree: each number finds its rules in few steps, and changes stay local."""

from hypothesis import given
from hypothesis import strategies as st

from pykubeproxy.rules.tree import LEAF, Branch, Prefix, Tree, build_tree

WIDTH = 16
numbers = st.sets(st.one_of(st.integers(0, 2**WIDTH - 1), st.integers(30000, 30300)), max_size=200)


def branch(prefix: Prefix) -> Branch:
    name = f"{prefix.bits}/{prefix.length}"
    return Branch(name, f"from {prefix.bits} to {prefix.last} go {name}", f"note {name}")


def grown(of: set[int]) -> Tree:
    return build_tree({number: (f"take {number}",) for number in of}, WIDTH, branch)


def met(tree: Tree, number: int) -> list[str]:
    """The rules that a packet for a number meets until one takes it."""
    chains = dict(tree.chains)

    def walk(rules: tuple[str, ...]) -> list[str]:
        seen: list[str] = []
        for rule in rules:
            seen.append(rule)
            words = rule.split()
            if rule == f"take {number}":
                return seen
            if words[0] == "from" and int(words[1]) <= number <= int(words[3]):
                seen += walk(chains[words[5]])
                if seen[-1] == f"take {number}":
                    return seen
        return seen

    return walk(tree.root)


@given(numbers, st.integers(0, 2**WIDTH - 1))
def test_every_number_finds_its_rules(present: set[int], absent: int) -> None:
    """A number in the tree matches its own rule, any other number none."""
    tree = grown(present)
    for number in present:
        assert met(tree, number)[-1] == f"take {number}"
    if absent not in present:
        assert f"take {absent}" not in met(tree, absent)


@given(numbers)
def test_number_of_visited_rules_is_bounded(present: set[int]) -> None:
    """A packet visits at most sixteen rules a level, and a leaf."""
    tree = grown(present)
    for number in present:
        assert len(met(tree, number)) <= 16 * (WIDTH // 4) + LEAF


def test_evenly_spread_numbers_need_few_visits() -> None:
    """30,000 services cost about as many visits as 30 rules."""
    width = 20
    spread = {(number * 2654435761) % 2**width for number in range(30_000)}
    tree = build_tree({number: (f"take {number}",) for number in spread}, width, branch)
    visits = [len(met(tree, number)) for number in list(spread)[:500]]
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
