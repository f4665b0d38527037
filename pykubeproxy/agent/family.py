"""One address family of this node: when each step of its work is due, and carrying it out."""

import math
import time
from collections.abc import Callable, Mapping

import msgspec
import structlog

from pykubeproxy.agent.drift import DriftSchedule, DriftScope
from pykubeproxy.agent.limiter import TimeShare
from pykubeproxy.agent.notices import (
    DriftCalm,
    DriftRepaired,
    Notice,
    RulesMissing,
    SyncFailure,
    SyncQueued,
    SyncReport,
)
from pykubeproxy.agent.pending import Work
from pykubeproxy.agent.quarantine import RetrySchedule
from pykubeproxy.agent.startup import OpenedFamily
from pykubeproxy.agent.tables import FamilyTables
from pykubeproxy.agent.write import SyncFailed
from pykubeproxy.config import Config
from pykubeproxy.kernel import ExternalWrite, KernelError, TableWatch, system
from pykubeproxy.objects import Family, Key, Node
from pykubeproxy.rules.context import node_port_networks, rule_context
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.flows import NodePortAddresses
from pykubeproxy.services.ports import ApiServers

log = structlog.get_logger()

# The parts of the time that turns and losses may take, so that one tenant cannot keep the loop busy. Short ones may use
# that of the last minute at once, so that thousands of honest changes do not wait.
_SHARES = {Work.TURN: 0.25, Work.LOSSES: 0.5}
_SHORT_SECONDS, _SAVED_SECONDS = 2.0, 60.0


class FamilyController:
    """Check one family for drift, sync it and try what is suspect or quarantined, each when it is due.

    `notice` is called with each thing that happens. The reconcile loop owns it: call it from that thread only.
    `requested` is when a sync was requested, if none has started since; else infinity.
    """

    def __init__(
        self,
        opened: OpenedFamily,
        config: Config,
        node_name: str,
        notice: Callable[[Notice], None],
        watch: TableWatch | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.family: Family = opened.tables.family
        self.tables: FamilyTables = opened.tables
        self.requested = math.inf
        self._opened = opened
        self._config = config
        self._node_name = node_name
        self._notice = notice
        self._watch = watch
        self._clock = clock
        # When the oldest change arrived that was not reported yet.
        self._arrived = math.inf
        period = config.iptables.sync_period
        self._checks = DriftSchedule(period, clock())
        self._retries = RetrySchedule()
        self._failed = False  # the last sync
        self._shares = {
            step: TimeShare(share, period, _SHORT_SECONDS, _SAVED_SECONDS) for step, share in _SHARES.items()
        }
        # As of the last sync.
        self._local_addresses: tuple[str, ...] = ()
        self._node_ports = NodePortAddresses()

    @property
    def is_searching(self) -> bool:
        """Return whether suspect service ports keep the rules that they have, until tries have decided about them."""
        return bool(self.tables.quarantine.held())

    @property
    def needs_sync(self) -> bool:
        """Return whether a step CHANGES has something to do."""
        return self.requested < math.inf or self._failed or self.tables.needs_sync

    def due(self, step: Work) -> float:
        """Return when a step other than CHANGES is due; infinity if it has nothing to do."""
        match step:
            case Work.TRY:
                return self._retries.due() if self.tables.may_try else math.inf
            case Work.LOSSES:
                # What failed delays no new losses.
                losing = self.tables.pending.losing
                return self._shares[step].due(losing.has_new) if losing else math.inf
            case _:
                return self._shares[step].due() if self.tables.waiting else math.inf

    def next_due(self, work_from: float) -> float:
        """Return when time alone brings something to do; turns and tries wait until `work_from`."""
        checks = self._checks
        work = max(work_from, min(self.due(Work.TURN), self.due(Work.TRY)))
        return min(checks.due(), checks.next_missing_check(), checks.calm_at, self.due(Work.LOSSES), work)

    def request(self, arrived: float, services: Mapping[Key, bool] = {}, listed: bool = False) -> None:
        """Request a sync, after a change that arrived at that time; see `Pending.changed` for the others."""
        now = self._clock()
        self.requested = min(self.requested, now)
        self._arrived = min(self._arrived, arrived, now)
        self.tables.pending.changed(services, listed)
        self._retries.changed(services, now)

    def external_write(self, write: ExternalWrite) -> None:
        """Record that another program wrote to the tables of this family."""
        self._checks.external_write(write, self._clock())

    def report_queued(self) -> None:
        """Report that only the rate limiter delays the requested sync, if one is. Call it only then."""
        arrived, self._arrived = self._arrived, math.inf
        if arrived < math.inf:
            self._notice(SyncQueued(self.family, arrived))

    def check_drift(self) -> bool:
        """Check for drift if a check is due. Return whether the next sync has something to repair.

        If the backoff delays it, only check whether rules are missing: the node must not be ready without them.
        """
        now, checks = self._clock(), self._checks
        if now >= checks.calm_at:
            checks.calmed()
            self._notice(DriftCalm(self.family))
        if now >= checks.due():
            return self._check(checks.take(now))
        if now >= checks.next_missing_check() and (scope := checks.suspected):
            self._check_missing(scope)
        return False

    def _check(self, scope: DriftScope) -> bool:
        begun, checks, pending = self._clock(), self._checks, self.tables.pending
        is_missing = pending.all_services or pending.drift is not None
        try:
            drift = self.tables.note_drift(scope)
        except KernelError as error:
            log.warning("drift check failed", family=self.family.value, error=str(error))
            checks.check_failed(scope, self._clock())
            return False
        now = self._clock()
        checks.checked(scope, now - begun, now)
        if not is_missing:  # else the next sync reports it
            self._notice(RulesMissing(self.family, scope.since if drift and drift.missing else None))
        if scope.tables:
            system.release_memory()
        return drift is not None

    def _check_missing(self, scope: DriftScope) -> None:
        begun = self._clock()
        try:
            drift = self.tables.find_drift(scope)
        except KernelError:
            drift = None  # The check that follows reports it.
        now = self._clock()
        missing = drift is not None and drift.missing
        self._checks.missing_checked(now - begun, now, missing)
        if missing:
            self._notice(RulesMissing(self.family, scope.since))

    def try_ports(self, cluster: Cluster) -> bool:
        """Try some suspect or quarantined service ports. Return whether a sync must write or report the result."""
        begun, quarantine = self._clock(), self.tables.quarantine
        searched = self.is_searching
        quarantine.retry(self._retries.take(begun))
        try:
            tried = self.tables.try_next(cluster)
        except (KernelError, SyncFailed) as error:
            log.warning("quarantine retry failed", family=self.family.value, error=str(error))
            self._retries.tried((), begun, self._clock(), succeeded=False)
        else:
            self._retries.tried(tried.rejected, begun, self._clock())
            if tried.report:
                self._report(tried.report)
        self._follow_quarantine()
        return self.tables.needs_sync or (searched and not self.is_searching)

    def sync(self, step: Work, cluster: Cluster, node: Node | None, api_servers: ApiServers) -> bool:
        """Sync the tables with the cluster. Return whether that succeeded."""
        begun = self._clock()
        if step is Work.CHANGES:
            self.report_queued()  # a drift repair comes before the rate limiter
            self.requested = math.inf
        synced = self._write(step, cluster, node, api_servers)
        self._failed = not synced
        if share := self._shares.get(step):
            share.worked(begun, self._clock(), synced)
        self._follow_quarantine()
        return synced

    def _follow_quarantine(self) -> None:
        quarantine = self.tables.quarantine
        self._retries.follow(
            quarantine.rejected(),
            self._clock(),
            has_tries=quarantine.has_tries,
            searching=self.is_searching,
        )

    def _write(self, step: Work, cluster: Cluster, node: Node | None, api_servers: ApiServers) -> bool:
        begun, checks, pending = self._clock(), self._checks, self.tables.pending
        full, drift, reads_all = pending.all_services, pending.drift, self.tables.reads_all
        if reads_all:
            checks.resync_starts()
        config, family = self._config, self.family
        try:
            facts = self._opened.facts(with_addresses=bool(config.node_port_addresses))
            context = rule_context(config, self._node_name, node, facts, family, api_servers)
            networks = node_port_networks(config, context.options.node_ip, family)
            loopback = context.options.localhost_node_ports and family is Family.IPV4
            self._local_addresses, self._node_ports = facts.addresses, NodePortAddresses(networks, loopback)
            report = self.tables.sync(cluster, context, step)
        except (KernelError, SyncFailed) as error:
            log.error("sync failed, retrying", family=family.value, error=str(error))
            restore_failed = isinstance(error, SyncFailed)
            self._notice(SyncFailure(family, full, self._clock() - begun, restore_failed, str(error)))
            return False
        if reads_all:
            checks.resynced(self._clock())
        if reads_all or drift:
            self._notice(RulesMissing(family, None))
        if drift and report.drift:
            now = self._clock()
            checks.repaired(now)
            seconds = now - drift.since
            self._notice(DriftRepaired(family, report.drift, drift.writers, seconds, checks.contested))
        self._report(report)
        return True

    def _report(self, report: SyncReport) -> None:
        if self._watch:
            self._watch.synced(self.family, report.table_counts)
        self._notice(
            msgspec.structs.replace(
                report, local_addresses=self._local_addresses, node_ports=self._node_ports
            )
        )
