"""Check that jumps between chains end, as iptables and the kernel do before they accept rules."""

import re
from collections.abc import Iterator, Mapping

from pykubeproxy.rules.parse import parse_options
from pykubeproxy.rules.ruleset import ChainKey, Ruleset

# nftables accepts 15 jumps in a row; legacy has no limit.
_MOST_JUMPS = 100
_JUMP = re.compile(r"(?<!\S)-[jg]\s+(\S+)")


def check_jumps(ruleset: Ruleset) -> None:
    """Raise ValueError if chains jump in a circle or too deep, so that walks through them end."""
    targets = {key: frozenset(_targets(ruleset.chains, key)) for key in ruleset.chains}
    depth: dict[ChainKey, int] = {}
    for start in targets:
        path: dict[ChainKey, Iterator[ChainKey]] = {} if start in depth else {start: iter(targets[start])}
        while path:
            key = next(reversed(path))
            below = next(path[key], None)
            if below is None:
                depth[key] = 1 + max((depth[it] for it in targets[key]), default=0)
                if depth[key] > _MOST_JUMPS:
                    raise ValueError(
                        f"more than {_MOST_JUMPS} jumps in a row from chain {key.chain} of table {key.table}"
                    )
                del path[key]
            elif below in path:
                raise ValueError(
                    f"chain {below.chain} of table {below.table} jumps to itself, by way of {key.chain}"
                )
            elif below not in depth:
                path[below] = iter(targets[below])


def _targets(chains: Mapping[ChainKey, tuple[str, ...]], key: ChainKey) -> Iterator[ChainKey]:
    """Yield the chains to which a chain jumps, by any reading of its rules."""
    for rule in chains[key]:
        found = _JUMP.findall(rule)
        # In a comment or a prefix for logs, "-j" is no jump.
        if len(found) != 1 or '"' in found[0]:
            found = [value for name, value, _ in parse_options(rule) if name in ("-j", "-g")]
        yield from (to for it in found if (to := ChainKey(key.table, it)) in chains)
