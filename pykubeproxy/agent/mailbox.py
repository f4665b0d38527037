"""What the threads of the agent tell the one that owns all state."""

import queue
from typing import Any

import msgspec

from pykubeproxy.agent.observe.query import Query
from pykubeproxy.config import Config
from pykubeproxy.kernel import ExternalWrite
from pykubeproxy.objects import Event


class Stop(msgspec.Struct, frozen=True):
    """End the process, leaving the rules in place. `code` is its exit status, `reason` goes to the log."""

    code: int
    reason: str


class Reconfigured(msgspec.Struct, frozen=True):
    """Go on with another configuration."""

    config: Config


class AddressesChanged(msgspec.Struct, frozen=True):
    """Addresses of this node came or went."""


Message = Event | ExternalWrite | AddressesChanged | Reconfigured | Query[Any] | Stop
# Waits are cut into pieces: lock waits longer than the platform's limit raise OverflowError.
_LONGEST_WAIT = 3600.0


class Mailbox:
    """A queue that may be put to from any thread and from signal handlers, emptied in one go by its owner."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def put(self, message: Message) -> None:
        self._queue.put(message)

    def take(self, seconds: float) -> list[Message]:
        """All messages that are there; if there are none, wait for up to `seconds` (may be infinite) for one."""
        messages: list[Message] = []
        try:
            messages.append(self._queue.get(timeout=min(max(seconds, 0.0), _LONGEST_WAIT)))
            while True:
                messages.append(self._queue.get_nowait())
        except queue.Empty:
            return messages
