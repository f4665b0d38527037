"""The messages that other threads send to the reconcile loop."""

import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import structlog

from pykubeproxy.objects import Event

if TYPE_CHECKING:  # the mailbox receives events before these are imported
    from pykubeproxy.agent.observe.query import Query
    from pykubeproxy.kernel import ExternalWrite


class Stop(msgspec.Struct, frozen=True):
    """End the process, leaving the rules in place. `code` is its exit status, `reason` goes to the log."""

    code: int
    reason: str


class AddressesChanged(msgspec.Struct, frozen=True):
    """Addresses of this node were added or removed."""


Change: TypeAlias = "Event | ExternalWrite | AddressesChanged"
Work: TypeAlias = "Change | Query[Any]"
Message: TypeAlias = "Work | Stop"
# Python's locks cannot wait longer than a platform limit; the loop wakes up at least this often, in seconds.
_LONGEST_WAIT = 3600.0

log = structlog.get_logger()


def log_stop(stop: Stop) -> int:
    """Log why the process ends, and return its exit status."""
    level = log.error if stop.code else log.info
    level("stopping, rules stay in place", reason=stop.reason)
    return stop.code


class Mailbox:
    """A queue of messages. Only the reconcile loop calls `take` and `handled`; any thread may call the other methods."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._messages: list[Message] = []
        # When the oldest message arrived, of those that wait and of those that the loop has taken.
        self._arrived = self._taken = math.inf

    def put(self, message: "Change | Stop") -> None:
        with self._changed:
            self._messages.append(message)
            self._arrived = min(self._arrived, self._clock())
            self._changed.notify()

    def ask(self, query: "Query[Any]") -> None:
        """Add a query, which does not count as waiting: the loop answers it only between two syncs."""
        with self._changed:
            self._messages.append(query)
            self._changed.notify()

    def take(self, seconds: float) -> list[Message]:
        """Return all messages; if there are none, wait up to `seconds` (may be infinite) for one."""
        with self._changed:
            self._changed.wait_for(lambda: self._messages, min(max(seconds, 0.0), _LONGEST_WAIT))
            messages, self._messages = self._messages, []
            self._taken, self._arrived = self._arrived, math.inf
            return messages

    def stop(self) -> Stop | None:
        """Return the first Stop among the messages, and leave all of them."""
        with self._changed:
            return next((message for message in self._messages if isinstance(message, Stop)), None)

    def handled(self) -> None:
        """Note that the loop has handled all messages that it took."""
        with self._changed:
            self._taken = math.inf

    def waiting_since(self) -> float:
        """Return when the oldest message arrived that the loop has not handled yet; infinity if there is none."""
        with self._changed:
            return min(self._taken, self._arrived)
