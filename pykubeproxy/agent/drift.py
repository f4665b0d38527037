"""Detect what other programs changed in our chains: when to check which tables, and how to read them."""

import math
from collections.abc import Collection
from typing import NamedTuple

import msgspec
import structlog

from pykubeproxy.kernel import TABLES, ExternalWrite, Tables, Unreadable
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.ownership import FOREIGN_CHAINS, is_ours
from pykubeproxy.rules.ruleset import ChainKey, Ruleset

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

    All tables are checked about every `period`, even if no external write is reported. `suspected` is the scope of external
    writes since the last check. At `calm_at`, a repair has lasted long enough to reset the backoff; infinity if there is
    nothing to reset.
    """

    def __init__(self, period: float, now: float) -> None:
        self._period = period
        self.suspected: DriftScope | None = None
        self._next_full_check = now + period
        self._not_before = -math.inf
        # While the backoff delays a repair: when to check for missing rules, and whether any write came since that check.
        self._next_missing_check = -math.inf
        self._written_since = False
        self._failures = 0
        self._repairs = 0
        self.calm_at = math.inf

    @property
    def contested(self) -> bool:
        """Return whether another program keeps undoing our repairs."""
        return self._repairs > _REPAIRS_AT_ONCE

    def due(self) -> float:
        """Return when the next check is due."""
        return max(min(self._debounced(), self._next_full_check), self._not_before)

    def next_missing_check(self) -> float:
        """Return when to check `suspected` for missing rules only; infinity if not before the next full check of it."""
        if self.suspected is None or not self._written_since:
            return math.inf
        return max(self._debounced(), self._next_missing_check)

    def missing_checked(self, seconds: float, now: float, missing: bool) -> None:
        """Record how many seconds this check took. If rules are `missing`, the next one comes only after their repair."""
        self._written_since = False
        self._next_missing_check = (
            math.inf if missing else now + min(_WRITE_PAUSE * seconds, _LONGEST_WRITE_PAUSE)
        )

    def take(self, now: float) -> DriftScope:
        """Return what to check now: the scope of external writes, or everything."""
        scope, self.suspected = self.suspected or DriftScope(now), None
        if now >= self._next_full_check:
            return msgspec.structs.replace(scope, tables=frozenset(TABLES))
        return scope

    def external_write(self, write: ExternalWrite, now: float) -> None:
        """Record a write of another program."""
        chains = frozenset(key for key in write.chains if is_ours(key) or key in FOREIGN_CHAINS)
        if chains or write.tables:
            self._add(DriftScope(now, write.tables, chains, (write.writer,) if write.writer else ()))

    def resync_starts(self) -> None:
        """Record that a sync is about to read all tables."""
        self.suspected = None

    def resynced(self, now: float) -> None:
        """Record that a sync has read all tables, which counts as a full check."""
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
        self.calm_at = now + _CALM + 2 * self._backoff()

    def calmed(self) -> None:
        """Reset the backoff: no repair was needed for long enough."""
        self._repairs, self.calm_at = 0, math.inf

    def _add(self, scope: DriftScope) -> None:
        self._written_since = True
        before = self.suspected or scope
        self.suspected = DriftScope(
            min(before.since, scope.since),
            before.tables | scope.tables,
            before.chains | scope.chains,
            tuple(dict.fromkeys((*before.writers, *scope.writers)))[:_MOST_WRITERS],
        )

    def _debounced(self) -> float:
        """Return when the debounce of the external writes ends; infinity if there were none.

        Do not wait after lost events: writing more rules than the watch can follow takes longer than the debounce.
        """
        if self.suspected is None:
            return math.inf
        return self.suspected.since + (0.0 if self.suspected.tables.issuperset(TABLES) else _DEBOUNCE)

    def _backoff(self) -> float:
        further = self._repairs - _REPAIRS_AT_ONCE
        return min(_LONGEST_BACKOFF, _FIRST_BACKOFF * 2.0**further) if further >= 0 else 0.0


log = structlog.get_logger()

# The chains to read in a table that iptables cannot show as a whole: all except those of single services.
_ALWAYS = frozenset((*FOREIGN_CHAINS, *skeleton.SHARED, *skeleton.FIXED))


class Reading(NamedTuple):
    """Live tables: `tables` as a whole, and some chains. `hidden` are tables that iptables cannot show as a whole.

    Of a built-in chain that iptables cannot show, `live` holds our jumps only.
    """

    live: Ruleset
    tables: frozenset[str]
    chains: frozenset[ChainKey]
    hidden: frozenset[str] = frozenset()


class TableReader:
    """Read the tables of one family, and log once when iptables cannot show some of them any more."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._hidden: frozenset[str] = frozenset()

    def read(self, whole: Collection[str], chains: Collection[ChainKey] = ()) -> Reading:
        """Read `whole` tables and those of `chains` completely; without `whole`, read only the chains.

        Raises KernelError.
        """
        reading = _read(self._tables, whole, frozenset(chains))
        if new := reading.hidden - self._hidden:
            log.warning(
                "tables not readable as a whole, checking shared chains only",
                family=self._tables.family.value,
                tables=", ".join(sorted(new)),
                likely_reason="rules made with nft",
            )
        self._hidden = reading.hidden if whole else self._hidden | new
        return reading


def _read(tables: Tables, whole: Collection[str], chains: frozenset[ChainKey]) -> Reading:
    names = frozenset((*whole, *(key.table for key in chains))) if whole else frozenset()
    try:
        live = tables.save(names) if names else tables.chains(chains)
    except Unreadable:
        return _read_in_parts(tables, names, chains)
    return Reading(live, names, chains)


def _read_in_parts(tables: Tables, names: frozenset[str], chains: frozenset[ChainKey]) -> Reading:
    live: dict[ChainKey, tuple[str, ...]] = {}
    shown = set()
    for table in names:
        try:
            live.update(tables.save({table}).chains)
            shown.add(table)
        except Unreadable:
            chains |= {key for key in _ALWAYS if key.table == table}
    hidden = set(names - shown)
    for key in sorted(key for key in chains if key.table not in shown):
        try:
            live.update(tables.chains([key]).chains)
        except Unreadable:
            hidden.add(key.table)
            live[key] = tuple(rule for rule in skeleton.JUMPS.get(key, ()) if tables.has_rule(key, rule))
    return Reading(Ruleset(tables.family, live), frozenset(shown), chains, frozenset(hidden))
