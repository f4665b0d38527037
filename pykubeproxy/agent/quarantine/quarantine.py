"""Quarantine service ports whose rules iptables rejects, and Services that are too large, so that all others are served."""

import time
from collections.abc import Callable, Collection, Container, Hashable, Iterable, Mapping

import msgspec

from pykubeproxy.agent.quarantine.bisect import TRIES, Bisection, PortGroup, Split, may_blame_service
from pykubeproxy.agent.quarantine.quarantined import Quarantined
from pykubeproxy.kernel import KernelError, Rejected, Tables, TimedOut
from pykubeproxy.objects import Key
from pykubeproxy.rules.options import RuleOptions
from pykubeproxy.rules.restore_text import Chain
from pykubeproxy.rules.service import PortRules, note_rules, port_rules, reject_rules
from pykubeproxy.services.ports import PortName, whole_service
from pykubeproxy.services.selection import ResolvedPort
from pykubeproxy.services.size import Oversized

# How long a search may take, in seconds: all Services wait for it, a minute at most with the syncs before and after it.
# Legacy replaces the whole table for each try. Retries continue the search in short parts.
SEARCH_SECONDS = 45.0
RETRY_SECONDS = 1.0
# If this many samples of a kind are all rejected, quarantine the whole kind.
_SAMPLES = 10
_UNDECIDED = (
    "iptables rejects the rules of some service ports; it is not known yet whether this is one of them"
)


class Quarantine:
    """The quarantined service ports and Services of one family, and the rules written in place of the ports.

    The reconcile loop owns it. It calls `progress` during a search, which may take a minute.
    """

    def __init__(self, tables: Tables, chains_per_block: int | None) -> None:
        self._tables = tables
        self._limit = chains_per_block
        self._rejected: Mapping[PortName, Quarantined] = {}
        self._oversized: Mapping[PortName, Quarantined] = {}
        # What the last search has not decided yet.
        self._undecided: tuple[PortGroup, ...] = ()
        # What the last retry left in the canary chain of table nat, if any.
        self.canary: Chain | None = None
        self.progress: Callable[[], None] = lambda: None

    def all(self) -> tuple[Quarantined, ...]:
        """Return all quarantined ports and Services, by name."""
        both = {**self._rejected, **self._oversized}
        return tuple(both[name] for name in sorted(both))

    def rejected(self) -> Collection[PortName]:
        """Return the ports whose rules iptables rejects."""
        return self._rejected.keys()

    def untried(self) -> Collection[PortName]:
        """Return the quarantined ports that the search has not decided about yet."""
        return [name for name, port in self._rejected.items() if not port.tried]

    def rules(self, port: ResolvedPort, options: RuleOptions) -> PortRules:
        """Return the rules of a service port, or those that replace them in quarantine."""
        quarantined = self._rejected.get(port.port.name)
        if quarantined is None:
            return _rules(port, options)
        return reject_rules(port.port, options) if quarantined.rejects_clients else note_rules(port.port)

    def resolved(
        self,
        services: Mapping[Key, Collection[ResolvedPort]],
        oversized: Mapping[Key, Oversized],
        kept: Collection[PortName] = frozenset(),
    ) -> None:
        """Release the ports of these Services that no longer exist, and note which Services are too large.

        `kept` ports exist too.
        """
        names = {port.port.name for ports in services.values() for port in ports}

        def exists(name: PortName) -> bool:
            return name in names or name in kept or name.service_key not in services

        self._rejected = {name: port for name, port in self._rejected.items() if exists(name)}
        self._keep_undecided(exists)
        kept = {name: port for name, port in self._oversized.items() if name.service_key not in services}
        family, now = self._tables.family, time.time()
        for service, it in oversized.items():
            name = whole_service(service)
            since = self._oversized[name].since if name in self._oversized else now
            reason = f"it has {it.pairs} pairs of a port and an endpoint or address, more than maxServicePairs, {it.limit}"
            kept[name] = Quarantined.from_port(family, name, reason, since)
        self._oversized = kept

    def retry(self, ports: Iterable[ResolvedPort], options: RuleOptions) -> Split:
        """Try quarantined ports again; release those whose rules iptables accepts now.

        The returned value tells which of them are undecided. `canary` is what is left to empty. Raises KernelError.
        """
        self.canary = None
        rules = {port.port.name: _rules(port, options) for port in ports}
        if not rules:
            return Split(frozenset(), {})
        bisection = self._bisection(options)
        try:
            split = self._split(bisection, rules, RETRY_SECONDS)
        finally:
            self.canary = bisection.canary
        bisection.clear()
        self._decided(split.rejected)
        self._rejected = {
            name: msgspec.structs.replace(port, reason=split.rejected[name], tried=True)
            if name in split.rejected
            else port
            for name, port in self._rejected.items()
            if name not in split.accepted
        }
        return split

    def isolate(
        self,
        failure: KernelError,
        resolved: Iterable[ResolvedPort],
        unchanged: Iterable[PortName],
        options: RuleOptions,
    ) -> bool:
        """Quarantine the ports that made a restore of these service ports fail. Return whether there were any.

        If time runs out, quarantine those that may have been the reason too: `retry` continues the search. The tables hold
        the own chains of `unchanged` ports already, so these are tried apart from the others.

        Do not blame services for a fault of the node: if iptables rejects even an ordinary service, or hangs with it, or
        accepts no service at all in time, quarantine none. Raises KernelError.
        """
        if not isinstance(failure, Rejected | TimedOut):
            return False
        found = [port for port in resolved if port.port.name not in self._rejected]
        # The largest first: they are the likely reason for a timeout.
        found.sort(key=lambda port: (-len(port.selection.verdicts), port.port.name))
        ports = {port.port.name: port for port in found}
        rules = {name: _rules(port, options) for name, port in ports.items()}
        if isinstance(failure, Rejected) and not may_blame_service(failure, rules):
            return False
        bisection = self._bisection(options)
        if not bisection.accepts_plain_service():
            return False
        deadline = time.monotonic() + SEARCH_SECONDS
        sampled = Split(frozenset(), {})
        if isinstance(failure, Rejected) and not any(rules.keys() & it.names for it in self._undecided):
            sampled = _try_samples(bisection, ports, rules)
            self._undecided += sampled.undecided
        decided = sampled.accepted | sampled.rejected.keys()
        others = {name: it for name, it in rules.items() if name not in decided}
        split = self._split(bisection, others, deadline - time.monotonic(), frozenset(unchanged))
        undecided = {name: _UNDECIDED for group in split.undecided for name in group.names}
        rejected = {**sampled.rejected, **split.rejected}
        reasons = {**rejected, **undecided}
        if not reasons or (undecided and not (sampled.accepted or split.accepted)):
            return False
        rejects_clients: Collection[PortName] = reasons
        rejectable = {name: reject_rules(ports[name].port, options) for name in reasons}
        # The node may have failed during the search, so try the ordinary service again.
        if not bisection.accepts_plain_service(rejectable):
            if not bisection.accepts_plain_service():
                return False
            rejects_clients = bisection.split(rejectable, RETRY_SECONDS).checked().accepted
        self._decided(rejected)
        family, now = self._tables.family, time.time()
        self._rejected = {
            **self._rejected,
            **{
                name: Quarantined.from_port(
                    family, name, reason, now, name in rejects_clients, name not in undecided
                )
                for name, reason in reasons.items()
            },
        }
        return True

    def served(self, ports: Container[PortName]) -> None:
        """Forget what a search found about these ports if they are served now."""
        self._keep_undecided(lambda name: name in self._rejected or name not in ports)

    def _keep_undecided(self, keeps: Callable[[PortName], bool]) -> None:
        self._undecided = tuple(
            PortGroup(left, group.rejections)
            for group in self._undecided
            if (left := tuple(filter(keeps, group.names)))
        )

    def _bisection(self, options: RuleOptions) -> Bisection:
        return Bisection(self._tables, options, self._limit, self.progress)

    def _split(
        self,
        bisection: Bisection,
        rules: Mapping[PortName, PortRules],
        seconds: float,
        unchanged: Collection[PortName] = (),
    ) -> Split:
        """Split these ports, and keep the groups for the next time; rejected ports too, until `_decided`.

        Raises KernelError.
        """
        earlier = [
            PortGroup(tuple(name for name in it.names if name in rules), it.rejections)
            for it in self._undecided
        ]
        others = [it for it in self._undecided if rules.keys().isdisjoint(it.names)]
        grouped = {name for it in earlier for name in it.names}
        apart = bisection.batches(
            {name: it for name, it in rules.items() if name in unchanged and name not in grouped}
        )
        split = bisection.split(rules, seconds, [*(it for it in earlier if it.names), *apart])
        confirm = (PortGroup((name,), TRIES - 1) for name in split.rejected)
        self._undecided = (*others, *split.undecided, *confirm)
        return split.checked()

    def _decided(self, rejected: Collection[PortName]) -> None:
        """Forget the groups of these rejected ports."""
        self._undecided = tuple(
            it for it in self._undecided if not any(name in rejected for name in it.names)
        )


def _rules(port: ResolvedPort, options: RuleOptions) -> PortRules:
    return port_rules(port.port, port.selection, options)


def _try_samples(
    bisection: Bisection, ports: Mapping[PortName, ResolvedPort], rules: Mapping[PortName, PortRules]
) -> Split:
    """Split samples of each kind. If all samples of a kind are rejected, the whole kind is. Raises KernelError.

    A missing kernel feature affects a whole kind, and there are few kinds. Trying samples takes a moment; finding
    hundreds of ports among thousands takes minutes on legacy.
    """
    kinds: dict[Hashable, list[PortName]] = {}
    for name, port in ports.items():
        kinds.setdefault(_kind(port), []).append(name)
    samples = [(names, names[:: max(1, len(names) // _SAMPLES)]) for names in kinds.values()]
    tried = {name: rules[name] for _, some in samples for name in some}
    split = bisection.split(tried, SEARCH_SECONDS / 2, tries=1).checked()
    rejected = {
        name: split.rejected.get(name, split.rejected[some[0]])
        for names, some in samples
        if len(some) >= _SAMPLES and all(name in split.rejected for name in some)
        for name in names
    }
    # One rejection of a single port may be a coincidence.
    left = (*split.undecided, *(PortGroup((name,), 1) for name in split.rejected if name not in rejected))
    return Split(split.accepted, rejected, left)


def _kind(resolved: ResolvedPort) -> Hashable:
    """Return the properties that decide which matches and targets the rules of a service port use."""
    port, selection = resolved.port, resolved.selection
    return (
        port.protocol,
        port.affinity_seconds is not None,
        *map(bool, (port.node_port, port.external_ips, port.load_balancer_ips, port.source_ranges)),
        port.source_ranges is None,
        *(port.internal_local, port.external_local, bool(port.health_check_node_port)),
        *(selection.any_usable, bool(selection.cluster), bool(selection.local)),
        len(selection.reachable) > 1,
    )
