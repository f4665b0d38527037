"""Schedule the retries of quarantined service ports."""

import math
from collections.abc import Collection

import msgspec

from pykubeproxy.agent.sync.limiter import MAX_PERIOD, TimeShare, backoff
from pykubeproxy.objects import Key
from pykubeproxy.services.ports import PortName

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
        self._ports: dict[PortName, _Port] = {}
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
        self._ports = {name: self._ports.get(name) or _Port(now, now + MAX_PERIOD) for name in quarantined}
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


class _Port(msgspec.Struct):
    tried: float
    due: float
    failures: int = 0

    def backoff(self) -> float:
        return backoff(self.failures + 1, _LONGEST_BACKOFF)
