"""The bounds of chance."""

import math

import pytest

from pykubeproxy.lab.scenarios.chance import bounds


def outside(tries: int, probability: float, low: int, high: int) -> float:
    """The probability of a count below low or above high, added up from whole numbers."""
    return sum(
        math.comb(tries, count) * probability**count * (1 - probability) ** (tries - count)
        for count in range(tries + 1)
        if not low <= count <= high
    )


@pytest.mark.parametrize("tries", [20, 100, 300, 600])
@pytest.mark.parametrize("probability", [1 / 3, 1 / 2, 2 / 3])
@pytest.mark.parametrize("alarm", [1e-6, 1e-3])
def test_as_wide_as_needed(tries: int, probability: float, alarm: float) -> None:
    """A count falls outside about as rarely as stated, and the bounds are no wider than that takes."""
    low, high = bounds(tries, probability, alarm)
    assert outside(tries, probability, low, high) <= alarm
    assert outside(tries, probability, low + 1, high - 1) > alarm


def test_a_wrong_share_is_noticed() -> None:
    """Of 600 connections to three pods, a half or a quarter for one of them is no chance."""
    low, high = bounds(600, 1 / 3)
    assert 150 > low > 140
    assert 300 > high > 250


@pytest.mark.parametrize(("probability", "count"), [(0.0, 0), (1.0, 50)])
def test_certain(probability: float, count: int) -> None:
    """What is certain has no room for chance."""
    assert bounds(50, probability) == (count, count)
