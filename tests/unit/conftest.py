"""What unit tests share."""

from collections.abc import Iterator

import pytest

from pykubeproxy.rules import balancing, tree


@pytest.fixture(scope="module")
def small_trees() -> Iterator[None]:
    """A handful of services is enough for dispatch trees, and of endpoints for groups, of more than one level."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree, "LEAF", 1)
        patch.setattr(balancing, "GROUPS_ABOVE", 1)
        yield
