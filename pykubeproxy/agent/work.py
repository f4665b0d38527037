"""The pending work of one family: what waits, since when, and which step comes next."""

import math
from collections.abc import Collection, Iterable
from typing import TypeAlias

import msgspec

from pykubeproxy.agent.drift import DriftSchedule, DriftScope
from pykubeproxy.agent.limiter import TimeShare
from pykubeproxy.agent.quarantine import RetrySchedule
from pykubeproxy.objects import Key
from pykubeproxy.rules.drift import Drift
from pykubeproxy.services.ports import PortName

# The part of the time that turns may take. Short ones may use that of the last minute at once, so that thousands of honest
# changes do not wait.
_TURN_SHARE, _SHORT_SECONDS, _SAVED_SECONDS = 0.25, 2.0, 60.0

# Service ports that wait for a turn, by Service, in the order of turns.
Waiting = dict[Key, dict[PortName, None]]


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

    - `visit_all`: the next sync goes through all Services
    - `uncertain`: it reads tables or chains, after a write with an unknown end
    - `requested`: when a sync was requested, if none has started since; else infinity
    - `dirty`: the Services to render again, until a sync succeeds
    - `drift`, `drifted`: what the next sync repairs, and the Services with drift: they do not wait
    - `listed`: a list has arrived: small Services do not wait
    - `deferred`: the service ports that wait for their turn
    - `losing`: those of them whose rules a step `Losses` must reduce
    - `behind`: the last sync failed, so the tables may hold new rules of dirty Services
    - `alone`: a turn takes one port, so that a port that fails delays no others
    - `unused_chains`: the tables hold chains that no rule of ours uses; a turn deletes some
    """

    def __init__(self) -> None:
        self.visit_all = True
        self.uncertain = False
        self.requested = math.inf
        self._changed: set[Key] = set()
        self._changed_by_list = False
        self._arrived = math.inf
        self.dirty: set[Key] = set()
        self.listed = False
        self.drift: Drift | None = None
        self.drifted: set[Key] = set()
        self.deferred: Waiting = {}
        self.losing: Waiting = {}
        self.behind = False
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
    def has_changes(self) -> bool:
        """Return whether a sync is needed without a further request."""
        return self.visit_all or self.uncertain or bool(self.dirty) or self.drift is not None

    @property
    def has_losses(self) -> bool:
        """Return whether a step `Losses` is due: at once, but others may be synced before."""
        return bool(self.losing)

    @property
    def turns(self) -> int:
        """Return how many service ports wait for a turn; unused chains that wait count as one."""
        return sum(map(len, self.deferred.values())) + self.unused_chains

    def due(self, work_from: float) -> float:
        """Return when `plan` may return a step that nothing but time brings; turns and retries wait until `work_from`."""
        if self.has_losses:
            return -math.inf
        check = min(self.checks.due(), self.checks.next_missing_check(), self.checks.calm_at)
        return min(check, max(work_from, min(self._turn_due(), self.tries_due())))

    def tries_due(self) -> float:
        """Return when the next try is due: none while a sync must find out what the tables hold, and write the rest."""
        return math.inf if self.behind or self.uncertain or self.visit_all else self.retries.due()

    def _turn_due(self) -> float:
        return self._turn_share.due() if self.turns else math.inf

    # Decide.

    def plan(self, kind: type[Step], now: float, fits: bool = True) -> Step | None:
        """Return the step of this kind to take now; None if there is none. Take what it returns: it is not planned again.

        Without `fits`, other work is due before a turn or a retry would end.
        """
        if kind is Changes:
            needed = self.requested < math.inf or self.has_changes
            return self._take_changes() if needed else None
        if kind is Losses:
            return Losses() if self.has_losses else None
        if kind is Turn:
            return Turn() if fits and now >= self._turn_due() else None
        if kind is Retry:
            return Retry(self.retries.take(now)) if fits and now >= self.tries_due() else None
        if now >= self.checks.due():
            return DriftCheck(self.checks.take(now))
        if now >= self.checks.next_missing_check() and (scope := self.checks.suspected):
            return DriftCheck(scope, missing_only=True)
        return None

    def _take_changes(self) -> Changes:
        step = Changes(frozenset(self._changed), self._changed_by_list)
        # A sync may fail before it begins.
        self.dirty |= self._changed
        self.listed = self.listed or self._changed_by_list
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

    def found_drift(self, drift: Drift, services: Collection[Key]) -> None:
        """Have the next sync repair drift, in these Services."""
        self.dirty |= set(services)
        self.drifted |= set(services)
        self.drift = drift

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
        self.alone = self.alone and not turn
        self.drift, self.listed, self.visit_all, self.behind = None, False, False, False
        self.dirty.clear()
        self.drifted.clear()

    def failed(self, turn: bool) -> None:
        """Record a sync that failed; `turn`: it was the turn of some ports. From now on, drifted Services wait, too."""
        self.alone = self.alone or turn
        self.behind = True
        self.drifted.clear()

    def turn_ended(self, begun: float, now: float, succeeded: bool) -> None:
        """Record how long a turn took: they may take a share of the time only."""
        self._turn_share.worked(begun, now, succeeded)
