"""Our rules in foreign chains: the jumps to our chains, and a rule in the kubelet's chain."""

from collections.abc import Collection, Iterator

from pykubeproxy.rules import names, skeleton
from pykubeproxy.rules.options import RuleOptions
from pykubeproxy.rules.ruleset import ChainKey, Ruleset

# The foreign chains that hold rules of ours: built-in ones and KUBE-FIREWALL.
FOREIGN_CHAINS = frozenset((*skeleton.JUMPS, skeleton.KUBELET_FIREWALL))


def ensured_lines(
    live: Ruleset, options: RuleOptions, chains: Collection[ChainKey] = FOREIGN_CHAINS
) -> dict[str, tuple[str, ...]]:
    """Return the lines that add our missing rules to these chains, by table."""
    lines: dict[str, tuple[str, ...]] = {}
    for key in (skeleton.KUBELET_FIREWALL, *skeleton.JUMPS):
        if key in chains and (missing := tuple(_missing_lines(live, key, options))):
            lines[key.table] = (*lines.get(key.table, ()), *missing)
    return lines


def missing_jumps(live: Ruleset, chains: Collection[ChainKey]) -> dict[str, int]:
    """Return how many of our jumps are missing in these chains, by table."""
    missing: dict[str, int] = {}
    for key, jumps in skeleton.JUMPS.items():
        present = live.chains.get(key, ())
        if key in chains and (count := sum(jump not in present for jump in jumps)):
            missing[key.table] = missing.get(key.table, 0) + count
    return missing


def _missing_lines(live: Ruleset, key: ChainKey, options: RuleOptions) -> Iterator[str]:
    """Yield the lines for one chain.

    If a jump is missing, delete all our jumps and insert them again on top, in their order. The order of foreign rules
    stays.
    """
    present = live.chains.get(key)
    if key == skeleton.KUBELET_FIREWALL:
        if present is None:
            yield f"-N {names.KUBELET_FIREWALL}"
        yield from (
            f"-A {key.chain} {rule}"
            for rule in skeleton.kubelet_firewall(options)
            if rule not in (present or ())
        )
        return
    jumps = skeleton.JUMPS[key]
    if any(jump not in (present or ()) for jump in jumps):
        yield from (f"-D {key.chain} {rule}" for rule in present or () if rule in jumps)
        yield from (f"-I {key.chain} {jump}" for jump in reversed(jumps))
