"""The pending work of one family: what waits, since when, and which step comes next.

`TRANSITIONS` are the states of its tables, as the agent knows them, and what moves them; docs/design.md shows them.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from enum import Enum
from typing import TypeAlias

import msgspec

from pykubeproxy.agent.drift import DriftSchedule, DriftScope
from pykubeproxy.agent.limiter import TimeShare
from pykubeproxy.agent.quarantine import RetrySchedule
from pykubeproxy.objects import Key
from pykubeproxy.rules.drift import Drift
from pykubeproxy.rules.ruleset import ChainKey
from pykubeproxy.services.ports import PortName

# The part of the time that turns may take. Short ones may use that of the last minute at once, so that thousands of honest
# changes do not wait.
_TURN_SHARE, _SHORT_SECONDS, _SAVED_SECONDS = 0.25, 2.0, 60.0

# Service ports that wait for a turn, by Service, in the order of turns.
Waiting = dict[Key, dict[PortName, None]]


class TablesState(Enum):
    """What the agent knows about the live tables of a family, and so what the next sync does."""

    UNREAD = "it reads the tables and goes through all Services"
    KNOWN = "it writes what has changed since the last sync"
    DRIFTED = "it also repairs drift, and starts at once"
    BROKEN_OFF = "as unread, and the tables may hold a part of the sync that failed"


class Trigger(Enum):
    """What moves this state."""

    SUCCESS = "a sync succeeds"
    FAILURE = "a sync fails"
    DRIFT = "a check finds drift"
    DISTRUST = "the tables may differ from what it knows"


# The first state is the first one; a trigger that a state does not list leaves it as it is.
TRANSITIONS: Mapping[TablesState, Mapping[Trigger, TablesState]] = {
    TablesState.UNREAD: {Trigger.SUCCESS: TablesState.KNOWN, Trigger.FAILURE: TablesState.BROKEN_OFF},
    TablesState.KNOWN: {
        Trigger.DRIFT: TablesState.DRIFTED,
        Trigger.DISTRUST: TablesState.UNREAD,
        Trigger.FAILURE: TablesState.BROKEN_OFF,
    },
    TablesState.DRIFTED: {
        Trigger.SUCCESS: TablesState.KNOWN,
        Trigger.DISTRUST: TablesState.UNREAD,
        Trigger.FAILURE: TablesState.BROKEN_OFF,
    },
    TablesState.BROKEN_OFF: {Trigger.SUCCESS: TablesState.KNOWN},
}


class Changes(msgspec.Struct, frozen=True):
    """Sync these changed Services, and all drift. `listed`: a list brought them, so only large Services wait."""

    services: Collection[Key] = ()
    listed: bool = False


class Losses(msgspec.Struct, frozen=True):
    """Sync what some waiting ports have lost, so that no packet meets it any more."""


class Turn(msgspec.Struct, frozen=True):
    """Sync the waiting ports whose turn it is, and delete some unused chains."""


class Retry(msgspec.Struct, frozen=True):
    """Try the rules of these quarantined ports again."""

    ports: tuple[PortName, ...]


class DriftCheck(msgspec.Struct, frozen=True):
    """Check these tables and chains for drift; `missing_only` if the repair itself has to wait."""

    scope: DriftScope
    missing_only: bool = False


# A step that writes the tables, and any step.
SyncStep: TypeAlias = Changes | Losses | Turn
Step: TypeAlias = SyncStep | Retry | DriftCheck


class Work:
    """The pending work of one family. The reconcile loop owns it; it reads no clock.

    - `tables`: what the agent knows about the live tables
    - `requested`: when a sync was requested, if none has started since; else infinity
    - `dirty`, `dirty_chains`: the Services and shared chains to render again, until a sync succeeds
    - `drift`, `drifted`: what the next sync repairs, and the Services with drift: they do not wait
    - `listed`: a list has arrived: small Services do not wait
    - `deferred`: the service ports that wait for their turn
    - `losing`: those of them whose rules a step `Losses` must reduce
    - `alone`: a turn takes one port, so that a port that fails delays no others
    - `unused_chains`: the tables hold chains that no rule of ours uses; a turn deletes some
    """

    def __init__(self) -> None:
        self.tables = TablesState.UNREAD
        self.requested = math.inf
        self._changed: set[Key] = set()
        self._changed_by_list = False
        self._arrived = math.inf
        self.dirty: set[Key] = set()
        self.dirty_chains: set[ChainKey] = set()
        self.listed = False
        self.drift: Drift | None = None
        self.drifted: set[Key] = set()
        self.deferred: Waiting = {}
        self.losing: Waiting = {}
        self.alone = False
        self.unused_chains = False
        self.checks = DriftSchedule(math.inf, 0.0)
        self.retries = RetrySchedule()
        self._turn_share = TimeShare(_TURN_SHARE, 0.0, _SHORT_SECONDS, _SAVED_SECONDS)

    def schedule(self, period: float, now: float) -> None:
        """Check all tables about every `period` from now on; failed turns wait that long at most."""
        self.checks = DriftSchedule(period, now)
        self._turn_share = TimeShare(_TURN_SHARE, period, _SHORT_SECONDS, _SAVED_SECONDS)

    # Read.

    @property
    def needs_resync(self) -> bool:
        """Return whether the next sync reads the live tables and goes through all Services."""
        return self.tables in (TablesState.UNREAD, TablesState.BROKEN_OFF)

    @property
    def broken_off(self) -> bool:
        """Return whether the tables may hold a part of a sync that failed."""
        return self.tables is TablesState.BROKEN_OFF

    @property
    def has_losses(self) -> bool:
        """Return whether a step `Losses` is due: at once, but others may be synced before."""
        return bool(self.losing) and not self.needs_resync

    @property
    def turns(self) -> int:
        """Return how many service ports wait for a turn; unused chains that wait count as one."""
        return sum(map(len, self.deferred.values())) + self.unused_chains

    def due(self, work_from: float) -> float:
        """Return when `plan` may return a step that nothing but time brings; turns and retries wait until `work_from`."""
        if self.has_losses:
            return -math.inf
        check = min(self.checks.due(), self.checks.next_missing_check(), self.checks.calm_at)
        return min(check, max(work_from, min(self._turn_due(), self.retries.due())))

    def _turn_due(self) -> float:
        return self._turn_share.due() if self.turns else math.inf

    # Decide.

    def plan(self, kind: type[Step], now: float, fits: bool = True) -> Step | None:
        """Return the step of this kind to take now; None if there is none. Take what it returns: it is not planned again.

        Without `fits`, other work is due before a turn or a retry would end.
        """
        if kind is Changes:
            needed = self.requested < math.inf or self.tables is not TablesState.KNOWN
            return self._take_changes() if needed else None
        if kind is Losses:
            return Losses() if self.has_losses else None
        if kind is Turn:
            return Turn() if fits and now >= self._turn_due() else None
        if kind is Retry:
            return Retry(self.retries.take(now)) if fits and now >= self.retries.due() else None
        if now >= self.checks.due():
            return DriftCheck(self.checks.take(now))
        if now >= self.checks.next_missing_check() and (scope := self.checks.suspected):
            return DriftCheck(scope, missing_only=True)
        return None

    def _take_changes(self) -> Changes:
        step = Changes(frozenset(self._changed), self._changed_by_list)
        self._changed.clear()
        self._changed_by_list, self.requested = False, math.inf
        return step

    def take_arrival(self) -> float:
        """Return when the oldest change arrived that this function has not returned yet; infinity if there is none."""
        arrived, self._arrived = self._arrived, math.inf
        return arrived

    # Record.

    def request(self, now: float, arrived: float, services: Iterable[Key] = (), listed: bool = False) -> None:
        """Request a sync, after a change that arrived at that time. It may change these Services; a list may bring it."""
        self.requested = min(self.requested, now)
        self._arrived = min(self._arrived, arrived)
        self._changed.update(services)
        self._changed_by_list = self._changed_by_list or listed

    def distrust(self) -> None:
        """Make the next sync a full one: the live tables may differ from the applied state."""
        self._move(Trigger.DISTRUST)

    def found_drift(self, drift: Drift, services: Collection[Key], shared: Collection[ChainKey]) -> None:
        """Have the next sync repair drift, in these Services and shared chains."""
        self._move(Trigger.DRIFT)
        self.dirty |= set(services)
        self.drifted |= set(services)
        self.dirty_chains |= set(shared)
        self.drift = drift
        if drift.unknown:
            self.distrust()

    def defer(self, service: Key, ports: Iterable[PortName]) -> None:
        """Let these ports of a Service wait for their turn, behind all that wait already."""
        self.deferred[service] = {**self.deferred.get(service, {}), **dict.fromkeys(ports)}

    def lose(self, service: Key, ports: Iterable[PortName]) -> None:
        """Have a step `Losses` reduce the rules of these waiting ports."""
        self.losing[service] = {**self.losing.get(service, {}), **dict.fromkeys(ports)}

    def rotate(self, queue: Waiting, turn: Collection[PortName]) -> None:
        """Move the ports whose turn it is to the end of their queue: if they fail, they must not keep others waiting."""
        services = {name.service_key for name in turn}
        namespaces = {key.namespace for key in services}
        for key in sorted(queue, key=lambda key: (key.namespace in namespaces, key in services)):
            ports = queue.pop(key)
            queue[key] = dict.fromkeys(sorted(ports, key=turn.__contains__))

    def settle(
        self, services: Collection[Key], deferred: Collection[PortName], losing: Collection[PortName]
    ) -> None:
        """Remove the ports of these Services from the queues, except those that must still wait there."""
        for queue, left in ((self.losing, losing), (self.deferred, deferred)):
            for key in queue.keys() & services:
                queue[key] = {name: None for name in queue[key] if name in left}
                if not queue[key]:
                    del queue[key]

    def done(self, turn: bool) -> None:
        """Record a sync that succeeded; `turn`: it was the turn of some ports."""
        self._move(Trigger.SUCCESS)
        self.alone = self.alone and not turn
        self.drift, self.listed = None, False
        for changes in (self.dirty, self.drifted, self.dirty_chains):
            changes.clear()

    def failed(self, turn: bool) -> None:
        """Record a sync that failed; `turn`: it was the turn of some ports."""
        self._move(Trigger.FAILURE)
        self.alone = self.alone or turn

    def turn_ended(self, begun: float, now: float, succeeded: bool) -> None:
        """Record how long a turn took: they may take a share of the time only."""
        self._turn_share.worked(begun, now, succeeded)

    def _move(self, trigger: Trigger) -> None:
        self.tables = TRANSITIONS[self.tables].get(trigger, self.tables)
