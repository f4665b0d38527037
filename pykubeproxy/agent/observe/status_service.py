"""Answer /statusz and /servicez: collect the status of an agent from its parts."""

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

import pykubeproxy
from pykubeproxy.agent.observe.object_documents import Objects
from pykubeproxy.agent.observe.observers import Observers
from pykubeproxy.agent.observe.query import Query, list_objects, list_services
from pykubeproxy.agent.observe.status import Filter, Status, Unwatched
from pykubeproxy.agent.startup import Families
from pykubeproxy.agent.sync.tables import FamilyTables
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.ports import ApiServers
from pykubeproxy.sources import Watch

# How long a client waits for the loop, in seconds; a sync may take longer.
_TIMEOUT = 2.0

_T = TypeVar("_T")


class StatusService:
    """Collect the status of the agent. Any thread may call it.

    `ask` sends a query to the reconcile loop. `waiting` returns the agents that wait to take over.
    """

    def __init__(
        self,
        node_name: str,
        families: Families,
        observers: Observers,
        ask: Callable[[Query[Any]], None],
        watches: Iterable[Watch] = (),
        api_servers: Callable[[], ApiServers] = frozenset,
        waiting: Callable[[], tuple[str, ...]] = tuple,
    ) -> None:
        self._node_name = node_name
        self._families = families
        self._observers = observers
        self._ask = ask
        self._watches = tuple(watches)
        self._api_servers = api_servers
        self._waiting = waiting
        self._started = time.time()
        self._lock = threading.Lock()

    def status(self, filter_: Filter) -> Status:
        """Return the current status; without services while a sync runs."""
        services = self._query(lambda cluster, tables: list_services(cluster, tables, filter_))
        health = self._observers.health.state()
        history = self._observers.history
        pending_services, pending_endpoints = self._observers.pending()
        now = time.time()
        return Status(
            version=pykubeproxy.__version__,
            node=self._node_name,
            backend=self._families.backend.value,
            started=self._started,
            now=now,
            healthy=health.healthy,
            ready=health.ready,
            alive=health.alive,
            node_eligible=health.node_eligible,
            families=history.families(health),
            unavailable_families={
                family.value: reason for family, reason in self._families.unsupported.items()
            },
            pending_services=pending_services,
            pending_endpoints=pending_endpoints,
            syncs=history.syncs,
            repairs=history.repairs,
            unwatched=tuple(
                Unwatched(outage.resource, now - outage.seconds, outage.reason)
                for watch in self._watches
                if (outage := watch.outage)
            ),
            waiting=self._waiting(),
            filter=filter_,
            matching=services.matching if services else 0,
            services=services.ports if services else (),
            busy=services is None,
        )

    def objects(self, filter_: Filter, all_slices: bool = False) -> Objects | None:
        """Return the objects of the agent, see `list_objects`; None while a sync runs."""
        return self._query(
            lambda cluster, tables: list_objects(
                cluster, tables, self._node_name, filter_, self._api_servers(), all_slices
            )
        )

    def _query(self, question: Callable[[Cluster, Iterable[FamilyTables]], _T]) -> _T | None:
        # One query at a time, so that a sync waits for one query at most.
        deadline = time.monotonic() + _TIMEOUT
        if not self._lock.acquire(timeout=_TIMEOUT):
            return None
        query = Query[_T](question, Future())
        try:
            self._ask(query)
            return query.future.result(deadline - time.monotonic())
        except TimeoutError:
            query.future.cancel()
            return None
        finally:
            self._lock.release()
