"""Kinds of setting values: read each from YAML or a flag as Go does, and write it.

All functions raise ValueError with the allowed values ("must be ..."); the caller adds the setting.
"""

import csv
import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import cast

from pykubeproxy.config.model import Address, FeatureGates


def same(value: object) -> object:
    """Return the value itself."""
    return value


@dataclass(frozen=True, slots=True)
class ValueKind:
    """A kind of value.

    name: the metavar in help texts. read: from YAML. parse: from a flag's text. plain: to JSON. text: to a flag's text.
    effective: from a value as given to the one in Config. repeatable: whether repeated flags add to a list. textual:
    whether empty text can mean the default. nullable: whether null in YAML means the default.
    """

    name: str
    read: Callable[[object], object]
    parse: Callable[[str], object]
    plain: Callable[[object], object]
    text: Callable[[object], str]
    effective: Callable[..., object] = same
    repeatable: bool = False
    textual: bool = False
    nullable: bool = True


def plain_text(value: object) -> str:
    """Return a value as a flag's text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple) and not isinstance(value, Address):
        return ",".join(map(str, value))
    return "" if value is None else str(value)


def string(value: object) -> str:
    """Return a value from YAML that must be text."""
    if not isinstance(value, str):
        raise ValueError("must be a string (put quotes around it)")
    return value


def of_text(
    name: str, parse: Callable[[str], object] = string, effective: Callable[..., object] = same
) -> ValueKind:
    """Return a kind that is text in YAML and in a flag; `parse` returns the value."""
    return ValueKind(
        name, lambda value: parse(string(value)), parse, plain_text, plain_text, effective, textual=True
    )


STRING = of_text("TEXT")
NAME = of_text("NAME")


def _hostname(text: str) -> str:
    if text and not text.strip():
        raise ValueError("must be a node's name or empty")
    return text.strip().lower()


# As in kube-proxy, a flag is changed at once, a field where it is used.
HOSTNAME = replace(NAME, parse=_hostname, effective=_hostname)


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


BOOL = ValueKind("true|false", _bool, _parse_bool, same, plain_text)


def _items(text: str) -> tuple[str, ...]:
    """Return the items of comma-separated text. As in CSV, quotes protect commas."""
    try:
        return tuple(next(csv.reader([text], strict=True), ()))
    except csv.Error:
        raise ValueError("must be a comma-separated list") from None


def list_of(name: str, effective: Callable[..., object] = same) -> ValueKind:
    """Return the kind for a list of texts, comma-separated in a flag. None is Go's nil slice, null in JSON."""

    def read(value: object) -> tuple[str, ...]:
        if not isinstance(value, list | tuple):
            raise ValueError("must be a list")
        return tuple("" if item is None else string(item) for item in value)

    def plain(value: object) -> object:
        return value if value is None else [*cast("tuple[str, ...]", value)]

    def text(value: object) -> str:
        quoted = (f'"{item}"' if "," in item else item for item in cast("tuple[str, ...]", value or ()))
        return f"[{','.join(quoted)}]"

    return ValueKind(name, read, _items, plain, text, effective, repeatable=True)


def _gates(value: object) -> FeatureGates:
    if not isinstance(value, Mapping) or not all(on is None or isinstance(on, bool) for on in value.values()):
        raise ValueError("must map each gate's name to true or false")
    return FeatureGates(tuple(sorted((str(name), bool(on)) for name, on in value.items())))


def _parse_gates(text: str) -> FeatureGates:
    gates: dict[str, bool] = {}
    for item in filter(None, text.split(",")):
        name, equals, value = item.partition("=")
        if not equals:
            raise ValueError("must be a list such as A=true,B=false")
        gates[name.strip()] = _parse_bool(value.strip())
    return _gates(gates)


def _plain_gates(value: object) -> object:
    return dict(cast("FeatureGates", value).gates)


GATES = ValueKind("NAME=true|false", _gates, _parse_gates, _plain_gates, plain_text, repeatable=True)


def flag_text(kind: ValueKind, raw: object) -> str:
    """Return the text of a flag's value. Of a repeated flag, join all values if the kind allows it, or return the last."""
    if isinstance(raw, bool):
        return "true" if raw else "false"
    if isinstance(raw, list | tuple):
        texts = [str(item) for item in raw]
        return ",".join(filter(None, texts)) if kind.repeatable else texts[-1]
    return str(raw)
