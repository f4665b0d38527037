"""Run watches in threads and keep their state, in place of the agent."""

import ctypes
import threading
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from pykubeproxy.objects import Deleted, Event, Key, Kind, Listed, Object, Updated
from pykubeproxy.sources import Watch
from tests.fakes.waiting import eventually

State = dict[Kind, dict[Key, Object]]


class Follower:
    """Run watches in threads and keep their state; a context manager.

    On exit no watch may have failed. Watches never end, so each thread gets a SystemExit after its current wait.
    """

    def __init__(self, watches: Iterable[Watch]) -> None:
        self.watches = list(watches)
        self.events: list[Event] = []
        self.state: State = {}
        self.errors: list[BaseException] = []
        self._lock = threading.Lock()
        self._stopped = False
        self._threads = [
            threading.Thread(target=self._run, args=(it,), name=it.name, daemon=True) for it in self.watches
        ]

    def _run(self, watch: Watch) -> None:
        try:
            watch.run(self._emit)
        except SystemExit:
            pass
        except BaseException as error:
            self.errors.append(error)

    def _emit(self, event: Event) -> None:
        with self._lock:
            if self._stopped:
                raise SystemExit
            self.events.append(event)
            match event:
                case Listed():
                    self.state[event.kind] = {it.key: it for it in event.objects}
                case Updated():
                    kind = Kind(type(event.object).__name__)
                    self.state[kind][event.object.key] = event.object
                case Deleted():
                    self.state[event.kind].pop(event.key, None) if event.too_large else self.state[
                        event.kind
                    ].pop(event.key)

    def names(self, kind: Kind = Kind.SERVICE) -> set[str]:
        """Return the names of the objects of a kind."""
        with self._lock:
            return {key.name for key in self.state.get(kind, {})}

    def sees(self, *names: str, kind: Kind = Kind.SERVICE) -> None:
        """Wait for exactly these objects."""
        eventually(lambda: kind in self.state and self.names(kind) == set(names))

    def lists(self, kind: Kind = Kind.SERVICE) -> int:
        """Return the number of complete lists of a kind."""
        return sum(isinstance(it, Listed) and it.kind is kind for it in self.events)

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped = True
        for thread in self._threads:
            raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
            raise_in(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
        if error is None:
            assert not self.errors
