"""Arrange rules in a dispatch tree: each level branches on four bits of a number, which is an address or a port.

In a flat chain, a packet visits all rules before its own. In the tree it visits at most sixteen rules on each level.
The shape depends only on the set of numbers, and a branch is named by its prefix. So a new or removed entry usually
changes one leaf. Masks are always prefixes: iptables-nft 1.8.7 stores other masks wrongly.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

Rules = tuple[str, ...]

# The maximum of numbers in a chain without branches.
LEAF = 16
_STEP = 4  # bits


class Prefix(NamedTuple):
    """The first `length` bits of a number of `width` bits; the other bits are 0."""

    bits: int
    length: int
    width: int

    @property
    def last(self) -> int:
        """Return the greatest number with this prefix."""
        return self.bits | ((1 << (self.width - self.length)) - 1)


class Tree(NamedTuple):
    """The rules of the root chain and all chains below it, each after those it jumps to."""

    root: Rules
    chains: tuple[tuple[str, Rules], ...]


class Branch(NamedTuple):
    """A chain below another one: its name, the rule that jumps to it, and a rule without effect that describes it.

    `note` is the last rule of the chain: packets that match another rule do not visit it.
    """

    name: str
    jump: str
    note: str


def build_tree(entries: Mapping[int, Rules], width: int, branch: Callable[[Prefix], Branch]) -> Tree:
    """Arrange the rules of each number in a tree.

    `width` is the length of the numbers in bits, a multiple of four. `branch` returns the chain for a prefix.
    """
    chains: list[tuple[str, Rules]] = []
    root = tuple(_rules(entries, sorted(entries), 0, width, branch, chains))
    return Tree(root, tuple(chains))


def _rules(
    entries: Mapping[int, Rules],
    numbers: Sequence[int],
    depth: int,
    width: int,
    branch: Callable[[Prefix], Branch],
    chains: list[tuple[str, Rules]],
) -> Iterator[str]:
    """Yield the rules for sorted numbers that share their first `depth` bits; add chains below to `chains`."""
    if len(numbers) <= LEAF:
        for number in numbers:
            yield from entries[number]
        return
    depth = _shared_bits(numbers[0], numbers[-1], depth, width) + _STEP
    for group in _runs(numbers, width - depth):
        if len(group) == 1:
            # A branch costs as much as the entry itself.
            yield from entries[group[0]]
            continue
        prefix = Prefix(group[0] >> (width - depth) << (width - depth), depth, width)
        child = branch(prefix)
        below = tuple(_rules(entries, group, depth, width, branch, chains))
        chains.append((child.name, (*below, child.note)))
        yield child.jump


def _shared_bits(first: int, last: int, depth: int, width: int) -> int:
    """Return how many leading bits two numbers share, in whole steps."""
    while first >> (width - depth - _STEP) == last >> (width - depth - _STEP):
        depth += _STEP
    return depth


def _runs(numbers: Sequence[int], shift: int) -> Iterator[Sequence[int]]:
    """Yield runs of sorted numbers that differ only in their last `shift` bits."""
    start = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] >> shift != numbers[start] >> shift:
            yield numbers[start:i]
            start = i
