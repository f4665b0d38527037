"""The world of the sources: a clock, and the log lines."""

import random
import time
from collections.abc import Iterator, MutableMapping
from typing import Any

import pytest
from structlog.testing import capture_logs


@pytest.fixture
def logged() -> Iterator[list[MutableMapping[str, Any]]]:
    """The log lines of the test."""
    with capture_logs() as lines:
        yield lines


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of the monotonic clock."""
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    return clock


@pytest.fixture
def no_jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pause is as long as its ceiling."""
    monkeypatch.setattr(random, "uniform", lambda low, high: high)
