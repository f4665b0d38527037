"""Asking the loop, which owns all state, what it serves: a question in its mailbox, answered between two syncs."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Generic, TypeVar

import msgspec

from pykubeproxy.agent.observe.object_documents import Objects, QuarantinedPort
from pykubeproxy.agent.observe.status import Filter, PortStatus, port_statuses
from pykubeproxy.agent.sync.tables import FamilyTables
from pykubeproxy.objects import Key, Node
from pykubeproxy.services.cluster import Cluster

# No more services are told of once there are so many endpoints, for the loop has other things to do.
_MOST_ENDPOINTS = 10_000

_T = TypeVar("_T")


class Seen(msgspec.Struct, frozen=True):
    """What the loop answers: how many services match, and the ports of the first of them."""

    matching: int
    services: tuple[PortStatus, ...]


class Query(msgspec.Struct, Generic[_T], frozen=True):
    """A question about the services. Whoever asks waits for `answer`, and cancels it when it comes too late."""

    question: Callable[[Cluster, Iterable[FamilyTables]], _T]
    answer: Future[_T]

    def meet(self, cluster: Cluster, tables: Iterable[FamilyTables]) -> None:
        """Answer, for the one thread that these belong to. Never raises: whoever asks gets to know."""
        if not self.answer.set_running_or_notify_cancel():
            return
        try:
            self.answer.set_result(self.question(cluster, tables))
        except Exception as error:
            self.answer.set_exception(error)


def see(cluster: Cluster, tables: Iterable[FamilyTables], wanted: Filter) -> Seen:
    """The services that there are rules for and that are wanted, by name, as they would be served now."""
    families = tuple(tables)
    keys = sorted({key for family in families for key in family.programmed() if _matches(key, wanted)})
    found: list[PortStatus] = []
    endpoints = 0
    for key in keys[: wanted.limit]:
        if endpoints > _MOST_ENDPOINTS:
            break
        for family in families:
            for served in family.serving(cluster, key):
                found += port_statuses(served, family.family.value)
                endpoints += len(served.selection.verdicts)
    return Seen(len(keys), tuple(found))


def look(cluster: Cluster, tables: Iterable[FamilyTables], node_name: str, wanted: Filter) -> Objects:
    """The Services that are wanted, with their EndpointSlices if they are asked for by name; and the Node."""
    services = tuple(it for it in cluster.services() if _matches(it.key, wanted))
    return Objects(
        node=cluster.node(node_name) or Node(node_name),
        services=services,
        slices=tuple(slice_ for it in services for slice_ in cluster.all_slices_of(it.key))
        if wanted.service
        else (),
        set_aside=tuple(
            QuarantinedPort(it.family.value, aside.name, aside.why)
            for it in tables
            for aside in it.set_aside()
            if _matches(aside.name.service_key, wanted)
        ),
    )


def _matches(key: Key, wanted: Filter) -> bool:
    return wanted.namespace in ("", key.namespace) and wanted.service in ("", key.name)
