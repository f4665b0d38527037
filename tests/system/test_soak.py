"""A short soak test; `make soak` runs longer."""

import pytest

from tests.soak.soak import new_seed, soak

pytestmark = pytest.mark.root

SECONDS = 6.0


@pytest.mark.parametrize("backend", ["nft", "legacy"])
def test_soak(backend: str) -> None:
    """No connection fails because of the agent, the rules equal a fresh start's, and memory does not grow."""
    assert soak(backend, new_seed(), SECONDS) == []
