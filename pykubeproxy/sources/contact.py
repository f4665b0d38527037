"""Outages of the API server: the watches of an agent share a Contact, and each has an OutageLog.

An outage of the whole server is one log line for all watches.
"""

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from pykubeproxy.sources.failures import Failure
from pykubeproxy.sources.watch import Outage

# The same reason is logged again after this many seconds.
_LOG_INTERVAL = 60.0

log = structlog.get_logger()


class Contact:
    """Record when the API server last sent something, and log its outages. Thread-safe.

    An outage is logged once requests have failed for `limit` seconds; at once if the server has never sent anything. While
    a watch is open, only checks can tell. Two counters tell open watches that they must begin anew.
    """

    def __init__(self, limit: float = 10.0) -> None:
        self.limit = limit
        # How often the server has answered again after a check without an answer: open connections may be dead.
        self.renewals = 0
        self.restores = 0  # how often versions of objects went back: the server was restored from a backup
        self._lock = threading.Lock()
        self._heard: float | None = None
        self._open = 0  # watches
        self.in_doubt = False  # whether a check got no answer, and no request has had one since
        self._failing: tuple[float, str] | None = None  # since when requests fail, and the last reason
        self._logged = False  # whether this outage is in the log

    def heard(self) -> None:
        """Record data from the server."""
        self._heard = time.monotonic()
        if self._failing is None:
            return
        with self._lock:
            failing, self._failing = self._failing, None
            logged, self._logged = self._logged, False
        if failing and logged:
            seconds = time.monotonic() - failing[0]
            log.info("api server available again", reason=failing[1], after=f"{seconds:.1f}s")

    def answered(self) -> None:
        """Record an answer to a request."""
        self.heard()
        with self._lock:
            self.renewals += self.in_doubt
            self.in_doubt = False

    def failed(self, failure: Failure, since: float) -> None:
        """Record that a request has had no answer `since` a monotonic time, or that a watch broke."""
        with self._lock:
            started = self._failing[0] if self._failing else since
            self._failing = started, str(failure)
            seconds = time.monotonic() - started
            if self._logged or not self.outage():
                return
            self._logged = True
        log.warning("api server unavailable", reason=str(failure), silence=f"{seconds:.1f}s")

    def check_failed(self, failure: Failure, since: float) -> None:
        """Record that a check has had no answer `since` a monotonic time."""
        self.in_doubt = True
        self.failed(failure, since)

    def restored(self) -> None:
        """Record that versions of objects went back."""
        with self._lock:
            self.restores += 1

    def silence(self) -> float:
        """Return the seconds since the server sent something, infinity if it never did."""
        return math.inf if self._heard is None else time.monotonic() - self._heard

    @contextmanager
    def open_watch(self) -> Iterator[None]:
        """Count a watch as open."""
        with self._lock:
            self._open += 1
        try:
            yield
        finally:
            with self._lock:
                self._open -= 1

    @property
    def is_watched(self) -> bool:
        """Whether a watch is open, and the last check had an answer."""
        return self._open > 0 and not self.in_doubt

    def outage(self) -> str:
        """Return why the server is unavailable, "" if it is not."""
        failing = self._failing  # read once: other threads replace it
        if failing is None or self.is_watched:
            return ""
        is_long = self._heard is None or time.monotonic() - failing[0] >= self.limit
        return failing[1] if is_long else ""


class OutageLog:
    """Log the failures of one watch, each reason once a minute, and the recovery.

    An outage counts from the last data of the server. `Contact` logs outages of the whole server.
    """

    def __init__(self, resource: str, contact: Contact) -> None:
        self._resource, self._contact = resource, contact
        self._started = time.monotonic()
        self._requested: float | None = None  # since when a request has had no answer
        self._logged: dict[str, float] = {}
        self._present: tuple[float, str] | None = None  # start and last reason
        self._failed = 0.0  # when the first attempt of the present outage failed
        self._in_log = False  # whether the present outage has a line

    def requested(self) -> None:
        """Record that a request is about to be sent, or that a part of its response has arrived."""
        self._requested = time.monotonic()

    def answered(self) -> None:
        """Record that a list is complete, or that the watch is open."""
        self._requested = None

    def failed(self, failure: Failure, retry_in: float) -> None:
        """Record a failed attempt; the next one follows in `retry_in` seconds."""
        now, reason = time.monotonic(), str(failure)
        since, self._requested = self._requested, None
        if self._present is None:
            self._failed = now
        self._present = (self._present[0] if self._present else self._last_heard(), reason)
        if failure.server_wide:
            self._contact.failed(failure, now if since is None else since)
        self._logged = {earlier: at for earlier, at in self._logged.items() if now - at < _LOG_INTERVAL}
        if self._is_own(failure, now):
            self._in_log = True
            if reason not in self._logged:
                self._logged[reason] = now
                log.warning(
                    "watch failed", resource=self._resource, reason=reason, retry_in=f"{retry_in:.1f}s"
                )

    def _last_heard(self) -> float:
        return max(self._started, time.monotonic() - self._contact.silence())

    def _is_own(self, failure: Failure, now: float) -> bool:
        """Return whether only this watch fails: the server answers, or other watches work."""
        is_long = now - self._failed >= self._contact.limit
        return not failure.server_wide or (is_long and self._contact.is_watched)

    def recovered(self) -> None:
        """Record a success."""
        if present := self._present:
            self._present = None
            if self._in_log:
                seconds = time.monotonic() - present[0]
                log.info("watch recovered", resource=self._resource, after=f"{seconds:.1f}s")
            self._in_log = False

    def outage(self) -> Outage | None:
        """Return the current outage; any thread may call it."""
        now, present, requested = time.monotonic(), self._present, self._requested
        if present:
            return Outage(self._resource, now - present[0], present[1])
        reason = self._contact.outage()
        if not reason and requested is not None and now - requested >= self._contact.limit:
            reason = "the API server sends nothing"
        return Outage(self._resource, now - self._last_heard(), reason) if reason else None
