"""What syncs leave out, so that all others are served: rules that iptables rejects, and Services that are too large."""

import math
import time
from collections.abc import Collection, Mapping
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
from pykubeproxy.services.ports import PortName
from pykubeproxy.services.selection import ResolvedPort

# A port is quarantined after so many rejected writes of it alone. A concurrent writer causes rejections: on legacy, without
# a reason, if it takes no lock; on nft, if it deletes the chains of a port between two blocks.
TRIES = 3


class PortGroup(NamedTuple):
    """Service ports to try together, and how many writes with all of them were rejected."""

    names: tuple[PortName, ...]
    rejections: int

    def parts(self) -> tuple[tuple[PortName, ...], tuple[PortName, ...]]:
        """Return the ports to try next, and the others: halves if all of them were rejected together."""
        half = len(self.names) // 2 if self.rejections else 0
        return (self.names[:half], self.names[half:]) if half else (self.names, ())

    def promise(self) -> tuple[int, int, int]:
        """Return how many ports a try may release; of equal numbers, those that are less suspect are greater."""
        return len(self.parts()[0]), -self.rejections, len(self.names)


class Refused(NamedTuple):
    """Why a service port or a Service is not served, whatever iptables says, and whether it rejects its clients."""

    reason: str
    rejects_clients: bool = True


class Quarantine:
    """The service ports of one family whose rules iptables rejects or may reject, and what is refused before.

    A suspect port was in a block that iptables rejected. Syncs hold it back: it keeps the rules that the tables have, until
    a try has decided. A rejected port has rules that replace its own; it is tried again from time to time. The reconcile
    loop owns it.
    """

    def __init__(self, family: Family) -> None:
        self._family = family
        self._rejected: dict[PortName, Quarantined] = {}
        self._refused: Mapping[PortName, Quarantined] = {}
        # All ports to try: suspect ones, and rejected ones that are due.
        self._groups: list[PortGroup] = []
        self._trying: tuple[PortGroup, PortGroup] | None = None

    # Read.

    def all(self) -> tuple[Quarantined, ...]:
        """Return all quarantined ports and Services, by name."""
        both = {**self._rejected, **self._refused}
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

    def rules(self, port: ResolvedPort, options: RuleOptions, tried: bool = False) -> PortRules:
        """Return the rules of a service port, or those that replace them in quarantine unless it is `tried`."""
        quarantined = None if tried else self._rejected.get(port.port.name)
        if quarantined is None:
            return port_rules(port.port, port.selection, options)
        return reject_rules(port.port, options) if quarantined.rejects_clients else note_rules(port.port)

    # Record.

    def suspect(self, names: Collection[PortName], reason: str) -> tuple[PortName, ...]:
        """Hold back ports that were rejected together. Return the ports that are quarantined now.

        If only rules that replace those of quarantined ports may be the reason, these ports get none.
        """
        new = [name for name in names if name not in self._rejected]
        self._remove(new)
        if not new:
            for name in names:
                self._rejected[name] = msgspec.structs.replace(self._rejected[name], rejects_clients=False)
        elif len(names) == 1:
            return self._rejected_alone(new[0], reason, 1)
        self._add(new, 1)
        return ()

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
        self._add(others.names, 1)

    def rejected_again(self, suspects: Collection[PortName], reason: str) -> tuple[PortName, ...]:
        """Record that the try was rejected because of some of its ports. Return the ports that are quarantined now."""
        tried, others = self._take_back()
        self._add(others.names, 0)
        if len(tried.names) == 1:
            (name,) = tried.names
            return self._rejected_alone(name, reason, tried.rejections + 1)
        to_blame = tuple(name for name in tried.names if name in suspects)
        self._add([name for name in tried.names if name not in suspects], 0)
        if len(to_blame) == 1:
            return self._rejected_alone(to_blame[0], reason, 1)
        self._add(to_blame, 1)
        return ()

    def is_last_try(self) -> bool:
        """Return whether a suspect port is quarantined if this try is rejected."""
        assert self._trying, "nothing was taken"
        (name, *others), rejections = self._trying[0]
        return not others and name not in self._rejected and self._decides(name, rejections + 1)

    def _decides(self, name: PortName, rejections: int) -> bool:
        return name in self._rejected or rejections >= TRIES

    def resolved(
        self,
        services: Mapping[Key, Collection[ResolvedPort]],
        refused: Mapping[PortName, Refused],
        kept: Collection[PortName] = frozenset(),
    ) -> None:
        """Forget the ports of these Services that no longer exist, and record what is refused.

        `kept` ports exist too.
        """
        names = {port.port.name for ports in services.values() for port in ports}
        known = {*self._rejected, *self.held()}
        gone = [
            name for name in known if name.service_key in services and name not in names and name not in kept
        ]
        self._remove(gone)
        for name in gone:
            self._rejected.pop(name, None)
        still = {name: port for name, port in self._refused.items() if name.service_key not in services}
        now = time.time()
        for name, (reason, rejects_clients) in refused.items():
            since = self._refused[name].since if name in self._refused else now
            still[name] = Quarantined.from_port(self._family, name, reason, since, rejects_clients)
        self._refused = still

    def _take_back(self) -> tuple[PortGroup, PortGroup]:
        assert self._trying, "nothing was taken"
        trying, self._trying = self._trying, None
        return trying

    def _rejected_alone(self, name: PortName, reason: str, rejections: int) -> tuple[PortName, ...]:
        """Quarantine a port if it was rejected often enough, or try it again."""
        if not self._decides(name, rejections):
            self._add([name], rejections)
            return ()
        self._remove([name])
        since = self._rejected[name].since if name in self._rejected else time.time()
        self._rejected[name] = Quarantined.from_port(self._family, name, reason, since)
        return (name,)

    def _add(self, names: Collection[PortName], rejections: int) -> None:
        if names:
            self._groups.append(PortGroup(tuple(names), rejections))

    def _remove(self, names: Collection[PortName]) -> None:
        gone = frozenset(names)
        left = (
            group._replace(names=tuple(name for name in group.names if name not in gone))
            for group in self._groups
        )
        self._groups = [group for group in left if group.names]


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
