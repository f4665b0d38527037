"""What all tests share: those that need root are skipped by name where there is none."""

import os
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import settings

# How long an example takes is no test's business; in CI the examples are the same every time.
settings.register_profile("project", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("project")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.geteuid() == 0:
        return
    skip = pytest.mark.skip(
        reason="needs root, for network namespaces and iptables: run as root or with sudo"
    )
    for item in items:
        if "root" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """What a command sets up for its own log is not there for the next test."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)
