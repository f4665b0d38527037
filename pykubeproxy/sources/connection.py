"""The connection state of one watch: when to retry, whether to list first, and which outages to log."""

import math
import random
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import structlog

from pykubeproxy.sources.contact import Contact
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

    def next(self, spread: float = 0.0) -> float:
        """Return the seconds to wait after one more failure. The ceiling is at least `spread`, at most the longest."""
        ceiling = min(max(self._first * 2.0 ** min(self.failures, 32), spread), self._longest)
        self.failures += 1
        return random.uniform(0.0, ceiling)  # noqa: S311

    def reset(self) -> None:
        """Start over after a success."""
        self.failures = 0


class Pause(NamedTuple):
    """A wait of `seconds` before the next attempt.

    After `at_least` seconds it ends early if more watches are open than `opened`, counted since the start.
    """

    seconds: float
    at_least: float
    opened: int


class Reconnection:
    """Share the attempts to reach a failing server among the watches of one agent: each failure takes the next turn.

    So three watches try as often as one. When one of them is open again, the others wait no longer. Thread-safe.
    """

    def __init__(self, first: float, longest: float) -> None:
        self._backoff = Backoff(first, longest)
        self._changed = threading.Condition()
        self._failed = self._turn = 0.0  # when the last watch failed, and when the last turn begins
        self._opened = 0  # watches opened since the start
        self._restored = 0  # how often versions went back

    def failed(self, worked: float, at_least: float = 0.0, spread: float = 0.0) -> Pause:
        """Take the next turn for a watch that worked until `worked`, not before `at_least` seconds have passed.

        The backoff starts over only if the watch worked after the last failure of any watch. `spread` is as in Backoff.
        """
        with self._changed:
            now = time.monotonic()
            if worked > self._failed:
                self._backoff.reset()
            self._failed = now
            self._turn = max(now + at_least, self._turn) + self._backoff.next(spread)
            return Pause(self._turn - now, at_least, self._opened)

    def opened(self) -> None:
        """Record that a watch is open, so the server can be reached."""
        with self._changed:
            self._turn = 0.0
            self._opened += 1
            self._changed.notify_all()

    def restored(self, went_back: bool = False) -> int:
        """Return how often the versions of objects went back: the server was restored from a backup. Count one more."""
        with self._changed:
            self._restored += went_back
            return self._restored

    def wait(self, pause: Pause) -> None:
        """Wait for the next attempt."""
        time.sleep(pause.at_least)
        with self._changed:
            self._changed.wait_for(
                lambda: self._opened > pause.opened, timeout=max(0.0, pause.seconds - pause.at_least)
            )


class OutageLog:
    """Log the failures of one watch, each reason once a minute, and the recovery.

    An outage counts from the last answer: data, or an acknowledgement on a connection that broke. `contact` logs outages of
    the whole server.
    """

    def __init__(self, resource: str, contact: Contact) -> None:
        self._resource, self._contact = resource, contact
        self._heard = time.monotonic()
        self._logged: dict[str, float] = {}
        self._present: tuple[float, str] | None = None  # start and last reason
        self._failed = 0.0  # when the first attempt of the present outage failed
        self._in_log = False  # whether the present outage has a line

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
        if self._is_own(failure, now):
            self._in_log = True
            if reason not in self._logged:
                self._logged[reason] = now
                log.warning(
                    "watch failed", resource=self._resource, reason=reason, retry_in=f"{retry_in:.1f}s"
                )

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
            if self._in_log:
                log.info("watch recovered", resource=self._resource, after=f"{seconds:.1f}s")
            self._in_log = False

    def outage(self) -> Outage | None:
        """Return the current outage; any thread may call it."""
        if present := self._present:
            return Outage(self._resource, time.monotonic() - present[0], present[1])
        reason = self._contact.outage()
        return Outage(self._resource, self._contact.silence(), reason) if reason else None


class Timing(msgspec.Struct, frozen=True):
    """Timeouts in seconds.

    A watch of objects that do not change is silent. So the agent opens its successor after a random time from `watch`,
    `answer` seconds before the server should end it. See docs/performance.md for the load that this causes.
    """

    watch: tuple[int, int] = (540, 600)
    answer: float = 60.0  # until the header of a response, and silence within a list
    list: float = 600.0  # all pages of a list together
    steady: float = 1.0  # a watch open for this long works
    first_pause: float = 1.0  # ceiling of the first random pause after a failure
    longest_pause: float = 30.0


class Lifetime(NamedTuple):
    """A watch's seconds until the agent opens its successor, and until the server should end it."""

    check: float
    end: int


class ConnectionState:
    """Decide after each watch request when to send the next one and whether to list first.

    A watch that was open for `timing.steady` seconds or delivered an event counts as a success.
    """

    def __init__(self, resource: str, reconnection: Reconnection, timing: Timing, contact: Contact) -> None:
        self.must_list = True
        self._restored = 0  # as in Reconnection, at the last list
        self.outages = OutageLog(resource, contact)
        self._resource, self._reconnection, self._timing = resource, reconnection, timing
        self._contact = contact
        # For failures of this resource only.
        self._backoff = Backoff(timing.first_pause, timing.longest_pause)
        self._persistent = 0  # persistent failures in a row
        self._expired = 0  # 410s in a row
        self._opened: float | None = None
        self._delivered = False
        self._checking: float | None = None  # since when the successor of an open watch has no answer

    def lifetime(self) -> Lifetime:
        """Draw the lifetime of the next watch. Without an open watch, the check may come at any time of it.

        So watches that begin together are not replaced together.
        """
        seconds = random.uniform(*self._timing.watch)  # noqa: S311
        check = seconds if self._checking is not None else random.uniform(0.0, seconds)  # noqa: S311
        return Lifetime(check, math.ceil(seconds + self._timing.answer))

    def connecting(self) -> None:
        """Record that a request is about to be sent while no watch is open."""
        self._opened, self._delivered, self._checking = None, False, None

    def listed(self, went_back: bool) -> None:
        """Record a complete list. If its version is older than the last one, other watches must list too."""
        self.must_list = False
        self._restored = self._reconnection.restored(went_back)

    def notices_restore(self) -> bool:
        """Return whether another watch has found older versions since the last list or call; then this one must list."""
        before, self._restored = self._restored, self._reconnection.restored()
        self.must_list |= self._restored != before
        return self._restored != before

    def checking(self) -> bool:
        """Record that a successor of the open watch is about to be requested; return whether the last one was answered."""
        if self._checking is not None:
            return False
        self._checking = time.monotonic()
        return True

    def opened(self, at: float | None = None) -> None:
        """Record that the server answered the watch, now or `at` an earlier time, as others know already."""
        self._opened = time.monotonic() if at is None else at
        self.outages.heard(at)
        if at is None:
            self._reconnection.opened()

    def listing(self, body: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the pieces of a list and record their arrival."""
        for piece in body:
            self.outages.heard()
            yield piece

    def delivered(self) -> None:
        """Record that the watch delivered an event."""
        self._delivered, self._persistent = True, 0
        self.outages.recovered()

    def works(self) -> None:
        """Record that the watch is steady."""
        self._checking = None
        self._backoff.reset()
        self._persistent = self._expired = 0
        self.outages.recovered()

    def ended(self, seconds: float) -> Pause:
        """Record that the server ended a watch of `seconds`; return the pause before the next attempt."""
        if not self._is_steady():
            return self.failed(Failure("the API server ends the watch at once", persistent=True))
        self.outages.heard()
        self._backoff.reset()
        self._persistent = self._expired = 0
        self.outages.recovered()
        if self._open_for() < seconds - self._timing.steady:
            # A server that stops ends the watches of all agents.
            return self._reconnection.failed(time.monotonic())
        return self._own(self._rest())

    def failed(self, failure: Failure) -> Pause:
        """Record a failure; return the pause before the next attempt."""
        if isinstance(failure, Expired):
            return self._version_expired(failure)
        if self._is_steady():
            self._backoff.reset()
            self._expired = 0
        if failure.persistent and not self._delivered:
            self._persistent += 1
        if self._persistent >= _MAX_PERSISTENT:
            self.must_list = True
        pause = self._pause(failure)
        self.outages.failed(failure, pause.seconds)
        return pause

    def check_failed(self, failure: Failure) -> float:
        """Record that the successor of an open watch failed; return the seconds until the next attempt.

        That is no outage, because the open watch goes on, unless the server does not answer for `answer` seconds. A
        refusal ends such an outage.
        """
        began = self._checking
        if failure.refused:
            self._checking = None
        if failure.answered:
            self._contact.doubt(False)
            self.outages.heard()
            self.outages.recovered()
        if isinstance(failure, Expired):
            self.must_list = True
            self._expired += 1
            # All agents list after a restart of the server; a server that never has the version must not see that often.
            ceiling = self._timing.longest_pause * 2.0 ** min(self._expired - 1, 32)
            return random.uniform(0.0, min(ceiling, self._timing.watch[1]))  # noqa: S311
        pause = failure.retry_after + self._backoff.next(spread=failure.retry_after)
        if not failure.refused and began is not None and time.monotonic() - began >= self._timing.answer:
            if failure.server_wide:
                self._contact.doubt()
            self.outages.failed(failure, pause)
        return pause

    def _pause(self, failure: Failure) -> Pause:
        at_least = max(failure.retry_after, self._rest())
        if failure.server_wide:
            worked = time.monotonic() - self.outages.silence() if self._is_steady() else -math.inf
            return self._reconnection.failed(worked, at_least, spread=failure.retry_after)
        return self._own(at_least + self._backoff.next(spread=failure.retry_after))

    def _version_expired(self, failure: Failure) -> Pause:
        # A first 410 is normal after a long interruption; more of them in a row are a fault.
        self.must_list = True
        self._expired += 1
        pause = self._own(self._backoff.next())
        if self._expired > 1:
            self.outages.failed(failure, pause.seconds)
        return pause

    @staticmethod
    def _own(seconds: float) -> Pause:
        """Return a pause that other watches do not end."""
        return Pause(seconds, seconds, 0)

    def is_steady(self, opened: float | None) -> bool:
        """Return whether a watch that the server answered at `opened` has been open long enough."""
        return opened is not None and time.monotonic() - opened >= self._timing.steady

    def _is_steady(self) -> bool:
        return self._delivered or self.is_steady(self._opened)

    def _open_for(self) -> float:
        opened = self._opened  # read once: another thread may ask for the outage
        return time.monotonic() - opened if opened is not None else 0.0

    def _rest(self) -> float:
        """Return the rest of `steady` seconds since the watch was opened, to prevent a hot loop."""
        return max(0.0, self._timing.steady - self._open_for()) if self._opened is not None else 0.0
