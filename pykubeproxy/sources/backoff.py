"""How long to wait after a failure, and how much to say about it."""

import random
import time
from collections.abc import Callable

import structlog

from pykubeproxy.sources.watch import Trouble

log = structlog.get_logger()

# The same trouble is logged no more often than this, in seconds.
_SILENCE = 60.0


class Backoff:
    """Pauses that grow twofold from `first` to `longest` seconds, each drawn evenly from 0 to that ("full jitter").

    So that the agents of a whole cluster do not come back to a server all at once.
    """

    def __init__(
        self,
        first: float = 0.2,
        longest: float = 30.0,
        draw: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._first, self._longest, self._draw = first, longest, draw
        self.failures = 0

    def next(self) -> float:
        """Seconds to wait after one more failure."""
        ceiling = min(self._first * 2.0 ** min(self.failures, 32), self._longest)
        self.failures += 1
        return self._draw(0.0, ceiling)

    def reset(self) -> None:
        """Begin anew, after a success."""
        self.failures = 0


class Troubles:
    """Logs failures of one watch: each reason at once, then once a minute; and the end of it."""

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._clock = clock
        self._told: dict[str, float] = {}
        self._present: tuple[float, str] | None = None  # since when, and the last reason

    def failed(self, reason: str, again_in: float) -> None:
        """A try failed; the next one is made in `again_in` seconds."""
        now = self._clock()
        self._present = (self._present[0] if self._present else now, reason)
        self._told = {r: at for r, at in self._told.items() if now - at < _SILENCE}
        if reason not in self._told:
            self._told[reason] = now
            log.warning(f"{self._what} cannot be watched", reason=reason, again_in=f"{again_in:.1f}s")

    def over(self) -> None:
        """It works; a line says so if there was trouble."""
        if trouble := self.present():
            self._present = None
            log.info(f"{self._what} are watched again", after=f"{trouble.seconds:.1f}s")

    def present(self) -> Trouble | None:
        """What has failed and not worked since; for any thread."""
        present = self._present
        return Trouble(self._what, self._clock() - present[0], present[1]) if present else None
