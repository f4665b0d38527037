"""Arrange rules in a dispatch tree, in which a packet finds the rules of its number: an address or a port.

In a flat chain, a packet visits all rules before its own. In the tree it visits at most about sixteen rules on each
level, and there are at most `LEVELS` levels.

Usually a level branches on four bits of the number. Numbers with ever longer common prefixes would need a level for each
of them. Then a level branches by count: on prefixes of any length that divide the numbers evenly. The prefix of one
chain may contain that of another: the longer prefix comes first, and the chain of the shorter one has a hole there.

The shape depends only on the set of numbers. A chain's name states its numbers and how many levels are below it. So a new
or removed entry usually changes one leaf, and if only some chains of a new tree are written, a packet still finds every
number in no more levels. Masks are always prefixes: iptables-nft 1.8.7 stores other masks wrongly.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

Rules = tuple[str, ...]

# The maximum of numbers in a chain without branches, and of rules of one number among those of others.
LEAF = 16
# The maximum of levels below the root. nftables rejects more than 15 jumps: 13 remain with 7 around the tree, from
# PREROUTING to KUBE-MARK-MASQ. More than LEAF * 8**5 numbers, half a million, would make longer leaves.
LEVELS = 6
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


class Area(NamedTuple):
    """The numbers of a chain: those with a prefix, except those in holes; `levels` is how many levels are below it."""

    prefix: Prefix
    holes: tuple[Prefix, ...]
    levels: int

    @property
    def suffix(self) -> str:
        """Return what distinguishes this chain from others of its prefix; "" for a leaf without holes."""
        holes = "".join(f" -{hole.bits:x}/{hole.length}" for hole in sorted(self.holes))
        return holes + (f" {self.levels}" if self.levels else "")


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


def build_tree(
    entries: Mapping[int, Rules],
    width: int,
    branch: Callable[[Area], Branch],
    leaf: int = 0,
    levels: int = LEVELS,
    elsewhere: Iterable[int] = (),
) -> Tree:
    """Arrange the rules of each number in a tree.

    `width` is the length of the numbers in bits, a multiple of four. `branch` returns the chain for an area. `leaf` is the
    maximum of numbers in a chain without branches, usually `LEAF`; `levels` is that of levels below the root. The rules
    of the numbers `elsewhere` are in another tree: chains have holes there.
    """
    builder = _Builder(entries, width, branch, leaf or LEAF)
    holes = tuple(Prefix(number, width, width) for number in elsewhere)
    root, _ = builder.rules(sorted(entries), holes, levels)
    return Tree(root, tuple(builder.chains))


class _Part(NamedTuple):
    """Numbers that share a prefix, and the holes in it."""

    prefix: Prefix
    numbers: Sequence[int]
    holes: tuple[Prefix, ...] = ()


class _Builder:
    def __init__(
        self, entries: Mapping[int, Rules], width: int, branch: Callable[[Area], Branch], leaf: int
    ) -> None:
        self.chains: list[tuple[str, Rules]] = []
        self._entries = entries
        self._width = width
        self._branch = branch
        self._leaf = leaf
        # A number with more rules has a chain of its own, so a leaf has at most as many rules for any `leaf`.
        self._most = max(LEAF * LEAF // leaf, 1)

    def rules(
        self, numbers: Sequence[int], holes: tuple[Prefix, ...], levels: int, by_digit: bool = False
    ) -> tuple[Rules, int]:
        """Return the rules for sorted numbers, and how many levels of chains they need; at most `levels`."""
        entries = self._entries
        is_leaf = len(numbers) <= self._leaf
        if (
            not levels
            or len(numbers) == 1
            or (is_leaf and all(len(entries[it]) <= self._most for it in numbers))
        ):
            return tuple(rule for number in numbers for rule in entries[number]), 0
        # Below a level by digits, digits need one level less each time.
        by_digit = by_digit or _digits(numbers, self._leaf) < levels
        if is_leaf:
            width = self._width
            parts: Iterator[_Part] = (_Part(Prefix(number, width, width), (number,)) for number in numbers)
        else:
            parts = (
                _by_digit(numbers, holes, self._width)
                if by_digit
                else _by_count(numbers, holes, self._width, self._leaf)
            )
        rules: list[str] = []
        needed = 0
        for part in parts:
            if len(part.numbers) == 1 and len(entries[part.numbers[0]]) <= self._most:
                # A branch costs as much as the entry itself.
                rules += entries[part.numbers[0]]
                continue
            below, levels_below = self.rules(part.numbers, part.holes, levels - 1, by_digit)
            child = self._branch(Area(part.prefix, part.holes, levels_below))
            self.chains.append((child.name, (*below, child.note)))
            rules.append(child.jump)
            needed = max(needed, levels_below + 1)
        return tuple(rules), needed


def _digits(numbers: Sequence[int], leaf: int) -> int:
    """Return how many levels by digits these sorted numbers need at most.

    A level divides more numbers than a leaf holds, so two of them that are so far apart differ first in its digit.
    """
    return len({((a ^ b).bit_length() - 1) // _STEP for a, b in zip(numbers, numbers[leaf:], strict=False)})


def _by_digit(numbers: Sequence[int], holes: tuple[Prefix, ...], width: int) -> Iterator[_Part]:
    """Divide sorted numbers by the first digit of four bits in which they differ."""
    length = _shared(numbers, width).length // _STEP * _STEP + _STEP
    shift = width - length
    start = 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] >> shift != numbers[start] >> shift:
            prefix = Prefix(numbers[start] >> shift << shift, length, width)
            yield _Part(prefix, numbers[start:end], _inside(prefix, holes))
            start = end


def _by_count(numbers: Sequence[int], holes: tuple[Prefix, ...], width: int, leaf: int) -> Iterator[_Part]:
    """Divide sorted numbers into at most 17 parts of an eighth at most, rounded up to a power of two.

    From the leaves of the binary tree of all prefixes upwards, cut off each subtree with more than a sixteenth.
    """
    least = max(leaf, (1 << (len(numbers) - 1).bit_length()) // 8, 2) // 2
    parts: list[_Part] = []

    def cut(numbers: Sequence[int], enough: int = least) -> tuple[Sequence[int], tuple[Prefix, ...]]:
        """Return the numbers that no part has taken, and the prefixes of the parts."""
        left = numbers
        taken: tuple[Prefix, ...] = ()
        prefix = _shared(numbers, width)
        if len(numbers) > least:
            (low, taken_low), (high, taken_high) = map(cut, _halves(numbers))
            left, taken = [*low, *high], (*taken_low, *taken_high)
        if len(left) <= enough:
            return left, taken
        parts.append(_Part(prefix, left, (*taken, *_inside(prefix, holes))))
        return (), (prefix,)

    for half in _halves(numbers):
        cut(half, enough=0)
    return iter(parts)


def _shared(numbers: Sequence[int], width: int) -> Prefix:
    """Return the longest prefix that sorted numbers share."""
    differing = (numbers[0] ^ numbers[-1]).bit_length()
    return Prefix(numbers[0] >> differing << differing, width - differing, width)


def _halves(numbers: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """Divide sorted numbers by the first bit in which they differ."""
    differing = (numbers[0] ^ numbers[-1]).bit_length() - 1
    middle = bisect_left(numbers, numbers[-1] >> differing << differing)
    return numbers[:middle], numbers[middle:]


def _inside(prefix: Prefix, holes: tuple[Prefix, ...]) -> tuple[Prefix, ...]:
    return tuple(hole for hole in holes if prefix.bits <= hole.bits <= prefix.last)
