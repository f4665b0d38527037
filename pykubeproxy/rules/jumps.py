"""Check that jumps between chains end, as iptables and the kernel do before they accept rules."""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from pykubeproxy.rules.parse import parse_options
from pykubeproxy.rules.ruleset import Ruleset

# nftables accepts 15 jumps in a row; legacy has no limit.
_MOST_JUMPS = 100
# How many chains to remember for other nodes, which share most of them.
_MOST_CHAINS = 1 << 16
_JUMP = re.compile(r"(?<!\S)-[jg]\s+(\S+)")


def check_jumps(ruleset: Ruleset) -> None:
    """Raise ValueError if chains jump in a circle or too deep, so that walks through them end."""
    tables: dict[str, dict[str, frozenset[str]]] = {}
    for (table, chain), rules in ruleset.chains.items():
        tables.setdefault(table, {})[chain] = _jumps(rules)
    for table, jumps in tables.items():
        _check_table(table, {chain: [it for it in some if it in jumps] for chain, some in jumps.items()})


def _check_table(table: str, targets: Mapping[str, Sequence[str]]) -> None:
    depth = {chain: 1 for chain, some in targets.items() if not some}
    for start in targets:
        path: dict[str, Iterator[str]] = {} if start in depth else {start: iter(targets[start])}
        while path:
            chain = next(reversed(path))
            below = next(path[chain], None)
            if below is None:
                depth[chain] = 1 + max([depth[it] for it in targets[chain]], default=0)
                if depth[chain] > _MOST_JUMPS:
                    raise ValueError(
                        f"more than {_MOST_JUMPS} jumps in a row from chain {chain} of table {table}"
                    )
                del path[chain]
            elif below in path:
                raise ValueError(f"chain {below} of table {table} jumps to itself, by way of {chain}")
            elif below not in depth:
                path[below] = iter(targets[below])


@lru_cache(maxsize=_MOST_CHAINS)
def _jumps(rules: tuple[str, ...]) -> frozenset[str]:
    """Return all targets to which rules may jump, by any reading of them."""
    return frozenset(target for rule in rules for target in _targets(rule))


def _targets(rule: str) -> list[str]:
    found: list[str] = _JUMP.findall(rule)
    # In a comment or a prefix for logs, "-j" is no jump.
    if len(found) != 1 or '"' in found[0]:
        return [value for name, value, _ in parse_options(rule) if name in ("-j", "-g")]
    return found
