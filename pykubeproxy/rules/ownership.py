"""Which chains are ours, and which rules of ours stand in foreign chains."""

from collections.abc import Collection, Iterator

from pykubeproxy.rules import names, skeleton
from pykubeproxy.rules.options import RuleOptions
from pykubeproxy.rules.parse import parse_target
from pykubeproxy.rules.ruleset import ChainKey, Ruleset

_FIXED = frozenset((*skeleton.SHARED, *skeleton.FIXED))
# In table filter, only chains of dispatch trees.
_OWNED_TABLES = ("nat", "filter")
# The foreign chains that hold rules of ours: built-in ones and KUBE-FIREWALL.
FOREIGN_CHAINS = frozenset((*skeleton.JUMPS, skeleton.KUBELET_FIREWALL))


def is_ours(key: ChainKey) -> bool:
    """Return whether a chain belongs to the proxy alone; KUBE-FIREWALL is shared with the kubelet."""
    return key in _FIXED or is_owned(key)


def is_owned(key: ChainKey) -> bool:
    """Return whether a chain belongs to a single service or endpoint, of any proxy, or to a dispatch tree."""
    return key.table in _OWNED_TABLES and names.is_owned(key.chain)


def referenced_by_others(live: Ruleset) -> frozenset[ChainKey]:
    """Return the chains that cannot be deleted because a rule in a foreign chain jumps to them.

    Built-in chains are foreign, so the targets of our jumps in them are included.
    """
    return frozenset(
        ChainKey(key.table, parse_target(rule))
        for key, rules in live.chains.items()
        if not is_ours(key)
        for rule in rules
        if "KUBE-" in rule
    )


def served_chains(live: Ruleset) -> frozenset[str]:
    """Return the chains of table nat to which our shared chains lead."""
    pending = [key for key in skeleton.SHARED if key.table == "nat"]
    found = {key.chain for key in pending}
    while pending:
        for target in map(parse_target, live.chains.get(pending.pop(), ())):
            if target.startswith("KUBE-") and target not in found:
                found.add(target)
                pending.append(ChainKey("nat", target))
    return frozenset(found)


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
