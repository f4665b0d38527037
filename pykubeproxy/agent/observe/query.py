"""Queries to the loop thread, which owns all state; it answers them between two syncs."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Generic, TypeVar

import msgspec

from pykubeproxy.agent.observe.object_documents import Objects
from pykubeproxy.agent.observe.status import Filter, PortStatus, port_statuses
from pykubeproxy.agent.sync.tables import FamilyTables
from pykubeproxy.objects import Key, Node
from pykubeproxy.services.affinity import rivals
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.ports import ApiServers

# List no further services above this many endpoints, so that syncs do not wait long.
_MOST_ENDPOINTS = 10_000

_T = TypeVar("_T")


class Query(msgspec.Struct, Generic[_T], frozen=True):
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


def list_services(cluster: Cluster, tables: Iterable[FamilyTables], filter_: Filter) -> ServiceList:
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


def list_objects(
    cluster: Cluster,
    tables: Iterable[FamilyTables],
    node_name: str,
    filter_: Filter,
    api_servers: ApiServers = frozenset(),
    all_slices: bool = False,
) -> Objects:
    """Return the Services that match, and the Node; EndpointSlices of a Service that the filter names, or of all.

    With a Service come those that may decide whether it keeps session affinity.
    """
    services = tuple(service for service in cluster.services() if _matches(service.key, filter_))
    services += rivals(services, cluster.services() if filter_.service else ())
    slices = (slice_ for service in services for slice_ in cluster.all_slices_of(service.key))
    quarantined = (port for family in tables for port in family.quarantined())
    return Objects(
        node=cluster.node(node_name) or Node(node_name),
        services=services,
        slices=tuple(slices) if filter_.service or all_slices else (),
        quarantined=tuple(port for port in quarantined if _matches(port.port_name.service_key, filter_)),
        api_servers=api_servers,
    )


def _matches(key: Key, filter_: Filter) -> bool:
    return filter_.namespace in ("", key.namespace) and filter_.service in ("", key.name)
