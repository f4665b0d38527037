"""The messages that other threads send to the reconcile loop."""

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from pykubeproxy.agent.observe.query import Query
from pykubeproxy.kernel import ExternalWrite
from pykubeproxy.objects import Event


class Stop(msgspec.Struct, frozen=True):
    """End the process, leaving the rules in place. `code` is its exit status, `reason` goes to the log."""

    code: int
    reason: str


class AddressesChanged(msgspec.Struct, frozen=True):
    """Addresses of this node were added or removed."""


Work = Event | ExternalWrite | AddressesChanged | Query[Any]
Message = Work | Stop
# Python's locks cannot wait longer than a platform limit; the loop wakes up at least this often, in seconds.
_LONGEST_WAIT = 3600.0


class Mailbox:
    """A queue of messages. Any thread may call `put` and `waiting_since`; only the reconcile loop calls `take`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._messages: list[Message] = []
        # When the oldest message arrived, of those that wait and of those that the loop has taken.
        self._arrived = self._taken = math.inf

    def put(self, message: Message) -> None:
        with self._changed:
            self._messages.append(message)
            # A client's query is no change, and the loop answers a query only between two syncs.
            if not isinstance(message, Query):
                self._arrived = min(self._arrived, self._clock())
            self._changed.notify()

    def take(self, seconds: float) -> list[Message]:
        """Return all messages; if there are none, wait up to `seconds` (may be infinite) for one."""
        with self._changed:
            self._changed.wait_for(lambda: self._messages, min(max(seconds, 0.0), _LONGEST_WAIT))
            messages, self._messages = self._messages, []
            self._taken, self._arrived = self._arrived, math.inf
            return messages

    def handled(self) -> None:
        """Note that the loop has handled all messages that it took."""
        with self._changed:
            self._taken = math.inf

    def waiting_since(self) -> float:
        """Return when the oldest message arrived that the loop has not handled yet; infinity if there is none."""
        with self._changed:
            return min(self._taken, self._arrived)
