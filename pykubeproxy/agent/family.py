"""One address family of this node: carry out the steps that its pending work plans."""

import math
import time
from collections.abc import Callable, Collection

import structlog

from pykubeproxy.agent.flow_cleaner import FlowCleaner
from pykubeproxy.agent.observe.observers import Observers
from pykubeproxy.agent.report import SyncReport
from pykubeproxy.agent.startup import OpenedFamily
from pykubeproxy.agent.tables import FamilyTables
from pykubeproxy.agent.work import Changes, DriftCheck, Retry, SyncStep, Turn, Work
from pykubeproxy.agent.write import SyncFailed
from pykubeproxy.config import Config
from pykubeproxy.kernel import ExternalWrite, KernelError, TableWatch, system
from pykubeproxy.objects import Family, Key, Node
from pykubeproxy.rules.context import node_port_networks, rule_context
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.flows import NodePortAddresses
from pykubeproxy.services.ports import ApiServers

log = structlog.get_logger()


class FamilyController:
    """Check one family for drift, sync it and retry what is quarantined, as `work` plans it.

    Report each sync to the observers and to `flows`, and log each failure. The reconcile loop owns it: call it from that
    thread only.
    """

    def __init__(
        self,
        opened: OpenedFamily,
        config: Config,
        node_name: str,
        observers: Observers,
        flows: FlowCleaner,
        watch: TableWatch | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.family: Family = opened.tables.family
        self.tables: FamilyTables = opened.tables
        self.work: Work = opened.tables.work
        self._opened = opened
        self._config = config
        self._node_name = node_name
        self._observers = observers
        self._flows = flows
        self._watch = watch
        self._clock = clock
        # As of the last sync.
        self._local_addresses: tuple[str, ...] = ()
        self._node_ports = NodePortAddresses()
        self.work.schedule(config.iptables.sync_period, clock())
        opened.tables.on_progress(observers.progress)

    @property
    def is_searching(self) -> bool:
        """Return whether suspect service ports keep the rules that they have, until tries have decided about them."""
        return bool(self.tables.quarantine.held())

    def external_write(self, write: ExternalWrite) -> None:
        """Record that another program wrote to the tables of this family."""
        self.work.checks.external_write(write, self._clock())

    def report_queued(self) -> None:
        """Report that only the rate limiter delays the requested sync, if one is. Call it only then."""
        if (arrived := self.work.take_arrival()) < math.inf:
            self._observers.sync_queued(self.family, arrived)

    def check_drift(self) -> bool:
        """Check for drift if a check is due. Return whether the next sync has something to repair.

        If the backoff delays it, only check whether rules are missing: the node must not be ready without them.
        """
        begun = self._clock()
        if begun >= self.work.checks.calm_at:
            self.work.checks.calmed()
            self._observers.drift_calm(self.family)
        step = self.work.plan(DriftCheck, begun)
        if not isinstance(step, DriftCheck):
            return False
        if step.missing_only:
            self._check_missing(step, begun)
            return False
        return self._check(step, begun)

    def _check(self, step: DriftCheck, begun: float) -> bool:
        scope, checks = step.scope, self.work.checks
        is_missing = self.work.visit_all or self.work.drift is not None
        try:
            drift = self.tables.note_drift(scope)
        except KernelError as error:
            log.warning("drift check failed", family=self.family.value, error=str(error))
            checks.check_failed(scope, self._clock())
            return False
        now = self._clock()
        checks.checked(scope, now - begun, now)
        if not is_missing:  # else the next sync reports it
            self._observers.rules_missing(self.family, scope.since if drift and drift.missing else None)
        if scope.tables:
            system.release_memory()
        return drift is not None

    def _check_missing(self, step: DriftCheck, begun: float) -> None:
        try:
            drift = self.tables.find_drift(step.scope)
        except KernelError:
            drift = None  # The check that follows reports it.
        now = self._clock()
        missing = drift is not None and drift.missing
        self.work.checks.missing_checked(now - begun, now, missing)
        if missing:
            self._observers.rules_missing(self.family, step.scope.since)

    def retry(self, step: Retry, cluster: Cluster) -> bool:
        """Try some suspect or quarantined service ports. Return whether a sync must write or report the result."""
        begun, retries, quarantine = self._clock(), self.work.retries, self.tables.quarantine
        searched = self.is_searching
        quarantine.retry(step.ports)
        try:
            tried = self.tables.try_next(cluster)
        except (KernelError, SyncFailed) as error:
            log.warning("quarantine retry failed", family=self.family.value, error=str(error))
            retries.tried((), begun, self._clock(), succeeded=False)
        else:
            retries.tried(tried.rejected, begun, self._clock())
            if tried.report:
                self._report(tried.report)
        self._follow_quarantine(())
        return self.work.has_changes or (searched and not self.is_searching)

    def sync(self, step: SyncStep, cluster: Cluster, node: Node | None, api_servers: ApiServers) -> bool:
        """Sync the tables with the cluster. Return whether that succeeded."""
        begun = self._clock()
        if isinstance(step, Changes):
            self.report_queued()  # a drift repair comes before the rate limiter
        synced = self._write(step, cluster, node, api_servers)
        if isinstance(step, Changes):
            self._follow_quarantine(step.services)
        elif isinstance(step, Turn):
            self.work.turn_ended(begun, self._clock(), synced)
            self._follow_quarantine(())
        return synced

    def _follow_quarantine(self, changed: Collection[Key]) -> None:
        """Schedule retries after a sync; `changed` are the Services that have changed since the last one."""
        quarantine = self.tables.quarantine
        self.work.retries.follow(
            quarantine.rejected(),
            changed,
            self._clock(),
            has_tries=quarantine.has_tries,
            searching=self.is_searching,
        )

    def _write(self, step: SyncStep, cluster: Cluster, node: Node | None, api_servers: ApiServers) -> bool:
        full, begun, work = self.work.visit_all, self._clock(), self.work
        drift, reads_all = work.drift, self.tables.reads_all
        if reads_all:
            work.checks.resync_starts()
        config, family = self._config, self.family
        try:
            facts = self._opened.facts(with_addresses=bool(config.node_port_addresses))
            context = rule_context(config, self._node_name, node, facts, family, api_servers)
            networks = node_port_networks(config, context.options.node_ip, family)
            loopback = context.options.localhost_node_ports and family is Family.IPV4
            self._local_addresses, self._node_ports = facts.addresses, NodePortAddresses(networks, loopback)
            report = self.tables.sync(cluster, step, context)
        except (KernelError, SyncFailed) as error:
            log.error("sync failed, retrying", family=family.value, error=str(error))
            restore_failed = isinstance(error, SyncFailed)
            self._observers.sync_failed(family, full, self._clock() - begun, restore_failed, str(error))
            return False
        if reads_all:
            work.checks.resynced(self._clock())
        if reads_all or drift:
            self._observers.rules_missing(family, None)
        if drift and report.drift:
            now = self._clock()
            work.checks.repaired(now)
            seconds = now - drift.since
            self._observers.drift_repaired(report, drift.writers, seconds, work.checks.contested)
        self._report(report)
        return True

    def _report(self, report: SyncReport) -> None:
        if self._watch:
            self._watch.synced(self.family, report.table_counts)
        self._observers.sync_succeeded(report, self._local_addresses)
        self._flows.synced(report, self._node_ports)
