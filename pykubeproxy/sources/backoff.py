"""When to try again: exponential backoff with full jitter, for one watch and for all watches of an agent."""

import random
import threading
import time
from typing import NamedTuple


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
