"""A stand-in for the agent: runs watches in threads and keeps the state that their events lead to."""

import threading
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

from pykubeproxy.objects import Deleted, Event, Key, Kind, Listed, Object, Updated
from pykubeproxy.sources import Watch

State = dict[Kind, dict[Key, Object]]


def eventually(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Wait until the condition holds; fails the test if it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass in time"
        time.sleep(0.005)


class Follower:
    """A context manager; on exit all watches must have ended within a second and without an exception."""

    def __init__(self, watches: Iterable[Watch]) -> None:
        self.watches = list(watches)
        self.events: list[Event] = []
        self.state: State = {}
        self.errors: list[BaseException] = []
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(it,), name=it.name) for it in self.watches]

    def _run(self, watch: Watch) -> None:
        try:
            watch.run(self._emit)
        except BaseException as error:
            self.errors.append(error)

    def _emit(self, event: Event) -> None:
        with self._lock:
            self.events.append(event)
            match event:
                case Listed():
                    self.state[event.kind] = {it.key: it for it in event.objects}
                case Updated():
                    kind = Kind(type(event.object).__name__)
                    self.state[kind][event.object.key] = event.object
                case Deleted():
                    del self.state[event.kind][event.key]

    def names(self, kind: Kind = Kind.SERVICE) -> set[str]:
        """The names of the objects of a kind that are there now."""
        with self._lock:
            return {key.name for key in self.state.get(kind, {})}

    def sees(self, *names: str, kind: Kind = Kind.SERVICE, seconds: float = 10.0) -> None:
        """Wait until exactly these objects are there."""
        eventually(lambda: kind in self.state and self.names(kind) == set(names), seconds)

    def lists(self, kind: Kind = Kind.SERVICE) -> int:
        """How many whole lists of a kind have come."""
        return sum(isinstance(it, Listed) and it.kind is kind for it in self.events)

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> float:
        """Stop all watches; the seconds until the last of them has ended."""
        started = time.monotonic()
        for watch in self.watches:
            watch.stop()
        for thread in self._threads:
            thread.join(10)
        return time.monotonic() - started

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        seconds = self.stop()
        if error is None:
            assert seconds < 1.0
            assert not self.errors
