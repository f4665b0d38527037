"""Kinds of numbers and durations. Flags have them in Go's notation."""

import contextlib
import math
import re
import struct
from collections.abc import Callable
from typing import cast

from pykubeproxy.config import durations
from pykubeproxy.config.kinds import ValueKind, plain_text, same

# A Go literal: 0x1f, 0o17, 017, 0b11, 1_000.
_INTEGER = re.compile(r"[+-]?(0[xX](_?[0-9a-fA-F])+|0[bB](_?[01])+|0[oO]?(_?[0-7])+|0|[1-9](_?[0-9])*)")
_OCTAL = re.compile(r"(?<![0-9a-zA-Z_])0(?=[0-7_])")
_MAX_DIGITS = 100
_FLOAT = re.compile(
    r"[+-]?([0-9](_?[0-9])*\.?([0-9](_?[0-9])*)?|\.[0-9](_?[0-9])*)([eE][+-]?[0-9](_?[0-9])*)?"
)
# client-go reads these as no limit, like negative numbers.
_NO_LIMIT = re.compile("[+-]?(inf|infinity)|nan", re.IGNORECASE)


def integer(low: int, high: int, expected: str = "") -> ValueKind:
    """Return the kind for integers within inclusive bounds."""
    allowed = "must be " + (expected or f"a whole number from {low} to {high}")

    def read(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(allowed)
        return value

    def parse(text: str) -> int:
        if len(text) > _MAX_DIGITS or not _INTEGER.fullmatch(text):
            raise ValueError(allowed)
        # Python reads 017 only as 0o17.
        return read(int(_OCTAL.sub("0o", text), 0))

    return ValueKind("INTEGER", read, parse, same, plain_text)


COUNT = integer(0, 2**31 - 1, "a whole number, 0 or more")


def _number(value: object) -> float:
    with contextlib.suppress(OverflowError):
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            # In Go's float32 a very small number is 0, and a very large one an error.
            (rounded,) = struct.unpack("<f", struct.pack("<f", value))
            return float(value) if rounded else 0.0
    raise ValueError("must be a number up to 3.4e38; a negative one means no limit")


def _parse_number(text: str) -> float:
    if _NO_LIMIT.fullmatch(text):
        return -1.0
    return _number(float(text.replace("_", "")) if _FLOAT.fullmatch(text) else None)


def _plain_number(value: object) -> object:
    """Return integral floats as integers, as Go writes them, up to those of 64 bits."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**63 else value


NUMBER = ValueKind("NUMBER", _number, _parse_number, _plain_number, lambda value: str(_plain_number(value)))


def _duration(parse: Callable[[str], float], nullable: bool = False) -> ValueKind:
    """Return the kind for durations in seconds. As in kube-proxy, a bare number is an error in YAML, even 0."""

    def read(value: object) -> float:
        if not isinstance(value, str):
            raise ValueError(f"must be {durations.EXPECTED}, with its unit")
        return parse(value)

    def text(value: object) -> str:
        return durations.render(cast("float", value))

    return ValueKind("DURATION", read, parse, text, text, nullable=nullable)


def not_negative(text: str) -> float:
    """Return the seconds of a duration that is 0 or more."""
    seconds = durations.parse(text)
    if seconds < 0:
        raise ValueError("must be 0 or more")
    return seconds


DURATION = _duration(not_negative)
OPTIONAL_DURATION = _duration(not_negative, nullable=True)
ANY_DURATION = _duration(durations.parse)
