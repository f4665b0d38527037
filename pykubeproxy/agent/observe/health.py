"""The health of the agent, and the pages /healthz, /livez and /readyz."""

import math
import time
from collections.abc import Callable, Iterable
from functools import partial

import msgspec

from pykubeproxy import http
from pykubeproxy.objects import Family, Node
from pykubeproxy.sources import Outage, Watch

# The cluster autoscaler sets this taint on a node before it removes it.
_AUTOSCALER_TAINT = "ToBeDeletedByClusterAutoscaler"
# Go's zero time: clients written in Go expect it for a family that was never synced.
_NEVER = "0001-01-01T00:00:00Z"


# How long our rules may be missing, in seconds; most repairs take less than one.
_MISSING_AFTER = 5.0
# How long lists may fail, in seconds.
_UNLISTED_AFTER = 60.0


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
        # Replaced, never changed: other threads read it.
        self._families = dict.fromkeys(families, _Times())
        self._needs_node = needs_node
        self._node_eligible = not needs_node
        self._watches: tuple[Watch, ...] = ()

    def watching(self, watches: Iterable[Watch]) -> None:
        """Include the lists of these watches."""
        self._watches = tuple(watches)

    def sync_queued(self, family: Family, since: float | None = None) -> None:
        """Record that a sync is due, after a change at `since` or a failure; the oldest since the last success counts."""
        since = self._clock() if since is None else since
        self._note(family, queued=min(self._families[family].queued, since))

    def sync_succeeded(self, family: Family) -> None:
        self._note(family, updated=self._wall_clock(), queued=math.inf)

    def rules_missing(self, family: Family, since: float | None) -> None:
        """Record since when rules of ours are missing; None if none are."""
        self._note(family, missing=math.inf if since is None else since)

    def drift_contested(self, family: Family, contested: bool) -> None:
        self._note(family, contested=contested)

    def node_changed(self, node: Node | None) -> None:
        leaving = node is not None and (node.deleting or _AUTOSCALER_TAINT in node.taints)
        self._node_eligible = not leaving and (node is not None or not self._needs_node)

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

    def _note(self, family: Family, **changes: float) -> None:
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
    content: dict[str, object] = {"lastUpdated": timestamp(last), "currentTime": timestamp(state.now)}
    if name == "healthz":
        content["nodeEligible"] = state.node_eligible
    content["healthy"] = healthy
    if name == "readyz" and state.unlisted:
        content["reasons"] = [f"cannot list {it.resource}: {it.reason}" for it in state.unlisted]
    content["status"] = {
        family.value: {
            "lastUpdated": timestamp(family_health.last_updated),
            "healthy": state.alive and (live or family_health.ready),
        }
        for family, family_health in state.families.items()
    }
    return http.Response(msgspec.json.encode(content), http.JSON, 200 if passed else 503)


def timestamp(ns: int) -> str:
    """Format nanoseconds since 1970 as Go does, without trailing zeros: 2026-11-20T23:53:58.07467896Z."""
    if not ns:
        return _NEVER
    seconds, fraction = divmod(ns, 1_000_000_000)
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{fraction:09d}".rstrip("0").rstrip(".") + "Z"
