"""How far a count may stray by chance alone."""

import math

#: How often a scenario may fail although everything is right, for each count that is checked.
FALSE_ALARM = 1e-6


def bounds(tries: int, probability: float, alarm: float = FALSE_ALARM) -> tuple[int, int]:
    """The lowest and highest count that `tries` with this probability may give.

    From the binomial distribution itself: what lies outside has, on either side, a probability of no more
    than alarm / 2.
    """
    chances = [_exactly(count, tries, probability) for count in range(tries + 1)]
    return _first_likely(chances, alarm / 2), tries - _first_likely(chances[::-1], alarm / 2)


def _exactly(count: int, tries: int, probability: float) -> float:
    if probability in (0.0, 1.0):
        return float(count == tries * probability)
    ways = math.lgamma(tries + 1) - math.lgamma(count + 1) - math.lgamma(tries - count + 1)
    return math.exp(ways + count * math.log(probability) + (tries - count) * math.log1p(-probability))


def _first_likely(chances: list[float], alarm: float) -> int:
    below = 0.0
    for count, chance in enumerate(chances):
        below += chance
        if below > alarm:
            return count
    return len(chances) - 1
