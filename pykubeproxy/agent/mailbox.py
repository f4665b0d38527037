"""The messages that other threads send to the reconcile loop."""

import queue
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
    """A queue of messages. Any thread or signal handler may call `put`; only the reconcile loop calls `take`."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def put(self, message: Message) -> None:
        self._queue.put(message)

    def take(self, seconds: float) -> list[Message]:
        """Return all messages; if there are none, wait up to `seconds` (may be infinite) for one."""
        messages: list[Message] = []
        try:
            messages.append(self._queue.get(timeout=min(max(seconds, 0.0), _LONGEST_WAIT)))
            while True:
                messages.append(self._queue.get_nowait())
        except queue.Empty:
            return messages
