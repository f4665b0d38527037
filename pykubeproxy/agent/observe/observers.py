"""Pass the events of the reconcile loop to everything that observes it."""

import math
import time
from collections.abc import Callable, Iterable, Mapping

import msgspec
import structlog

from pykubeproxy.agent import BindFailed
from pykubeproxy.agent.observe.events import NORMAL, WARNING, KubernetesEvent, Recorder
from pykubeproxy.agent.observe.handlers import metrics_pages
from pykubeproxy.agent.observe.health import Health, HealthState, Heartbeat, health_pages
from pykubeproxy.agent.observe.health_checks import DesiredChecks, HealthChecks, listening_hosts
from pykubeproxy.agent.observe.listeners import Listeners
from pykubeproxy.agent.observe.metrics import Metrics
from pykubeproxy.agent.observe.service_reports import ServiceReporter, SyncLog
from pykubeproxy.agent.report import SyncReport
from pykubeproxy.config import Config
from pykubeproxy.kernel import system
from pykubeproxy.objects import Deleted, Event, Family, Key, Kind, Node
from pykubeproxy.pages.servicez import NodeObjects
from pykubeproxy.pages.statusz import AgentStatus, FamilyStatus, PageFilter, RepairRecord, SyncRecord
from pykubeproxy.services.cluster import ChangedServices

_BIND_FAILED = {"health": "FailedToStartProxierHealthcheck", "metrics": "FailedToStartMetricServer"}
# How long `close` waits for queued events to be sent.
_CLOSE_SECONDS = 2.0

log = structlog.get_logger()
_SYNCS, _REPAIRS = 50, 10


class Observers:
    """Fan out loop events to health, metrics, health check ports and the event recorder.

    Call from the loop thread only; any thread may read `health`, `metrics` and `history`.
    No port opens before `serve`; see Health for `needs_node` and `waiting_since`.
    """

    def __init__(
        self,
        config: Config,
        families: Iterable[Family],
        recorder: Recorder,
        needs_node: bool = True,
        waiting_since: Callable[[], float] = lambda: math.inf,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        self._config = config
        self._families = tuple(families)
        self.recorder = recorder
        self._heartbeat = heartbeat = heartbeat or Heartbeat()
        sync_period = config.iptables.sync_period
        self.health = Health(self._families, sync_period, needs_node, waiting_since, heartbeat.hung)
        self.metrics = Metrics(busy_seconds=heartbeat.busy_seconds, families=self._families)
        self.history = SyncHistory()
        self._services = ServiceReporter(recorder, config.max_affinity_lists)
        self._sync_log = SyncLog(config.logging.verbosity)
        self._rejected_trees: dict[Family, str] = {}
        self._desired_checks = DesiredChecks()
        self._checks: HealthChecks | None = None
        self._addresses: dict[Family, tuple[str, ...]] = dict.fromkeys(self._families, ())
        self._listeners = Listeners(config.bind_address_hard_fail)

    def serve(
        self,
        flags: Mapping[str, object],
        status: Callable[[PageFilter], AgentStatus] | None = None,
        objects: Callable[[PageFilter, bool], NodeObjects | None] | None = None,
    ) -> None:
        """Open the health and metrics addresses and record the event Starting; see `metrics_pages` for the arguments.

        Raises BindFailed, after recording an event, if an address is in use and bindAddressHardFail is set.
        """
        config = self._config
        self._heartbeat.progress()  # a start that hangs is seen too
        open_files = system.raise_open_files()
        self._checks = HealthChecks(self.recorder, lambda: self.health.state().serving, open_files)
        health = health_pages(self.health, self.metrics.health_served)
        metrics = metrics_pages(self.metrics.page, config, flags, status, objects)
        try:
            self._listeners.open(config, health, metrics)
        except BindFailed as error:
            self.recorder.on_node(_BIND_FAILED[error.server], str(error), "StartKubeProxy")
            self.close()
            raise
        self.recorder.on_node("Starting", action="StartKubeProxy", type_=NORMAL)

    def know_uids(self, uid_of: Callable[[Key], str]) -> None:
        """Add the UID that `uid_of` returns for a Service to events about it."""
        self.recorder.uid_of = uid_of

    def progress(self) -> None:
        """Record that the loop starts a step of its work; call it often."""
        self._heartbeat.progress()

    def idle(self) -> None:
        """Record that the loop waits for messages."""
        self._heartbeat.idle()

    def event_applied(self, event: Event, changes: ChangedServices) -> None:
        """Record that an event was applied to the cluster, with these changes."""
        node_name = self.recorder.node_name
        if event == Deleted(Kind.NODE, Key("", node_name)):
            log.warning("node deleted, serving with its last state", about=event.key, node=node_name)
        if isinstance(event, Deleted) and event.too_large:
            kind, note = event.kind.value, f"{event.kind.value} {event.key}: {event.too_large}"
            skipped = KubernetesEvent(
                kind, event.key, WARNING, "ObjectSkipped", "Watch", f"node {node_name} skips {note}"
            )
            self.recorder.record(skipped)
        self.metrics.event_applied(event, changes)

    def node_changed(self, node: Node | None) -> None:
        """Record the Node object of this node as last seen; None while it is unknown."""
        self.health.node_changed(node)

    def sync_queued(self, family: Family, since: float) -> None:
        """Record that a change that arrived at `since` requires a sync, and only the rate limiter delays it."""
        self.health.sync_queued(family, since)
        self.metrics.sync_queued(family, time.time())

    def sync_succeeded(self, report: SyncReport, local_addresses: tuple[str, ...]) -> None:
        """Record that the rules of one family reflect all events applied so far.

        `local_addresses` are those of this node's interfaces, needed only with nodePortAddresses.
        """
        now = time.time()
        self._sync_log.synced(report)
        self.health.sync_succeeded(report.family, is_complete=report.held <= report.services)
        self.metrics.sync_succeeded(report, now)
        if self._services.sync_succeeded(report):
            self.metrics.restore_failed(report.family)
        self._report_tree(report)
        self.history.sync_succeeded(report, now)
        self._desired_checks.sync_succeeded(report)
        self._addresses[report.family] = local_addresses

    def sync_failed(
        self, family: Family, full: bool, seconds: float, restore_failed: bool, reason: str
    ) -> None:
        """Record that the sync of one family failed after `seconds`; `restore_failed`: because of iptables-restore."""
        self.health.sync_queued(family)
        self.metrics.sync_failed(family, full, seconds, restore_failed)
        self.history.sync_failed(family, full, seconds, time.time(), reason)

    def drift_repaired(
        self, report: SyncReport, writers: tuple[str, ...], seconds: float, contested: bool
    ) -> None:
        """Report that a sync repaired drift, `seconds` after it was detected.

        `writers` are the processes that may have caused it, if known. `contested`: the drift keeps coming back.
        """
        family, node_name = report.family, self.recorder.node_name
        where, tables = (
            f"{family.value} rules of node {node_name}",
            {drift.table: str(drift) for drift in report.drift},
        )
        log.warning(
            "drift repaired",
            family=family.value,
            **tables,
            writers=", ".join(writers) or "unknown",
            seconds=round(seconds, 3),
        )
        if contested:
            log.error("drift contested, backing off", family=family.value)
        self.metrics.drift_repaired(family, tables, seconds)
        if contested and not self._is_contested(family):
            note = f"another program keeps undoing {where}; pykubeproxy waits longer before each repair"
            self.recorder.on_node("DriftContested", note)
        self._drift_contested(family, contested)
        self.history.drift_repaired(RepairRecord(time.time(), family.value, seconds, report.drift, writers))
        who, drift = ", ".join(writers) or "another program", "; ".join(map(": ".join, tables.items()))
        self.recorder.on_node("DriftRepaired", f"{who} changed {where}; pykubeproxy repaired them: {drift}")

    def rules_missing(self, family: Family, since: float | None) -> None:
        """Record since when rules of one family have been missing, on the loop's clock; None if they are in place."""
        self.health.rules_missing(family, since)

    def drift_calm(self, family: Family) -> None:
        """Record that no other program changed the rules of one family for a while."""
        if self._is_contested(family):
            log.info("drift no longer contested", family=family.value)
            note = f"no other program undoes {family.value} rules of node {self.recorder.node_name} any more"
            self.recorder.on_node("DriftCalm", note, type_=NORMAL)
        self._drift_contested(family, False)

    def round_finished(self, succeeded: bool, node: Node | None) -> None:
        """Record that every family was synced that needed it; `succeeded`: no sync failed."""
        if succeeded:
            self.metrics.changes_synced()
        self.apply_checks(node)

    def apply_checks(self, node: Node | None) -> None:
        """Open and close health check ports as the latest syncs require."""
        if self._checks:
            hosts = listening_hosts(self._config, node, self._addresses)
            self._checks.apply(self._desired_checks.checks(), hosts)

    def retry_listeners(self) -> None:
        """Retry health check ports that could not be opened; call every syncPeriod."""
        if self._checks:
            self._checks.retry()

    def close(self) -> None:
        """Close all ports and wait up to two seconds for queued events."""
        self._listeners.close()
        if self._checks:
            self._checks.close()
        self.recorder.close(_CLOSE_SECONDS)

    def _is_contested(self, family: Family) -> bool:
        return self.health.state().families[family].contested

    def _report_tree(self, report: SyncReport) -> None:
        """Log when iptables begins to reject a dispatch tree, and when it accepts the tree again."""
        family, reason = report.family, report.rejected_tree
        before, self._rejected_trees[family] = self._rejected_trees.get(family, ""), reason
        if reason and not before:
            log.warning("dispatch tree rejected, using a flat chain", family=family.value, reason=reason)
            self.metrics.restore_failed(family)
        elif before and not reason:
            log.info("dispatch tree accepted again", family=family.value)

    def _drift_contested(self, family: Family, contested: bool) -> None:
        self.health.drift_contested(family, contested)
        self.metrics.drift_contested(family, contested)


class SyncHistory:
    """Remember the last syncs and repairs, oldest first, with times in seconds since 1970.

    Call from the loop thread only; any thread may read: values are replaced, never changed.
    """

    def __init__(self) -> None:
        self.syncs: tuple[SyncRecord, ...] = ()
        self.repairs: tuple[RepairRecord, ...] = ()
        self._last: Mapping[Family, FamilyStatus] = {}

    def sync_succeeded(self, report: SyncReport, now: float) -> None:
        family, seconds = report.family.value, sum(report.seconds.values())
        self._add(SyncRecord(now, family, report.full, seconds, sum(report.rules_written.values())))
        # Keep a summary: the report refers to every Service of the sync.
        status = FamilyStatus(
            family=family,
            overdue=False,
            services=report.services,
            endpoints=report.endpoints,
            rules=report.rules,
            quarantined=report.quarantined,
            rejected_tree=report.rejected_tree,
        )
        self._last = {**self._last, report.family: status}

    def sync_failed(self, family: Family, full: bool, seconds: float, now: float, reason: str) -> None:
        self._add(SyncRecord(now, family.value, full, seconds, failure=reason))

    def drift_repaired(self, repair: RepairRecord) -> None:
        self.repairs = (*self.repairs, repair)[-_REPAIRS:]

    def families(self, health: HealthState) -> tuple[FamilyStatus, ...]:
        """Return the status of each family in `health`, as of its last successful sync."""
        last = self._last
        return tuple(
            msgspec.structs.replace(
                last.get(family) or FamilyStatus(family=family.value, overdue=False),
                overdue=state.overdue,
                contested=state.contested,
                last_updated=state.last_updated / 1e9 or None,
            )
            for family, state in health.families.items()
        )

    def _add(self, sync: SyncRecord) -> None:
        self.syncs = (*self.syncs, sync)[-_SYNCS:]
