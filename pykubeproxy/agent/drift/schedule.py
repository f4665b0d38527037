"""Schedule checks for drift, and back off while it keeps coming back."""

import math

import msgspec

from pykubeproxy.kernel import TABLES, ExternalWrite
from pykubeproxy.rules.ownership import FOREIGN_CHAINS, is_ours
from pykubeproxy.rules.ruleset import ChainKey

# All times are in seconds. Debounce: external writers usually run several commands.
_DEBOUNCE = 0.1
# The pauses after a check of external writes (with its maximum) and after a full check, as multiples of their duration.
_WRITE_PAUSE, _LONGEST_WRITE_PAUSE, _FULL_CHECK_PAUSE = 5, 10.0, 1000
# The first repairs happen at once. After further ones the rules are contested, and each pause is twice as long.
_REPAIRS_AT_ONCE, _FIRST_BACKOFF, _LONGEST_BACKOFF = 3, 0.5, 60.0
_MOST_WRITERS = 5
# Reset the backoff this long after a repair, plus twice its backoff.
_CALM = 5.0


class DriftScope(msgspec.Struct, frozen=True):
    """The tables and chains to check. `since` is when the first external write was noticed, `writers` are its programs."""

    since: float
    tables: frozenset[str] = frozenset()
    chains: frozenset[ChainKey] = frozenset()
    writers: tuple[str, ...] = ()


class DriftSchedule:
    """Schedule the checks of one family. It reads no clock: the caller passes the time in.

    All tables are checked about every `period`, even if no external write is reported.
    """

    def __init__(self, period: float, now: float) -> None:
        self._period = period
        self._suspect: DriftScope | None = None
        self._next_full_check = now + period
        self._not_before = -math.inf
        # While the backoff delays a repair: when to check for missing rules, and whether any write came since that check.
        self._next_missing_check = -math.inf
        self._written_since = False
        self._failures = 0
        self._repairs = 0
        self._calm_at = math.inf

    @property
    def calm_at(self) -> float:
        """Return when a repair will have lasted long enough to reset the backoff; infinity if there is nothing to reset."""
        return self._calm_at

    @property
    def contested(self) -> bool:
        """Return whether another program keeps undoing our repairs."""
        return self._repairs > _REPAIRS_AT_ONCE

    def due(self) -> float:
        """Return when the next check is due."""
        return max(min(self._debounced(), self._next_full_check), self._not_before)

    def next_missing_check(self) -> float:
        """Return when to check `suspected` for missing rules only; infinity if not before the next full check of it."""
        if self._suspect is None or not self._written_since:
            return math.inf
        return max(self._debounced(), self._next_missing_check)

    @property
    def suspected(self) -> DriftScope | None:
        """Return the scope of external writes since the last check."""
        return self._suspect

    def missing_checked(self, seconds: float, now: float, missing: bool) -> None:
        """Record how many seconds this check took. If rules are `missing`, the next one comes only after their repair."""
        self._written_since = False
        self._next_missing_check = (
            math.inf if missing else now + min(_WRITE_PAUSE * seconds, _LONGEST_WRITE_PAUSE)
        )

    def take(self, now: float) -> DriftScope:
        """Return what to check now: the scope of external writes, or everything."""
        scope, self._suspect = self._suspect or DriftScope(now), None
        if now >= self._next_full_check:
            return msgspec.structs.replace(scope, tables=frozenset(TABLES))
        return scope

    def external_write(self, write: ExternalWrite, now: float) -> None:
        """Record a write of another program."""
        chains = frozenset(key for key in write.chains if is_ours(key) or key in FOREIGN_CHAINS)
        if chains or write.tables:
            self._add(DriftScope(now, write.tables, chains, (write.writer,) if write.writer else ()))

    def resync_starts(self) -> None:
        """Record that a full sync is about to read everything."""
        self._suspect = None

    def resynced(self, now: float) -> None:
        """Record that a full sync has read everything, which counts as a full check."""
        self._next_full_check = max(self._next_full_check, now + self._period)

    def checked(self, scope: DriftScope, seconds: float, now: float) -> None:
        """Record how many seconds a check of this scope took."""
        self._failures = 0
        self._next_missing_check = now + min(_WRITE_PAUSE * seconds, _LONGEST_WRITE_PAUSE)
        self._not_before = max(self._not_before, self._next_missing_check)
        if scope.tables.issuperset(TABLES):
            self._next_full_check = now + max(self._period, _FULL_CHECK_PAUSE * seconds)

    def check_failed(self, scope: DriftScope, now: float) -> None:
        """Record that a check failed; retry it after 0.5 s, then after 1, 2, … up to the period."""
        self._add(scope)
        self._not_before = now + min(self._period, _FIRST_BACKOFF * 2.0 ** min(self._failures, 16))
        self._next_missing_check = self._not_before
        self._failures += 1

    def repaired(self, now: float) -> None:
        """Record that drift was repaired."""
        self._repairs += 1
        self._not_before = max(self._not_before, now + self._backoff())
        self._calm_at = now + _CALM + 2 * self._backoff()

    def calmed(self) -> None:
        """Reset the backoff: no repair was needed for long enough."""
        self._repairs, self._calm_at = 0, math.inf

    def _add(self, scope: DriftScope) -> None:
        self._written_since = True
        before = self._suspect or scope
        self._suspect = DriftScope(
            min(before.since, scope.since),
            before.tables | scope.tables,
            before.chains | scope.chains,
            tuple(dict.fromkeys((*before.writers, *scope.writers)))[:_MOST_WRITERS],
        )

    def _debounced(self) -> float:
        """Return when the debounce of the external writes ends; infinity if there were none.

        Do not wait after lost events: writing more rules than the watch can follow takes longer than the debounce.
        """
        if self._suspect is None:
            return math.inf
        return self._suspect.since + (0.0 if self._suspect.tables.issuperset(TABLES) else _DEBOUNCE)

    def _backoff(self) -> float:
        further = self._repairs - _REPAIRS_AT_ONCE
        return min(_LONGEST_BACKOFF, _FIRST_BACKOFF * 2.0**further) if further >= 0 else 0.0
