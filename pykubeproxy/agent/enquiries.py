"""Asking the loop, which owns all state, what it serves: a question in its mailbox, answered between two syncs."""

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future

import msgspec

import pykubeproxy
from pykubeproxy.agent.observers import Observers
from pykubeproxy.agent.startup import Families
from pykubeproxy.agent.status import Filter, PortStatus, Status, port_statuses
from pykubeproxy.agent.tables import FamilyTables
from pykubeproxy.objects import Key
from pykubeproxy.services.cluster import Cluster

# How long an answer is waited for, in seconds; a sync may take longer.
_PATIENCE = 2.0
# No more services are told of once there are so many endpoints, for the loop has other things to do.
_MOST_ENDPOINTS = 10_000


class Seen(msgspec.Struct, frozen=True):
    """What the loop answers: how many services match, and the ports of the first of them."""

    matching: int
    services: tuple[PortStatus, ...]


class Enquiry(msgspec.Struct, frozen=True):
    """A question about the services. Whoever asks waits for `answer`, and cancels it when it comes too late."""

    filter: Filter
    answer: Future[Seen]

    def meet(self, cluster: Cluster, tables: Iterable[FamilyTables]) -> None:
        """Answer, for the one thread that these belong to. Never raises: whoever asks gets to know."""
        if not self.answer.set_running_or_notify_cancel():
            return
        try:
            self.answer.set_result(see(cluster, tables, self.filter))
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


def _matches(key: Key, wanted: Filter) -> bool:
    return wanted.namespace in ("", key.namespace) and wanted.service in ("", key.name)


class Desk:
    """Puts a Status together from all who know a part of it. Any thread may ask."""

    def __init__(
        self, node_name: str, families: Families, observers: Observers, put: Callable[[Enquiry], None]
    ) -> None:
        self._node_name = node_name
        self._families = families
        self._observers = observers
        self._put = put
        self._started = time.time()

    def status(self, wanted: Filter) -> Status:
        """The state at this moment; without services if the loop is too busy to tell."""
        seen = self._ask(wanted)
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
            lacking=_lacking(self._families),
            pending_services=services,
            pending_endpoints=endpoints,
            syncs=history.syncs,
            filter=wanted,
            matching=seen.matching if seen else 0,
            services=seen.services if seen else (),
            busy=seen is None,
        )

    def _ask(self, wanted: Filter) -> Seen | None:
        enquiry = Enquiry(wanted, Future())
        self._put(enquiry)
        try:
            return enquiry.answer.result(_PATIENCE)
        except TimeoutError:
            enquiry.answer.cancel()
            return None


def _lacking(families: Families) -> Mapping[str, str]:
    return {family.value: reason for family, reason in families.lacking.items()}
