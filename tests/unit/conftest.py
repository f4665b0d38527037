"""Fixtures for unit tests."""

from collections.abc import Iterator

import pytest

from pykubeproxy.rules import dispatch, service


@pytest.fixture(scope="module")
def small_trees() -> Iterator[None]:
    """Lower the thresholds so that few services and endpoints make trees and groups of several levels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "LEAF", 1)
        patch.setattr(dispatch, "PORTS_LEAF", 1)
        patch.setattr(service, "GROUPS_ABOVE", 1)
        yield
