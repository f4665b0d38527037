"""Sync the tables of one family: resolve what changed, plan how the known tables get its rules, write the plan."""

import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Collection, Container, Mapping
from typing import NamedTuple

import msgspec

from pykubeproxy.agent.drift import DriftScope, TableReader
from pykubeproxy.agent.notices import SyncReport
from pykubeproxy.agent.pending import Batch, Budget, Pending, Work
from pykubeproxy.agent.quarantine import Fallback, Quarantine
from pykubeproxy.agent.rejections import (
    TRY_SECONDS,
    accepts_ordinary_service,
    changed_ports,
    may_blame_ports,
    owner_of_line,
    reason,
)
from pykubeproxy.agent.resolution import Resolution, is_large_cluster
from pykubeproxy.agent.wanted import Wanted
from pykubeproxy.agent.write import SyncFailed, Written, write_chunks
from pykubeproxy.kernel import TABLES, KernelError, Rejected, TableCounts, Tables, Unreadable
from pykubeproxy.objects import Key
from pykubeproxy.pages.servicez import Quarantined
from pykubeproxy.rules import drift as rule_drift
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.context import RuleContext, api_servers_of
from pykubeproxy.rules.drift import Drift
from pykubeproxy.rules.known import MISSING_CHAIN, KnownTables, nat
from pykubeproxy.rules.options import RuleOptions
from pykubeproxy.rules.ownership import FOREIGN_CHAINS, ensured_lines, release_input, udp_frontends
from pykubeproxy.rules.plan import Chunk, Plan, PlanLimits
from pykubeproxy.rules.ruleset import ChainKey, Entries, Ruleset
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.ports import ApiServers, PortName
from pykubeproxy.services.selection import ResolvedPort

# The attempts of one sync: each further one omits what iptables rejected: service ports, or a dispatch tree. On nft, each
# finds one port; after so many, all of a block are suspect.
_ATTEMPTS = 20
_FOUND_ALONE = 10


class _Chosen(NamedTuple):
    """The Services of a sync: those to render whole, in this order, with their costs, and some ports of waiting ones.

    The ports come with the endpoint chains that each may use; None means all.
    """

    whole: Mapping[Key, int]
    portions: Mapping[Key, Mapping[PortName, Container[str] | None]]


class Tried(NamedTuple):
    """The report of a try whose ports are served now, or the ports that it found to be rejected."""

    report: SyncReport | None = None
    rejected: tuple[PortName, ...] = ()


class _Attempt(NamedTuple):
    """A plan for one write, and what it is made of; `live` is what was read before if it is all tables."""

    resolution: Resolution
    plan: Plan
    live: Ruleset | None
    written: Written
    stopwatch: "_Stopwatch"


class FamilyTables:
    """Keep the tables of one family in line with the cluster, writing only chains that differ.

    The reconcile loop owns it: call it from that thread only.
    """

    def __init__(
        self,
        tables: Tables,
        chains_per_block: int | None,
        budget: Budget | None = None,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        """See `PlanLimits` for `chains_per_block`; the default `budget` is that of the backend.

        `progress` is called after each step of a sync, such as each chunk that was written.
        """
        self.family = tables.family
        self.pending = Pending(budget or Budget.of(tables.backend))
        self._known = KnownTables()
        self.quarantine = Quarantine(self.family)
        self._tables = tables
        self._chains_per_block = chains_per_block
        self._progress = progress
        self._reader = TableReader(tables)
        self._fallback = Fallback()
        # As of the last sync, and whether a later one has failed.
        self._context: RuleContext | None = None
        self._is_behind = False
        # Of failed writes: the entries that ports had before, and the ports that are gone.
        self._replaced: dict[PortName, Entries] = {}
        self._gone: dict[PortName, None] = {}
        # Those of them of which nobody knows which entries are in force.
        self._unsure: set[PortName] = set()

    def distrust(self) -> None:
        """Have the next sync read all tables and go through all Services."""
        self._known.unread = frozenset(TABLES)
        self.pending.all_services = True

    @property
    def reads_all(self) -> bool:
        """Return whether the next sync reads all tables."""
        return self._known.unread.issuperset(TABLES)

    @property
    def needs_sync(self) -> bool:
        """Return whether a sync is needed at once: something has changed, or nobody knows what the tables hold."""
        return self.pending.has_changes or not self._known.is_certain

    @property
    def may_try(self) -> bool:
        """Return whether suspect ports may be tried: the tables hold what they must, apart from what waits for a turn."""
        return self._known.is_certain and not (self.pending.all_services or self._is_behind)

    @property
    def waiting(self) -> int:
        """Return how many service ports wait for a turn; unused chains that wait count as one."""
        return len(self.pending.deferred) + self._known.can_delete()

    def retry_tree(self) -> None:
        """Make the next sync a full one that tries a rejected dispatch tree again."""
        self.distrust()
        self._fallback.retry()

    def services(self) -> Collection[Key]:
        """Return the Services that have rules as of the last sync."""
        return self._known.services()

    def resolve(self, cluster: Cluster, service: Key) -> tuple[ResolvedPort, ...]:
        """Return the ports of one Service as the cluster is now, in the context of the last sync; none before it."""
        return Wanted(cluster, self._context).ports(service) if self._context else ()

    def quarantined(self) -> tuple[Quarantined, ...]:
        """Return the service ports and Services in quarantine."""
        return self.quarantine.all()

    def find_drift(self, scope: DriftScope) -> Drift | None:
        """Compare live tables, or just some chains, with the known ones. Return what differs; change nothing.

        Returns None if the next sync reads the tables. Raises KernelError.
        """
        if self._known.unread or self._context is None:
            return None
        reading = self._reader.read(scope.tables, scope.chains)
        options = self._context.options
        return rule_drift.compare(self._known, reading.live, reading.tables, reading.chains, options)

    def note_drift(self, scope: DriftScope) -> Drift | None:
        """Find drift, and have the next sync repair it. Returns and raises as `find_drift` does."""
        drift = self.find_drift(scope)
        if self._known.unread:
            self._known.unread |= scope.tables | {key.table for key in scope.chains}
        if drift is None:
            return None
        services = self._known.observe(drift.live, (), drift.changed)
        # Others may refer to unknown chains, which only whole tables show.
        self._known.unread |= {key.table for key in drift.unknown}
        self._known.ensured |= drift.ensured
        drift = msgspec.structs.replace(drift, since=scope.since, writers=scope.writers)
        self.pending.mark(services, drifted=True)
        self.pending.drift = drift
        return drift

    def release(self, api_servers: ApiServers) -> bool:
        """Delete rules, of any proxy, that redirect this node from its API servers. Return whether there were any.

        Raises KernelError.
        """
        found = release_input(self._tables.save(("nat", "filter")), api_servers_of(api_servers, self.family))
        self._tables.restore(found)
        return bool(found)

    def sync(self, cluster: Cluster, context: RuleContext, step: Work = Work.CHANGES) -> SyncReport:
        """Make the tables follow the cluster as far as a step covers it, except what iptables rejects.

        What has changed belongs to every step. Raises KernelError and SyncFailed; all of it stays pending then.
        """
        turn = frozenset() if step is Work.CHANGES else self.pending.next_turn(step, Wanted(cluster, context))
        try:
            report = self._sync(cluster, context, step, turn)
        except BaseException:
            self.pending.failed(step)
            self._is_behind = True
            raise
        self.pending.done(step)
        self._is_behind = False
        return report

    def _sync(
        self, cluster: Cluster, given: RuleContext, step: Work, turn: frozenset[PortName]
    ) -> SyncReport:
        for number in range(_ATTEMPTS):
            stopwatch = _Stopwatch(self._progress)
            wanted = Wanted(cluster, self._fallback.context(given))
            self._follow_context(wanted)
            live = self._read_tables(wanted.context.options)
            stopwatch.lap("read")
            chosen = self._choose(wanted, step, turn, live)
            is_alone = step is Work.TURN and len(turn) == 1
            attempt = self._prepare(wanted, chosen, live, stopwatch, in_portions=is_alone)
            try:
                self._write(attempt)
            except SyncFailed as failed:
                if not self._leave_out(failed, attempt, number < _FOUND_ALONE):
                    raise
            else:
                return self._settle(attempt)
        raise SyncFailed(KernelError("iptables rejects the rules of more services on every attempt"))

    def try_next(self, cluster: Cluster) -> Tried:
        """Write the rules of some suspect or quarantined service ports.

        Those that iptables has rejected often enough are quarantined; the next sync replaces their rules. Call it after a
        sync. Raises KernelError and SyncFailed.
        """
        try:
            return self._try(cluster, frozenset(self.quarantine.take()))
        finally:
            self.quarantine.put_off()

    def _try(self, cluster: Cluster, tried: frozenset[PortName]) -> Tried:
        stopwatch, context = _Stopwatch(self._progress), self._context
        if not tried or not context:
            return Tried()
        live = self._read_tables(context.options)
        stopwatch.lap("read")
        portions: dict[Key, dict[PortName, Container[str] | None]] = {}
        for name in tried:
            portions.setdefault(name.service_key, {})[name] = None
        wanted = Wanted(cluster, context)
        attempt = self._prepare(wanted, _Chosen({}, portions), live, stopwatch, tried)
        try:
            self._write(attempt, TRY_SECONDS)
        except SyncFailed as failed:
            return Tried(rejected=self._judge(failed, attempt, tried))
        self.quarantine.accepted()
        return Tried(self._settle(attempt))

    def _prepare(
        self,
        wanted: Wanted,
        chosen: _Chosen,
        live: Ruleset | None,
        stopwatch: "_Stopwatch",
        tried: frozenset[PortName] = frozenset(),
        in_portions: bool = False,
    ) -> _Attempt:
        keys = (*chosen.whole, *chosen.portions)
        large = is_large_cluster(self._known, wanted, keys)
        options = msgspec.structs.replace(wanted.context.options, large_cluster=large)
        wanted = Wanted(wanted.cluster, msgspec.structs.replace(wanted.context, options=options))
        resolution = Resolution(wanted, chosen.whole, chosen.portions, self._known, tried)
        plan = self._plan(resolution, in_portions)
        written = Written(self.pending.drift, self._known.ensured)
        stopwatch.lap("choose")
        return _Attempt(resolution, plan, live, written, stopwatch)

    def _write(self, attempt: _Attempt, seconds: float | None = None) -> None:
        """Write a plan. Raises SyncFailed."""

        def note(chunk: Chunk) -> None:
            attempt.written.add(chunk)
            self._progress()

        resolution, stopwatch = attempt.resolution, attempt.stopwatch
        try:
            waited = write_chunks(self._tables, attempt.plan, self._known, note, seconds)
        except SyncFailed as failed:
            self._replaced = {**attempt.plan.replaced, **self._replaced}
            if not isinstance(failed.error, Rejected):
                self._unsure |= attempt.plan.replaced.keys()
            self._gone |= dict.fromkeys(attempt.plan.gone)
            raise
        finally:
            exist = resolution.kept | resolution.held
            self.quarantine.resolved(resolution.services, resolution.refused, exist)
        stopwatch.lap("render")
        stopwatch.move("render", "restore", waited)

    def _settle(self, attempt: _Attempt) -> SyncReport:
        """Record that a plan is in force."""
        resolution, plan = attempt.resolution, attempt.plan
        self._context = resolution.wanted.context
        self._known.settle()
        self._replaced = {}
        self._unsure.clear()
        gone, self._gone = {**self._gone, **dict.fromkeys(plan.gone)}, {}
        left = resolution.kept | plan.unfinished
        self.pending.written(resolution.services.keys(), deferred=left | resolution.reduced, losing=left)
        return self._report(attempt, tuple(name for name in gone if not self._known.port(name)))

    # Rejected writes.

    def _leave_out(self, failed: SyncFailed, attempt: _Attempt, alone: bool) -> bool:
        """Find what iptables may have rejected: one port `alone` if a line tells it, else all of the block.

        Return whether the next attempt leaves something out. Raises SyncFailed.
        """
        error = failed.error
        if self._fallback.reject(error, attempt.plan):
            return True
        if not may_blame_ports(error):
            return False
        try:
            owner, wanted = _owner(failed, attempt.plan), attempt.resolution.wanted
            if self._others_interfered(error, owner, wanted.context.options):
                return True
            # Only the tables tell what is in force after a failure, or before the first sync.
            is_unknown = self._context is None or self._is_behind or not isinstance(error, Rejected)
            if owner and alone:
                names, live = [owner], self._tables.save(("nat", "filter")) if is_unknown else None
            else:
                live = self._tables.save(("nat", "filter"))
                names = changed_ports(failed.facts, attempt.plan, live)
            if self._hold_back(names, reason(error), wanted, live if is_unknown else None):
                return True
        except KernelError as another:
            raise SyncFailed(another) from failed
        if isinstance(error, Rejected):
            # No service is to blame: another program may have changed what the plan builds on.
            self._known.unread = frozenset(TABLES)
        return False

    def _hold_back(
        self,
        names: Collection[PortName],
        why: str,
        wanted: Wanted,
        live: Ruleset | None = None,
    ) -> bool:
        """Hold suspect service ports back. Return whether there are any. Raises KernelError.

        Do not blame services for a fault of the node: if iptables rejects even an ordinary service, suspect none.
        `live` are the tables as read if only they tell what is in force.
        """
        services = dict.fromkeys(name.service_key for name in names)
        ports = {port.port.name for key in services for port in wanted.ports(key)}
        suspects = [name for name in names if name in ports]
        if not suspects or not accepts_ordinary_service(self._tables, self._known, wanted.context.options):
            return False
        held, rejecting = self.quarantine.held(), self.quarantine.rejecting()
        quarantined = self.quarantine.suspect(suspects, why)
        for name in suspects:
            self._put_back(name)
        if live is not None:
            self._known.claim(self.quarantine.held() - held, live)
        self._note_quarantined(quarantined, rejecting)
        return True

    def _judge(
        self, failed: SyncFailed, attempt: _Attempt, tried: frozenset[PortName]
    ) -> tuple[PortName, ...]:
        """Record a rejected try. Return the ports about which it decides. Raises KernelError and SyncFailed."""
        error = failed.error
        if not may_blame_ports(error):
            raise failed
        owner, wanted = _owner(failed, attempt.plan), attempt.resolution.wanted
        if self._others_interfered(error, owner, wanted.context.options):
            return ()
        if owner and owner not in tried:
            self._hold_back([owner], reason(error), wanted)
            return ()
        for name in tried:
            self._put_back(name)
        if self.quarantine.is_last_try() and not accepts_ordinary_service(
            self._tables, self._known, wanted.context.options
        ):
            raise failed
        rejecting = self.quarantine.rejecting()
        rejected = self.quarantine.rejected_again([owner] if owner else tried, reason(error))
        self._note_quarantined(rejected, rejecting)
        return rejected

    def _note_quarantined(self, ports: Collection[PortName], before: Collection[PortName]) -> None:
        """Have the next sync replace the rules of these ports, except of those that rejected clients before."""
        for name in ports:
            self._known.drop_chains(name)  # those that tries wrote
        self.pending.mark({name.service_key for name in ports if name not in before})

    def _put_back(self, name: PortName) -> None:
        if name in self._replaced:
            self._known.put_back(name, self._replaced[name])

    def _others_interfered(self, error: KernelError, owner: PortName | None, options: RuleOptions) -> bool:
        """Return whether a rejection is due to another program; the next attempt reads the tables then.

        It refers to an unused chain, or has deleted one on which the rules of the `owner` of the line build. Raises
        KernelError.
        """
        refers = isinstance(error, Rejected) and error.line.startswith("-X ")
        if not refers and not (owner and self._lack_chains(owner, options)):
            return False
        self._known.unread = frozenset(TABLES)
        return True

    def _lack_chains(self, name: PortName, options: RuleOptions) -> bool:
        """Return whether the tables lack known chains on which rules of a port build. Raises KernelError."""
        port = self._known.port(name)
        own = frozenset(map(nat, port.existing_chains())) if port else frozenset[ChainKey]()
        others = (*skeleton.fixed_chains(options), *skeleton.SHARED)
        keys = own | {key for key in others if self._known.chain(key) != MISSING_CHAIN}
        return bool(keys) and len(self._tables.chains(keys).chains) < len(keys)

    # What a sync covers.

    def _follow_context(self, wanted: Wanted) -> None:
        """Have this sync go through the Services whose rules may differ in this context."""
        context, before = wanted.context, self._context
        if before is None:
            return
        if not _same_service_rules(context, before):
            self.pending.all_services = True
            # The rules of ours in these chains may differ, too.
            self._known.doubtful |= dict.fromkeys(FOREIGN_CHAINS)
        if context.node_port_jumps != before.node_port_jumps:
            self._known.outdated.setdefault(skeleton.NAT_SERVICES, set())
        self.pending.mark(wanted.reserved_since(before))

    def _read_tables(self, options: RuleOptions) -> Ruleset | None:
        """Read what is uncertain; what differs then is pending. Return what was read if it is all tables.

        Raises KernelError.
        """
        known = self._known
        if known.is_certain:
            return None
        is_all = self.reads_all
        written = {owner.service_key for owner in known.doubtful.values() if isinstance(owner, PortName)}
        reading = self._reader.read(known.unread, known.doubtful)
        changed = known.observe(reading.live, reading.tables, reading.chains)
        known.unread = frozenset()  # some may be hidden
        self.pending.mark(changed & written)
        self.pending.mark(changed - written, drifted=is_all)  # others have changed them
        read = {key for key in FOREIGN_CHAINS if key.table in reading.tables or key in reading.chains}
        for table in {key.table for key in read}:
            known.ensured.pop(table, None)
        known.ensured |= ensured_lines(reading.live, options, read)
        return reading.live if is_all else None

    def _choose(self, wanted: Wanted, step: Work, turn: frozenset[PortName], live: Ruleset | None) -> _Chosen:
        """Choose the Services of this sync, and let the others wait; `live` are all tables if they were read."""
        known, held = self._known, self.quarantine.held()
        left_out = (*(port.port_name for port in self.quarantine.all()), *held)
        served = itertools.chain(known.services(), (name.service_key for name in left_out))
        batch = self.pending.choose(wanted, served, turn, is_first=self._context is None)
        self._claim(batch, held, live)
        portions: dict[Key, dict[PortName, Container[str] | None]] = {}
        is_earlier = self._context is None and (known.unused() or known.lead_to_services())
        existing = {key.chain for key in known.unused() if key.table == "nat"} if is_earlier else set()
        for key in sorted(batch.waiting):
            ports = known.ports(key)
            if self.pending.wait(key, wanted.port_names(key), [port.name for port in ports]):
                # Another Service may have the address or node port now.
                known.withdraw(key, wanted.frontends(key))
            if is_earlier:
                # An earlier agent has written rules whose owners nobody knows. Endpoints without a chain come in a turn.
                chains = existing.union(*(port.existing_chains() for port in ports))
                portions[key] = dict.fromkeys(wanted.port_names(key), chains)
        for key in {*batch.waiting, *(name.service_key for name in held)}:
            known.withdraw_damaged(key)
        for name in turn:
            if name.service_key in batch.waiting:
                port, portion = known.port(name), portions.setdefault(name.service_key, {})
                portion[name] = None if step is Work.TURN else port.existing_chains() if port else ()
        return _Chosen(batch.whole, portions)

    def _claim(self, batch: Batch, held: Collection[PortName], live: Ruleset | None) -> None:
        """Let ports that this sync does not write keep what the tables hold of them, if only the tables tell."""
        ports = {
            name
            for name in self._unsure
            if name in held or (self._context and name.service_key not in batch.whole)
        }
        # If a table cannot be shown, they keep what they had before the write with an unknown end.
        with contextlib.suppress(Unreadable):
            if ports:
                self._known.claim(ports, live or self._tables.save(("nat", "filter")))

    def _plan(self, resolution: Resolution, in_portions: bool) -> Plan:
        at_once = self._chains_per_block is None or self._context is None or self.pending.is_bulk
        return Plan(
            self._known,
            resolution.desired(self.quarantine),
            resolution.wanted.context.options,
            resolution.wanted.context.node_port_jumps,
            PlanLimits(
                self._chains_per_block,
                deleted=None if at_once else self.pending.budget.deleted,
                portion=self.pending.budget.portion if in_portions else None,
            ),
            skeleton.SHARED if self.pending.all_services else (),
        )

    def _report(self, attempt: _Attempt, gone: tuple[PortName, ...]) -> SyncReport:
        resolution, live, written = attempt.resolution, attempt.live, attempt.written
        drift = self.pending.drift
        if live is not None:
            others = rule_drift.other_entries(live, TABLES)
        else:
            others = rule_drift.other_entries(drift.live, drift.tables) if drift else {}
        # kube-proxy counts the guard in KUBE-FIREWALL too, but no jumps.
        rules = Counter(filter=len(skeleton.kubelet_firewall(resolution.wanted.context.options)))
        rules.update(self._known.rule_counts())
        return SyncReport(
            family=self.family,
            full=self.pending.all_services,
            services=len(self._known.services()),
            endpoints=self._known.endpoints(),
            chains_written=written.chains,
            chains_deleted=written.deleted,
            rules_written=written.rules,
            rules=rules,
            seconds=attempt.stopwatch.laps,
            resolved=resolution.ports(),
            gone=gone,
            wrote=written.anything,
            deferred=frozenset(self.pending.deferred.services()),
            installed=udp_frontends(live) if live is not None else frozenset(),
            quarantined=self.quarantine.all(),
            held=len(self.quarantine.held()),
            rejected_tree=self._fallback.reason,
            drift=written.drift(),
            table_counts=TableCounts(
                ours=self._known.entry_counts(),
                others=others,
                added=rule_drift.added_entries(written.ensured),
            ),
        )


def _owner(failed: SyncFailed, plan: Plan) -> PortName | None:
    error = failed.error
    return owner_of_line(error.line, failed.facts, plan) if isinstance(error, Rejected) else None


class _Stopwatch:
    """Measure the seconds of each phase, and call `progress` after it."""

    def __init__(self, progress: Callable[[], None]) -> None:
        self._progress = progress
        self.laps: dict[str, float] = {}
        self._last = time.monotonic()

    def move(self, phase: str, other: str, seconds: float) -> None:
        """Count some seconds of a phase as another one."""
        self.laps[phase] -= seconds
        self.laps[other] = seconds

    def lap(self, phase: str) -> None:
        now = time.monotonic()
        self.laps[phase], self._last = now - self._last, now
        self._progress()


def _same_service_rules(new: RuleContext, old: RuleContext) -> bool:
    """Return whether every service has the same rules in both contexts, apart from jumps to node ports and `reserved`."""
    options = msgspec.structs.replace(new.options, large_cluster=old.options.large_cluster)
    same = msgspec.structs.replace(
        new, options=options, node_port_jumps=old.node_port_jumps, reserved=old.reserved
    )
    return same == old
