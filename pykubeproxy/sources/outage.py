"""The outage of one watch: since when, why, and what to log."""

import time

import structlog

from pykubeproxy.sources.contact import Contact
from pykubeproxy.sources.failures import Failure
from pykubeproxy.sources.watch import Outage

# The same reason is logged again after this many seconds.
_LOG_INTERVAL = 60.0

log = structlog.get_logger()


class OutageLog:
    """Log the failures of one watch, each reason once a minute, and the recovery.

    An outage counts from the last answer: data, or an acknowledgement on a connection that broke. Lines about an outage
    of the whole server, which `contact` logs, have the level debug.
    """

    def __init__(self, resource: str, contact: Contact) -> None:
        self._resource, self._contact = resource, contact
        self._heard = time.monotonic()
        self._logged: dict[tuple[str, bool], float] = {}
        self._present: tuple[float, str] | None = None  # start and last reason
        self._failed = 0.0  # when the first attempt of the present outage failed
        self._in_log = False  # whether the present outage has a line above debug

    def heard(self, at: float | None = None) -> None:
        """Record an answer of the server, now or `at` an earlier time."""
        self._heard = time.monotonic() if at is None else max(self._heard, at)

    def silence(self) -> float:
        """Return the seconds since the last answer."""
        return time.monotonic() - self._heard

    def failed(self, failure: Failure, retry_in: float) -> None:
        """Record a failed attempt; the next one follows in `retry_in` seconds."""
        now, reason = time.monotonic(), str(failure)
        if self._present is None:
            self._failed = now
        self._present = (self._present[0] if self._present else self._heard, reason)
        self._logged = {earlier: at for earlier, at in self._logged.items() if now - at < _LOG_INTERVAL}
        own = self._is_own(failure, now)
        if (reason, own) not in self._logged:
            self._logged[reason, own] = now
            write = log.warning if own else log.debug
            write("watch failed", resource=self._resource, reason=reason, retry_in=f"{retry_in:.1f}s")
        self._in_log |= own

    def _is_own(self, failure: Failure, now: float) -> bool:
        """Return whether only this watch fails: the server sends data, but not to this watch."""
        since = self._heard if failure.persistent else self._failed
        limit = self._contact.limit
        return not failure.server_wide or (now - since >= limit and self._contact.silence() < limit)

    def recovered(self) -> None:
        """Record a success."""
        if present := self._present:
            self._present = None
            seconds = time.monotonic() - present[0]
            write = log.info if self._in_log else log.debug
            write("watch recovered", resource=self._resource, after=f"{seconds:.1f}s")
            self._in_log = False

    def outage(self) -> Outage | None:
        """Return the current outage; any thread may call it."""
        if present := self._present:
            return Outage(self._resource, time.monotonic() - present[0], present[1])
        reason = self._contact.outage()
        return Outage(self._resource, self._contact.silence(), reason) if reason else None
