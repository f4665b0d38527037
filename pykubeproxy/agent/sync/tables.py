"""The tables of one family, made to follow the cluster: what changed is decided, rendered, written and remembered."""

import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

import msgspec

from pykubeproxy.agent.drift.finding import Finding, find, others
from pykubeproxy.agent.drift.reading import Reader
from pykubeproxy.agent.quarantine.quarantine import Quarantine, Quarantined
from pykubeproxy.agent.sync.report import Report
from pykubeproxy.kernel import TABLES, KernelError, Refused, TableCounts, Tables
from pykubeproxy.objects import Key
from pykubeproxy.rules import entries
from pykubeproxy.rules.context import RuleContext
from pykubeproxy.rules.damage import Damage
from pykubeproxy.rules.draft import Draft
from pykubeproxy.rules.installed import udp_frontends
from pykubeproxy.rules.options import LARGE_CLUSTER_ENDPOINTS
from pykubeproxy.rules.plan import restore_input
from pykubeproxy.rules.programmed import Programmed
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.ports import PortName
from pykubeproxy.services.resolve import ResolvedPort, resolve_ports

# Comments begin with the service port, or have it after a few words: "pod traffic for ns/web:http external …".
_COMMENT = re.compile(r'--comment "[^"]*?([a-z0-9.-]+/[a-z0-9.-]+(?::[a-z0-9-]+)?)')
# How often a sync is begun: again without kinds of services that are refused, and again without single ones.
_ATTEMPTS = 3


class SyncFailed(Exception):
    """iptables-restore did not do what it was to do.

    `service` says whose rule it refused, as `namespace/name:port`; "" if that is not known, or nobody's.
    """

    def __init__(self, error: KernelError, service: str) -> None:
        super().__init__(f"{error} (a rule of service {service})" if service else str(error))
        self.error = error
        self.service = service


class _Decision(msgspec.Struct, frozen=True):
    """Who serves whom in the Services that were looked at, and the terms for their rules."""

    served: Mapping[Key, tuple[ResolvedPort, ...]]
    terms: RuleContext

    def items(self) -> tuple[ResolvedPort, ...]:
        return tuple(item for items in self.served.values() for item in items)


class _Counted(NamedTuple):
    name: PortName
    endpoints: int


class FamilyTables:
    """Keeps the tables of one family in line with the cluster, writing only the chains that differ."""

    def __init__(self, tables: Tables, chains_per_block: int | None) -> None:
        self.family = tables.family
        self._tables = tables
        self._chains_per_block = chains_per_block
        self._reader = Reader(tables)
        self._aside = Quarantine(tables, chains_per_block)
        self._programmed: Programmed | None = None
        self._terms: RuleContext | None = None
        self._pending: set[Key] = set()
        # The ports of each Service, and how many endpoints each had when it was last looked at.
        self._ports: dict[Key, tuple[_Counted, ...]] = {}
        self._endpoints = 0
        self._found: Finding | None = None

    def forget(self) -> None:
        """Trust nothing that is known of the kernel: the next sync reads the live tables and is a full one."""
        self._programmed = None

    def when_trying(self, progress: Callable[[], None]) -> None:
        """Have `progress` called now and then while a sync finds out which services are refused."""
        self._aside.progress = progress

    @property
    def is_unknown(self) -> bool:
        """Whether the next sync is a full one for not knowing what the kernel holds."""
        return self._programmed is None

    def examine(self, tables: Collection[str] = TABLES, chains: Collection[ChainKey] = ()) -> bool:
        """Hold live tables, or just some chains, against what was written.

        Returns whether somebody changed something of ours; the next sync puts it right, and says so in its report.
        Raises KernelError.
        """
        if self._programmed is None:
            return False  # The next sync goes through everything.
        found = find(self._reader.read(tables, chains), self._programmed, self._terms)
        if found is None:
            return False
        owners = self._programmed.doubt(found.difference.changed, found.live)
        self._pending.update(name.service_key for name in owners)
        self._found = found
        if found.difference.strange:
            self.forget()
        return True

    def set_aside(self) -> tuple[Quarantined, ...]:
        """The service ports that are set aside for iptables refuses their rules."""
        return self._aside.all()

    def programmed(self) -> Collection[Key]:
        """The Services that have rules as of the last sync."""
        return self._ports.keys()

    def serving(self, cluster: Cluster, key: Key) -> tuple[ResolvedPort, ...]:
        """Who serves whom in one Service as the cluster is now, on the terms of the last sync; nothing before it."""
        if self._terms is None:
            return ()
        return resolve_ports(cluster, key, self.family, self._terms.place, self._terms.allow_external_ips)

    def sync(self, cluster: Cluster, touched: Collection[Key], terms: RuleContext) -> Report:
        """Make the tables follow the cluster, of which the `touched` Services have changed since the last call.

        Raises KernelError and SyncFailed; then the next call is a full one.
        """
        self._pending.update(touched)
        if self._terms and not _same_rules(terms, self._terms):
            self.forget()
        for attempt in range(_ATTEMPTS):
            if report := self._sync(cluster, terms, try_again=attempt == 0):
                return report
        raise SyncFailed(KernelError("iptables refuses the rules of ever more services"), "")

    def _sync(self, cluster: Cluster, terms: RuleContext, try_again: bool) -> Report | None:
        """One attempt; None if service ports had to be set aside for being refused: the next one goes without them.

        `try_again`: first see whether those that were set aside before are taken now.
        """
        # While iptables-restore runs, and after it has failed, it is not known what the kernel holds.
        programmed, self._programmed = self._programmed, None
        clock = _Stopwatch()
        live = None if programmed else self._reader.read(TABLES).live
        clock.lap("read")
        decision = self._decide(cluster, terms, everything=live is not None)
        if try_again:
            self._aside.try_again(decision.served, decision.terms.options)
        clock.lap("decide")
        programmed, draft, gone = self._draft(programmed, live, decision)
        text = restore_input(draft.change, self._chains_per_block)
        clock.lap("plan")
        try:
            self._write(text, draft)
        except SyncFailed as failure:
            if self._narrow(failure, decision):
                return None
            raise
        clock.lap("apply")
        found, self._found = self._found, None
        # The draft's change is against what was programmed before.
        repaired = found.damages(draft.change) if found else ()
        programmed.commit(draft)
        self._programmed = programmed
        self._remember(decision)
        rules = programmed.rules()
        ours = entries.of_ours(rules, programmed.chains())
        held = TableCounts(ours, others(live, found), entries.added(draft.change.ensured))
        return self._report(live, draft, decision, gone, clock.laps, rules, held, repaired)

    def _write(self, text: Iterable[str], draft: Draft) -> None:
        try:
            self._tables.restore(text)
        except KernelError as error:
            service = _service_of(error.line, draft) if isinstance(error, Refused) else ""
            raise SyncFailed(error, service) from error

    def _narrow(self, failure: SyncFailed, decision: _Decision) -> bool:
        """Set aside the service ports that were the reason, if any were. Raises SyncFailed."""
        try:
            return self._aside.narrow(failure.error, decision.items(), decision.terms.options)
        except KernelError as error:
            raise SyncFailed(error, "") from failure

    def _decide(self, cluster: Cluster, terms: RuleContext, everything: bool) -> _Decision:
        """Look at the Services that changed, or at all of them."""
        last = self._terms
        if everything or last is None:
            aside = {it.name.service_key for it in self._aside.all()}
            keys = {service.key for service in cluster.services()} | set(self._ports) | aside
        else:
            keys = self._pending
        family, place = self.family, terms.place
        served = {key: resolve_ports(cluster, key, family, place, terms.allow_external_ips) for key in keys}
        large = self._count_endpoints(served) > LARGE_CLUSTER_ENDPOINTS
        if last and keys is self._pending and large != last.options.large_cluster:
            return self._decide(cluster, terms, everything=True)
        options = msgspec.structs.replace(terms.options, large_cluster=large)
        return _Decision(served, msgspec.structs.replace(terms, options=options))

    def _count_endpoints(self, served: Mapping[Key, tuple[ResolvedPort, ...]]) -> int:
        before = sum(port.endpoints for key in served for port in self._ports.get(key, ()))
        now = sum(len(item.selection.verdicts) for items in served.values() for item in items)
        return self._endpoints - before + now

    def _draft(
        self, programmed: Programmed | None, live: Ruleset | None, decision: _Decision
    ) -> tuple[Programmed, Draft, tuple[PortName, ...]]:
        options, jumps = decision.terms.options, decision.terms.node_port_jumps
        rendered = {item.port.name: self._aside.rules(item, options) for item in decision.items()}
        gone = tuple(
            name for key in decision.served for name, _ in self._ports.get(key, ()) if name not in rendered
        )
        if programmed is None or live is not None:
            assert live is not None
            programmed = Programmed(live)
            return programmed, programmed.first_draft(rendered, options, jumps, live), gone
        lines = self._found.lines(decision.terms) if self._found else {}
        return programmed, programmed.draft(rendered, gone, options, jumps, lines), gone

    def _remember(self, decision: _Decision) -> None:
        self._terms = decision.terms
        self._pending.clear()
        self._endpoints = self._count_endpoints(decision.served)
        for key, items in decision.served.items():
            self._ports.pop(key, None)
            if items:
                self._ports[key] = tuple(_Counted(it.port.name, len(it.selection.verdicts)) for it in items)

    def _report(
        self,
        live: Ruleset | None,
        draft: Draft,
        decision: _Decision,
        gone: tuple[PortName, ...],
        seconds: Mapping[str, float],
        rules: Mapping[str, int],
        held: TableCounts,
        repaired: tuple[Damage, ...],
    ) -> Report:
        deleted = sum(1 for _ in draft.change.stale)
        return Report(
            family=self.family,
            full=live is not None,
            services=len(self._ports),
            endpoints=self._endpoints,
            chains_written=draft.tally.chains,
            chains_deleted=deleted,
            rules_written=draft.tally.rules,
            rules=rules,
            seconds=seconds,
            served=decision.items(),
            gone=gone,
            wrote=bool(draft.tally.chains or deleted or draft.change.ensured),
            installed=udp_frontends(live) if live else frozenset(),
            aside=self._aside.all(),
            repaired=repaired,
            held=held,
        )


class _Stopwatch:
    """Seconds for each phase of a run."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, phase: str) -> None:
        now = time.monotonic()
        self.laps[phase], self._last = now - self._last, now


def _service_of(line: str, draft: Draft) -> str:
    """The service port that a line of restore input belongs to, by its chain or else by the rule's comment."""
    words = line.replace(":", " ", 1).split()
    for name, written in draft.ports.items():
        if written and any(chain in words for chain in written.chains):
            return str(name)
    match = _COMMENT.search(line)
    return match[1] if match else ""


def _same_rules(new: RuleContext, old: RuleContext) -> bool:
    """Whether every service's rules are the same on both terms; how node ports are reached is not among them."""
    options = msgspec.structs.replace(new.options, large_cluster=old.options.large_cluster)
    return msgspec.structs.replace(new, options=options, node_port_jumps=old.node_port_jumps) == old
