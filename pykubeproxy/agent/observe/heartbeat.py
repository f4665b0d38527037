"""The heartbeat of the reconcile loop, from which other threads see that it hangs."""

import math
import sys
import threading
import time
import traceback
from collections.abc import Callable

import structlog

# How long the loop may take for one step, in seconds. Commands are part of it: one that makes no progress is killed
# after 60 s, and 5 s later the loop no longer waits for its end.
HUNG_AFTER = 90.0
_FRAMES_LOGGED = 8

log = structlog.get_logger()


class Heartbeat:
    """Track since when the loop has been busy with one step. Create it on the loop's thread; any thread may read it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._thread = threading.get_ident()
        self._hung_step = math.inf  # the step last logged as hung
        self._step_started = math.inf

    def progress(self) -> None:
        """Record that a step starts or advances, such as an event, a chunk of rules, or a command."""
        self._step_started = self._clock()

    def idle(self) -> None:
        """Record that the loop waits for messages."""
        self._step_started = math.inf

    def busy_seconds(self) -> float:
        """Return how long the current step has made no progress; 0 while the loop waits for messages."""
        return max(0.0, self._clock() - self._step_started)

    def hung(self) -> bool:
        """Return whether the current step takes too long, so that only a restart helps; log once where it hangs."""
        step, seconds = self._step_started, self.busy_seconds()
        if seconds <= HUNG_AFTER:
            return False
        if step != self._hung_step:
            self._hung_step = step
            log.error("reconcile loop hung", seconds=round(seconds), at=self._position())
        return True

    def _position(self) -> str:
        """Return the innermost calls of the loop, the last one first."""
        frame = sys._current_frames().get(self._thread)
        calls = traceback.extract_stack(frame)[-_FRAMES_LOGGED:] if frame else ()
        return ", ".join(
            f"{it.name} ({it.filename.rpartition('/')[2]}:{it.lineno})" for it in reversed(calls)
        )
