"""What has to stand in chains that are not ours alone: the jumps to our chains, and the kubelet's chain."""

from collections.abc import Collection

from pykubeproxy.rules import names, skeleton
from pykubeproxy.rules.options import RuleOptions
from pykubeproxy.rules.plan import missing_lines
from pykubeproxy.rules.ruleset import ChainKey, Ruleset

# The chains in which we keep rules among those of others.
SHARED_GROUND = frozenset((*skeleton.JUMPS, skeleton.KUBELET_FIREWALL))


def ensured_lines(
    live: Ruleset, options: RuleOptions, asked: Collection[ChainKey] = SHARED_GROUND
) -> dict[str, tuple[str, ...]]:
    """Lines for what is missing in those of the asked chains that are not ours alone, by table."""
    lines: dict[str, tuple[str, ...]] = {}
    if skeleton.KUBELET_FIREWALL in asked:
        kubelets = live.chains.get(skeleton.KUBELET_FIREWALL)
        if kubelets is None:
            lines["filter"] = (f"-N {names.KUBELET_FIREWALL}",)
        for rule in skeleton.kubelet_firewall(options):
            if rule not in (kubelets or ()):
                lines["filter"] = (*lines.get("filter", ()), f"-A {names.KUBELET_FIREWALL} {rule}")
    wanted = {key: rules for key, rules in skeleton.JUMPS.items() if key in asked}
    for key, jumps in missing_lines(live, wanted).items():
        lines[key.table] = (*lines.get(key.table, ()), *jumps)
    return lines


def missing_jumps(live: Ruleset, asked: Collection[ChainKey]) -> dict[str, int]:
    """How many of our jumps those of the asked chains lack, by table."""
    missing: dict[str, int] = {}
    for key, jumps in skeleton.JUMPS.items():
        there = live.chains.get(key, ())
        if key in asked and (count := sum(jump not in there for jump in jumps)):
            missing[key.table] = missing.get(key.table, 0) + count
    return missing
