"""Whether the shares of endpoints over some probes can be chance."""

from collections.abc import Mapping
from math import comb

# A difference is one if chance makes it less often than once in five thousand traces.
_SIGNIFICANT = 0.0002


def unlikely_share(expected: Mapping[str, float], observed: Mapping[str, int]) -> str:
    """Return the endpoint whose number of probes chance does not explain, the most unlikely one; "" if there is none.

    Exact for any number of probes: a binomial test for each endpoint, with Bonferroni's correction for their number.
    """
    number = sum(observed.values())
    chances = {
        name: _chance(observed.get(name, 0), number, share) * len(expected)
        for name, share in expected.items()
    }
    least = min(chances, key=chances.__getitem__, default="")
    return least if chances and chances[least] < _SIGNIFICANT else ""


def _chance(hits: int, number: int, share: float) -> float:
    """Return the probability of so many hits, or of a number as far off in the same direction, doubled for both."""
    if share >= 1:
        return 1.0 if hits == number else 0.0
    far = range(hits + 1) if hits <= number * share else range(hits, number + 1)
    tail = sum(comb(number, one) * share**one * (1 - share) ** (number - one) for one in far)
    return min(1.0, 2 * tail)
