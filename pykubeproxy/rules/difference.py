"""Compare two states of the proxy's chains in one family."""

from collections.abc import Iterator

import msgspec

from pykubeproxy.rules import skeleton
from pykubeproxy.rules.digests import comparable
from pykubeproxy.rules.order import aligned
from pykubeproxy.rules.ownership import is_ours, referenced_by_others
from pykubeproxy.rules.ruleset import ChainKey, Rules, Ruleset, without


class ChainDifference(msgspec.Struct, frozen=True):
    """A chain that differs, with its rules before and after; None if the chain does not exist.

    Where order means nothing to a packet, the rules before are in the order of those after.
    """

    key: ChainKey
    before: Rules | None
    after: Rules | None

    @property
    def gone(self) -> Rules:
        """Return the rules that only `before` has. If none is gone and none new, the order differs."""
        return without(self.before or (), self.after or ())

    @property
    def new(self) -> Rules:
        """Return the rules that only `after` has."""
        return without(self.after or (), self.before or ())


def own_part(live: Ruleset, desired: Ruleset) -> Ruleset:
    """Return the part of live tables to compare with the desired rules, including jumps and the kubelet's chain.

    Of chains shared with others, include only the desired rules. Omit an undesired empty chain of ours if foreign rules
    jump to it: it cannot be deleted.
    """
    referenced = referenced_by_others(live)
    chains: dict[ChainKey, Rules] = {}
    for key, rules in live.chains.items():
        if is_ours(key):
            if rules or key in desired.chains or key not in referenced:
                chains[key] = rules
        elif key in desired.chains:
            present = frozenset(rules)
            chains[key] = tuple(rule for rule in desired.chains[key] if rule in present)
    return Ruleset(live.family, chains)


def difference(before: Ruleset, after: Ruleset) -> tuple[ChainDifference, ...]:
    """Return the chains that differ: those of `after` in its order, then those it lacks, sorted.

    A missing built-in chain counts as empty, as its table may not exist yet. In chains shared by services, an order that
    means nothing to a packet is no difference: kube-proxy writes them in any order. In chains of services, comments are
    none: see `digests`.
    """
    return tuple(_differing(before, after))


def _differing(before: Ruleset, after: Ruleset) -> Iterator[ChainDifference]:
    gone = sorted(key for key in before.chains if key not in after.chains)
    for key in (*after.chains, *gone):
        empty = () if key in skeleton.JUMPS else None
        old, new = before.chains.get(key, empty), after.chains.get(key, empty)
        if old and new and key in skeleton.SHARED:
            old = aligned(old, new)
        if old and new:
            comments = dict(zip(comparable(key, new), new, strict=True))
            old = tuple(
                comments.get(text, rule) for text, rule in zip(comparable(key, old), old, strict=True)
            )
        if old != new:
            yield ChainDifference(key, old, new)
