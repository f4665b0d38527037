"""Kinds of values that only klog has, the logging library of Kubernetes."""

import re
from dataclasses import replace
from typing import cast

import msgspec

from pykubeproxy.config import durations
from pykubeproxy.config.kinds import ValueKind, plain_text, same, string
from pykubeproxy.config.numbers import COUNT, DURATION, OPTIONAL_DURATION, not_negative

_DIGITS = re.compile("[0-9]{1,100}")


def _parse_verbosity(text: str) -> object:
    return COUNT.read(int(text) if _DIGITS.fullmatch(text) else None)


VERBOSITY = replace(COUNT, parse=_parse_verbosity)


def _flush_frequency(value: object) -> object:
    """Return a duration in seconds, or an integer of nanoseconds as it is."""
    if isinstance(value, bool) or not isinstance(value, int):
        return DURATION.read(value)
    if not 0 <= value < 2**63:
        raise ValueError(f"must be {durations.EXPECTED}")
    return value


def _plain_flush_frequency(value: object) -> object:
    return value if isinstance(value, int) else DURATION.plain(value)


def _positive(text: str) -> float:
    seconds = not_negative(text)
    if not seconds:
        raise ValueError("must be greater than 0")
    return seconds


FLUSH_FREQUENCY = replace(
    OPTIONAL_DURATION, read=_flush_frequency, parse=_positive, plain=_plain_flush_frequency
)

_QUANTITY = re.compile(
    r"[+-]?([0-9]{1,18}(\.[0-9]{0,9})?|\.[0-9]{1,9})([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]{1,2})?"
)


def _quantity(text: str) -> str:
    if not _QUANTITY.fullmatch(text):
        raise ValueError('must be a quantity such as "0" or "64Ki"')
    return text


def _read_quantity(value: object) -> str:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return _quantity(str(value) if is_number else string(value))


QUANTITY = ValueKind("QUANTITY", _read_quantity, _quantity, same, plain_text)


class _VmoduleItem(msgspec.Struct):
    filePattern: str  # noqa: N815
    verbosity: int = 0


def _vmodule_item(text: str) -> str:
    pattern, _, verbosity = text.partition("=")
    if not pattern or "," in pattern or not _DIGITS.fullmatch(verbosity) or int(verbosity) >= 2**31:
        raise ValueError("must be a list such as PATTERN=4,OTHER=2")
    return text


def _read_vmodule(value: object) -> tuple[str, ...]:
    try:
        items = msgspec.convert(value, list[_VmoduleItem])
    except ValueError:
        raise ValueError("must be a list of mappings with filePattern and verbosity") from None
    return tuple(_vmodule_item(f"{item.filePattern}={COUNT.read(item.verbosity)}") for item in items)


def _parse_vmodule(text: str) -> tuple[str, ...]:
    return tuple(map(_vmodule_item, filter(None, text.split(","))))


def _plain_vmodule(value: object) -> object:
    pairs = (item.rpartition("=") for item in cast("tuple[str, ...]", value))
    return [{"filePattern": pattern, "verbosity": int(verbosity)} for pattern, _, verbosity in pairs] or None


VMODULE = ValueKind("PATTERN=N", _read_vmodule, _parse_vmodule, _plain_vmodule, plain_text, repeatable=True)
