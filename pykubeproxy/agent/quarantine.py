"""What syncs leave out, so that all others are served: rules that iptables rejects, and Services that are too large."""

import math
import time
from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import NamedTuple

import msgspec

from pykubeproxy.agent.limiter import MAX_PERIOD, TimeShare, backoff
from pykubeproxy.config import Dispatch
from pykubeproxy.kernel import KernelError, Rejected
from pykubeproxy.objects import Family, Key
from pykubeproxy.pages.servicez import Quarantined
from pykubeproxy.rules.context import RuleContext
from pykubeproxy.rules.options import RuleOptions
from pykubeproxy.rules.plan import Plan
from pykubeproxy.rules.service import PortRules, note_rules, port_rules, reject_rules
from pykubeproxy.services.ports import PortName, whole_service
from pykubeproxy.services.selection import ResolvedPort
from pykubeproxy.services.size import Oversized

# A port is quarantined after so many rejected writes of it alone. A concurrent writer causes rejections: on legacy, without
# a reason, if it takes no lock; on nft, if it deletes the chains of a port between two blocks.
TRIES = 3
# A missing kernel feature affects a whole kind of ports, and to find hundreds among thousands takes minutes on legacy. So
# after this many ports of a kind were rejected, syncs hold back others of it; and if so many samples, taken evenly from
# the suspect ports of a kind, are all rejected, the whole kind is.
_SAMPLES = 10


class PortGroup(NamedTuple):
    """Service ports to try together, and how many writes with all of them were rejected; samples of a kind come first."""

    names: tuple[PortName, ...]
    rejections: int = 0
    are_samples: bool = False

    def parts(self) -> tuple[tuple[PortName, ...], tuple[PortName, ...]]:
        """Return the ports to try next, and the others: halves if all of them were rejected together."""
        half = len(self.names) // 2 if self.rejections else 0
        return (self.names[:half], self.names[half:]) if half else (self.names, ())

    def promise(self) -> tuple[bool, int, int, int]:
        """Return how many ports a try may release; of equal numbers, those that are less suspect are greater."""
        return self.are_samples, len(self.parts()[0]), -self.rejections, len(self.names)


class _Samples(NamedTuple):
    """The ports that stand for others of their kind."""

    chosen: frozenset[PortName]
    all: frozenset[PortName]


class Quarantine:
    """The service ports of one family whose rules iptables rejects or may reject, and its oversized Services.

    A suspect port was in a block that iptables rejected. Syncs hold it back: it keeps the rules that the tables have, until
    a try has decided. A rejected port has rules that replace its own; it is tried again from time to time. The reconcile
    loop owns it.
    """

    def __init__(self, family: Family) -> None:
        self._family = family
        self._rejected: dict[PortName, Quarantined] = {}
        self._oversized: Mapping[PortName, Quarantined] = {}
        # All ports to try: suspect ones, and rejected ones that are due.
        self._groups: list[PortGroup] = []
        self._trying: tuple[PortGroup, PortGroup] | None = None
        self._kinds: dict[PortName, Hashable] = {}
        # By kind: the samples of some ports, and the ports that were rejected alone since one of the kind was accepted.
        self._samples: dict[Hashable, _Samples] = {}
        self._alone: dict[Hashable, set[PortName]] = {}

    # Read.

    def all(self) -> tuple[Quarantined, ...]:
        """Return all quarantined ports and Services, by name."""
        both = {**self._rejected, **self._oversized}
        return tuple(both[name] for name in sorted(both))

    def rejected(self) -> Collection[PortName]:
        """Return the ports whose rules iptables rejects."""
        return self._rejected.keys()

    def rejecting(self) -> frozenset[PortName]:
        """Return those of them that have rules which reject clients."""
        return frozenset(name for name, port in self._rejected.items() if port.rejects_clients)

    def held(self) -> frozenset[PortName]:
        """Return the suspect ports that syncs hold back."""
        groups = (*self._groups, *(self._trying or ()))
        return frozenset(name for group in groups for name in group.names if name not in self._rejected)

    @property
    def has_tries(self) -> bool:
        """Return whether there are ports to try."""
        return bool(self._groups)

    def is_doubtful(self, port: ResolvedPort) -> bool:
        """Return whether many ports of the kind of a port were rejected, and none accepted since, and it may be, too."""
        name = port.port.name
        return (
            bool(self._alone)
            and name not in self._rejected
            and len(self._alone.get(_kind(port), ())) >= _SAMPLES
        )

    def rules(self, port: ResolvedPort, options: RuleOptions, tried: bool = False) -> PortRules:
        """Return the rules of a service port, or those that replace them in quarantine unless it is `tried`."""
        quarantined = None if tried else self._rejected.get(port.port.name)
        if quarantined is None:
            return port_rules(port.port, port.selection, options)
        return reject_rules(port.port, options) if quarantined.rejects_clients else note_rules(port.port)

    # Record.

    def suspect(self, ports: Collection[ResolvedPort], reason: str) -> tuple[PortName, ...]:
        """Hold back ports that were rejected together. Return the ports that are quarantined now.

        If only rules that replace those of quarantined ports may be the reason, these ports get none.
        """
        new = [port for port in ports if port.port.name not in self._rejected]
        if not new:
            for name in (port.port.name for port in ports):
                self._rejected[name] = msgspec.structs.replace(self._rejected[name], rejects_clients=False)
            return ()
        if len(ports) > 1:
            self.hold(new, 1)
            return ()
        (port,) = new
        name = port.port.name
        self._remove([name])
        self._kinds[name] = _kind(port)
        return self._rejected_alone(name, reason, 1)

    def hold(self, ports: Collection[ResolvedPort], rejections: int = 0) -> None:
        """Hold back ports after so many writes with all of them were rejected."""
        kinds: dict[Hashable, list[PortName]] = {}
        for port in ports:
            kinds.setdefault(_kind(port), []).append(port.port.name)
        for kind, names in kinds.items():
            self._kinds |= dict.fromkeys(names, kind)
            self._remove(names)
            samples = names[:: len(names) // _SAMPLES][:_SAMPLES] if len(names) > _SAMPLES else []
            if samples:
                self._samples[kind] = _Samples(frozenset(samples), frozenset(names))
            self._add(samples, 0, are_samples=True)
            others = [name for name in names if name not in samples]
            self._add(others, rejections if len(kinds) == 1 else 0)

    def retry(self, ports: Collection[PortName]) -> None:
        """Try these rejected ports again."""
        self._add([name for name in ports if name in self._rejected], 0)

    def take(self) -> tuple[PortName, ...]:
        """Return the ports to try next; none if there are none. Record the result, or `put_off` the try."""
        if not self._groups:
            return ()
        group = max(self._groups, key=lambda group: (group.names[0] not in self._rejected, *group.promise()))
        self._groups.remove(group)
        tried, others = group.parts()
        self._trying = group._replace(names=tried), group._replace(names=others)
        return tried

    def put_off(self) -> None:
        """Record that the try, if there is one without a result, was not made."""
        if self._trying:
            tried, others = self._take_back()
            self._groups.append(tried._replace(names=(*tried.names, *others.names)))

    def accepted(self) -> None:
        """Release the tried ports. If they are one half of a rejected group, the other half is to blame."""
        tried, others = self._take_back()
        for name in tried.names:
            self._rejected.pop(name, None)
            self._clear(self._kinds.pop(name, None))
        self._add(others.names, 1, others.are_samples)

    def served(self, ports: Iterable[ResolvedPort]) -> None:
        """Record that a sync serves these ports: the rules of their kinds are accepted."""
        for port in ports if self._alone else ():
            if port.port.name not in self._rejected:
                self._clear(_kind(port))

    def _clear(self, kind: Hashable) -> None:
        self._alone.pop(kind, None)
        self._samples.pop(kind, None)

    def rejected_again(self, suspects: Collection[PortName], reason: str) -> tuple[PortName, ...]:
        """Record that the try was rejected because of some of its ports. Return the ports that are quarantined now."""
        tried, others = self._take_back()
        self._add(others.names, 0, others.are_samples)
        if len(tried.names) == 1:
            (name,) = tried.names
            return self._rejected_alone(name, reason, tried.rejections + 1)
        to_blame = tuple(name for name in tried.names if name in suspects)
        self._add([name for name in tried.names if name not in suspects], 0, tried.are_samples)
        if len(to_blame) == 1:
            return self._rejected_alone(to_blame[0], reason, 1)
        self._add(to_blame, 1, tried.are_samples)
        return ()

    def is_last_try(self) -> bool:
        """Return whether a suspect port is quarantined if this try is rejected."""
        assert self._trying, "nothing was taken"
        (name, *others), rejections, _ = self._trying[0]
        return not others and name not in self._rejected and self._decides(name, rejections + 1)

    def _decides(self, name: PortName, rejections: int) -> bool:
        return name in self._rejected or rejections >= TRIES or self._rejects_kind(name)

    def _rejects_kind(self, name: PortName) -> bool:
        """Return whether all samples of the kind of a port are rejected once this port is."""
        kind = self._kinds.get(name)
        samples = self._samples.get(kind)
        return samples is not None and samples.chosen <= {name, *self._alone.get(kind, ())}

    def resolved(
        self,
        services: Mapping[Key, Collection[ResolvedPort]],
        oversized: Mapping[Key, Oversized],
        kept: Collection[PortName] = frozenset(),
    ) -> None:
        """Forget the ports of these Services that no longer exist, and record which Services are too large.

        `kept` ports exist too.
        """
        names = {port.port.name for ports in services.values() for port in ports}
        gone = [
            name
            for name in {*self._rejected, *self._kinds}
            if name.service_key in services and name not in names and name not in kept
        ]
        self._remove(gone)
        for name in gone:
            self._rejected.pop(name, None)
            self._alone.get(self._kinds.pop(name, None), set()).discard(name)
        still = {name: port for name, port in self._oversized.items() if name.service_key not in services}
        now = time.time()
        for service, large in oversized.items():
            name = whole_service(service)
            since = self._oversized[name].since if name in self._oversized else now
            reason = f"it has {large.pairs} pairs of a port and an endpoint or address, more than maxServicePairs, {large.limit}"
            still[name] = Quarantined.from_port(self._family, name, reason, since)
        self._oversized = still

    def _take_back(self) -> tuple[PortGroup, PortGroup]:
        assert self._trying, "nothing was taken"
        trying, self._trying = self._trying, None
        return trying

    def _rejected_alone(self, name: PortName, reason: str, rejections: int) -> tuple[PortName, ...]:
        """Quarantine a port if it was rejected often enough, with its kind if all samples are, or try it again."""
        kind, is_kind = self._kinds.get(name), self._rejects_kind(name)
        is_decided = self._decides(name, rejections)
        self._alone.setdefault(kind, set()).add(name)
        if not is_decided:
            self._add([name], rejections)
            return ()
        alike = self._samples.pop(kind).all & self.held() if is_kind else ()
        names = tuple(dict.fromkeys((name, *alike)))
        self._reject(names, reason)
        return names

    def _reject(self, names: Collection[PortName], reason: str) -> None:
        now = time.time()
        self._remove(names)
        for name in names:
            since = self._rejected[name].since if name in self._rejected else now
            self._rejected[name] = Quarantined.from_port(self._family, name, reason, since)

    def _add(self, names: Collection[PortName], rejections: int, are_samples: bool = False) -> None:
        if names:
            self._groups.append(PortGroup(tuple(names), rejections, are_samples))

    def _remove(self, names: Collection[PortName]) -> None:
        gone = frozenset(names)
        left = (
            group._replace(names=tuple(name for name in group.names if name not in gone))
            for group in self._groups
        )
        self._groups = [group for group in left if group.names]


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
# The part of the time that retries of rejected ports may take: all other Services wait for them.
_SHARE = 0.1


class RetrySchedule:
    """Schedule the tries of one family. It reads no clock: the caller passes the time in, in seconds.

    A rejected port is due when its Service changes, not before its backoff ends, and every hour. Suspect ports are due at
    once: they may be innocent, and one try follows the other.
    """

    def __init__(self) -> None:
        self._ports: dict[PortName, _TriedPort] = {}
        self._shares = {
            searching: TimeShare(share, _LONGEST_BACKOFF)
            for searching, share in ((False, _SHARE), (True, 1.0))
        }
        self._has_tries = self._searching = False

    def follow(
        self,
        rejected: Collection[PortName],
        now: float,
        *,
        has_tries: bool = False,
        searching: bool = False,
    ) -> None:
        """Schedule exactly these ports. `has_tries`: some are being tried already; `searching`: suspect ports are."""
        self._has_tries, self._searching = has_tries or searching, searching
        self._ports = {name: self._ports.get(name) or _TriedPort(now, now + MAX_PERIOD) for name in rejected}

    def changed(self, services: Collection[Key], now: float) -> None:
        """Record that these Services have changed."""
        for name, port in self._ports.items():
            if name.service_key in services:
                port.due = min(port.due, max(now, port.tried + port.backoff()))

    def due(self) -> float:
        """Return when the next try is due; infinity if there is nothing to try."""
        first = (
            -math.inf
            if self._has_tries
            else min((port.due for port in self._ports.values()), default=math.inf)
        )
        return max(first, self._shares[self._searching].due())

    def take(self, now: float) -> tuple[PortName, ...]:
        """Return the rejected ports to try now, the one that has waited longest first; none while others are tried."""
        due = {
            name: port.due for name, port in self._ports.items() if port.due <= now and not self._has_tries
        }
        return tuple(sorted(due, key=lambda name: (due[name], name)))

    def tried(self, decided: Collection[PortName], begun: float, now: float, succeeded: bool = True) -> None:
        """Record a try since `begun`, after which these ports are still rejected."""
        self._shares[self._searching].worked(begun, now, succeeded)
        for name in decided:
            if port := self._ports.get(name):
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
    """Dispatch flat in one family after iptables has found too many jumps in its tree, until `retry` or other options.

    The reconcile loop owns it.
    """

    def __init__(self) -> None:
        # Why the tree is rejected, "" if it is not; and the configured options of the last attempt.
        self.reason = ""
        self._options: RuleOptions | None = None

    def retry(self) -> None:
        """Try the tree again."""
        self.reason = ""

    def context(self, context: RuleContext) -> RuleContext:
        """Return the context for the next attempt."""
        if self._options != context.options:
            self._options, self.reason = context.options, ""
        if not self.reason:
            return context
        options = msgspec.structs.replace(context.options, dispatch=Dispatch.FLAT)
        return msgspec.structs.replace(context, options=options)

    def reject(self, error: KernelError, plan: Plan) -> bool:
        """Reject the tree of a plan if iptables found too many jumps or a loop. Return whether to make another attempt."""
        if not isinstance(error, Rejected):
            return False
        if not any(words in error.message.lower() for words in _TOO_DEEP) or not plan.has_tree():
            return False
        self.reason = error.message
        return True
