"""Where the status of an agent is put together, from all who know a part of it."""

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

import pykubeproxy
from pykubeproxy.agent.observe.object_documents import Objects
from pykubeproxy.agent.observe.observers import Observers
from pykubeproxy.agent.observe.query import Query, look, see
from pykubeproxy.agent.observe.status import Filter, Status, Unwatched
from pykubeproxy.agent.startup import Families
from pykubeproxy.agent.sync.tables import FamilyTables
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.sources import Watch

# How long the loop is waited for, in seconds; a sync may take longer.
_PATIENCE = 2.0

_T = TypeVar("_T")


class StatusService:
    """Tells any thread how the agent is. `put` hands the loop a question, as its mailbox does."""

    def __init__(
        self,
        node_name: str,
        families: Families,
        observers: Observers,
        put: Callable[[Query[Any]], None],
        watches: Iterable[Watch] = (),
    ) -> None:
        self._node_name = node_name
        self._families = families
        self._observers = observers
        self._put = put
        self._watches = tuple(watches)
        self._started = time.time()
        self._asking = threading.Lock()

    def status(self, wanted: Filter) -> Status:
        """The state at this moment; without services if the loop is too busy to tell."""
        seen = self._ask(lambda cluster, tables: see(cluster, tables, wanted))
        health = self._observers.health.state()
        history = self._observers.history
        services, endpoints = self._observers.pending()
        return Status(
            version=pykubeproxy.__version__,
            node=self._node_name,
            backend=self._families.backend.value,
            started=self._started,
            now=time.time(),
            healthy=health.healthy,
            ready=health.ready,
            alive=health.alive,
            node_eligible=health.node_eligible,
            families=history.families(health),
            lacking={family.value: why for family, why in self._families.lacking.items()},
            pending_services=services,
            pending_endpoints=endpoints,
            syncs=history.syncs,
            repairs=history.repairs,
            unwatched=self._unwatched(),
            filter=wanted,
            matching=seen.matching if seen else 0,
            services=seen.services if seen else (),
            busy=seen is None,
        )

    def _unwatched(self) -> tuple[Unwatched, ...]:
        now = time.time()
        troubles = (watch.trouble for watch in self._watches)
        return tuple(Unwatched(it.what, now - it.seconds, it.why) for it in troubles if it)

    def objects(self, wanted: Filter) -> Objects | None:
        """The objects that are worked from; None if the loop is too busy to tell."""
        return self._ask(lambda cluster, tables: look(cluster, tables, self._node_name, wanted))

    def _ask(self, question: Callable[[Cluster, Iterable[FamilyTables]], _T]) -> _T | None:
        """One question at a time: whoever asks in a hurry waits for others who do, and syncs do not."""
        deadline = time.monotonic() + _PATIENCE
        if not self._asking.acquire(timeout=_PATIENCE):
            return None
        enquiry = Query[_T](question, Future())
        try:
            self._put(enquiry)
            return enquiry.answer.result(deadline - time.monotonic())
        except TimeoutError:
            enquiry.answer.cancel()
            return None
        finally:
            self._asking.release()
