"""Kinds of setting values: read each from YAML or a flag, and write it.

All functions raise ValueError with the allowed values ("must be ..."); the caller adds the setting.
"""

import enum
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import msgspec

from pykubeproxy.config import durations
from pykubeproxy.config.model import Address, FeatureGates


@dataclass(frozen=True, slots=True)
class ValueKind:
    """A kind of value.

    name: the metavar in help texts. read: from YAML. parse: from a flag's text. plain: to JSON. text: to a flag's text.
    repeatable: whether repeated flags add to a list.
    """

    name: str
    read: Callable[[object], object]
    parse: Callable[[str], object]
    plain: Callable[[object], object]
    text: Callable[[object], str]
    repeatable: bool = False


def _same(value: object) -> object:
    return value


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple) and not isinstance(value, Address):
        return ",".join(map(str, value))
    return "" if value is None else str(value)


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("must be a string (put quotes around it)")
    return value


def of_text(name: str, parse: Callable[[str], object]) -> ValueKind:
    """Return a kind that is text in YAML and in a flag; `parse` returns the value."""
    return ValueKind(name, lambda value: parse(_string(value)), parse, _text, _text)


STRING = of_text("TEXT", _string)


def choice(words: type[enum.StrEnum]) -> ValueKind:
    """Return the kind for the values of an enumeration."""

    def parse(text: str) -> enum.StrEnum:
        if text not in [*words]:
            raise ValueError(f"must be {' or '.join(words)}")
        return words(text)

    return of_text("|".join(words), parse)


_BOOLS = {
    **dict.fromkeys(("1", "t", "T", "true", "TRUE", "True"), True),
    **dict.fromkeys(("0", "f", "F", "false", "FALSE", "False"), False),
}


def _bool(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _parse_bool(text: str) -> bool:
    return _bool(_BOOLS.get(text))


BOOL = ValueKind("true|false", _bool, _parse_bool, _same, _text)

_INTEGER = re.compile(r"[+-]?(0[xX][0-9a-fA-F]{1,16}|[0-9]{1,19})")


def integer(low: int, high: int, expected: str = "") -> ValueKind:
    """Return the kind for integers within inclusive bounds."""
    allowed = "must be " + (expected or f"a whole number from {low} to {high}")

    def read(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(allowed)
        return value

    def parse(text: str) -> int:
        if not _INTEGER.fullmatch(text):
            raise ValueError(allowed)
        return read(int(text, 16 if "x" in text.lower() else 10))

    return ValueKind("INTEGER", read, parse, _same, _text)


COUNT = integer(0, 2**31 - 1, "a whole number, 0 or more")

_FLOAT = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**31:
        raise ValueError("must be a number, 0 or more")
    return float(value)


def _parse_number(text: str) -> float:
    return _number(float(text) if _FLOAT.fullmatch(text) else None)


def _plain_number(value: object) -> object:
    """Return integral floats as integers, as Go writes them."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


NUMBER = ValueKind("NUMBER", _number, _parse_number, _plain_number, lambda value: str(_plain_number(value)))


def _duration(nanoseconds: bool = False) -> ValueKind:
    """Return the kind for durations in seconds, 0 or more; `nanoseconds` permits a bare number of them in YAML.

    kube-proxy accepts a number only for logging.flushFrequency, in nanoseconds. Here all durations accept the number 0.
    """
    allowed = f"must be {durations.EXPECTED}"

    def parse(text: str) -> float:
        seconds = durations.parse(text)
        if seconds < 0:
            raise ValueError("must be 0 or more")
        return seconds

    def read(value: object) -> float:
        if isinstance(value, str):
            return parse(value)
        if isinstance(value, bool) or not isinstance(value, int) or (value and not nanoseconds):
            raise ValueError(f"{allowed}, with its unit")
        if not 0 <= value < 2**63:
            raise ValueError(allowed)
        return value / 10**9

    def text(value: object) -> str:
        return durations.render(cast("float", value))

    return ValueKind("DURATION", read, parse, text, text)


DURATION = _duration()
DURATION_OR_NANOSECONDS = _duration(nanoseconds=True)


def _items(text: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in text.split(",")) if text else ()


def list_of(name: str, check: Callable[[tuple[str, ...]], tuple[str, ...]]) -> ValueKind:
    """Return the kind for a list of texts, comma-separated in a flag, and null in JSON if empty, like Go's nil slice."""

    def read(value: object) -> tuple[str, ...]:
        if not isinstance(value, list | tuple):
            raise ValueError("must be a list")
        return check(tuple(map(_string, value)))

    def plain(value: object) -> object:
        return [*cast("tuple[str, ...]", value)] or None

    return ValueKind(
        name,
        read,
        lambda text: check(_items(text)),
        plain,
        lambda value: f"[{_text(value)}]",
        repeatable=True,
    )


def joined(name: str, check: Callable[[tuple[str, ...]], tuple[str, ...]]) -> ValueKind:
    """Return the kind for comma-separated texts, in YAML and in a flag."""
    return of_text(name, lambda text: check(_items(text)))


def _gates(value: object) -> FeatureGates:
    if not isinstance(value, Mapping) or not all(isinstance(item, bool) for item in value.values()):
        raise ValueError("must map each gate's name to true or false")
    return FeatureGates(tuple(sorted((str(name), bool(on)) for name, on in value.items())))


def _parse_gates(text: str) -> FeatureGates:
    gates: dict[str, bool] = {}
    for item in filter(None, _items(text)):
        name, equals, value = item.partition("=")
        if not name or not equals:
            raise ValueError("must be a list such as A=true,B=false")
        gates[name.strip()] = _parse_bool(value.strip())
    return _gates(gates)


def _plain_gates(value: object) -> object:
    return dict(cast("FeatureGates", value).gates)


GATES = ValueKind("NAME=true|false", _gates, _parse_gates, _plain_gates, _text, repeatable=True)


def _quantity(text: str) -> str:
    if not re.fullmatch(r"[0-9]{1,18}(\.[0-9]{1,9})?([KMGTPE]i|[kMGTPE])?", text):
        raise ValueError('must be a quantity such as "0" or "64Ki"')
    return text


def _read_quantity(value: object) -> str:
    return _quantity(str(value) if isinstance(value, int) and 0 <= value < 10**18 else _string(value))


QUANTITY = ValueKind("QUANTITY", _read_quantity, _quantity, _same, _text)


class _Verbosity(msgspec.Struct):
    filePattern: str  # noqa: N815
    verbosity: int


def _vmodule_item(text: str) -> str:
    pattern, _, verbosity = text.partition("=")
    if not pattern or not re.fullmatch("[0-9]{1,9}", verbosity):
        raise ValueError("must be a list such as PATTERN=4,OTHER=2")
    return text


def _read_vmodule(value: object) -> tuple[str, ...]:
    try:
        items = msgspec.convert(value, list[_Verbosity])
    except ValueError:
        raise ValueError("must be a list of mappings with filePattern and verbosity") from None
    return tuple(_vmodule_item(f"{item.filePattern}={COUNT.read(item.verbosity)}") for item in items)


def _parse_vmodule(text: str) -> tuple[str, ...]:
    return tuple(map(_vmodule_item, _items(text)))


def _plain_vmodule(value: object) -> object:
    pairs = (item.rpartition("=") for item in cast("tuple[str, ...]", value))
    return [{"filePattern": pattern, "verbosity": int(verbosity)} for pattern, _, verbosity in pairs] or None


VMODULE = ValueKind("PATTERN=N", _read_vmodule, _parse_vmodule, _plain_vmodule, _text)


def flag_text(kind: ValueKind, raw: object) -> str:
    """Return the text of a flag's value. Of a repeated flag, join all values if the kind allows it, or return the last."""
    if isinstance(raw, bool):
        return "true" if raw else "false"
    if isinstance(raw, list | tuple):
        texts = [str(item) for item in raw]
        return ",".join(filter(None, texts)) if kind.repeatable else texts[-1]
    return str(raw)
