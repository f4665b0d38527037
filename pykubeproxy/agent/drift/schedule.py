"""When to look whether others have changed our chains, and how soon to put them right again."""

import math

import msgspec

from pykubeproxy.kernel import TABLES, ExternalWrite
from pykubeproxy.rules.jumps import SHARED_GROUND
from pykubeproxy.rules.ownership import is_ours
from pykubeproxy.rules.ruleset import ChainKey

# All times are seconds. Whoever changes something seldom does so with one command: give them a moment.
_SETTLING = 0.1
# After a look there is a break of so many times what it took while others write and write, and when nothing is heard.
_BUSY_SHARE, _LONGEST_BREAK, _IDLE_SHARE = 5, 10.0, 1000
# So many repairs are made at once. Each further one waits twice as long: somebody is working against us.
_AT_ONCE, _FIRST_PAUSE, _LONGEST_PAUSE = 3, 0.5, 60.0
_MOST_WRITERS = 5
# Tables count as left alone after that time and twice the pause.
_CALM = 5.0


class DriftScope(msgspec.Struct, frozen=True):
    """What is to be looked at: whole tables, and chains. `since` is when it was first heard of, `writers` from whom."""

    since: float
    tables: frozenset[str] = frozenset()
    chains: frozenset[ChainKey] = frozenset()
    writers: tuple[str, ...] = ()


class DriftSchedule:
    """Decides for one family, on a clock that the caller reads.

    `period` is the least time between two comparisons of everything, which are made even if nothing is heard.
    """

    def __init__(self, period: float, now: float) -> None:
        self._period = period
        self._heard: DriftScope | None = None
        self._next_round = now + period
        self._not_before = -math.inf
        self._failures = 0
        self._repairs = 0
        self._calm_at = math.inf

    def adjust(self, period: float, now: float) -> None:
        """Go on with another period."""
        self._period = period
        self._next_round = min(self._next_round, now + period)

    def heard(self, foreign: ExternalWrite, now: float) -> None:
        """Somebody wrote."""
        chains = frozenset(key for key in foreign.chains if is_ours(key) or key in SHARED_GROUND)
        if chains or foreign.tables:
            writers = (foreign.writer,) if foreign.writer else ()
            self._suspect(DriftScope(now, foreign.tables, chains, writers))

    def forget(self) -> None:
        """Everything is about to be read anyway."""
        self._heard = None

    def read(self, now: float) -> None:
        """Everything has been read: that is as good as a comparison."""
        self._next_round = max(self._next_round, now + self._period)

    def due(self) -> float:
        """When there is something to look at."""
        wanted = self._heard.since + _SETTLING if self._heard else math.inf
        return max(min(wanted, self._next_round), self._not_before)

    def take(self, now: float) -> DriftScope:
        """What is to be looked at now that it is due: what was heard of, or everything."""
        heard, self._heard = self._heard or DriftScope(now), None
        if now >= self._next_round:
            return msgspec.structs.replace(heard, tables=frozenset(TABLES))
        return heard

    def looked(self, suspicion: DriftScope, seconds: float, now: float) -> None:
        """A look at this has taken that long."""
        self._failures = 0
        self._not_before = max(self._not_before, now + min(_BUSY_SHARE * seconds, _LONGEST_BREAK))
        if suspicion.tables.issuperset(TABLES):
            self._next_round = now + max(self._period, _IDLE_SHARE * seconds)

    def failed(self, suspicion: DriftScope, now: float) -> None:
        """It could not be looked at this: again after half a second, then after one, two and so on up to the period."""
        self._suspect(suspicion)
        self._not_before = now + min(self._period, _FIRST_PAUSE * 2.0 ** min(self._failures, 16))
        self._failures += 1

    def repaired(self, now: float) -> None:
        """What was found has been put right."""
        self._repairs += 1
        self._not_before = max(self._not_before, now + self._pause())
        self._calm_at = now + _CALM + 2 * self._pause()

    @property
    def calm_at(self) -> float:
        """When the tables will have been left alone for long enough after a repair; infinity if they have been."""
        return self._calm_at

    def calm(self) -> None:
        """They have been left alone."""
        self._repairs, self._calm_at = 0, math.inf

    @property
    def contested(self) -> bool:
        """Whether somebody undoes our repairs again and again."""
        return self._repairs > _AT_ONCE

    def _suspect(self, more: DriftScope) -> None:
        before = self._heard or more
        self._heard = DriftScope(
            min(before.since, more.since),
            before.tables | more.tables,
            before.chains | more.chains,
            tuple(dict.fromkeys((*before.writers, *more.writers)))[:_MOST_WRITERS],
        )

    def _pause(self) -> float:
        further = self._repairs - _AT_ONCE
        return min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0**further) if further >= 0 else 0.0
