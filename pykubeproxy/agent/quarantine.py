"""What syncs leave out, so that all others are served: rules that iptables rejects, and Services that are too large."""

import math
import time
from collections.abc import Callable, Collection, Container, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import msgspec

from pykubeproxy.agent.bisect import TRIES, Bisection, BisectResult, PortGroup, may_blame_service
from pykubeproxy.agent.limiter import MAX_PERIOD, TimeShare, backoff
from pykubeproxy.config import Dispatch
from pykubeproxy.kernel import KernelError, Rejected, Tables, TimedOut
from pykubeproxy.objects import Key
from pykubeproxy.pages.servicez import Quarantined
from pykubeproxy.rules.context import RuleContext
from pykubeproxy.rules.known import KnownTables
from pykubeproxy.rules.options import RuleOptions
from pykubeproxy.rules.plan import DesiredPort, is_written
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

    def __init__(self, tables: Tables, known: KnownTables, chains_per_block: int | None) -> None:
        self._tables = tables
        self._known = known
        self._limit = chains_per_block
        self._rejected: Mapping[PortName, Quarantined] = {}
        self._oversized: Mapping[PortName, Quarantined] = {}
        # What the last search has not decided yet.
        self._undecided: tuple[PortGroup, ...] = ()
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

    def rules_or_replacement(self, port: ResolvedPort, options: RuleOptions) -> PortRules:
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
        """Release the ports of these Services that no longer exist, and record which Services are too large.

        `kept` ports exist too.
        """
        names = {port.port.name for ports in services.values() for port in ports}

        def exists(name: PortName) -> bool:
            return name in names or name in kept or name.service_key not in services

        self._rejected = {name: port for name, port in self._rejected.items() if exists(name)}
        self._keep_undecided(exists)
        kept = {name: port for name, port in self._oversized.items() if name.service_key not in services}
        family, now = self._tables.family, time.time()
        for service, large in oversized.items():
            name = whole_service(service)
            since = self._oversized[name].since if name in self._oversized else now
            reason = f"it has {large.pairs} pairs of a port and an endpoint or address, more than maxServicePairs, {large.limit}"
            kept[name] = Quarantined.from_port(family, name, reason, since)
        self._oversized = kept

    def retry(self, ports: Iterable[ResolvedPort], options: RuleOptions) -> BisectResult:
        """Try quarantined ports again; release those whose rules iptables accepts now.

        The returned value names the undecided ones. Raises KernelError.
        """
        rules = {port.port.name: _rules(port, options) for port in ports}
        if not rules:
            return BisectResult(frozenset(), {})
        bisection = self._bisection(options)
        split = self._split(bisection, rules, RETRY_SECONDS)
        bisection.clear()
        self._keep_undecided(lambda name: name not in split.rejected)
        for name in split.rejected:
            self._known.drop_chains(name)  # those that tries wrote
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
        options: RuleOptions,
    ) -> bool:
        """Quarantine the ports that made a restore of these service ports fail. Return whether there were any.

        If time runs out, quarantine those that may have been the reason too: `retry` continues the search. Ports of which
        the tables hold all own chains already are tried apart from the others.

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
        unchanged = frozenset(
            name for name, of_port in rules.items() if is_written(self._known, DesiredPort(name, of_port, 0))
        )
        deadline = time.monotonic() + SEARCH_SECONDS
        sampled = BisectResult(frozenset(), {})
        if isinstance(failure, Rejected) and not any(rules.keys() & group.names for group in self._undecided):
            sampled = _try_samples(bisection, ports, rules)
            self._undecided += sampled.undecided
        decided = sampled.accepted | sampled.rejected.keys()
        others = {name: of_port for name, of_port in rules.items() if name not in decided}
        split = self._split(bisection, others, deadline - time.monotonic(), unchanged)
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
        self._keep_undecided(lambda name: name not in rejected)
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
        return Bisection(self._tables, self._known, options, self._limit, self.progress)

    def _split(
        self,
        bisection: Bisection,
        rules: Mapping[PortName, PortRules],
        seconds: float,
        unchanged: Collection[PortName] = (),
    ) -> BisectResult:
        """Split these ports, and keep the groups for the next time, also those of rejected ports. Raises KernelError."""
        earlier = [
            PortGroup(tuple(name for name in group.names if name in rules), group.rejections)
            for group in self._undecided
        ]
        others = [group for group in self._undecided if rules.keys().isdisjoint(group.names)]
        grouped = {name for group in earlier for name in group.names}
        apart = bisection.batches(
            {name: of_port for name, of_port in rules.items() if name in unchanged and name not in grouped}
        )
        split = bisection.split(rules, seconds, [*(group for group in earlier if group.names), *apart])
        confirm = (PortGroup((name,), TRIES - 1) for name in split.rejected)
        self._undecided = (*others, *split.undecided, *confirm)
        return split.checked()


def _rules(port: ResolvedPort, options: RuleOptions) -> PortRules:
    return port_rules(port.port, port.selection, options)


def _try_samples(
    bisection: Bisection, ports: Mapping[PortName, ResolvedPort], rules: Mapping[PortName, PortRules]
) -> BisectResult:
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
    return BisectResult(split.accepted, rejected, left)


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


# After n failed retries, a changed port waits 2**n seconds since the last one, up to this many.
_LONGEST_BACKOFF = 300.0
# The part of the time that retries may take: all other Services wait for them. Ports that no search has decided about may
# be innocent.
_SHARE, _SEARCH_SHARE = 0.1, 0.5


class RetrySchedule:
    """Schedule the retries of one family. It reads no clock: the caller passes the time in, in seconds.

    A port is due when its Service changes, not before its backoff ends, and every hour; at once if no search has decided
    about it yet.
    """

    def __init__(self) -> None:
        self._ports: dict[PortName, _TriedPort] = {}
        self._shares = {
            searching: TimeShare(share, _LONGEST_BACKOFF)
            for searching, share in ((False, _SHARE), (True, _SEARCH_SHARE))
        }
        self._searching = False

    def follow(
        self,
        quarantined: Collection[PortName],
        untried: Collection[PortName],
        changed: Collection[Key],
        now: float,
    ) -> None:
        """Schedule exactly these ports, the `untried` ones among them at once.

        `changed` are the Services that have changed since the last call.
        """
        self._searching = bool(untried)
        self._ports = {
            name: self._ports.get(name) or _TriedPort(now, now + MAX_PERIOD) for name in quarantined
        }
        for name in untried:
            self._ports[name].due = min(now, self._ports[name].due)
        for name, port in self._ports.items():
            if name.service_key in changed:
                port.due = min(port.due, max(now, port.tried + port.backoff()))

    def due(self) -> float:
        """Return when the next retries are due; infinity if nothing is quarantined."""
        return max(
            min((port.due for port in self._ports.values()), default=math.inf),
            self._shares[self._searching].due(),
        )

    def take(self, now: float) -> tuple[PortName, ...]:
        """Return the ports to try now, the one that has waited longest first."""
        due = {name: port.due for name, port in self._ports.items() if port.due <= now}
        return tuple(sorted(due, key=lambda name: (due[name], name)))

    def tried(self, names: Collection[PortName], begun: float, now: float, succeeded: bool = True) -> None:
        """Record that these ports were tried since `begun`. The others that `take` returned stay due."""
        self._shares[self._searching].worked(begun, now, succeeded)
        for name in names:
            port = self._ports[name]
            port.tried, port.due, port.failures = now, now + MAX_PERIOD, port.failures + 1


class _TriedPort(msgspec.Struct):
    tried: float
    due: float
    failures: int = 0

    def backoff(self) -> float:
        return backoff(self.failures + 1, _LONGEST_BACKOFF)


# From the messages of EMLINK (too many links) and ELOOP (too many levels of symbolic links), in lower case.
_TOO_DEEP = ("too many links", "too many levels")


class Fallback:
    """Dispatch flat in one family after iptables has rejected its tree, until `retry` or until the options change.

    The reconcile loop owns it.
    """

    def __init__(self) -> None:
        # Why the tree is rejected, "" if it is not; and the configured options of the last attempt.
        self.reason = ""
        self._options: RuleOptions | None = None
        self._unexplained = False

    def retry(self) -> None:
        """Try the tree again."""
        self.reason = ""

    @contextmanager
    def attempts(self) -> Iterator[None]:
        """Enclose the attempts of a sync. If all fail, a flat chain did not help: keep the choice from before."""
        before, self._unexplained = (self.reason, self._options), False
        try:
            yield
        except BaseException:
            self.reason, self._options = before
            raise

    def context(self, context: RuleContext) -> RuleContext:
        """Return the context for the next attempt."""
        if self._options != context.options:
            self._options, self.reason = context.options, ""
        if not self.reason:
            return context
        options = msgspec.structs.replace(context.options, dispatch=Dispatch.FLAT)
        return msgspec.structs.replace(context, options=options)

    def too_deep(self, error: KernelError, has_tree: bool) -> bool:
        """Reject the tree if iptables found too many jumps or a loop. Return whether to make another attempt."""
        return any(words in str(error).lower() for words in _TOO_DEEP) and self._reject(error, has_tree)

    def no_culprit(self, error: KernelError, has_tree: bool) -> bool:
        """Reject the tree because no service is to blame. Return whether to make another attempt.

        A concurrent writer causes single rejections, so try the tree once more. If a chain cannot be deleted, another proxy
        refers to it, and the tree is not the cause.
        """
        if isinstance(error, Rejected) and error.line.startswith("-X "):
            return False
        if isinstance(error, Rejected) and not self._unexplained:
            self._unexplained = True
            return has_tree
        return self._reject(error, has_tree)

    def _reject(self, error: KernelError, has_tree: bool) -> bool:
        if not isinstance(error, Rejected) or error.is_shortage or not has_tree:
            return False
        self.reason = error.message
        return True
