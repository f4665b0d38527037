"""One address family of this node: its tables, the schedule of its drift checks, and its syncs."""

import math
import time
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

import structlog

from pykubeproxy.agent.drift.schedule import DriftSchedule
from pykubeproxy.agent.observe.observers import Observers
from pykubeproxy.agent.quarantine.schedule import RetrySchedule
from pykubeproxy.agent.startup import OpenedFamily
from pykubeproxy.agent.sync.limiter import TimeShare
from pykubeproxy.agent.sync.report import SyncReport
from pykubeproxy.agent.sync.tables import FamilyTables
from pykubeproxy.agent.sync.write import SyncFailed
from pykubeproxy.config import Config
from pykubeproxy.kernel import ExternalWrite, KernelError, TableWatch, system
from pykubeproxy.objects import Family, Key, Node
from pykubeproxy.rules.context import RuleContext, node_port_networks, rule_context
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.flows import NodePortAddresses
from pykubeproxy.services.ports import ApiServers

# The part of the time that deferred syncs may take. Short ones may use that of the last minute at once, so that
# thousands of honest changes do not wait.
_DEFERRED_SHARE, _SHORT_SECONDS, _SAVED_SECONDS = 0.25, 2.0, 60.0

log = structlog.get_logger()


class Synced(NamedTuple):
    """A successful sync, and where this node serves node ports; `local_addresses` are empty without nodePortAddresses."""

    report: SyncReport
    node_port_addresses: NodePortAddresses
    local_addresses: tuple[str, ...]


class FamilyController:
    """Detect drift in one family, and sync it. The reconcile loop owns it: call it from that thread only."""

    def __init__(
        self,
        opened: OpenedFamily,
        config: Config,
        node_name: str,
        observers: Observers,
        watch: TableWatch | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.family: Family = opened.tables.family
        self.tables: FamilyTables = opened.tables
        self._opened = opened
        self._config = config
        self._node_name = node_name
        self._observers = observers
        self._watch = watch
        self._clock = clock
        self._schedule = DriftSchedule(config.iptables.sync_period, clock())
        self._retries = RetrySchedule()
        self._deferred_share = TimeShare(
            _DEFERRED_SHARE, config.iptables.sync_period, _SHORT_SECONDS, _SAVED_SECONDS
        )
        self._drifted = False  # the next sync repairs detected drift
        self._changed: set[Key] = set()
        self._requested = self._listed = False
        self._change_since = math.inf  # when the oldest change arrived that no sync was queued for
        opened.tables.on_progress(observers.progress)

    def external_write(self, write: ExternalWrite) -> None:
        """Record that another program wrote to the tables of this family."""
        self._schedule.external_write(write, self._clock())

    def request_sync(self, since: float, services: Iterable[Key] = (), listed: bool = False) -> None:
        """Have the next round sync this family, after a change that arrived at `since`; it may change these Services.

        `listed`: the change is a new list.
        """
        self._requested = True
        self._listed = self._listed or listed
        self._changed.update(services)
        self._change_since = min(self._change_since, since)

    def queue_sync(self) -> None:
        """Report that only the rate limiter delays the requested sync. Call it only then."""
        if self._change_since < math.inf:
            self._observers.sync_queued(self.family, self._change_since)
            self._change_since = math.inf

    @property
    def needs_sync(self) -> bool:
        """Return whether the next round has to sync this family."""
        return self._requested or self._drifted or self.tables.needs_resync

    def next_work(self, deferred_from: float) -> float:
        """Return when to call `check_drift`, `sync_losses`, `sync_deferred` or `retry_quarantined`.

        The last two wait until `deferred_from`.
        """
        if self.tables.has_losses:
            return -math.inf
        check = min(self._schedule.due(), self._schedule.next_missing_check(), self._schedule.calm_at)
        return min(check, max(deferred_from, min(self.next_deferred(), self.next_retry())))

    def check_drift(self) -> bool:
        """Check for drift if a check is due. Return whether the next sync has something to repair.

        If the backoff delays it, only check whether rules are missing.
        """
        begun = self._clock()
        if begun >= self._schedule.calm_at:
            self._schedule.calmed()
            self._observers.drift_calm(self.family)
        if begun < self._schedule.due():
            if begun >= self._schedule.next_missing_check():
                self._check_missing(begun)
            return False
        scope = self._schedule.take(begun)
        try:
            synced = not self.tables.needs_resync
            drift = self.tables.detect_drift(scope)
        except KernelError as error:
            log.warning("drift check failed", family=self.family.value, error=str(error))
            self._schedule.check_failed(scope, self._clock())
            return False
        now = self._clock()
        self._schedule.checked(scope, now - begun, now)
        if synced:
            self._observers.rules_missing(self.family, scope.since if drift and drift.missing else None)
        if scope.tables:
            system.release_memory()
        self._drifted = drift is not None
        return self._drifted

    def _check_missing(self, begun: float) -> None:
        """Check for missing rules while the backoff delays the drift check: the node must not be ready without them."""
        scope = self._schedule.suspected
        if scope is None:
            return
        try:
            drift = self.tables.find_drift(scope)
        except KernelError:
            drift = None  # The check that follows reports it.
        now = self._clock()
        missing = drift is not None and drift.missing
        self._schedule.missing_checked(now - begun, now, missing)
        if missing:
            self._observers.rules_missing(self.family, scope.since)

    def next_deferred(self) -> float:
        """Return when to call `sync_deferred`; infinity if nothing is deferred."""
        return self._deferred_share.due() if self.tables.deferred else math.inf

    def sync_deferred(self, cluster: Cluster, node: Node | None, api_servers: ApiServers) -> Synced | None:
        """Sync some deferred Services. Return as `sync` does."""
        begun = self._clock()
        synced = self._sync(node, api_servers, lambda context: self.tables.sync_deferred(cluster, context))
        self._deferred_share.worked(begun, self._clock(), synced is not None)
        self._follow_quarantine(())
        return synced

    def next_retry(self) -> float:
        """Return when to call `retry_quarantined`; infinity if nothing is quarantined."""
        return self._retries.due()

    def retry_quarantined(self, cluster: Cluster) -> bool:
        """Retry the quarantined service ports that are due. Return whether a sync must write or report the result."""
        begun = self._clock()
        ports = self._retries.take(begun)
        untried = frozenset(self.tables.quarantine.untried())
        try:
            split = self.tables.retry_quarantined(cluster, ports)
        except KernelError as error:
            log.warning("quarantine retry failed", family=self.family.value, error=str(error))
            self._retries.tried((), begun, self._clock(), succeeded=False)
            return False
        # Of ports that are in no part of the result, the next sync finds that they no longer exist.
        undecided = {name for group in split.undecided for name in group.names}
        self._retries.tried([name for name in ports if name not in undecided], begun, self._clock())
        return bool(split.accepted or untried & split.rejected.keys())

    def sync(self, cluster: Cluster, node: Node | None, api_servers: ApiServers) -> Synced | None:
        """Sync the tables with the cluster. If that fails, log and report why, and return None."""
        self.queue_sync()  # a drift repair comes before the rate limiter
        self._requested = False
        changed, self._changed = self._changed, set()
        listed, self._listed = self._listed, False
        synced = self._sync(
            node, api_servers, lambda context: self.tables.sync(cluster, changed, context, listed)
        )
        self._follow_quarantine(changed)
        return synced

    def sync_losses(self, cluster: Cluster, node: Node | None, api_servers: ApiServers) -> Synced | None:
        """Remove what some deferred Services have lost from their rules. Return as `sync` does."""
        return self._sync(node, api_servers, lambda context: self.tables.sync_losses(cluster, context))

    def _follow_quarantine(self, changed: Collection[Key]) -> None:
        """Schedule retries after a sync; `changed` are the Services that have changed since the last one."""
        quarantine = self.tables.quarantine
        self._retries.follow(quarantine.rejected(), quarantine.untried(), changed, self._clock())

    def _sync(
        self, node: Node | None, api_servers: ApiServers, sync: Callable[[RuleContext], SyncReport]
    ) -> Synced | None:
        full, begun = self.tables.needs_resync, self._clock()
        if full:
            self._schedule.resync_starts()
        config, family = self._config, self.family
        try:
            facts = self._opened.facts(with_addresses=bool(config.node_port_addresses))
            context = rule_context(config, self._node_name, node, facts, family, api_servers)
            report = sync(context)
        except (KernelError, SyncFailed) as error:
            # The failure may have come before `tables.sync` noted what changed.
            self.tables.require_resync()
            log.error("sync failed, retrying", family=family.value, error=str(error))
            restore_failed = isinstance(error, SyncFailed)
            self._observers.sync_failed(family, full, self._clock() - begun, restore_failed, str(error))
            return None
        if self._watch:
            self._watch.synced(family, report.table_counts)
        if full:
            self._schedule.resynced(self._clock())
        if full or self._drifted:
            self._drifted = False
            self._observers.rules_missing(family, None)
        if report.drift.tables:
            self._report_repair(report)
        networks = node_port_networks(config, context.options.node_ip, family)
        loopback = context.options.localhost_node_ports and family is Family.IPV4
        return Synced(report, NodePortAddresses(networks, loopback), facts.addresses)

    def _report_repair(self, report: SyncReport) -> None:
        now = self._clock()
        self._schedule.repaired(now)
        self._observers.drift_repaired(
            report, report.drift.writers, now - report.drift.since, self._schedule.contested
        )
