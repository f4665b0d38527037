"""Read iptables-save output lazily: chains are parsed on access."""

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from typing import TypeVar

from pykubeproxy.objects import Family
from pykubeproxy.rules.ruleset import NO_POLICY, ChainKey, Count, Counters, Ruleset

_T = TypeVar("_T")
# Line numbers of each chain's rules, by table and chain. The garbage collector does not track ranges.
_Lines = dict[str, dict[str, range]]
_NO_LINES = range(0)
# The line breaks of str.splitlines, and a quoted comment that contains one.
_BREAKS = "\\n\\r\\v\\f\\x1c-\\x1e\\x85\\u2028\\u2029"
_BREAK = re.compile(f"[{_BREAKS}]")
_BROKEN_COMMENT = re.compile(
    rf'--comment "[^"\\{_BREAKS}]*+(?:\\.[^"\\{_BREAKS}]*+)*+[{_BREAKS}][^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL
)


def canonical(saved: str) -> str:
    """Return the output of iptables-save, of any version, in the form in which we write rules.

    A rule in this form reads back byte for byte on both backends. Remove the second space that iptables prints before the
    name of an nfacct object, and the one that nft up to 1.8.7 prints after a rule without a target. Replace line breaks
    in comments by spaces, so that a rule is one line and no part of a comment looks like a rule.
    """
    saved = _BROKEN_COMMENT.sub(lambda comment: _BREAK.sub(" ", comment[0]), saved)
    return saved.replace("--nfacct-name  ", "--nfacct-name ").replace(" \n", "\n")


def read_counted(family: Family, text: str) -> tuple[Ruleset, Counters]:
    """Read the output of `iptables-save --counters`, in which the rules of a chain are adjacent.

    Much faster than `parse` if few chains are read. Raises ValueError as `parse` does.
    """
    lines = text.split("\n")
    try:
        positions, policies = _index(lines)
    except IndexError:
        raise ValueError("a rule with counts is not of the form iptables-save prints") from None
    ruleset = Ruleset(family, _LazyChains(lines, positions, _rule), policies)
    return ruleset, _LazyChains(lines, positions, _count)


def _index(lines: list[str]) -> tuple[_Lines, dict[ChainKey, str]]:
    """Return the line numbers of each chain and the policies other than ACCEPT."""
    positions: _Lines = {}
    policies: dict[ChainKey, str] = {}
    chains: dict[str, range] | None = None
    table, start = "", 0
    # Such as "[12:720] -A KUBE-MARK-MASQ -j MARK ...": the third word.
    for chain, group in groupby(line.split(" ", 3)[2] if line[:1] == "[" else "" for line in lines):
        first, start = start, start + len([*group])
        if chain and chains is not None:
            if chains.get(chain):
                raise ValueError(f"line {first + 1}: the rules of chain {chain} are not together")
            chains[chain] = range(first, start)
            continue
        for number in range(first, start):
            line = lines[number]
            if line.startswith(":") and chains is not None:
                name, policy, *_ = f"{line[1:]} -".split(" ", 2)
                chains.setdefault(name, _NO_LINES)
                if policy not in NO_POLICY:
                    policies[ChainKey(table, name)] = policy
            elif line.startswith("*"):
                table = line[1:].strip()
                chains = positions.setdefault(table, {})
            elif line and not line.startswith("#") and line != "COMMIT":
                raise ValueError(f"line {number + 1} is not of the form iptables-save prints: {line!r}")
    return positions, policies


class _LazyChains(Mapping[ChainKey, tuple[_T, ...]]):
    """The results of `read` for the rules of each chain, computed on access."""

    def __init__(self, lines: list[str], positions: _Lines, read: Callable[[str], _T]) -> None:
        self._lines = lines
        self._positions = positions
        self._read = read

    def __getitem__(self, key: ChainKey) -> tuple[_T, ...]:
        position = self._positions[key.table][key.chain]
        return tuple(map(self._read, self._lines[position.start : position.stop]))

    def __contains__(self, key: object) -> bool:
        return isinstance(key, ChainKey) and key.chain in self._positions.get(key.table, ())

    def __iter__(self) -> Iterator[ChainKey]:
        return (ChainKey(table, chain) for table, chains in self._positions.items() for chain in chains)

    def __len__(self) -> int:
        return sum(map(len, self._positions.values()))


def _rule(line: str) -> str:
    # The rule follows the counts, -A and the name of the chain; an empty rule lacks the last space.
    return "".join(line.split(" ", 3)[3:])


def _count(line: str) -> Count:
    packets, _, size = line[1 : line.index("]")].partition(":")
    return Count(int(packets), int(size))
