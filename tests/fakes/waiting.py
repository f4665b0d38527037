"""Wait for what other threads and processes do."""

import time
import traceback
from collections.abc import Callable

import pytest

# Seconds after which a wait fails: long enough for a machine with a load of 20.
PATIENCE = 180.0


def eventually(condition: Callable[[], object]) -> None:
    """Wait for the condition; fail the test after PATIENCE seconds, with the line of the caller.

    Pause as long as a check takes: many checks run commands, and other tests need the processor too.
    """
    deadline = time.monotonic() + PATIENCE
    while True:
        begun = time.monotonic()
        if condition():
            return
        now = time.monotonic()
        if now > deadline:
            caller = traceback.extract_stack(limit=2)[0]
            pytest.fail(f"not true after {PATIENCE:.0f} s: {caller.line}")
        time.sleep(max(0.005, now - begun))
