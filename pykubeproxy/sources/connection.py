"""The connection state of one watch: when to retry, whether to list first, and what to log."""

import math
import random
import time
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import structlog

from pykubeproxy.sources.backoff import Backoff, Pause, Reconnection
from pykubeproxy.sources.contact import Contact
from pykubeproxy.sources.failures import Expired, Failure
from pykubeproxy.sources.outage import OutageLog
from pykubeproxy.sources.watch import Outage

# List again after this many persistent failures in a row: the version may be the reason.
_MAX_PERSISTENT = 2

log = structlog.get_logger()


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
        self._outages = OutageLog(resource, contact)
        self._resource, self._reconnection, self._timing = resource, reconnection, timing
        self._contact = contact
        # For failures of this resource only.
        self._backoff = Backoff(timing.first_pause, timing.longest_pause)
        self._persistent = 0  # persistent failures in a row
        self._expired = 0  # 410s in a row
        self._opened: float | None = None
        self._delivered = False
        self._checking: float | None = None  # since when the successor of an open watch has no answer

    def outage(self) -> Outage | None:
        """Return the current outage; any thread may call it."""
        return self._outages.outage()

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
        self._outages.heard(at)
        if at is None:
            self._reconnection.opened()

    def listing(self, body: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the pieces of a list and record their arrival."""
        for piece in body:
            self._outages.heard()
            yield piece

    def heard(self, at: float | None = None) -> None:
        """Record an answer of the server, even one that changes nothing; now, or `at` an earlier time."""
        self._outages.heard(at)

    def delivered(self) -> None:
        """Record that the watch delivered an event."""
        self._delivered, self._persistent = True, 0
        self._outages.recovered()

    def works(self) -> None:
        """Record that the watch is steady."""
        self._checking = None
        self._backoff.reset()
        self._persistent = self._expired = 0
        self._outages.recovered()

    def ended(self, seconds: float) -> Pause:
        """Record that the server ended a watch of `seconds`; return the pause before the next attempt."""
        if not self._is_steady():
            return self.failed(Failure("the API server ends the watch at once", persistent=True))
        self._outages.heard()
        self._backoff.reset()
        self._persistent = self._expired = 0
        self._outages.recovered()
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
        self._outages.failed(failure, pause.seconds)
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
            self._outages.heard()
            self._outages.recovered()
        if isinstance(failure, Expired):
            self.must_list = True
            self._expired += 1
            # All agents list after a restart of the server; a server that never has the version must not see that often.
            ceiling = self._timing.longest_pause * 2.0 ** min(self._expired - 1, 32)
            log.debug("relisting", resource=self._resource, reason=str(failure))
            return random.uniform(0.0, min(ceiling, self._timing.watch[1]))  # noqa: S311
        pause = failure.retry_after + self._backoff.next(spread=failure.retry_after)
        log.debug("watch not renewed", resource=self._resource, reason=str(failure), retry_in=f"{pause:.1f}s")
        if not failure.refused and began is not None and time.monotonic() - began >= self._timing.answer:
            if failure.server_wide:
                self._contact.doubt()
            self._outages.failed(failure, pause)
        return pause

    def _pause(self, failure: Failure) -> Pause:
        at_least = max(failure.retry_after, self._rest())
        if failure.server_wide:
            worked = time.monotonic() - self._outages.silence() if self._is_steady() else -math.inf
            return self._reconnection.failed(worked, at_least, spread=failure.retry_after)
        return self._own(at_least + self._backoff.next(spread=failure.retry_after))

    def wait(self, pause: Pause) -> None:
        """Wait for the next attempt."""
        self._reconnection.wait(pause)

    def _version_expired(self, failure: Failure) -> Pause:
        # A first 410 is normal after a long interruption; more of them in a row are a fault.
        self.must_list = True
        self._expired += 1
        pause = self._own(self._backoff.next())
        if self._expired == 1:
            log.debug("relisting", resource=self._resource, reason=str(failure))
        else:
            self._outages.failed(failure, pause.seconds)
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
