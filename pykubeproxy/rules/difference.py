"""What differs between two states of one family's tables, looking at nothing but what is the proxy's own."""

from collections.abc import Iterator

import msgspec

from pykubeproxy.rules import skeleton
from pykubeproxy.rules.ownership import is_ours, referred_to_by_others
from pykubeproxy.rules.ruleset import ChainKey, Ruleset, without

Rules = tuple[str, ...]


class ChainDifference(msgspec.Struct, frozen=True):
    """A chain that differs: its rules in either state, None where there is no such chain."""

    key: ChainKey
    before: Rules | None
    after: Rules | None

    @property
    def gone(self) -> Rules:
        """The rules that are there before and not after; with none gone and none new, their order differs."""
        return without(self.before or (), self.after or ())

    @property
    def new(self) -> Rules:
        """The rules that are there after and not before."""
        return without(self.after or (), self.before or ())


def own_part(live: Ruleset, wanted: Ruleset) -> Ruleset:
    """What of live tables is to be compared with the rules that are wanted there, jumps and kubelet's chain included.

    Of chains that are not ours alone only those rules count that are wanted: others may stand around them. A chain of
    ours that is not wanted, but that rules of others jump to, can only be emptied; an empty one is as good as gone.
    """
    referred = referred_to_by_others(live)
    chains: dict[ChainKey, Rules] = {}
    for key, rules in live.chains.items():
        if is_ours(key):
            if rules or key in wanted.chains or key not in referred:
                chains[key] = rules
        elif key in wanted.chains:
            there = frozenset(rules)
            chains[key] = tuple(rule for rule in wanted.chains[key] if rule in there)
    return Ruleset(live.family, chains)


def difference(before: Ruleset, after: Ruleset) -> tuple[ChainDifference, ...]:
    """The chains that differ: those of `after` in its order, then those that it does not have, sorted.

    The kernel's own chains are always there: one that is missing is empty, for its table may not exist yet.
    """
    return tuple(_differing(before, after))


def _differing(before: Ruleset, after: Ruleset) -> Iterator[ChainDifference]:
    gone = sorted(key for key in before.chains if key not in after.chains)
    for key in (*after.chains, *gone):
        empty = () if key in skeleton.JUMPS else None
        old, new = before.chains.get(key, empty), after.chains.get(key, empty)
        if old != new:
            yield ChainDifference(key, old, new)
