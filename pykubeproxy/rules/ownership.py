"""Find which chains belong to the proxy, and which of them foreign rules refer to."""

from pykubeproxy.rules import names, skeleton
from pykubeproxy.rules.parse import parse_target
from pykubeproxy.rules.ruleset import ChainKey, Ruleset

_FIXED = frozenset((*skeleton.SHARED, *skeleton.FIXED))


def is_ours(key: ChainKey) -> bool:
    """Return whether a chain belongs to the proxy alone; KUBE-FIREWALL is shared with the kubelet."""
    return key in _FIXED or (key.table == "nat" and names.is_owned(key.chain))


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
