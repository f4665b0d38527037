"""The soak in short: `make soak` goes on for longer."""

import pytest

from tests.soak.soak import new_seed, soak

pytestmark = pytest.mark.root

SECONDS = 6.0


@pytest.mark.parametrize("backend", ["nft", "legacy"])
def test_soak(backend: str) -> None:
    """No connection fails by our doing, the rules are those of a fresh start, and memory stays; the seed is printed."""
    assert soak(backend, new_seed(), SECONDS) == []
