"""Record when the API server was last heard, and log its outages: one line for each, for all watches."""

import math
import threading
import time
from collections.abc import Callable
from typing import NoReturn

import structlog

from pykubeproxy.sources.attempt import Attempt
from pykubeproxy.sources.failures import Failure

log = structlog.get_logger()


class Contact:
    """Record when the API server was last heard. Thread-safe.

    It is heard when it sends data. It is also heard when it acknowledges packets on an open response, because a watch of
    objects that do not change carries nothing; but not from `doubt` until it answers. After `limit` seconds of
    silence, the server is unavailable. `clock` returns seconds.
    """

    def __init__(self, limit: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self._clock = clock
        self._lock = threading.Lock()
        self._heard = -math.inf
        # Since when a request has no answer; a pause between requests is no silence.
        self._waiting: float | None = None
        self._requested: float | None = None  # the same, but not for a response that breaks
        self._failure = ""  # the last one since the server was heard
        self._doubted = False
        self._responses: set[Attempt] = set()
        self._outage: tuple[float, str] | None = None  # start and reason of the outage in the log

    def requested(self) -> None:
        """Record that a request is about to be sent."""
        if self._waiting is None:
            self._waiting = self._clock()
        if self._requested is None:
            self._requested = self._clock()

    def heard(self) -> None:
        """Record data from the server."""
        self._heard, self._failure, self._doubted = self._clock(), "", False
        self._waiting = self._requested = None

    def doubt(self, doubted: bool = True) -> None:
        """Record whether a request has no answer although open responses are acknowledged: a balancer may do that."""
        self._doubted = doubted

    def failed(self, failure: Failure, acknowledged: float = -math.inf) -> None:
        """Record a failed request, or a response that broke; it does not count if the server has answered.

        `acknowledged` is the time of the last acknowledgement on its connection.
        """
        if failure.server_wide and self._waiting is None:
            self._waiting = self._heard
        if self._waiting is not None:
            self._failure = str(failure)
            if not self._doubted:
                self._waiting = max(self._waiting, acknowledged)

    def opened(self, attempt: Attempt) -> None:
        """Count acknowledgements on the connection of an attempt until `closed`."""
        with self._lock:
            self._responses.add(attempt)

    def closed(self, attempt: Attempt) -> None:
        """Record that a response ended."""
        with self._lock:
            self._responses.discard(attempt)

    def silence(self) -> float:
        """Return for how many seconds a request or an open response has waited for the server."""
        now, unacknowledged = self._clock(), self._unacknowledged()
        if unacknowledged is None:
            return 0.0 if self._waiting is None else now - self._waiting
        return now - max(self._heard, -math.inf if self._doubted else now - unacknowledged)

    def unanswered(self) -> float:
        """Return for how many seconds a request has had no answer."""
        return 0.0 if self._requested is None else self._clock() - self._requested

    def outage(self) -> str:
        """Return why the server is unavailable, empty if it is not."""
        if self._failure and (self._heard == -math.inf or self.silence() >= self.limit):
            return self._failure
        if self.silence() < self.limit:
            return ""
        unacknowledged = self._unacknowledged()
        if unacknowledged is not None and unacknowledged >= self.limit:
            return "no packets arrive from the API server"
        return "the API server sends nothing"

    def run(self) -> NoReturn:
        """Log outages; never return."""
        while True:
            self.check()
            time.sleep(self.limit / 10)

    def check(self) -> None:
        """Log the start or the end of an outage. Call it from one thread only."""
        silence, reason = self.silence(), self.outage()
        last = self._clock() - silence
        if self._outage is None:
            if reason:
                self._outage = last, reason
                log.warning("api server unavailable", reason=reason, silence=f"{silence:.1f}s")
        elif not reason and silence < self.limit / 2:
            started, reason = self._outage
            self._outage = None
            log.info("api server available again", reason=reason, after=f"{last - started:.1f}s")
        elif reason:
            self._outage = self._outage[0], reason

    def _unacknowledged(self) -> float | None:
        """Return the seconds since the last acknowledgement on open responses, None without any."""
        with self._lock:
            responses = tuple(self._responses)
        return min((attempt.unacknowledged() for attempt in responses), default=None)
