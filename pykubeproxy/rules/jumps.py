"""Our rules in chains that others use too: the jumps to our chains, and the kubelet's chain."""

from collections.abc import Collection, Mapping

from pykubeproxy.rules import names, skeleton
from pykubeproxy.rules.options import RuleOptions
from pykubeproxy.rules.restore_text import Rules
from pykubeproxy.rules.ruleset import ChainKey, Ruleset

# The chains in which our rules stand among those of others.
SHARED_GROUND = frozenset((*skeleton.JUMPS, skeleton.KUBELET_FIREWALL))


def ensured_lines(
    live: Ruleset, options: RuleOptions, chains: Collection[ChainKey] = SHARED_GROUND
) -> dict[str, tuple[str, ...]]:
    """Return the lines that add what is missing of ours in these chains, by table."""
    lines: dict[str, tuple[str, ...]] = {}
    if skeleton.KUBELET_FIREWALL in chains:
        kubelets = live.chains.get(skeleton.KUBELET_FIREWALL)
        if kubelets is None:
            lines["filter"] = (f"-N {names.KUBELET_FIREWALL}",)
        for rule in skeleton.kubelet_firewall(options):
            if rule not in (kubelets or ()):
                lines["filter"] = (*lines.get("filter", ()), f"-A {names.KUBELET_FIREWALL} {rule}")
    wanted = {key: rules for key, rules in skeleton.JUMPS.items() if key in chains}
    for key, jumps in _missing_lines(live, wanted).items():
        lines[key.table] = (*lines.get(key.table, ()), *jumps)
    return lines


def missing_jumps(live: Ruleset, chains: Collection[ChainKey]) -> dict[str, int]:
    """Return how many of our jumps are missing in these chains, by table."""
    missing: dict[str, int] = {}
    for key, jumps in skeleton.JUMPS.items():
        there = live.chains.get(key, ())
        if key in chains and (count := sum(jump not in there for jump in jumps)):
            missing[key.table] = missing.get(key.table, 0) + count
    return missing


def _missing_lines(live: Ruleset, wanted: Mapping[ChainKey, Rules]) -> dict[ChainKey, tuple[str, ...]]:
    """Return lines that put `wanted` rules on top of chains that others use too, where any of them is missing.

    All of ours are removed and inserted again on top, in their order; rules of others keep theirs.
    """
    lines: dict[ChainKey, tuple[str, ...]] = {}
    for key, rules in wanted.items():
        there = live.chains.get(key, ())
        if any(rule not in there for rule in rules):
            out = [f"-D {key.chain} {rule}" for rule in there if rule in rules]
            back = [f"-I {key.chain} {rule}" for rule in reversed(rules)]
            lines[key] = (*out, *back)
    return lines
