"""Entries, of which tables of iptables-legacy are made: one for a rule, two for a chain that is not built in."""

from collections import Counter
from collections.abc import Iterable, Mapping

from pykubeproxy.rules.ownership import is_ours
from pykubeproxy.rules.ruleset import BUILT_IN, Ruleset

_CHAIN = 2
_OF_LINE = {"-D": -1, "-N": _CHAIN}


def of_ours(rules: Mapping[str, int], chains: Mapping[str, int]) -> dict[str, int]:
    """The entries of so many rules, and of so many chains, by table."""
    return {table: rules.get(table, 0) + _CHAIN * chains.get(table, 0) for table in rules.keys() | chains}


def of_others(live: Ruleset) -> Counter[str]:
    """The entries of chains that are not ours alone, by table, without what the kernel adds to built-in chains."""
    count: Counter[str] = Counter()
    for key, rules in live.chains.items():
        if not is_ours(key):
            count[key.table] += len(rules) + (0 if key.chain in BUILT_IN else _CHAIN)
    return count


def added(lines: Mapping[str, Iterable[str]]) -> dict[str, int]:
    """How many entries lines such as `-I INPUT …` add to chains of others, by table."""
    return {table: sum(_OF_LINE.get(line[:2], 1) for line in of) for table, of in lines.items()}
