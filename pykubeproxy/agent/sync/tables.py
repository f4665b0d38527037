"""Sync the tables of one family: resolve what changed, compare it with the applied state, write the difference."""

import time
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Mapping

import msgspec

from pykubeproxy.agent.drift.reader import TableReader
from pykubeproxy.agent.drift.schedule import DriftScope
from pykubeproxy.agent.quarantine.bisect import Split
from pykubeproxy.agent.quarantine.quarantine import Quarantine
from pykubeproxy.agent.quarantine.quarantined import Quarantined
from pykubeproxy.agent.sync import large
from pykubeproxy.agent.sync.fallback import Fallback
from pykubeproxy.agent.sync.large import Waiting
from pykubeproxy.agent.sync.report import SyncReport
from pykubeproxy.agent.sync.resolution import Resolution, resolve, resolve_service
from pykubeproxy.agent.sync.write import SyncFailed, Written, write_update
from pykubeproxy.kernel import TABLES, KernelError, TableCounts, Tables
from pykubeproxy.objects import Key
from pykubeproxy.rules import drift as rule_drift
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.applied import AppliedState
from pykubeproxy.rules.context import RuleContext, api_servers_of
from pykubeproxy.rules.digests import Desired, DesiredPort
from pykubeproxy.rules.dispatch import udp_frontends
from pykubeproxy.rules.drift import Drift
from pykubeproxy.rules.ownership import ensured_lines, served_chains
from pykubeproxy.rules.release import release_input
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from pykubeproxy.services.cluster import Cluster, families_of
from pykubeproxy.services.ports import ApiServers, PortName
from pykubeproxy.services.selection import ResolvedPort
from pykubeproxy.services.size import exposure

# The attempts of one sync: each further one omits what iptables rejected: kinds of services, single services, or a
# dispatch tree.
_ATTEMPTS = 4
# Of Services with fewer endpoints in all ports, do not remember what they expose: looking at their rules takes no longer.
_FEW_ENDPOINTS = 500


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
        # Services and their ports that wait for `sync_deferred`, in the order of their turns.
        self._deferred: Waiting = {}
        # Those of them whose rules `sync_losses` must reduce.
        self._losing: Waiting = {}
        # What the applied rules of ports of larger Services expose at most (see `exposure`).
        self._exposed: dict[PortName, array[int]] = {}
        self._turn_failed = self._failed = False
        # A list arrived: small Services do not wait.
        self._listed = False
        # Drift that was detected but is not repaired yet.
        self._drift: Drift | None = None

    def on_progress(self, progress: Callable[[], None]) -> None:
        """Call this function after each step of a sync, such as each chunk that was written."""
        self._progress = self.quarantine.progress = progress

    @property
    def _factor(self) -> int:
        """Return how many times more pairs a turn has than on nft."""
        return large.LEGACY_FACTOR if self._chains_per_block is None else 1

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
        """Return how many service ports wait for `sync_deferred`; unused chains that wait count as one."""
        return sum(map(len, self._deferred.values())) + self._applied.has_unused_chains()

    @property
    def has_losses(self) -> bool:
        """Return whether to call `sync_losses`: at once, but others may be synced before."""
        return bool(self._losing) and not self._needs_resync

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

    def sync(
        self, cluster: Cluster, changed: Collection[Key], context: RuleContext, listed: bool = False
    ) -> SyncReport:
        """Make the tables follow the cluster, in which the `changed` Services have changed since the last call.

        Some Services wait for `sync_losses` and `sync_deferred`; with `listed`, only large ones do. Raises KernelError and
        SyncFailed; then the next sync is a full one.
        """
        self._dirty.update(changed)
        self._listed = self._listed or listed
        return self._sync(cluster, context)

    def sync_losses(self, cluster: Cluster, context: RuleContext) -> SyncReport:
        """Remove what some waiting ports have lost from their rules. Take turns and raise as `sync_deferred` does."""
        return self._sync(cluster, context, reduce=self._take_turn(self._losing, cluster, context))

    def sync_deferred(self, cluster: Cluster, context: RuleContext) -> SyncReport:
        """Sync some waiting ports and delete some unused chains; namespaces take turns. Raises as `sync` does."""
        return self._sync(cluster, context, turn=self._take_turn(self._deferred, cluster, context))

    def _take_turn(self, queue: Waiting, cluster: Cluster, context: RuleContext) -> frozenset[PortName]:
        """Return the service ports whose turn it is. After a failed turn, ports are alone.

        They move to the end of the queue: if their sync fails, they must not keep others waiting.
        """
        limit = large.LARGE_PAIRS * self._factor
        turn = large.next_turn(cluster, queue, context, 0 if self._turn_failed else limit)
        services = {name.service_key for name in turn}
        namespaces = {key.namespace for key in services}
        for key in sorted(queue, key=lambda key: (key.namespace in namespaces, key in services)):
            ports = queue.pop(key)
            queue[key] = dict.fromkeys(sorted(ports, key=turn.__contains__))
        return turn

    def retry_quarantined(self, cluster: Cluster, ports: Collection[PortName]) -> Split:
        """Retry quarantined service ports; those that iptables accepts get their rules with the next sync.

        Raises KernelError.
        """
        if self._context is None:
            return Split(frozenset(), {})
        services = dict.fromkeys(name.service_key for name in ports)
        resolved = {port.port.name: port for key in services for port in self.resolve(cluster, key)}
        found = [resolved[name] for name in ports if name in resolved]
        try:
            split = self.quarantine.retry(found, self._context.options)
        finally:
            if self.quarantine.canary:
                self._applied.hold(self.quarantine.canary)
        self._dirty |= {name.service_key for name in split.accepted}
        return split

    def _sync(
        self,
        cluster: Cluster,
        context: RuleContext,
        turn: frozenset[PortName] = frozenset(),
        reduce: frozenset[PortName] = frozenset(),
    ) -> SyncReport:
        failed, self._failed = self._failed, True
        if turn or reduce:
            self._turn_failed = True
        with self._fallback.attempts():
            for _ in range(_ATTEMPTS):
                if report := self._try_sync(cluster, context, turn, reduce, failed):
                    self._failed = False
                    if turn or reduce:
                        self._turn_failed = False
                    return report
            raise SyncFailed(KernelError("iptables rejects the rules of more services on every attempt"))

    def _try_sync(
        self,
        cluster: Cluster,
        context: RuleContext,
        turn: frozenset[PortName],
        reduce: frozenset[PortName],
        failed: bool,
    ) -> SyncReport | None:
        """Sync once, with the waiting ports whose `turn` it is, and those whose rules to `reduce`.

        `failed`: the last sync failed. Return None if iptables rejected rules that the next attempt omits.
        """
        stopwatch = _Stopwatch(self._progress)
        context = self._fallback.context(context)
        if self._context and not _same_service_rules(context, self._context):
            self.require_resync()
        full, self._needs_resync = self._needs_resync, True
        live = self._adopt_live_tables() if full else None
        stopwatch.lap("read")
        resolution = self._resolve(cluster, context, live, turn, reduce, failed)
        self.quarantine.resolved(resolution.services, resolution.oversized, resolution.kept)
        stopwatch.lap("resolve")
        desired = self._desired(resolution, live)
        growing: frozenset[PortName] = frozenset()
        if len(turn) == 1:
            desired, growing = self._growing(desired, turn)
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
        self._applied = self._applied.after(update, written.ports, written.deleted)
        self.quarantine.served(frozenset(port.port.name for port in resolution.ports()) - growing)
        self._note_exposure(cluster, resolution, (*gone, *growing))
        for queue, left in (
            (self._losing, resolution.kept | growing),
            (self._deferred, resolution.kept | growing | resolution.reduced),
        ):
            for key in queue.keys() & resolution.services.keys():
                queue[key] = {name: None for name in queue[key] if name in left}
                if not queue[key]:
                    del queue[key]
        report = self._report(resolution, gone, live, desired, written, stopwatch.laps)
        self._context, self._drift, self._needs_resync = resolution.context, None, False
        self._listed = False
        for changes in (self._dirty, self._drifted, self._dirty_chains):
            changes.clear()
        return report

    def _adopt_live_tables(self) -> Ruleset:
        live = self._reader.read(TABLES).live
        self._applied.adopt(live)
        return live

    def _resolve(
        self,
        cluster: Cluster,
        context: RuleContext,
        live: Ruleset | None,
        turn: frozenset[PortName],
        reduce: frozenset[PortName],
        failed: bool,
    ) -> Resolution:
        """Resolve the dirty Services, the ports whose `turn` it is, and those to `reduce`; others that wait stay.

        Resolve all Services of this family in a full sync, which has read the `live` tables.
        """
        portions: dict[Key, dict[PortName, Container[str] | None]] = {}
        for name in turn | reduce:
            portions.setdefault(name.service_key, {})[name] = None if name in turn else ()
        keys = self._dirty | portions.keys()
        if live is not None:
            quarantined = {port.port_name.service_key for port in self.quarantine.all()}
            present = {service.key for service in cluster.services() if self.family in families_of(service)}
            keys = keys | present | quarantined | set(self.services()) | self._deferred.keys()
        # The first list and later ones bring all changes at once.
        changed: Collection[Key] = () if self._context is None or self._listed else self._dirty
        waiting = large.must_wait(
            cluster,
            keys - (set() if failed else self._drifted),
            changed,
            self._deferred.keys(),
            context,
        )
        # An earlier agent or a failed sync may have written rules that the applied state does not know.
        served = served_chains(live) if live is not None and failed else frozenset()
        for key in sorted(waiting):
            known = [port.name for port in self._applied.ports(key)]
            if live is not None and not failed and self._is_damaged(cluster, key, live):
                waiting.discard(key)
                continue
            if lost := self._lost(cluster, key, live):
                self._losing[key] = {**self._losing.get(key, {}), **dict.fromkeys(lost)}
                # Another Service may have the address or node port now.
                self._dirty_chains |= self._applied.withdraw(key, context.frontends(cluster, key))
            if key in self._dirty or live is not None:
                names = [*known, *large.port_names(cluster, key)]
                self._deferred[key] = {**self._deferred.get(key, {}), **dict.fromkeys(names)}
                if live is not None and failed and not known:
                    portions[key] = {**dict.fromkeys(names, served), **portions.get(key, {})}
        for key in portions.keys() & waiting:
            for port in self._applied.ports(key):
                if port.name in reduce:
                    portions[key][port.name] = port.existing_chains()
        portions = {key: portion for key, portion in portions.items() if key in waiting}
        return resolve(cluster, keys - waiting | portions.keys(), self._applied, context, portions)

    def _is_damaged(self, cluster: Cluster, service: Key, live: Ruleset) -> bool:
        """Return whether chains of a Service are missing, or its rules are unknown after a start."""
        if self._applied.ports(service):
            return self._applied.misses_chains(service)
        return self._context is None and large.has_rules(live, cluster, service)

    def _lost(self, cluster: Cluster, service: Key, live: Ruleset | None) -> list[PortName]:
        """Return the ports of a Service whose rules expose what it may have lost."""
        names = [port.name for port in self._applied.ports(service)]
        if live is not None and names and not self._applied.keep(service, live):
            return names
        if not names or service not in self._dirty:
            return []
        now = exposure(cluster, service, self.family)
        # Ports that were synced together share what they expose.
        exposed = {id(it): it for name in names if (it := self._exposed.get(name)) is not None}
        fine = {number for number, it in exposed.items() if now.issuperset(it)}
        return [name for name in names if id(self._exposed.get(name)) not in fine]

    def _note_exposure(self, cluster: Cluster, resolution: Resolution, others: Iterable[PortName]) -> None:
        """Remember what the rules of ports of larger Services expose now; forget it of `others`."""
        for key, ports in resolution.services.items():
            is_large = sum(port.endpoints for port in self._applied.ports(key)) >= _FEW_ENDPOINTS
            now = exposure(cluster, key, self.family) if is_large else frozenset[int]()
            shared: dict[int, array[int]] = {}
            for name in (port.port.name for port in ports):
                before = self._exposed.pop(name, None)
                if is_large:
                    before = before if name in resolution.reduced else None
                    if id(before) not in shared:
                        found = now if before is None else now.intersection(before)
                        shared[id(before)] = array("q", found)
                    self._exposed[name] = shared[id(before)]
        for name in others:
            self._exposed.pop(name, None)

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
        at_once = (
            self._chains_per_block is None or self._context is None or self._listed or self._drift is not None
        )
        return Desired(
            services=resolution.desired(self.quarantine, self._applied),
            options=options,
            node_port_jumps=jumps,
            shared=frozenset(shared),
            ensured=ensured,
            most_deleted=None if at_once else large.MOST_DELETED,
        )

    def _growing(self, desired: Desired, turn: frozenset[PortName]) -> tuple[Desired, frozenset[PortName]]:
        """Let ports that are too large for one turn write only some of their chains. Return these ports too."""
        parts = {
            port.name: part
            for key in {name.service_key for name in turn}
            for port in desired.services.get(key, ())
            if port.name in turn and isinstance(port, DesiredPort)
            if (part := self._applied.growing(port, large.PORT_PAIRS * self._factor))
        }
        services = {
            key: tuple(parts.get(port.name, port) for port in ports)
            for key, ports in desired.services.items()
        }
        return msgspec.structs.replace(desired, services=services), frozenset(parts)

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
            chains_deleted=len(written.deleted),
            rules_written=written.rules,
            rules=rules,
            seconds=seconds,
            resolved=resolution.ports(),
            gone=gone,
            wrote=written.anything,
            deferred=frozenset(self._deferred),
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
