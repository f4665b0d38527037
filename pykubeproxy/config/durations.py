"""Durations in Go's format: "1m30s", "1.5h", "300ms", "0"."""

import re
from fractions import Fraction

# "ms" before "m" for the pattern. Go accepts both micro signs.
_UNITS = {
    "ns": 1,
    "us": 10**3,
    "\u00b5s": 10**3,
    "\u03bcs": 10**3,
    "ms": 10**6,
    "s": 10**9,
    "m": 60 * 10**9,
    "h": 3600 * 10**9,
}
_PART = re.compile(rf"([0-9]+\.?[0-9]*|\.[0-9]+)({'|'.join(_UNITS)})")
_MAX = 2**63 - 1  # nanoseconds, about 292 years: an int64 in Go
_MAX_CHARACTERS = 100

EXPECTED = 'a duration such as "30s", "1m30s" or "0s"'


def parse(text: str) -> float:
    """Return the seconds of a Go duration. Raises ValueError."""
    sign, body = (-1, text[1:]) if text.startswith("-") else (1, text.removeprefix("+"))
    if body == "0":
        return 0.0
    if not body or len(body) > _MAX_CHARACTERS:
        raise ValueError(f"must be {EXPECTED}")
    nanoseconds, at = 0, 0
    while at < len(body):
        part = _PART.match(body, at)
        if part is None:
            raise ValueError(f"must be {EXPECTED}")
        nanoseconds += int(Fraction(part[1]) * _UNITS[part[2]])
        at = part.end()
    if nanoseconds > _MAX + (sign < 0):
        raise ValueError("must be a duration of at most 292 years")
    return sign * nanoseconds / 10**9


def render(seconds: float) -> str:
    """Return the text Go prints: 90.0 is "1m30s", 0.3 is "300ms", 3600.0 is "1h0m0s"."""
    nanoseconds = min(round(abs(seconds) * 10**9), _MAX)  # a float may round the longest ones up
    sign = "-" if seconds < 0 and nanoseconds else ""
    if nanoseconds == 0:
        return "0s"
    for unit in ("ns", "\u00b5s", "ms"):
        if nanoseconds < _UNITS[unit] * 1000:
            return sign + _decimal(nanoseconds, _UNITS[unit]) + unit
    minutes, rest = divmod(nanoseconds, _UNITS["m"])
    hours, minutes = divmod(minutes, 60)
    text = _decimal(rest, _UNITS["s"]) + "s"
    if hours or minutes:
        text = f"{minutes}m{text}"
    return sign + (f"{hours}h{text}" if hours else text)


def _decimal(nanoseconds: int, unit: int) -> str:
    whole, rest = divmod(nanoseconds, unit)
    fraction = f"{rest:0{len(str(unit)) - 1}d}".rstrip("0") if rest else ""
    return f"{whole}.{fraction}" if fraction else str(whole)
