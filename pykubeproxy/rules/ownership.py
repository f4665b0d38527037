"""Whose chains are whose: what a proxy may empty and delete, and what others hold on to."""

import re

from pykubeproxy.rules import names, skeleton
from pykubeproxy.rules.ruleset import ChainKey, Ruleset

_FIXED = frozenset((*skeleton.SHARED, *skeleton.FIXED))
_JUMP = re.compile(r"-[jg] (KUBE-\S+)")


def is_ours(key: ChainKey) -> bool:
    """Whether a chain holds nothing but our rules; KUBE-FIREWALL, shared with the kubelet, does not count."""
    return key in _FIXED or (key.table == "nat" and names.is_owned(key.chain))


def referred_to_by_others(live: Ruleset) -> frozenset[ChainKey]:
    """Chains that cannot be deleted, for a rule in a chain that is not ours jumps to them.

    The kernel's own chains count as others', so our jumps in them make their targets such chains.
    """
    return frozenset(
        ChainKey(key.table, target)
        for key, rules in live.chains.items()
        if not is_ours(key)
        for rule in rules
        if "KUBE-" in rule
        for target in _JUMP.findall(rule)
    )
