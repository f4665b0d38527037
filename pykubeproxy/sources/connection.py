"""The connection state of one watch: when to retry, whether to list first, and what to log."""

import math
import time
from collections.abc import Iterator

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

    A server sends a bookmark about once a minute, so silence for `idle`, two missed ones, means that it is gone. After
    `quiet` seconds without an event, an outage begins to count.
    """

    idle: float = 150.0
    quiet: float = 75.0
    answer: float = 60.0  # silence within a list
    list: float = 600.0  # all pages of a list together
    watch: tuple[int, int] = (300, 600)  # bounds of timeoutSeconds
    steady: float = 1.0  # a watch open for this long works
    first_pause: float = 1.0  # ceiling of the first random pause after a failure
    longest_pause: float = 30.0


class ConnectionState:
    """Decide after each watch request when to send the next one and whether to list first.

    A watch that was open for `timing.steady` seconds or delivered an event counts as a success.
    """

    def __init__(self, resource: str, reconnection: Reconnection, timing: Timing, contact: Contact) -> None:
        self.must_list = True
        self._outages = OutageLog(resource, timing.quiet, contact)
        self._resource, self._reconnection, self._timing = resource, reconnection, timing
        # For failures of this resource only.
        self._backoff = Backoff(timing.first_pause, timing.longest_pause)
        self._persistent = 0  # persistent failures in a row
        self._expired = 0  # 410s in a row
        self._opened: float | None = None
        self._delivered = False

    def outage(self) -> Outage | None:
        """Return the current outage; any thread may call it."""
        open_again = not self._persistent and self._open_for() >= self._timing.steady
        return self._outages.outage(open_again=open_again)

    def connecting(self) -> None:
        """Note that a request is about to be sent."""
        self._opened, self._delivered = None, False

    def opened(self) -> None:
        """Note that the server answered the watch."""
        self._opened = time.monotonic()
        self._outages.heard()
        self._reconnection.opened()

    def listing(self, body: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the pieces of a list and note their arrival."""
        for piece in body:
            self._outages.heard()
            yield piece

    def watching(self, body: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the pieces of a watch. Raises Failure if they contain no event for too long."""
        for piece in body:
            if self._outages.silence() > self._timing.idle:
                raise Failure("no event from the API server for too long", persistent=True)
            yield piece

    def heard(self) -> None:
        """Note an event of the watch, even one that changes nothing."""
        self._outages.heard()

    def delivered(self) -> None:
        """Note that the watch delivered an event."""
        self._delivered, self._persistent = True, 0
        self._outages.recovered()

    def ended(self, seconds: float) -> Pause:
        """Note that the server ended a watch of `seconds`; return the pause before the next attempt."""
        if not self._is_steady():
            return self.failed(Failure("the API server ends the watch at once", persistent=True))
        self._backoff.reset()
        self._persistent = self._expired = 0
        self._outages.recovered()
        if self._open_for() < seconds - self._timing.steady:
            # A server that stops ends the watches of all agents.
            return self._reconnection.failed(time.monotonic())
        return self._own(self._rest())

    def failed(self, failure: Failure) -> Pause:
        """Note a failure; return the pause before the next attempt."""
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
        if self._expired == 1:
            log.debug("relisting", resource=self._resource, reason=str(failure))
            return self._own(0.0)
        pause = self._own(self._backoff.next())
        self._outages.failed(failure, pause.seconds)
        return pause

    @staticmethod
    def _own(seconds: float) -> Pause:
        """Return a pause that other watches do not end."""
        return Pause(seconds, seconds, 0)

    def _is_steady(self) -> bool:
        return self._delivered or self._open_for() >= self._timing.steady

    def _open_for(self) -> float:
        opened = self._opened  # read once: another thread may ask for the outage
        return time.monotonic() - opened if opened is not None else 0.0

    def _rest(self) -> float:
        """Return the rest of `steady` seconds since the watch was opened, to prevent a hot loop."""
        return max(0.0, self._timing.steady - self._open_for()) if self._opened is not None else 0.0
