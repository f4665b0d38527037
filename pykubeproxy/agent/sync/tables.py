"""Sync the tables of one family: resolve what changed, compare it with the applied state, write the difference."""

import time
from collections import Counter
from collections.abc import Collection, Mapping

import msgspec

from pykubeproxy.agent.drift.reader import TableReader
from pykubeproxy.agent.drift.schedule import DriftScope
from pykubeproxy.agent.quarantine.bisect import owner_of_line
from pykubeproxy.agent.quarantine.quarantine import Quarantine
from pykubeproxy.agent.quarantine.quarantined import Quarantined
from pykubeproxy.agent.sync.report import SyncReport
from pykubeproxy.kernel import TABLES, KernelError, Rejected, TableCounts, Tables
from pykubeproxy.objects import Key
from pykubeproxy.rules import drift as rule_drift
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.applied import AppliedPort, AppliedState, Desired, DesiredPort, Update
from pykubeproxy.rules.blocks import Chunk, chunks
from pykubeproxy.rules.context import RuleContext
from pykubeproxy.rules.dispatch import udp_frontends
from pykubeproxy.rules.drift import NO_DRIFT, Drift, DriftCounter
from pykubeproxy.rules.jumps import ensured_lines
from pykubeproxy.rules.options import LARGE_CLUSTER_ENDPOINTS
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.ports import PortName
from pykubeproxy.services.resolve import ResolvedPort, resolve_ports

# How often one sync starts over: first without kinds of services that iptables rejects, then without single ones.
_ATTEMPTS = 3


class SyncFailed(Exception):
    """iptables-restore failed.

    `service` is the service port whose rule it rejected, as `namespace/name:port`; "" if that is not known.
    """

    def __init__(self, error: KernelError, service: str = "") -> None:
        super().__init__(f"{error} (a rule of service {service})" if service else str(error))
        self.error = error
        self.service = service


class _Resolved(msgspec.Struct, frozen=True):
    """The service ports of the Services to render, and the context of their rules."""

    services: Mapping[Key, tuple[ResolvedPort, ...]]
    context: RuleContext

    def ports(self) -> tuple[ResolvedPort, ...]:
        return tuple(port for ports in self.services.values() for port in ports)


class FamilyTables:
    """Keep the tables of one family in line with the cluster, writing only chains that differ.

    The reconcile loop owns it: call it from that thread only.
    """

    def __init__(self, tables: Tables, chains_per_block: int | None) -> None:
        self.family = tables.family
        self.quarantine = Quarantine(tables, chains_per_block)
        self._tables = tables
        self._chains_per_block = chains_per_block
        self._reader = TableReader(tables)
        self._applied = AppliedState()
        self._context: RuleContext | None = None
        # What must be rendered again; after a failure, and at the start, that is everything.
        self._dirty: set[Key] = set()
        self._dirty_chains: set[ChainKey] = set()
        self._needs_resync = True
        # Drift that was detected and not repaired yet.
        self._drift: Drift | None = None

    @property
    def needs_resync(self) -> bool:
        """Tell whether the next sync reads the live tables and goes through all Services."""
        return self._needs_resync

    def require_resync(self) -> None:
        """Trust nothing that is known of the live tables: make the next sync a full one."""
        self._needs_resync = True

    def services(self) -> Collection[Key]:
        """Return the Services that have rules as of the last sync."""
        return self._applied.services()

    def resolve(self, cluster: Cluster, service: Key) -> tuple[ResolvedPort, ...]:
        """Return the ports of one Service as the cluster is now, in the context of the last sync; none before it."""
        return self._resolve_service(cluster, service, self._context) if self._context else ()

    def quarantined(self) -> tuple[Quarantined, ...]:
        """Return the service ports whose rules iptables rejects."""
        return self.quarantine.all()

    def detect_drift(self, scope: DriftScope) -> bool:
        """Compare live tables, or just some chains, with the applied state; the next sync repairs what differs.

        Returns whether anything of ours differs. Raises KernelError.
        """
        if self._needs_resync or self._context is None:
            return False  # The next sync goes through everything.
        reading = self._reader.read(scope.tables, scope.chains)
        options = self._context.options
        drift = rule_drift.compare(self._applied, reading.live, reading.tables, reading.chains, options)
        if drift is None:
            return False
        services, shared = self._applied.observe(drift.changed, drift.live)
        self._dirty |= services
        self._dirty_chains |= shared
        self._drift = msgspec.structs.replace(drift, since=scope.since, writers=scope.writers)
        if drift.unknown:
            self.require_resync()
        return True

    def sync(self, cluster: Cluster, changed: Collection[Key], context: RuleContext) -> SyncReport:
        """Make the tables follow the cluster, in which the `changed` Services have changed since the last call.

        Raises KernelError and SyncFailed; then the next sync is a full one.
        """
        self._dirty.update(changed)
        if self._context and not _same_service_rules(context, self._context):
            self.require_resync()
        for attempt in range(_ATTEMPTS):
            if report := self._try_sync(cluster, context, retry_quarantined=attempt == 0):
                return report
        raise SyncFailed(KernelError("iptables rejects the rules of more services on every attempt"))

    def _try_sync(self, cluster: Cluster, context: RuleContext, retry_quarantined: bool) -> SyncReport | None:
        """Return None if service ports had to be quarantined first; the next attempt goes without their rules."""
        stopwatch = _Stopwatch()
        full, self._needs_resync = self._needs_resync, True
        live = self._adopt_live_tables() if full else None
        stopwatch.lap("read")
        resolved = self._resolve(cluster, context, everything=full)
        if retry_quarantined:
            self.quarantine.retry(resolved.services, resolved.context.options)
        stopwatch.lap("resolve")
        desired = self._desired(resolved, live)
        update = self._applied.update_to(desired)
        stopwatch.lap("compare")
        try:
            written = self._write(update)
        except SyncFailed as failure:
            if self._isolate(failure, resolved):
                return None
            raise
        stopwatch.lap("restore")
        gone = self._gone(resolved)
        self._applied = self._applied.after(update, written.ports)
        rules = self._applied.rule_counts()
        counts = TableCounts(
            ours=rule_drift.own_entries(rules, self._applied.chain_counts()),
            others=self._other_entries(live),
            added=rule_drift.added_entries(desired.ensured),
        )
        self._context, self._drift, self._needs_resync = resolved.context, None, False
        self._dirty.clear()
        self._dirty_chains.clear()
        return SyncReport(
            family=self.family,
            full=full,
            services=len(self._applied.services()),
            endpoints=self._applied.endpoints(),
            chains_written=written.chains,
            chains_deleted=written.deleted,
            rules_written=written.rules,
            rules=rules,
            seconds=stopwatch.laps,
            resolved=resolved.ports(),
            gone=gone,
            wrote=written.anything,
            installed=udp_frontends(live) if live else frozenset(),
            quarantined=self.quarantine.all(),
            drift=written.drift.report() if written.drift else NO_DRIFT,
            table_counts=counts,
        )

    def _adopt_live_tables(self) -> Ruleset:
        live = self._reader.read(TABLES).live
        self._applied.adopt(live)
        return live

    def _resolve(self, cluster: Cluster, context: RuleContext, everything: bool) -> _Resolved:
        """Resolve the dirty Services, or all of them."""
        keys: Collection[Key] = self._dirty
        if everything:
            quarantined = {it.port_name.service_key for it in self.quarantine.all()}
            keys = {service.key for service in cluster.services()} | quarantined | set(self.services())
        services = {key: self._resolve_service(cluster, key, context) for key in keys}
        before = sum(port.endpoints for key in keys for port in self._applied.ports(key))
        now = sum(len(port.selection.verdicts) for ports in services.values() for port in ports)
        large = self._applied.endpoints() - before + now > LARGE_CLUSTER_ENDPOINTS
        if not everything and self._context and large != self._context.options.large_cluster:
            return self._resolve(cluster, context, everything=True)
        options = msgspec.structs.replace(context.options, large_cluster=large)
        return _Resolved(services, msgspec.structs.replace(context, options=options))

    def _resolve_service(
        self, cluster: Cluster, service: Key, context: RuleContext
    ) -> tuple[ResolvedPort, ...]:
        return resolve_ports(cluster, service, self.family, context.node, context.allow_external_ips)

    def _desired(self, resolved: _Resolved, live: Ruleset | None) -> Desired:
        """Return the rules to write; `live` are the tables that a full sync has read."""
        options, jumps = resolved.context.options, resolved.context.node_port_jumps
        shared = set(skeleton.SHARED) if live is not None else self._dirty_chains
        if self._context and self._context.node_port_jumps != jumps:
            shared = shared | {skeleton.NAT_SERVICES}
        ensured = self._drift.ensured if self._drift else {}
        return Desired(
            services={
                key: tuple(
                    DesiredPort(
                        port.port.name, self.quarantine.rules(port, options), len(port.selection.verdicts)
                    )
                    for port in sorted(ports, key=lambda port: port.port.name)
                )
                for key, ports in resolved.services.items()
            },
            options=options,
            node_port_jumps=jumps,
            shared=frozenset(shared),
            ensured=ensured if live is None else ensured_lines(live, options),
        )

    def _write(self, update: Update) -> "_Written":
        """Write an update, rendering one chunk while iptables-restore reads the one before. Raises SyncFailed."""
        written = _Written(self._drift)
        try:
            with self._tables.session() as session:
                for chunk in chunks(update, self._chains_per_block):
                    session.write(chunk.text)
                    written.add(chunk)
        except KernelError as error:
            ports = {port.name: port.rules for ports in update.desired.services.values() for port in ports}
            raise SyncFailed(
                error, owner_of_line(error.line, ports) if isinstance(error, Rejected) else ""
            ) from error
        return written

    def _isolate(self, failure: SyncFailed, resolved: _Resolved) -> bool:
        """Quarantine the service ports that caused a failure; tell whether there were any. Raises SyncFailed."""
        try:
            return self.quarantine.isolate(failure.error, resolved.ports(), resolved.context.options)
        except KernelError as error:
            raise SyncFailed(error) from failure

    def _gone(self, resolved: _Resolved) -> tuple[PortName, ...]:
        """Return the service ports that had rules and no longer exist."""
        now = {port.port.name for port in resolved.ports()}
        return tuple(
            port.name
            for key in resolved.services
            for port in self._applied.ports(key)
            if port.name not in now
        )

    def _other_entries(self, live: Ruleset | None) -> Mapping[str, int]:
        """Return the entries of others in the tables that were read before this sync."""
        if live is not None:
            return rule_drift.other_entries(live, TABLES)
        return rule_drift.other_entries(self._drift.live, self._drift.tables) if self._drift else {}


class _Written:
    """Counts what was written, and keeps what the applied state needs of it."""

    def __init__(self, drift: Drift | None) -> None:
        self.anything = False
        self.chains = self.deleted = 0
        self.rules: Counter[str] = Counter()
        self.ports: list[AppliedPort] = []
        self.drift = DriftCounter(drift) if drift else None

    def add(self, chunk: Chunk) -> None:
        self.anything = self.anything or bool(chunk.text)
        self.chains += len(chunk.chains)
        self.deleted += chunk.deleted
        for chain in chunk.chains:
            self.rules[chain.key.table] += len(chain.rules)
        self.ports += chunk.ports
        if self.drift:
            self.drift.add(chunk.chains)


class _Stopwatch:
    """Measures the seconds of each phase."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, phase: str) -> None:
        now = time.monotonic()
        self.laps[phase], self._last = now - self._last, now


def _same_service_rules(new: RuleContext, old: RuleContext) -> bool:
    """Tell whether every service has the same rules in both contexts; jumps to node ports are not among them."""
    options = msgspec.structs.replace(new.options, large_cluster=old.options.large_cluster)
    return msgspec.structs.replace(new, options=options, node_port_jumps=old.node_port_jumps) == old
