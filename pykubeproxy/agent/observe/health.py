"""How well this node's rules follow the cluster, and the pages that say so to load balancers, kubelets and people."""

import math
import threading
import time
from collections.abc import Callable, Iterable

import msgspec

from pykubeproxy.agent import http
from pykubeproxy.objects import Family, Node

# The cluster autoscaler sets it on a node that it is about to remove.
_DOOMED = "ToBeDeletedByClusterAutoscaler"
# What Go's zero time looks like: the reader of a family that was never programmed may well be written in Go.
_NEVER = "0001-01-01T00:00:00Z"


class FamilyHealth(msgspec.Struct, frozen=True):
    """The state of one family. `last_updated` is when its rules were last brought up to date, in ns since 1970, or 0.

    `overdue`: a change has been waiting for too long, or its sync keeps failing. `contested`: somebody undoes what is
    written, again and again. `at_work`: a sync that takes long has got on of late.
    """

    last_updated: int
    overdue: bool
    contested: bool = False
    at_work: bool = False

    @property
    def programmed(self) -> bool:
        """Whether its rules have been in place at all."""
        return self.last_updated > 0

    @property
    def ready(self) -> bool:
        """Whether they are in place, follow the cluster, and are left alone."""
        return self.programmed and not self.overdue and not self.contested

    @property
    def hangs(self) -> bool:
        """Whether nothing has happened for too long, so that a restart may help."""
        return self.overdue and not self.at_work


class State(msgspec.Struct, frozen=True):
    """The health of the proxy and of its node at one moment, `now` in ns since 1970."""

    now: int
    families: dict[Family, FamilyHealth]
    node_eligible: bool

    @property
    def alive(self) -> bool:
        """Whether no family hangs: /livez."""
        return not any(family.hangs for family in self.families.values())

    @property
    def ready(self) -> bool:
        """Whether all families are ready: /readyz."""
        return all(family.ready for family in self.families.values())

    @property
    def healthy(self) -> bool:
        """Whether balancers should send clients here: /healthz."""
        return self.ready and self.node_eligible


class Health:
    """Keeps what the state of health follows from. The loop tells it, any thread may ask.

    A family is overdue once a change has been queued for more than twice `sync_period` (seconds). With `needs_node`
    a node that is not known gets no traffic from balancers; without, only one that is known to be going.
    """

    def __init__(
        self,
        families: Iterable[Family],
        sync_period: float,
        needs_node: bool = True,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self._patience = 2 * sync_period
        self._clock, self._wall_clock = clock, wall_clock
        self._lock = threading.Lock()
        self._updated = dict.fromkeys(families, 0)
        self._queued: dict[Family, float] = {}
        self._contested: set[Family] = set()
        self._at_work: dict[Family, float] = {}
        self._needs_node = needs_node
        self._node_eligible = not needs_node

    def adjust(self, sync_period: float) -> None:
        """Go on with another syncPeriod, in seconds."""
        with self._lock:
            self._patience = 2 * sync_period

    def queued(self, family: Family) -> None:
        """A sync is wanted, be it for a change or because the last one failed; the oldest wish counts."""
        with self._lock:
            self._queued.setdefault(family, self._clock())

    def synced(self, family: Family) -> None:
        """A sync has succeeded that took in all that was queued."""
        with self._lock:
            self._queued.pop(family, None)
            self._updated[family] = self._wall_clock()

    def at_work(self, family: Family) -> None:
        """A sync that takes long gets on."""
        with self._lock:
            self._at_work[family] = self._clock()

    def contested(self, family: Family, whether: bool) -> None:
        """Somebody undoes what is written, again and again; or no longer does."""
        with self._lock:
            (self._contested.add if whether else self._contested.discard)(family)

    def node(self, node: Node | None) -> None:
        """The Node object as it is now, None if there is none."""
        with self._lock:
            going = node is not None and (node.deleting or _DOOMED in node.taints)
            self._node_eligible = not going and (node is not None or not self._needs_node)

    def state(self) -> State:
        """The state at this moment."""
        with self._lock:
            now = self._clock()
            families = {
                family: FamilyHealth(
                    updated,
                    family in self._queued and now - self._queued[family] > self._patience,
                    family in self._contested,
                    now - self._at_work.get(family, -math.inf) <= self._patience,
                )
                for family, updated in self._updated.items()
            }
            return State(self._wall_clock(), families, self._node_eligible)


def health_pages(health: Health, asked: Callable[[str, int], None]) -> http.Page:
    """/healthz, /livez and /readyz. `asked` is told the page ("healthz") and the status it was answered with.

    Until its first sync a family is unhealthy on /healthz and /readyz, but not on /livez: a restart would not help.
    """

    def healthz() -> http.Answer:
        state = health.state()
        return _page(state, state.healthy, state.ready, needs_rules=True, about_node=True)

    def livez() -> http.Answer:
        state = health.state()
        return _page(state, state.alive, state.alive, needs_rules=False)

    def readyz() -> http.Answer:
        state = health.state()
        return _page(state, state.ready, state.ready, needs_rules=True)

    def counted(name: str, make: Callable[[], http.Answer]) -> Callable[[], http.Answer]:
        def page() -> http.Answer:
            answer = make()
            asked(name, answer.status)
            return answer

        return page

    made = {"healthz": healthz, "livez": livez, "readyz": readyz}
    return http.pages({f"/{name}": counted(name, make) for name, make in made.items()})


def _page(
    state: State, passed: bool, healthy: bool, needs_rules: bool, about_node: bool = False
) -> http.Answer:
    # While all is well lastUpdated is now: it has always meant that the proxy is up to date, not that much happens.
    last = state.now if passed else max((f.last_updated for f in state.families.values()), default=0)
    content: dict[str, object] = {"lastUpdated": timestamp(last), "currentTime": timestamp(state.now)}
    if about_node:
        content["nodeEligible"] = state.node_eligible
    content["healthy"] = healthy
    content["status"] = {
        family.value: {
            "lastUpdated": timestamp(of.last_updated),
            "healthy": of.ready if needs_rules else not of.hangs,
        }
        for family, of in state.families.items()
    }
    return http.Answer(msgspec.json.encode(content), http.JSON, 200 if passed else 503)


def timestamp(ns: int) -> str:
    """Nanoseconds since 1970 as Go writes a time: 2026-11-20T23:53:58.07467896Z. Zeros at the end are left out."""
    if not ns:
        return _NEVER
    seconds, fraction = divmod(ns, 1_000_000_000)
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{fraction:09d}".rstrip("0").rstrip(".") + "Z"
