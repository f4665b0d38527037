"""The health of the agent: what the loop and the watches show, and /healthz, /livez and /readyz."""

import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from functools import partial

import msgspec
import structlog

from pykubeproxy import http
from pykubeproxy.agent.notices import (
    DriftCalm,
    DriftRepaired,
    EventApplied,
    Notice,
    RulesMissing,
    SyncFailure,
    SyncQueued,
    SyncReport,
)
from pykubeproxy.objects import Family
from pykubeproxy.pages.kube_proxy import FamilyHealthPage, HealthPage
from pykubeproxy.sources import Outage, Watch

log = structlog.get_logger()


# How long the loop may take for one step, in seconds. Commands are part of it: one that makes no progress is killed
# after 60 s, and 5 s later the loop no longer waits for its end.
HUNG_AFTER = 90.0
_FRAMES_LOGGED = 8
# The cluster autoscaler sets this taint on a node before it removes it.
_AUTOSCALER_TAINT = "ToBeDeletedByClusterAutoscaler"
# Go's zero time: clients written in Go expect it for a family that was never synced.
_NEVER = "0001-01-01T00:00:00Z"
# How long our rules may be missing, in seconds; most repairs take less than one.
_MISSING_AFTER = 5.0
# How long lists may fail, in seconds.
_UNLISTED_AFTER = 60.0


class Heartbeat:
    """Track since when the loop has been busy with one step. Create it on the loop's thread; any thread may read it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._thread = threading.get_ident()
        self._hung_step = math.inf  # the step last logged as hung
        self._step_started = math.inf

    def progress(self) -> None:
        """Record that a step starts or advances, such as an event, a chunk of rules, or a command."""
        self._step_started = self._clock()

    def idle(self) -> None:
        """Record that the loop waits for messages."""
        self._step_started = math.inf

    def busy_seconds(self) -> float:
        """Return how long the current step has made no progress; 0 while the loop waits for messages."""
        return max(0.0, self._clock() - self._step_started)

    def hung(self) -> bool:
        """Return whether the current step takes too long, so that only a restart helps; log once where it hangs."""
        step, seconds = self._step_started, self.busy_seconds()
        if seconds <= HUNG_AFTER:
            return False
        if step != self._hung_step:
            self._hung_step = step
            log.error("reconcile loop hung", seconds=round(seconds), at=self._position())
        return True

    def _position(self) -> str:
        """Return the innermost calls of the loop, the last one first."""
        frame = sys._current_frames().get(self._thread)
        calls = traceback.extract_stack(frame)[-_FRAMES_LOGGED:] if frame else ()
        return ", ".join(
            f"{call.name} ({call.filename.rpartition('/')[2]}:{call.lineno})" for call in reversed(calls)
        )


class FamilyHealth(msgspec.Struct, frozen=True):
    """The state of one family.

    - `last_updated`: the last successful sync, in ns since 1970, or 0
    - `overdue`: a change has waited too long for a sync, syncs keep failing, or missing rules are not written back
    - `contested`: another program keeps undoing the rules; this says nothing about the rules of this moment
    """

    last_updated: int
    overdue: bool
    contested: bool

    @property
    def ready(self) -> bool:
        """Whether the rules are in place and up to date."""
        return self.last_updated > 0 and not self.overdue


class HealthState(msgspec.Struct, frozen=True):
    """The health of the proxy and of its node at one moment, `now` in ns since 1970.

    - `alive`: the reconcile loop does not hang (/livez). A restart would not help against anything else.
    - `unlisted`: lists that have failed for a minute although the API server answers
    """

    now: int
    families: dict[Family, FamilyHealth]
    node_eligible: bool
    alive: bool
    unlisted: tuple[Outage, ...] = ()

    @property
    def serving(self) -> bool:
        """Whether all families are ready."""
        return self.alive and all(family.ready for family in self.families.values())

    @property
    def ready(self) -> bool:
        """Whether the rules follow changes too: /readyz."""
        return self.serving and not self.unlisted

    @property
    def healthy(self) -> bool:
        """Whether load balancers should send clients to this node: /healthz.

        Failing lists do not count: if all nodes have them, clients would reach none.
        """
        return self.serving and self.node_eligible


class Health:
    """Track the health of each family and of the node. Call from the loop thread only; any thread may call `state`.

    A family is overdue when a sync has been queued for more than twice `sync_period` (seconds), or when a message has
    waited that long for the loop: `waiting_since` returns since when, infinity if none waits. `hung` returns whether
    the loop hangs. With `needs_node`, an unknown node is not eligible for traffic.
    """

    def __init__(
        self,
        families: Iterable[Family],
        sync_period: float,
        needs_node: bool = True,
        waiting_since: Callable[[], float] = lambda: math.inf,
        hung: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self._overdue_after = 2 * sync_period
        self._waiting_since, self._hung = waiting_since, hung
        self._clock, self._wall_clock = clock, wall_clock
        # Other threads read it: its keys stay, and each value is replaced as a whole.
        self._families = dict.fromkeys(families, _Times())
        self._needs_node = needs_node
        self._node_eligible = not needs_node
        self._watches: tuple[Watch, ...] = ()

    def watching(self, watches: Iterable[Watch]) -> None:
        """Include the lists of these watches."""
        self._watches = tuple(watches)

    def notice(self, notice: Notice) -> None:
        """Follow what the loop does."""
        match notice:
            case EventApplied(node=node):
                leaving = node is not None and (node.deleting or _AUTOSCALER_TAINT in node.taints)
                self._node_eligible = not leaving and (node is not None or not self._needs_node)
            case SyncQueued(family, since):
                self._queued(family, since)
            case SyncFailure(family):
                self._queued(family, self._clock())
            case SyncReport(family=family, held=held, services=services):
                # A family that was never synced is not ready while most Services are suspect.
                if held <= services or self._families[family].updated:
                    self._record(family, updated=self._wall_clock(), queued=math.inf)
            case RulesMissing(family, since):
                self._record(family, missing=math.inf if since is None else since)
            case DriftRepaired(family=family, contested=contested):
                self._record(family, contested=contested)
            case DriftCalm(family):
                self._record(family, contested=False)

    def state(self) -> HealthState:
        """Return the current state."""
        now, waiting = self._clock(), self._waiting_since()
        families = {
            family: FamilyHealth(
                last_updated=times.updated,
                overdue=now - min(times.queued, waiting) > self._overdue_after
                or now - times.missing > _MISSING_AFTER,
                contested=times.contested,
            )
            for family, times in self._families.items()
        }
        outages = [outage for watch in self._watches if (outage := watch.list_outage)]
        unlisted = tuple(outage for outage in outages if outage.seconds > _UNLISTED_AFTER)
        return HealthState(self._wall_clock(), families, self._node_eligible, not self._hung(), unlisted)

    def _queued(self, family: Family, since: float) -> None:
        self._record(family, queued=min(self._families[family].queued, since))

    def _record(self, family: Family, **changes: float) -> None:
        self._families[family] = msgspec.structs.replace(self._families[family], **changes)


class _Times(msgspec.Struct, frozen=True):
    updated: int = 0
    queued: float = math.inf
    missing: float = math.inf
    contested: bool = False


def health_pages(health: Health, served: Callable[[str, int], None]) -> http.Handler:
    """Return the pages /healthz, /livez and /readyz; call `served` with name ("healthz") and status of each response."""

    def page(name: str, _: http.Request) -> http.Response:
        answer = _page(name, health.state())
        served(name, answer.status)
        return answer

    pages = {f"/{name}": partial(page, name) for name in ("healthz", "livez", "readyz")}
    return http.redirecting(http.router(pages))


def _page(name: str, state: HealthState) -> http.Response:
    live = name == "livez"
    healthy = {"livez": state.alive, "readyz": state.ready}.get(name, state.serving)
    passed = state.healthy if name == "healthz" else healthy
    # In kube-proxy, lastUpdated is the current time while the proxy is healthy.
    last = (
        state.now if passed else max((family.last_updated for family in state.families.values()), default=0)
    )
    families = {
        family.value: FamilyHealthPage(timestamp(known.last_updated), state.alive and (live or known.ready))
        for family, known in state.families.items()
    }
    unlisted = tuple(f"cannot list {outage.resource}: {outage.reason}" for outage in state.unlisted)
    content = HealthPage(
        last_updated=timestamp(last),
        current_time=timestamp(state.now),
        node_eligible=state.node_eligible if name == "healthz" else msgspec.UNSET,
        healthy=healthy,
        reasons=unlisted if name == "readyz" and unlisted else msgspec.UNSET,
        status=families,
    )
    return http.Response(msgspec.json.encode(content), http.JSON, 200 if passed else 503)


def timestamp(ns: int) -> str:
    """Format nanoseconds since 1970 as Go does, without trailing zeros: 2026-11-20T23:53:58.07467896Z."""
    if not ns:
        return _NEVER
    seconds, fraction = divmod(ns, 1_000_000_000)
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{fraction:09d}".rstrip("0").rstrip(".") + "Z"
