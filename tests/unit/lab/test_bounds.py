"""The bounds of a random count."""

import math

import pytest

from pykubeproxy.lab.scenarios.scenario import FALSE_ALARM, bounds


def probability_outside(tries: int, probability: float, low: int, high: int) -> float:
    """The probability of a count below low or above high."""
    return sum(
        math.comb(tries, count) * probability**count * (1 - probability) ** (tries - count)
        for count in range(tries + 1)
        if not low <= count <= high
    )


@pytest.mark.parametrize("tries", [20, 100, 300, 600])
@pytest.mark.parametrize("probability", [1 / 3, 1 / 2, 2 / 3])
def test_bounds_are_as_wide_as_needed(tries: int, probability: float) -> None:
    """The false alarm rate is at most as stated, and narrower bounds would exceed it."""
    low, high = bounds(tries, probability)
    assert probability_outside(tries, probability, low, high) <= FALSE_ALARM
    assert probability_outside(tries, probability, low + 1, high - 1) > FALSE_ALARM


def test_wrong_share_is_outside() -> None:
    """Of 600 connections to three pods, a half or a quarter for one of them is outside."""
    low, high = bounds(600, 1 / 3)
    assert 150 > low > 140
    assert 300 > high > 250


@pytest.mark.parametrize(("probability", "count"), [(0.0, 0), (1.0, 50)])
def test_certain_outcome_has_one_count(probability: float, count: int) -> None:
    """With probability 0 or 1 only one count is plausible."""
    assert bounds(50, probability) == (count, count)
