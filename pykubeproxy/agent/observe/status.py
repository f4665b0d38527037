"""Collect the status and the objects of the agent, which only the loop thread may read."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import msgspec

import pykubeproxy
from pykubeproxy.agent.observe.observers import Observers
from pykubeproxy.agent.startup import Families
from pykubeproxy.agent.tables import FamilyTables
from pykubeproxy.objects import Key, Node
from pykubeproxy.pages.servicez import NodeObjects
from pykubeproxy.pages.statusz import (
    AgentStatus,
    EndpointStatus,
    PageFilter,
    PortStatus,
    Unwatched,
)
from pykubeproxy.services.cluster import Cluster, rivals
from pykubeproxy.services.ports import ApiServers, policy_frontends
from pykubeproxy.services.selection import EndpointVerdict, Reason, ResolvedPort
from pykubeproxy.sources import Watch

# List no further services above this many endpoints, so that syncs do not wait long.
_MOST_ENDPOINTS = 10_000

_T = TypeVar("_T")
# How long a client waits for the loop, in seconds; a sync may take longer.
_TIMEOUT = 2.0


class LoopQuery(msgspec.Struct, Generic[_T], frozen=True):
    """A question to the loop. The sender waits for `future`, and cancels it on timeout."""

    question: Callable[[Cluster, Iterable[FamilyTables]], _T]
    future: Future[_T]

    def answer(self, cluster: Cluster, tables: Iterable[FamilyTables]) -> None:
        """Answer the question, or pass its exception on. Call from the loop thread only."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.question(cluster, tables))
        except Exception as error:
            self.future.set_exception(error)


class ServiceList(msgspec.Struct, frozen=True):
    """How many Services match a filter, and the ports of the first of them."""

    matching: int
    ports: tuple[PortStatus, ...]


def list_services(cluster: Cluster, tables: Iterable[FamilyTables], filter_: PageFilter) -> ServiceList:
    """Return the Services that have rules and match, by name, with their current endpoints."""
    families = tuple(tables)
    keys = sorted({key for family in families for key in family.services() if _matches(key, filter_)})
    ports: list[PortStatus] = []
    endpoints = 0
    for key in keys[: filter_.limit]:
        if endpoints > _MOST_ENDPOINTS:
            break
        for family in families:
            for resolved in family.resolve(cluster, key):
                ports += port_statuses(resolved, family.family.value)
                endpoints += len(resolved.selection.verdicts)
    return ServiceList(len(keys), tuple(ports))


def port_statuses(resolved: ResolvedPort, family: str) -> Iterator[PortStatus]:
    """Yield the status of a service port under each traffic policy that applies to one of its frontends."""
    port, verdicts = resolved.port, resolved.selection.verdicts
    for policy, local in (("Cluster", False), ("Local", True)):
        if frontends := policy_frontends(port, local):
            reasons = [(verdict, verdict.local if local else verdict.cluster) for verdict in verdicts]
            yield PortStatus(
                namespace=port.name.namespace,
                name=port.name.service,
                port=port.name.port,
                protocol=port.name.protocol,
                family=family,
                policy=policy,
                frontends=frontends,
                endpoints=tuple(_endpoints(reasons)),
            )


def _endpoints(reasons: Sequence[tuple[EndpointVerdict, Reason | None]]) -> Iterator[EndpointStatus]:
    used = sum(1 for _, reason in reasons if reason and reason.used)
    for verdict, reason in reasons:
        if reason:
            address, _, port = verdict.endpoint.target.rpartition(":")
            share = round(1 / used, 9) if reason.used else 0.0
            yield EndpointStatus(address.strip("[]"), int(port), share, reason.used, reason.value)


def list_objects(
    cluster: Cluster,
    tables: Iterable[FamilyTables],
    node_name: str,
    filter_: PageFilter,
    api_servers: ApiServers = frozenset(),
    all_slices: bool = False,
) -> NodeObjects:
    """Return the Services that match, and the Node; EndpointSlices of a Service that the filter names, or of all.

    With a Service come those that may decide whether it keeps session affinity.
    """
    services = tuple(service for service in cluster.services() if _matches(service.key, filter_))
    services += rivals(services, cluster.services() if filter_.service else ())
    slices = (slice_ for service in services for slice_ in cluster.all_slices_of(service.key))
    quarantined = (port for family in tables for port in family.quarantined())
    return NodeObjects(
        node=cluster.node(node_name) or Node(node_name),
        services=services,
        slices=tuple(slices) if filter_.service or all_slices else (),
        quarantined=tuple(port for port in quarantined if _matches(port.port_name.service_key, filter_)),
        api_servers=api_servers,
    )


def _matches(key: Key, filter_: PageFilter) -> bool:
    return filter_.namespace in ("", key.namespace) and filter_.service in ("", key.name)


class StatusService:
    """Collect the status of the agent. Any thread may call it.

    `ask` sends a query to the reconcile loop. `waiting` returns the agents that wait to take over.
    """

    def __init__(
        self,
        node_name: str,
        families: Families,
        observers: Observers,
        ask: Callable[[LoopQuery[Any]], None],
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

    def status(self, filter_: PageFilter) -> AgentStatus:
        """Return the current status; without services while a sync runs."""
        services = self._query(lambda cluster, tables: list_services(cluster, tables, filter_))
        health = self._observers.health.state()
        history = self._observers.history
        pending_services, pending_endpoints = self._observers.metrics.pending()
        now = time.time()
        unwatched = tuple(
            Unwatched(outage.resource, now - outage.seconds, outage.reason)
            for watch in self._watches
            if (outage := watch.outage)
        )
        # The watches start before this object.
        started = min((self._started, *(failing.since for failing in unwatched)))
        return AgentStatus(
            version=pykubeproxy.__version__,
            node=self._node_name,
            backend=self._families.backend.value,
            started=started,
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
            unwatched=unwatched,
            waiting=self._waiting(),
            filter=filter_,
            matching=services.matching if services else 0,
            services=services.ports if services else (),
            busy=services is None,
        )

    def objects(self, filter_: PageFilter, all_slices: bool = False) -> NodeObjects | None:
        """Return the objects of the agent, see `list_objects`; None while a sync runs."""
        return self._query(
            lambda cluster, tables: list_objects(
                cluster, tables, self._node_name, filter_, self._api_servers(), all_slices
            )
        )

    def _query(self, question: Callable[[Cluster, Iterable[FamilyTables]], _T]) -> _T | None:
        """Let the loop answer a question; return None while a sync runs."""
        # One query at a time, so that a sync waits for one query at most.
        deadline = time.monotonic() + _TIMEOUT
        if not self._lock.acquire(timeout=_TIMEOUT):
            return None
        query = LoopQuery[_T](question, Future())
        try:
            self._ask(query)
            return query.future.result(deadline - time.monotonic())
        except TimeoutError:
            query.future.cancel()
            return None
        finally:
            self._lock.release()
