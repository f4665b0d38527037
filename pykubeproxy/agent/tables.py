"""Sync the tables of one family: resolve what changed, compare it with the applied state, write the difference."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Container, Mapping
from contextlib import AbstractContextManager, nullcontext

import msgspec

from pykubeproxy.agent import coverage
from pykubeproxy.agent.bisect import BisectResult
from pykubeproxy.agent.coverage import Exposures, Resolution, resolve, resolve_service
from pykubeproxy.agent.drift import DriftScope, TableReader
from pykubeproxy.agent.head_start import LEAST_SERVICES, HeadStart, head_start
from pykubeproxy.agent.quarantine import Fallback, Quarantine
from pykubeproxy.agent.report import SyncReport
from pykubeproxy.agent.work import Changes, Losses, SyncStep, Waiting, Work
from pykubeproxy.agent.write import SyncFailed, Written, write_update
from pykubeproxy.kernel import TABLES, KernelError, TableCounts, Tables
from pykubeproxy.objects import Key
from pykubeproxy.pages.servicez import Quarantined
from pykubeproxy.rules import drift as rule_drift
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.applied import AppliedState
from pykubeproxy.rules.context import RuleContext, api_servers_of
from pykubeproxy.rules.digests import AppliedPort, Desired, DesiredPort
from pykubeproxy.rules.drift import Drift
from pykubeproxy.rules.ownership import ensured_lines, is_owned, release_input, served_chains, udp_frontends
from pykubeproxy.rules.ruleset import Ruleset
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.ports import ApiServers, PortName
from pykubeproxy.services.selection import ResolvedPort

# The attempts of one sync: each further one omits what iptables rejected: kinds of services, single services, or a
# dispatch tree.
_ATTEMPTS = 4


class FamilyTables:
    """Keep the tables of one family in line with the cluster, writing only chains that differ.

    `work` is what is pending. The reconcile loop owns it: call it from that thread only.
    """

    def __init__(self, tables: Tables, chains_per_block: int | None) -> None:
        self.family = tables.family
        self.work = Work()
        self.quarantine = Quarantine(tables, chains_per_block)
        self._tables = tables
        self._chains_per_block = chains_per_block
        self._progress: Callable[[], None] = lambda: None
        self._reader = TableReader(tables)
        self._fallback = Fallback()
        self._applied = AppliedState()
        self._context: RuleContext | None = None  # as of the last sync
        self._exposures = Exposures(self.family)

    def on_progress(self, progress: Callable[[], None]) -> None:
        """Call this function after each step of a sync, such as each chunk that was written."""
        self._progress = self.quarantine.progress = progress

    @property
    def _factor(self) -> int:
        return coverage.LEGACY_FACTOR if self._chains_per_block is None else 1

    def retry_tree(self) -> None:
        """Make the next sync a full one that tries a rejected dispatch tree again."""
        self.work.distrust()
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

    def find_drift(self, scope: DriftScope) -> Drift | None:
        """Compare live tables, or just some chains, with the applied state. Return what differs; change nothing.

        Returns None if the next sync is a full one. Raises KernelError.
        """
        if self.work.needs_resync or self._context is None:
            return None
        reading = self._reader.read(scope.tables, scope.chains)
        options = self._context.options
        return rule_drift.compare(self._applied, reading.live, reading.tables, reading.chains, options)

    def note_drift(self, scope: DriftScope) -> Drift | None:
        """Find drift, and have the next sync repair it. Returns and raises as `find_drift` does."""
        drift = self.find_drift(scope)
        if drift is None:
            return None
        services, shared = self._applied.observe(drift.changed, drift.live)
        drift = msgspec.structs.replace(drift, since=scope.since, writers=scope.writers)
        self.work.found_drift(drift, services, shared)
        self.work.unused_chains = self._applied.has_unused_chains()
        return drift

    def release(self, api_servers: ApiServers) -> bool:
        """Delete rules, of any proxy, that redirect this node from its API servers. Return whether there were any.

        Raises KernelError.
        """
        found = release_input(self._tables.save(("nat", "filter")), api_servers_of(api_servers, self.family))
        self._tables.restore(found)
        return bool(found)

    def retry_quarantined(self, cluster: Cluster, ports: Collection[PortName]) -> BisectResult:
        """Retry quarantined service ports; those that iptables accepts get their rules with the next sync.

        Raises KernelError.
        """
        if self._context is None:
            return BisectResult(frozenset(), {})
        services = dict.fromkeys(name.service_key for name in ports)
        resolved = {port.port.name: port for key in services for port in self.resolve(cluster, key)}
        found = [resolved[name] for name in ports if name in resolved]
        try:
            split = self.quarantine.retry(found, self._context.options)
        finally:
            if self.quarantine.canary:
                self._applied.hold(self.quarantine.canary)
        self.work.dirty |= {name.service_key for name in split.accepted}
        return split

    def sync(self, cluster: Cluster, step: SyncStep, context: RuleContext) -> SyncReport:
        """Make the tables follow the cluster as far as a step covers it.

        Raises KernelError and SyncFailed; then the next sync is a full one.
        """
        turn, reduced = frozenset[PortName](), frozenset[PortName]()
        if isinstance(step, Changes):
            self.work.dirty.update(step.services)
            self.work.listed = self.work.listed or step.listed
        elif isinstance(step, Losses):
            reduced = self._take_turn(self.work.losing, cluster, context)
        else:
            turn = self._take_turn(self.work.deferred, cluster, context)
        try:
            with self._fallback.attempts():
                for _ in range(_ATTEMPTS):
                    if report := self._attempt(cluster, context, turn, reduced):
                        self.work.done(bool(turn or reduced))
                        return report
                raise SyncFailed(KernelError("iptables rejects the rules of more services on every attempt"))
        except BaseException:
            self.work.failed(bool(turn or reduced))
            raise
        finally:
            self.work.unused_chains = self._applied.has_unused_chains()

    def _take_turn(self, queue: Waiting, cluster: Cluster, context: RuleContext) -> frozenset[PortName]:
        """Return the service ports whose turn it is: one if the last turn failed. They go to the end of the queue."""
        most = 0 if self.work.alone else coverage.LARGE_PAIRS * self._factor
        turn = coverage.next_turn(cluster, queue, context, most)
        self.work.rotate(queue, turn)
        return turn

    def _attempt(
        self,
        cluster: Cluster,
        context: RuleContext,
        turn: frozenset[PortName],
        reduced: frozenset[PortName],
    ) -> SyncReport | None:
        """Sync once, with the waiting ports whose `turn` it is, and those to reduce.

        Return None if iptables rejected rules that the next attempt omits.
        """
        stopwatch = _Stopwatch(self._progress)
        work = self.work
        context = self._fallback.context(context)
        if self._context and not _same_service_rules(context, self._context):
            work.distrust()
        live = self._adopt_live_tables() if work.needs_resync else None
        stopwatch.lap("read")
        quarantined = (port.port_name for port in self.quarantine.all())
        first = self._context is None
        rendered, waiting = coverage.decide(
            work, cluster, self._applied, context, live, quarantined, turn | reduced, first
        )
        portions = self._let_wait(waiting, turn, reduced, cluster, context, live)
        keys = rendered | portions.keys()
        with self._head_start(live, keys, context) as ahead:
            resolution = resolve(cluster, keys, self._applied, context, portions, ahead.add)
            if ahead.options != resolution.context.options:
                ahead.fail()
            self.quarantine.resolved(resolution.services, resolution.oversized, resolution.kept)
            stopwatch.lap("resolve")
            desired = self._desired(resolution, live, ahead.ports)
            growing: frozenset[PortName] = frozenset()
            if len(turn) == 1:
                desired, growing = self._growing(desired, turn)
            update = self._applied.update_to(desired)
            stopwatch.lap("compare")
        if ahead.failure:
            desired = self._desired(resolution, live, ahead.ports)
        self._applied.hold_ports(ahead.ports.values())
        try:
            written = write_update(
                self._tables, update, self._chains_per_block, work.drift, self._progress, ahead.failure
            )
        except SyncFailed as failure:
            if (
                self._fallback.too_deep(failure.error, update)
                or self._isolate(failure, resolution, desired)
                or self._fallback.no_culprit(failure.error, update)
            ):
                work.distrust()
                return None
            raise
        stopwatch.lap("restore")
        written.include(ahead.written)
        gone = resolution.gone(self._applied)
        self._applied = self._applied.after(update, written.ports, written.deleted)
        self._context = resolution.context
        self.quarantine.served(frozenset(port.port.name for port in resolution.ports()) - growing)
        self._exposures.record(cluster, resolution, self._applied)
        self._exposures.forget((*gone, *growing))
        left = resolution.kept | growing
        work.settle(resolution.services.keys(), deferred=left | resolution.reduced, losing=left)
        return self._report(resolution, gone, live, desired, written, stopwatch.laps)

    def _head_start(
        self, live: Ruleset | None, services: Collection[Key], context: RuleContext
    ) -> AbstractContextManager[HeadStart]:
        """Return a head start if many Services meet tables without their chains; not on legacy, where it takes longer."""
        if (
            live is None
            or self._chains_per_block is None
            or len(services) < LEAST_SERVICES
            or any(map(is_owned, live.chains))
        ):
            return nullcontext(HeadStart(None, context.options))
        options = msgspec.structs.replace(context.options, large_cluster=True)
        quarantine = self.quarantine.rejected()
        return head_start(self._tables, options, quarantine, self._chains_per_block, self._progress)

    def _adopt_live_tables(self) -> Ruleset:
        live = self._reader.read(TABLES).live
        self._applied.adopt(live)
        return live

    def _let_wait(
        self,
        waiting: Collection[Key],
        turn: frozenset[PortName],
        reduced: frozenset[PortName],
        cluster: Cluster,
        context: RuleContext,
        live: Ruleset | None,
    ) -> dict[Key, dict[PortName, Container[str] | None]]:
        """Put what waits into the queues, and withdraw the entries that it has lost.

        Return the ports of waiting Services to render nevertheless, and the endpoint chains that each may use; None means
        all.
        """
        work, broken_off = self.work, self.work.broken_off
        portions: dict[Key, dict[PortName, Container[str] | None]] = {}
        for name in turn | reduced:
            portions.setdefault(name.service_key, {})[name] = None if name in turn else ()
        # An earlier agent or a failed sync may have written rules that the applied state does not know.
        served = served_chains(live) if live is not None and broken_off else frozenset()
        for key in sorted(waiting):
            known = [port.name for port in self._applied.ports(key)]
            if lost := self._lost(cluster, key, live):
                work.lose(key, lost)
                # Another Service may have the address or node port now.
                work.dirty_chains |= self._applied.withdraw(key, context.frontends(cluster, key))
            if key in work.dirty or live is not None:
                names = [*known, *coverage.port_names(cluster, key)]
                work.defer(key, names)
                if live is not None and broken_off and not known:
                    portions[key] = {**dict.fromkeys(names, served), **portions.get(key, {})}
        portions = {key: portion for key, portion in portions.items() if key in waiting}
        for key, portion in portions.items():
            for port in self._applied.ports(key):
                if port.name in reduced:
                    portion[port.name] = port.existing_chains()
        return portions

    def _lost(self, cluster: Cluster, service: Key, live: Ruleset | None) -> list[PortName]:
        """Return the ports of a waiting Service whose rules expose what it may have lost."""
        names = [port.name for port in self._applied.ports(service)]
        if live is not None and names and not self._applied.keep(service, live):
            return names
        if not names or service not in self.work.dirty:
            return []
        return self._exposures.lost(cluster, service, names)

    def _desired(
        self, resolution: Resolution, live: Ruleset | None, ahead: Mapping[PortName, AppliedPort]
    ) -> Desired:
        """Return the rules to write; `live` are the tables that a full sync has read, `ahead` what was written ahead."""
        work = self.work
        options, jumps = resolution.context.options, resolution.context.node_port_jumps
        shared = set(skeleton.SHARED) if live is not None else work.dirty_chains
        if self._context and self._context.node_port_jumps != jumps:
            shared = shared | {skeleton.NAT_SERVICES}
        if live is not None:
            ensured: Mapping[str, tuple[str, ...]] = ensured_lines(live, options)
        else:
            ensured = work.drift.ensured if work.drift else {}
        at_once = (
            self._chains_per_block is None or self._context is None or work.listed or work.drift is not None
        )
        return Desired(
            services=resolution.desired(self.quarantine, self._applied, ahead),
            options=options,
            node_port_jumps=jumps,
            shared=frozenset(shared),
            ensured=ensured,
            most_deleted=None if at_once else coverage.MOST_DELETED,
        )

    def _growing(self, desired: Desired, turn: frozenset[PortName]) -> tuple[Desired, frozenset[PortName]]:
        """Let ports that are too large for one turn write only some of their chains. Return these ports too."""
        parts = {
            port.name: part
            for key in {name.service_key for name in turn}
            for port in desired.services.get(key, ())
            if port.name in turn and isinstance(port, DesiredPort)
            if (part := self._applied.growing(port, coverage.PORT_PAIRS * self._factor))
        }
        services = {
            key: tuple(parts.get(port.name, port) for port in ports)
            for key, ports in desired.services.items()
        }
        return msgspec.structs.replace(desired, services=services), frozenset(parts)

    def _isolate(self, failure: SyncFailed, resolution: Resolution, desired: Desired) -> bool:
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
        drift = self.work.drift
        if live is not None:
            others = rule_drift.other_entries(live, TABLES)
        else:
            others = rule_drift.other_entries(drift.live, drift.tables) if drift else {}
        # kube-proxy counts the guard in KUBE-FIREWALL too, but no jumps.
        rules = Counter(filter=len(skeleton.kubelet_firewall(desired.options)))
        rules.update(self._applied.rule_counts())
        return SyncReport(
            family=self.family,
            full=live is not None,
            services=len(self._applied.services()),
            endpoints=self._applied.endpoints(),
            chains_written=written.chains,
            chains_deleted=len(written.deleted),
            rules_written=written.rules,
            rules=rules,
            seconds=seconds,
            resolved=resolution.ports(),
            gone=gone,
            wrote=written.anything,
            deferred=frozenset(self.work.deferred),
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
