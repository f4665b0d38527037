"""The messages that other threads send to the reconcile loop."""

import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import structlog

from pykubeproxy.objects import Deleted, EndpointSlice, Event, Kind, Listed, Service, Updated

if TYPE_CHECKING:  # the mailbox receives events before these are imported
    from pykubeproxy.agent.observe.status import LoopQuery
    from pykubeproxy.kernel import ExternalWrite


class Stop(msgspec.Struct, frozen=True):
    """End the process, leaving the rules in place. `code` is its exit status, `reason` goes to the log."""

    code: int
    reason: str


class AddressesChanged(msgspec.Struct, frozen=True):
    """Addresses of this node were added or removed."""


Change: TypeAlias = "Event | ExternalWrite | AddressesChanged"
Task: TypeAlias = "Change | LoopQuery[Any]"
Message: TypeAlias = "Task | Stop"
# Python's locks cannot wait longer than a platform limit; the loop wakes up at least this often, in seconds.
_LONGEST_WAIT = 3600.0
# The most entries of lists, such as endpoints, that queued events may hold. Most take 250 bytes, none a kilobyte.
_MOST_ENTRIES = 100_000

log = structlog.get_logger()


def log_stop(stop: Stop) -> int:
    """Log why the process ends, and return its exit status."""
    level = log.error if stop.code else log.info
    level("stopping, rules stay in place", reason=stop.reason)
    return stop.code


class Mailbox:
    """A queue of messages. Only the reconcile loop calls `take` and `handled`; any thread may call the other methods.

    A message replaces an equal one, an event the earlier one about its object, a list all events of its kind. So a deleted
    and recreated object is one update; rules depend on no UID.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._messages: dict[object, Message] = {}
        self._entries = 0
        # Arrival of the oldest queued and oldest in-progress message.
        self._arrived = self._taken = math.inf

    def put(self, message: "Change | Stop") -> None:
        """Add a message. While queued events hold too much memory, an event waits, so that the API server sends no more."""
        with self._changed:
            arrived, slot = self._clock(), _slot(message)
            if isinstance(message, Updated | Deleted):
                self._changed.wait_for(lambda: self._has_room(slot, message))
            if isinstance(message, Listed):
                for other in [
                    waiting
                    for waiting in self._messages
                    if isinstance(waiting, tuple) and waiting[0] is message.kind
                ]:
                    self._remove(other)
            earlier = self._remove(slot)
            if isinstance(earlier, Updated) and isinstance(message, Updated):
                message = Updated(message.object, min(earlier.trigger_times(), default=None))
            self._messages[slot] = message
            self._entries += _entries(message)
            self._arrived = min(self._arrived, arrived)
            self._changed.notify_all()

    def _has_room(self, slot: object, message: Message) -> bool:
        others = self._entries - _entries(self._messages.get(slot))
        return not others or others + _entries(message) <= _MOST_ENTRIES

    def _remove(self, slot: object) -> "Message | None":
        message = self._messages.pop(slot, None)
        self._entries -= _entries(message)
        return message

    def ask(self, query: "LoopQuery[Any]") -> None:
        """Add a query, which does not count as waiting: the loop answers it only between two syncs."""
        with self._changed:
            self._messages[query] = query
            self._changed.notify_all()

    def take(self, seconds: float) -> list[Message]:
        """Return all messages; if there are none, wait up to `seconds` (may be infinite) for one."""
        with self._changed:
            self._changed.wait_for(lambda: self._messages, min(max(seconds, 0.0), _LONGEST_WAIT))
            messages = [*self._messages.values()]
            self._messages.clear()
            self._entries = 0
            self._taken, self._arrived = self._arrived, math.inf
            self._changed.notify_all()
            return messages

    def stop(self) -> Stop | None:
        """Return the first Stop among the messages, and leave all of them."""
        with self._changed:
            return next((message for message in self._messages.values() if isinstance(message, Stop)), None)

    def handled(self) -> None:
        """Record that the loop has handled all messages that it took."""
        with self._changed:
            self._taken = math.inf

    def waiting_since(self) -> float:
        """Return when the oldest message arrived that the loop has not handled yet; infinity if there is none."""
        with self._changed:
            return min(self._taken, self._arrived)


def _slot(message: Message) -> object:
    """Return the key of a message in the mailbox: kind and name for an event about an object, else the message itself."""
    match message:
        case Listed(kind):
            return kind, None
        case Updated(object_):
            return Kind(type(object_).__name__), object_.key
        case Deleted(kind, key):
            return kind, key
    return message


def _entries(message: "Message | None") -> int:
    """Return how many entries of lists an event about an object holds, and one for its name."""
    match message:
        case Updated(EndpointSlice() as slice_):
            hints = sum(len(endpoint.zone_hints) + len(endpoint.node_hints) for endpoint in slice_.endpoints)
            return 1 + len(slice_.endpoints) + hints + len(slice_.ports) + len(slice_.rejected)
        case Updated(Service() as service):
            addresses = (
                len(service.external_ips) + len(service.load_balancer_ips) + len(service.source_ranges)
            )
            return 1 + len(service.ports) + addresses + len(service.rejected)
        case Updated() | Deleted():
            return 1
    return 0
