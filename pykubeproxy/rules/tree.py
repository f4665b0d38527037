"""The dispatch tree: rules that are looked for by a number, in chains that narrow it down four bits at a time.

A flat chain costs a packet one visit for each rule before its own. In the tree it passes at most sixteen branches on
each level, and a leaf. The shape follows from the set of numbers alone, so that an entry that comes or goes changes
its leaf, and seldom more: a branch is named by the bits that lead to it, whatever lies below.

Masks are always prefixes: iptables-nft 1.8.7 stores other masks wrongly.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

Rules = tuple[str, ...]

# Up to this many numbers stay together in one chain.
LEAF = 16
_STEP = 4  # bits


class Prefix(NamedTuple):
    """The first `length` bits of a number of `width` bits; the others are 0."""

    bits: int
    length: int
    width: int

    @property
    def last(self) -> int:
        """The greatest number that begins so."""
        return self.bits | ((1 << (self.width - self.length)) - 1)


class Tree(NamedTuple):
    """The rules of the chain at the root, and all chains below it, each after those that it jumps to."""

    root: Rules
    chains: tuple[tuple[str, Rules], ...]


class Branch(NamedTuple):
    """A chain below another one: its name, the rule that leads there, and a rule of no effect that describes it.

    The description comes last in the chain, where only packets that nobody wants meet it: in the kernel a comment takes
    256 bytes, and packets have to get past all rules before their own.
    """

    name: str
    jump: str
    note: str


def grow(entries: Mapping[int, Rules], width: int, branch: Callable[[Prefix], Branch]) -> Tree:
    """Arrange the rules of each number in a tree.

    `width` is the length of the numbers in bits, a multiple of four. `branch` makes the chain for a prefix.
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
    """The rules for some sorted numbers that share their first `depth` bits; chains below are added to `chains`."""
    if len(numbers) <= LEAF:
        for number in numbers:
            yield from entries[number]
        return
    depth = _shared_bits(numbers[0], numbers[-1], depth, width) + _STEP
    for group in _grouped(numbers, width - depth):
        if len(group) == 1:
            # A branch would cost as much as the entry itself.
            yield from entries[group[0]]
            continue
        prefix = Prefix(group[0] >> (width - depth) << (width - depth), depth, width)
        made = branch(prefix)
        below = tuple(_rules(entries, group, depth, width, branch, chains))
        chains.append((made.name, (*below, made.note)))
        yield made.jump


def _shared_bits(first: int, last: int, depth: int, width: int) -> int:
    """How many bits two numbers have in common from the left, in whole steps."""
    while first >> (width - depth - _STEP) == last >> (width - depth - _STEP):
        depth += _STEP
    return depth


def _grouped(numbers: Sequence[int], shift: int) -> Iterator[Sequence[int]]:
    """Sorted numbers in runs that are equal but for their last `shift` bits."""
    start = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] >> shift != numbers[start] >> shift:
            yield numbers[start:i]
            start = i
