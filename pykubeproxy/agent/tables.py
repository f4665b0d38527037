"""The tables of one family, made to follow the cluster: what changed is decided, rendered, written and remembered."""

import re
import time
from collections.abc import Collection, Mapping
from typing import NamedTuple

import msgspec

from pykubeproxy.kernel import KernelError, Refused, Tables
from pykubeproxy.objects import Family, Key
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.installed import udp_frontends
from pykubeproxy.rules.options import LARGE_CLUSTER_ENDPOINTS
from pykubeproxy.rules.plan import Change, restore_input
from pykubeproxy.rules.programmed import Draft, Programmed
from pykubeproxy.rules.ruleset import Ruleset
from pykubeproxy.rules.service import port_rules
from pykubeproxy.rules.terms import Terms
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.ports import PortName
from pykubeproxy.services.serving import Served, served_ports

# Comments begin with the service port, or have it after a few words: "pod traffic for ns/web:http external …".
_COMMENT = re.compile(r'--comment "[^"]*?([a-z0-9.-]+/[a-z0-9.-]+(?::[a-z0-9-]+)?)')
_TABLES = ("mangle", "filter", "nat")


class Report(msgspec.Struct, frozen=True):
    """What one sync of one family did.

    `seconds` are those of its phases, `endpoints` all there are of services, `rules` how many of ours each table holds.
    `installed` are the UDP frontends that were in the tables before a full sync.
    """

    family: Family
    full: bool
    services: int
    endpoints: int
    chains_written: int
    chains_deleted: int
    rules_written: Mapping[str, int]
    rules: Mapping[str, int]
    seconds: Mapping[str, float]
    served: tuple[Served, ...]
    gone: tuple[PortName, ...]
    wrote: bool
    installed: frozenset[tuple[str, int]] = frozenset()


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

    served: Mapping[Key, tuple[Served, ...]]
    terms: Terms

    def items(self) -> tuple[Served, ...]:
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
        self._programmed: Programmed | None = None
        self._terms: Terms | None = None
        self._pending: set[Key] = set()
        # The ports of each Service, and how many endpoints each had when it was last looked at.
        self._ports: dict[Key, tuple[_Counted, ...]] = {}
        self._endpoints = 0

    def forget(self) -> None:
        """Trust nothing that is known of the kernel: the next sync reads the live tables and is a full one."""
        self._programmed = None

    @property
    def is_unknown(self) -> bool:
        """Whether the next sync is a full one for not knowing what the kernel holds."""
        return self._programmed is None

    def is_intact(self) -> bool:
        """Whether the tables still hold what nobody would take out but by flushing them. Raises KernelError."""
        return all(self._tables.has_chain(key) for key in skeleton.CANARIES)

    def programmed(self) -> Collection[Key]:
        """The Services that have rules as of the last sync."""
        return self._ports.keys()

    def serving(self, cluster: Cluster, key: Key) -> tuple[Served, ...]:
        """Who serves whom in one Service as the cluster is now, on the terms of the last sync; nothing before it."""
        if self._terms is None:
            return ()
        return served_ports(cluster, key, self.family, self._terms.place, self._terms.allow_external_ips)

    def sync(self, cluster: Cluster, touched: Collection[Key], terms: Terms) -> Report:
        """Make the tables follow the cluster, of which the `touched` Services have changed since the last call.

        Raises KernelError and SyncFailed; then the next call is a full one.
        """
        self._pending.update(touched)
        if self._terms and not _same_rules(terms, self._terms):
            self.forget()
        # While iptables-restore runs, and after it has failed, it is not known what the kernel holds.
        programmed, self._programmed = self._programmed, None
        clock = _Stopwatch()
        live = None if programmed else self._tables.save(_TABLES)
        clock.lap("read")
        decision = self._decide(cluster, terms, everything=live is not None)
        clock.lap("decide")
        programmed, draft, gone = self._draft(programmed, live, decision)
        text = restore_input(draft.change, self._chains_per_block)
        clock.lap("plan")
        self._write(text, draft)
        clock.lap("apply")
        programmed.commit(draft)
        self._programmed = programmed
        self._remember(decision)
        return self._report(live, draft.change, decision, gone, clock.laps, programmed)

    def _write(self, text: str, draft: Draft) -> None:
        try:
            if text:
                self._tables.restore(text)
        except KernelError as error:
            service = _service_of(error.line, draft) if isinstance(error, Refused) else ""
            raise SyncFailed(error, service) from error

    def _decide(self, cluster: Cluster, terms: Terms, everything: bool) -> _Decision:
        """Look at the Services that changed, or at all of them."""
        last = self._terms
        if everything or last is None:
            keys = {service.key for service in cluster.services()} | set(self._ports)
        else:
            keys = self._pending
        family, place = self.family, terms.place
        served = {key: served_ports(cluster, key, family, place, terms.allow_external_ips) for key in keys}
        large = self._count_endpoints(served) > LARGE_CLUSTER_ENDPOINTS
        if last and keys is self._pending and large != last.options.large_cluster:
            return self._decide(cluster, terms, everything=True)
        options = msgspec.structs.replace(terms.options, large_cluster=large)
        return _Decision(served, msgspec.structs.replace(terms, options=options))

    def _count_endpoints(self, served: Mapping[Key, tuple[Served, ...]]) -> int:
        before = sum(port.endpoints for key in served for port in self._ports.get(key, ()))
        now = sum(len(item.selection.verdicts) for items in served.values() for item in items)
        return self._endpoints - before + now

    def _draft(
        self, programmed: Programmed | None, live: Ruleset | None, decision: _Decision
    ) -> tuple[Programmed, Draft, tuple[PortName, ...]]:
        options, jumps = decision.terms.options, decision.terms.node_port_jumps
        rendered = {
            item.port.name: port_rules(item.port, item.selection, options) for item in decision.items()
        }
        gone = tuple(
            name for key in decision.served for name, _ in self._ports.get(key, ()) if name not in rendered
        )
        if programmed is None or live is not None:
            assert live is not None
            programmed = Programmed(live)
            return programmed, programmed.first_draft(rendered, options, jumps, live), gone
        return programmed, programmed.draft(rendered, gone, options, jumps), gone

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
        change: Change,
        decision: _Decision,
        gone: tuple[PortName, ...],
        seconds: Mapping[str, float],
        programmed: Programmed,
    ) -> Report:
        rules: dict[str, int] = {}
        chains = list(change.chains())
        for chain in chains:
            rules[chain.key.table] = rules.get(chain.key.table, 0) + len(chain.rules)
        return Report(
            family=self.family,
            full=live is not None,
            services=len(self._ports),
            endpoints=self._endpoints,
            chains_written=len(chains),
            chains_deleted=len(change.stale),
            rules_written=rules,
            rules=programmed.rules(),
            seconds=seconds,
            served=decision.items(),
            gone=gone,
            wrote=not change.is_empty(),
            installed=udp_frontends(live) if live else frozenset(),
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


def _same_rules(new: Terms, old: Terms) -> bool:
    """Whether every service's rules are the same on both terms; how node ports are reached is not among them."""
    options = msgspec.structs.replace(new.options, large_cluster=old.options.large_cluster)
    return msgspec.structs.replace(new, options=options, node_port_jumps=old.node_port_jumps) == old
