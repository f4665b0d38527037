"""Sync the tables of one family: resolve what changed, compare it with the applied state, write the difference."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping

import msgspec

from pykubeproxy.agent.drift.reader import TableReader
from pykubeproxy.agent.drift.schedule import DriftScope
from pykubeproxy.agent.quarantine.bisect import Split
from pykubeproxy.agent.quarantine.quarantine import Quarantine
from pykubeproxy.agent.quarantine.quarantined import Quarantined
from pykubeproxy.agent.sync.fallback import Fallback
from pykubeproxy.agent.sync.large import may_defer
from pykubeproxy.agent.sync.report import SyncReport
from pykubeproxy.agent.sync.resolution import Resolution, resolve, resolve_service
from pykubeproxy.agent.sync.write import SyncFailed, Written, write_update
from pykubeproxy.kernel import TABLES, KernelError, TableCounts, Tables
from pykubeproxy.objects import Key
from pykubeproxy.rules import drift as rule_drift
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.applied import AppliedState
from pykubeproxy.rules.context import RuleContext, api_servers_of
from pykubeproxy.rules.digests import Desired
from pykubeproxy.rules.dispatch import udp_frontends
from pykubeproxy.rules.drift import Drift
from pykubeproxy.rules.ownership import ensured_lines
from pykubeproxy.rules.release import release_input
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from pykubeproxy.services.cluster import Cluster, families_of
from pykubeproxy.services.ports import ApiServers, PortName
from pykubeproxy.services.selection import ResolvedPort

# The attempts of one sync: each further one omits what iptables rejected: kinds of services, single services, or a
# dispatch tree.
_ATTEMPTS = 4


class FamilyTables:
    """Keep the tables of one family in line with the cluster, writing only chains that differ.

    The reconcile loop owns it: call it from that thread only.
    """

    def __init__(self, tables: Tables, chains_per_block: int | None) -> None:
        self.family = tables.family
        self.quarantine = Quarantine(tables, chains_per_block)
        self._tables = tables
        self._chains_per_block = chains_per_block
        self._progress: Callable[[], None] = lambda: None
        self._reader = TableReader(tables)
        self._fallback = Fallback()
        self._applied = AppliedState()
        self._context: RuleContext | None = None
        # The Services and shared chains to render again; a full sync, such as the first one, renders all.
        self._dirty: set[Key] = set()
        self._dirty_chains: set[ChainKey] = set()
        self._needs_resync = True
        # Services with drift: they do not wait.
        self._drifted: set[Key] = set()
        # Large Services that wait for `sync_deferred`, in the order of their turns.
        self._deferred: dict[Key, None] = {}
        # Drift that was detected but is not repaired yet.
        self._drift: Drift | None = None

    def on_progress(self, progress: Callable[[], None]) -> None:
        """Call this function after each step of a sync, such as each chunk that was written."""
        self._progress = self.quarantine.progress = progress

    @property
    def needs_resync(self) -> bool:
        """Return whether the next sync reads the live tables and goes through all Services."""
        return self._needs_resync

    def require_resync(self) -> None:
        """Make the next sync a full one: the live tables may differ from the applied state."""
        self._needs_resync = True

    def retry_tree(self) -> None:
        """Make the next sync a full one that tries a rejected dispatch tree again."""
        self.require_resync()
        self._fallback.retry()

    def services(self) -> Collection[Key]:
        """Return the Services that have rules as of the last sync."""
        return self._applied.services()

    def resolve(self, cluster: Cluster, service: Key) -> tuple[ResolvedPort, ...]:
        """Return the ports of one Service as the cluster is now, in the context of the last sync; none before it."""
        return resolve_service(cluster, service, self._context) if self._context else ()

    def quarantined(self) -> tuple[Quarantined, ...]:
        """Return the service ports and Services in quarantine."""
        return self.quarantine.all()

    @property
    def deferred(self) -> int:
        """Return how many large Services wait for `sync_deferred`."""
        return len(self._deferred)

    def find_drift(self, scope: DriftScope) -> Drift | None:
        """Compare live tables, or just some chains, with the applied state. Return what differs; change nothing.

        Returns None if the next sync is a full one. Raises KernelError.
        """
        if self._needs_resync or self._context is None:
            return None
        reading = self._reader.read(scope.tables, scope.chains)
        options = self._context.options
        return rule_drift.compare(self._applied, reading.live, reading.tables, reading.chains, options)

    def detect_drift(self, scope: DriftScope) -> Drift | None:
        """Find drift, and have the next sync repair it. Returns and raises as `find_drift` does."""
        drift = self.find_drift(scope)
        if drift is None:
            return None
        services, shared = self._applied.observe(drift.changed, drift.live)
        self._dirty |= services
        self._drifted |= services
        self._dirty_chains |= shared
        self._drift = msgspec.structs.replace(drift, since=scope.since, writers=scope.writers)
        if drift.unknown:
            self.require_resync()
        return self._drift

    def release(self, api_servers: ApiServers) -> bool:
        """Delete rules, of any proxy, that redirect this node from its API servers. Return whether there were any.

        Raises KernelError.
        """
        found = release_input(self._tables.save(("nat", "filter")), api_servers_of(api_servers, self.family))
        self._tables.restore(found)
        return bool(found)

    def sync(self, cluster: Cluster, changed: Collection[Key], context: RuleContext) -> SyncReport:
        """Make the tables follow the cluster, in which the `changed` Services have changed since the last call.

        Large Services may keep their rules until `sync_deferred`. Raises KernelError and SyncFailed; then the next sync
        is a full one.
        """
        self._dirty.update(changed)
        return self._sync(cluster, context)

    def sync_deferred(self, cluster: Cluster, context: RuleContext) -> SyncReport:
        """Sync a large Service, after any small one; namespaces take turns. Raises as `sync` does."""
        turn = next(iter(self._deferred), None)
        if turn:
            # If the sync fails, the Service stays: it must not keep others waiting.
            self._deferred = dict.fromkeys(
                sorted(self._deferred, key=lambda key: (key.namespace == turn.namespace, key == turn))
            )
        return self._sync(cluster, context, turn)

    def retry_quarantined(self, cluster: Cluster, ports: Collection[PortName]) -> Split:
        """Retry quarantined service ports; those that iptables accepts get their rules with the next sync.

        Raises KernelError.
        """
        if self._context is None:
            return Split(frozenset(), {})
        services = dict.fromkeys(name.service_key for name in ports)
        resolved = {port.port.name: port for key in services for port in self.resolve(cluster, key)}
        found = [resolved[name] for name in ports if name in resolved]
        split = self.quarantine.retry(found, self._context.options)
        self._dirty |= {name.service_key for name in split.accepted}
        return split

    def _sync(self, cluster: Cluster, context: RuleContext, turn: Key | None = None) -> SyncReport:
        with self._fallback.attempts():
            for _ in range(_ATTEMPTS):
                if report := self._try_sync(cluster, context, turn):
                    return report
            raise SyncFailed(KernelError("iptables rejects the rules of more services on every attempt"))

    def _try_sync(self, cluster: Cluster, context: RuleContext, turn: Key | None) -> SyncReport | None:
        """Sync once, with the large Service whose `turn` it is.

        Return None if iptables rejected rules that the next attempt omits.
        """
        stopwatch = _Stopwatch(self._progress)
        context = self._fallback.context(context)
        if self._context and not _same_service_rules(context, self._context):
            self.require_resync()
        full, self._needs_resync = self._needs_resync, True
        live = self._adopt_live_tables() if full else None
        stopwatch.lap("read")
        resolution = self._resolve(cluster, context, live, turn, everything=full)
        self.quarantine.resolved(resolution.services, resolution.oversized)
        stopwatch.lap("resolve")
        desired = self._desired(resolution, live)
        update = self._applied.update_to(desired)
        stopwatch.lap("compare")
        try:
            written = write_update(self._tables, update, self._chains_per_block, self._drift, self._progress)
        except SyncFailed as failure:
            if (
                self._fallback.too_deep(failure.error, update)
                or self._isolate(failure, resolution, desired)
                or self._fallback.no_culprit(failure.error, update)
            ):
                return None
            raise
        stopwatch.lap("restore")
        gone = resolution.gone(self._applied)
        self._applied = self._applied.after(update, written.ports)
        report = self._report(resolution, gone, live, desired, written, stopwatch.laps)
        self._context, self._drift, self._needs_resync = resolution.context, None, False
        for changes in (self._dirty, self._drifted, self._dirty_chains):
            changes.clear()
        for key in resolution.services:
            self._deferred.pop(key, None)
        return report

    def _adopt_live_tables(self) -> Ruleset:
        live = self._reader.read(TABLES).live
        self._applied.adopt(live)
        return live

    def _resolve(
        self, cluster: Cluster, context: RuleContext, live: Ruleset | None, turn: Key | None, everything: bool
    ) -> Resolution:
        """Resolve the dirty Services, and the large one whose turn it is; defer other large ones.

        Resolve all Services of this family with `everything`.
        """
        keys = self._dirty | ({turn} if turn else set())
        if everything:
            quarantined = {port.port_name.service_key for port in self.quarantine.all()}
            served = {service.key for service in cluster.services() if self.family in families_of(service)}
            keys = served | quarantined | set(self.services()) | self._deferred.keys()
        deferred = {
            key
            for key in keys - self._drifted - {turn}
            if may_defer(cluster, key, context, self._applied, live)
        }
        self._deferred |= dict.fromkeys(sorted(deferred))
        return resolve(cluster, keys - deferred, self._applied, context)

    def _desired(self, resolution: Resolution, live: Ruleset | None) -> Desired:
        """Return the rules to write; `live` are the tables that a full sync has read."""
        options, jumps = resolution.context.options, resolution.context.node_port_jumps
        shared = set(skeleton.SHARED) if live is not None else self._dirty_chains
        if self._context and self._context.node_port_jumps != jumps:
            shared = shared | {skeleton.NAT_SERVICES}
        if live is not None:
            ensured: Mapping[str, tuple[str, ...]] = ensured_lines(live, options)
        else:
            ensured = self._drift.ensured if self._drift else {}
        return Desired(resolution.desired(self.quarantine), options, jumps, frozenset(shared), ensured)

    def _isolate(self, failure: SyncFailed, resolution: Resolution, desired: Desired) -> bool:
        """Quarantine the service ports that caused a failure. Return whether there were any. Raises SyncFailed."""
        try:
            unchanged = self._applied.unchanged(desired)
            return self.quarantine.isolate(failure.error, resolution.ports(), unchanged, desired.options)
        except KernelError as error:
            raise SyncFailed(error) from failure

    def _report(
        self,
        resolution: Resolution,
        gone: tuple[PortName, ...],
        live: Ruleset | None,
        desired: Desired,
        written: Written,
        seconds: Mapping[str, float],
    ) -> SyncReport:
        if live is not None:
            others = rule_drift.other_entries(live, TABLES)
        else:
            others = rule_drift.other_entries(self._drift.live, self._drift.tables) if self._drift else {}
        # kube-proxy counts the guard in KUBE-FIREWALL too, but no jumps.
        rules = Counter(filter=len(skeleton.kubelet_firewall(desired.options)))
        rules.update(self._applied.rule_counts())
        return SyncReport(
            family=self.family,
            full=live is not None,
            services=len(self._applied.services()),
            endpoints=self._applied.endpoints(),
            chains_written=written.chains,
            chains_deleted=written.deleted,
            rules_written=written.rules,
            rules=rules,
            seconds=seconds,
            resolved=resolution.ports(),
            gone=gone,
            wrote=written.anything,
            installed=udp_frontends(live) if live is not None else frozenset(),
            quarantined=self.quarantine.all(),
            rejected_tree=self._fallback.reason,
            drift=written.drift(),
            table_counts=TableCounts(
                ours=self._applied.entry_counts(),
                others=others,
                added=rule_drift.added_entries(desired.ensured) if desired.ensured else {},
            ),
        )


class _Stopwatch:
    """Measure the seconds of each phase, and call `progress` after it."""

    def __init__(self, progress: Callable[[], None]) -> None:
        self._progress = progress
        self.laps: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, phase: str) -> None:
        now = time.monotonic()
        self.laps[phase], self._last = now - self._last, now
        self._progress()


def _same_service_rules(new: RuleContext, old: RuleContext) -> bool:
    """Return whether every service has the same rules in both contexts; jumps to node ports are not among them."""
    options = msgspec.structs.replace(new.options, large_cluster=old.options.large_cluster)
    return msgspec.structs.replace(new, options=options, node_port_jumps=old.node_port_jumps) == old
