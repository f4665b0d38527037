"""All who look on: health, metrics, health check ports and events, behind the few calls that the loop makes."""

import ipaddress
import threading
import time
from collections.abc import Callable, Iterable, Mapping

import structlog

from pykubeproxy.agent import http
from pykubeproxy.agent.http_server import Server
from pykubeproxy.agent.observe import events
from pykubeproxy.agent.observe.health import Health, health_pages
from pykubeproxy.agent.observe.healthchecks import HealthChecks, Wanted, listening_hosts
from pykubeproxy.agent.observe.history import History
from pykubeproxy.agent.observe.latency import Latencies
from pykubeproxy.agent.observe.metrics import Metrics
from pykubeproxy.agent.observe.object_documents import Objects
from pykubeproxy.agent.observe.pages import metrics_pages
from pykubeproxy.agent.observe.status import Filter, Repair, Status
from pykubeproxy.agent.quarantine.reporter import QuarantineReporter
from pykubeproxy.agent.sync.report import Report
from pykubeproxy.config import Address, Config
from pykubeproxy.objects import EndpointSlice, Event, Family, Key, Kind, Node, Service, Updated

# Between two tries to listen on an address that is taken, in seconds.
_RETRY_SECONDS = 5.0
# What an event may take to be sent when the process is about to end, in seconds.
_LAST_WORDS_SECONDS = 2.0

log = structlog.get_logger()


class BindFailed(Exception):
    """An address cannot be listened on, and bindAddressHardFail is set; `str()` says which and why."""


class Observers:
    """Told by the loop what happens, it keeps health, metrics and health check ports true. All calls from one thread.

    Nothing is listened on before `serve`. `needs_node`: whether a node that is not known counts as ineligible.
    """

    def __init__(
        self,
        config: Config,
        node_name: str,
        families: Iterable[Family],
        recorder: events.Recorder,
        needs_node: bool = True,
    ) -> None:
        self._config = config
        self._node_name = node_name
        self._families = tuple(families)
        self.recorder = recorder
        self.health = Health(self._families, config.iptables.sync_period, needs_node)
        self.metrics = Metrics()
        self.history = History()
        self._latencies = Latencies(time.time(), self._families)
        self._unsynced: dict[Kind, set[Key]] = {kind: set() for kind in Kind}
        self._complaints = QuarantineReporter(node_name, recorder)
        self._wanted = Wanted()
        self._addresses: dict[Family, tuple[str, ...]] = dict.fromkeys(self._families, ())
        self._checks: HealthChecks | None = None
        self._servers: list[Server] = []
        self._closing = threading.Event()

    def serve(
        self,
        flags: Mapping[str, object],
        status: Callable[[Filter], Status] | None = None,
        objects: Callable[[Filter], Objects | None] | None = None,
    ) -> None:
        """Listen from now on, and tell of the start. Raises BindFailed, after an event that says so.

        `status` tells /statusz what there is besides kube-proxy's lines, `objects` /servicez what it is made from.
        Without bindAddressHardFail an address that is taken is tried again and again.
        """
        health = health_pages(self.health, self.metrics.asked)
        metrics = metrics_pages(self.metrics.page, lambda: self._config, flags, status, objects)
        self._checks = HealthChecks(self._node_name, self.recorder, lambda: self.health.state().ready)
        self._open("health", self._config.health_address, health, events.health_server_failed)
        self._open("metrics", self._config.metrics_address, metrics, events.metrics_server_failed)
        self.recorder.record(events.starting(self._node_name))

    def reconfigured(self, config: Config) -> None:
        """A configuration that differs only in what is taken up live."""
        self._config = config
        self.health.adjust(config.iptables.sync_period)

    def applied(self, event: Event, concerned: set[Key]) -> None:
        """An event was applied and concerns these Services."""
        self._latencies.noted(event)
        kind = _kind(event)
        if concerned:
            unsynced = self._unsynced[kind]
            unsynced |= concerned
            self.metrics.changed(kind, concerned, pending=len(unsynced))

    def node(self, node: Node | None) -> None:
        """The Node object as it is now."""
        self.health.node(node)

    def queued(self) -> None:
        """A sync is asked for, and nothing but time stands before it."""
        for family in self._families:
            self.health.queued(family)
            self.metrics.queued(family, time.time())

    def synced(self, report: Report, rules: Mapping[str, int], local_addresses: tuple[str, ...]) -> None:
        """One family is in line with all events applied so far.

        `rules` are those in force for each table, `local_addresses` those of this node's interfaces in the family, read
        only if nodePortAddresses needs them.
        """
        now = time.time()
        self.health.synced(report.family)
        self.metrics.synced(report, rules, now)
        if self._complaints.synced(report):
            self.metrics.refused(report.family)
        self.history.synced(report, now)
        for latency in self._latencies.programmed(report.family, now):
            self.metrics.programmed(report.family, latency)
        self._wanted.follow(report)
        self._addresses[report.family] = local_addresses

    def failed(self, family: Family, full: bool, seconds: float, writing: bool, why: str = "") -> None:
        """The sync of one family failed after `seconds`; `writing` tells that iptables-restore was why."""
        self.health.queued(family)
        self.metrics.failed(family, full, seconds, writing)
        self.history.failed(family, full, seconds, time.time(), why)

    def at_work(self, family: Family) -> None:
        """The sync of one family takes long, and gets on."""
        self.health.at_work(family)

    def repaired(self, report: Report, writers: tuple[str, ...], seconds: float, contested: bool) -> None:
        """What others had done to our rules was put right, `seconds` after it was noticed.

        `writers` are who it may have been, so far as is known. `contested`: it is done again and again.
        """
        family, what = report.family, {damage.table: str(damage) for damage in report.repaired}
        log.warning(
            "others changed our rules; they are as they were",
            family=family.value,
            **what,
            by=", ".join(writers) or "unknown",
            seconds=round(seconds, 3),
        )
        if contested:
            log.error(
                "somebody undoes our rules again and again; repairs wait longer now", family=family.value
            )
        self.health.contested(family, contested)
        self.metrics.repaired(family, what, seconds, contested)
        self.history.repaired(Repair(time.time(), family.value, seconds, report.repaired, writers))
        note = "; ".join(f"{table}: {text}" for table, text in what.items())
        self.recorder.record(events.rules_repaired(self._node_name, family, note, writers))

    def left_alone(self, family: Family) -> None:
        """For a while nobody has changed our rules."""
        if self.health.state().families[family].contested:
            log.info("our rules are left alone again", family=family.value)
        self.health.contested(family, whether=False)
        self.metrics.left_alone(family)

    def settled(self, succeeded: bool, node: Node | None) -> None:
        """All families have had their sync; `succeeded` says whether all of them did."""
        if succeeded:
            for unsynced in self._unsynced.values():
                unsynced.clear()
            self.metrics.settled()
        if self._checks:
            hosts = listening_hosts(self._config, node, self._addresses)
            self._checks.apply(self._wanted.checks(), hosts)

    def pending(self) -> tuple[int, int]:
        """How many Services changed since all was in line, by themselves and in their endpoints. Any thread may ask."""
        return len(self._unsynced[Kind.SERVICE]), len(self._unsynced[Kind.ENDPOINT_SLICE])

    def checked(self) -> None:
        """Time to try again what has failed; to be called every syncPeriod."""
        if self._checks:
            self._checks.retry()

    def close(self) -> None:
        """Close all ports and give waiting events a moment."""
        self._closing.set()
        for server in self._servers:
            server.close()
        if self._checks:
            self._checks.close()
        self.recorder.close(_LAST_WORDS_SECONDS)

    def _open(
        self, name: str, address: Address | None, page: http.Page, failed: Callable[[str, str], events.Event]
    ) -> None:
        if address is None:
            return
        server = Server(name)
        self._servers.append(server)
        reason = _listen(server, address, page)
        if not reason:
            return
        complaint = f"the {name} server cannot listen on {address}: {reason}"
        if self._config.bind_address_hard_fail:
            self.recorder.record(failed(self._node_name, complaint))
            self.close()
            raise BindFailed(complaint)
        log.error(complaint, again_in=f"{_RETRY_SECONDS:.0f}s")
        threading.Thread(
            target=self._insist, args=(name, server, address, page), name=f"{name}-retry", daemon=True
        ).start()

    def _insist(self, name: str, server: Server, address: Address, page: http.Page) -> None:
        while not self._closing.wait(_RETRY_SECONDS):
            if not _listen(server, address, page):
                log.info(f"the {name} server listens now", address=str(address))
                return


def _listen(server: Server, address: Address, page: http.Page) -> str:
    """Returns why it cannot be, or "". An unspecified address of either family stands for both, as in Go."""
    host = "" if ipaddress.ip_address(address.host).is_unspecified else address.host
    try:
        server.listen(host, address.port, page)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _kind(event: Event) -> Kind:
    if not isinstance(event, Updated):
        return event.kind
    match event.object:
        case Service():
            return Kind.SERVICE
        case EndpointSlice():
            return Kind.ENDPOINT_SLICE
        case Node():
            return Kind.NODE
