"""The connection state of one watch: when to retry, whether to list first, and what to log."""

import random
import time

import structlog

from pykubeproxy.sources.failures import Expired, Failure
from pykubeproxy.sources.watch import Outage

# The same reason is logged again after this many seconds.
_LOG_INTERVAL = 60.0
# List again after this many persistent failures in a row: the version may be the reason.
_MAX_PERSISTENT = 2

log = structlog.get_logger()


class Backoff:
    """Exponential backoff with full jitter: each pause is drawn from 0 to a ceiling between `first` and `longest` seconds.

    The jitter prevents all agents of a cluster from reconnecting to a server at once.
    """

    def __init__(self, first: float, longest: float) -> None:
        self._first, self._longest = first, longest
        self.failures = 0

    def next(self) -> float:
        """Return the seconds to wait after one more failure."""
        ceiling = min(self._first * 2.0 ** min(self.failures, 32), self._longest)
        self.failures += 1
        return random.uniform(0.0, ceiling)  # noqa: S311

    def reset(self) -> None:
        """Start over after a success."""
        self.failures = 0


class OutageLog:
    """Log the failures of one watch, each reason once a minute, and the recovery."""

    def __init__(self, resource: str) -> None:
        self._resource = resource
        self._logged: dict[str, float] = {}
        self._present: tuple[float, str] | None = None  # start and last reason

    def failed(self, reason: str, retry_in: float) -> None:
        """Note a failed attempt; the next one follows in `retry_in` seconds."""
        now = time.monotonic()
        self._present = (self._present[0] if self._present else now, reason)
        self._logged = {earlier: at for earlier, at in self._logged.items() if now - at < _LOG_INTERVAL}
        if reason not in self._logged:
            self._logged[reason] = now
            log.warning("watch failed", resource=self._resource, reason=reason, retry_in=f"{retry_in:.1f}s")

    def recovered(self) -> None:
        """Note a success."""
        if outage := self.outage():
            self._present = None
            log.info("watch recovered", resource=self._resource, after=f"{outage.seconds:.1f}s")

    def outage(self) -> Outage | None:
        """Return the current outage; any thread may call it."""
        present = self._present
        return Outage(self._resource, time.monotonic() - present[0], present[1]) if present else None


class ConnectionState:
    """Decide after each watch request when to send the next one and whether to list first.

    A watch that was open for `steady` seconds or delivered an event counts as a success.
    """

    def __init__(self, resource: str, backoff: Backoff, steady: float) -> None:
        self.must_list = True
        self.outages = OutageLog(resource)
        self._resource, self._backoff, self._steady = resource, backoff, steady
        self._persistent = 0  # persistent failures in a row
        self._expired = 0  # 410s in a row
        self._opened: float | None = None
        self._delivered = False

    def connecting(self) -> None:
        """Note that a request is about to be sent."""
        self._opened, self._delivered = None, False

    def opened(self) -> None:
        """Note that the server answered the watch."""
        self._opened = time.monotonic()
        if not self._persistent:
            self.outages.recovered()

    def delivered(self) -> None:
        """Note that the watch delivered an event."""
        self._delivered, self._persistent = True, 0
        self.outages.recovered()

    def ended(self) -> float:
        """Note that the server ended the watch; return the seconds to wait."""
        if not self._is_steady():
            return self.failed(Failure("the API server ends the watch at once", persistent=True))
        self._backoff.reset()
        self._persistent = self._expired = 0
        return self._rest()

    def failed(self, failure: Failure) -> float:
        """Note a failure; return the seconds to wait."""
        if isinstance(failure, Expired):
            return self._version_expired(failure)
        if self._is_steady():
            self._backoff.reset()
            self._expired = 0
        if failure.persistent and not self._delivered:
            self._persistent += 1
        if self._persistent >= _MAX_PERSISTENT:
            self.must_list = True
        pause = max(self._backoff.next(), failure.retry_after, self._rest())
        self.outages.failed(str(failure), pause)
        return pause

    def _version_expired(self, failure: Failure) -> float:
        # A first 410 is normal after a long interruption; more of them in a row are a fault.
        self.must_list = True
        self._expired += 1
        if self._expired == 1:
            log.debug("relisting", resource=self._resource, reason=str(failure))
            return 0.0
        pause = self._backoff.next()
        self.outages.failed(str(failure), pause)
        return pause

    def _is_steady(self) -> bool:
        return self._delivered or self._open_for() >= self._steady

    def _open_for(self) -> float:
        return time.monotonic() - self._opened if self._opened is not None else 0.0

    def _rest(self) -> float:
        """Return the rest of `steady` seconds since the watch was opened, to prevent a hot loop."""
        return max(0.0, self._steady - self._open_for()) if self._opened is not None else 0.0
