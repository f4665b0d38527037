"""Balancing in groups: equal shares for many endpoints, and local changes."""

import pytest

from pykubeproxy.config import Dispatch
from pykubeproxy.objects import Family, Protocol
from pykubeproxy.rules import names
from pykubeproxy.rules.dispatch import Tree
from pykubeproxy.rules.options import RuleOptions
from pykubeproxy.rules.service import GROUPS_ABOVE, balance
from pykubeproxy.services.ports import PortName, ServicePort

NAME = PortName("ns", "web", "http", "TCP")
CHAIN = names.cluster_chain(NAME)


def port(affinity_seconds: int | None = None) -> ServicePort:
    return ServicePort(NAME, Protocol.TCP, "10.96.0.10", 80, 0, (), (), (), False, False, affinity_seconds, 0)


def backends(count: int) -> list[tuple[str, str]]:
    targets = (f"10.244.{n // 250}.{n % 250}:80" for n in range(count))
    return [(names.endpoint_chain(NAME, target), target) for target in targets]


def balanced(count: int, dispatch: Dispatch = Dispatch.AUTO, affinity: int | None = None) -> Tree:
    options = RuleOptions(Family.IPV4, dispatch=dispatch)
    return balance(port(affinity), CHAIN, backends(count), options)


def shares(tree: Tree) -> dict[str, float]:
    """The probability of each endpoint's chain, multiplied through."""
    groups = dict(tree.chains)
    found: dict[str, float] = {}

    def walk(rules: tuple[str, ...], weight: float) -> None:
        for rule in rules:
            if "-m recent" in rule:
                continue
            words = rule.split()
            chance = float(words[words.index("--probability") + 1]) if "--probability" in words else 1.0
            target = words[-1]
            if target in groups:
                walk(groups[target], weight * chance)
            else:
                found[target] = found.get(target, 0.0) + weight * chance
            weight *= 1 - chance

    walk(tree.root, 1.0)
    return found


@pytest.mark.parametrize("count", [GROUPS_ABOVE + 1, 200, 1000, 5000])
def test_each_endpoint_has_the_same_share(count: int) -> None:
    """Each share is 1/n within the kernel's 31 bits."""
    found = shares(balanced(count))
    assert len(found) == count
    for share in found.values():
        assert share == pytest.approx(1 / count, rel=1e-5)


def test_few_endpoints_and_flat_dispatch_have_no_groups() -> None:
    """The rules are those of kube-proxy."""
    assert not balanced(GROUPS_ABOVE).chains
    assert not balanced(1000, Dispatch.FLAT).chains
    assert len(balanced(1000, Dispatch.FLAT).root) == 1000


def test_picking_costs_tens_of_visits() -> None:
    """Among 1000 endpoints a packet visits at most two dozen groups and their members."""
    tree = balanced(1000)
    assert len(tree.root) <= 32
    assert max(len(rules) for _, rules in tree.chains) <= 64


def test_affinity_comes_first() -> None:
    """A known client goes to its endpoint before a group is picked."""
    rules = balanced(200, affinity=60).root
    assert all("-m recent --rcheck" in rule for rule in rules[:200])
    assert not any("-m recent" in rule for rule in rules[200:])


def test_one_endpoint_changes_one_group() -> None:
    """A change also updates the probabilities of groups, but no other group."""
    before, after = dict(balanced(300).chains), dict(balanced(301).chains)
    assert len({name for name, _ in before.items() ^ after.items()}) == 1
