"""The log lines of the sources."""

from collections.abc import Iterator, MutableMapping
from typing import Any

import pytest
from structlog.testing import capture_logs


@pytest.fixture
def logged() -> Iterator[list[MutableMapping[str, Any]]]:
    """The log lines of the test."""
    with capture_logs() as lines:
        yield lines
