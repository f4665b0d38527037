"""Fixtures and hooks for all tests."""

import os
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import settings

# Examples have no deadline; in CI they are the same every time.
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
def restore_structlog() -> Iterator[None]:
    """Restore the structlog configuration after each test."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)
