"""Kinds of setting values: read each from YAML or a flag as Go does, and write it.

All functions raise ValueError with the allowed values ("must be ..."); the caller adds the setting.
"""

import contextlib
import csv
import enum
import math
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import cast

import msgspec

from pykubeproxy.config.model import DetectLocalMode, FeatureGates, ListenAddress
from pykubeproxy.objects import check


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
    if isinstance(value, tuple) and not isinstance(value, ListenAddress):
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


# Durations in Go's format: "1m30s", "1.5h", "300ms", "0". "ms" comes before "m" for the
# pattern. Go accepts both micro signs.
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
_MAX_DURATION = 2**63 - 1  # nanoseconds, about 292 years: an int64 in Go
_LONGEST_DURATION = 100

_DURATION = 'a duration such as "30s", "1m30s" or "0s"'


def parse_duration(text: str) -> float:
    """Return the seconds of a Go duration. Raises ValueError."""
    sign, body = (-1, text[1:]) if text.startswith("-") else (1, text.removeprefix("+"))
    if body == "0":
        return 0.0
    if not body or len(body) > _LONGEST_DURATION:
        raise ValueError(f"must be {_DURATION}")
    nanoseconds, at = 0, 0
    while at < len(body):
        part = _PART.match(body, at)
        if part is None:
            raise ValueError(f"must be {_DURATION}")
        nanoseconds += int(Fraction(part[1]) * _UNITS[part[2]])
        at = part.end()
    if nanoseconds > _MAX_DURATION + (sign < 0):
        raise ValueError("must be a duration of at most 292 years")
    return sign * nanoseconds / 10**9


def duration_text(seconds: float) -> str:
    """Return the text Go prints: 90.0 is "1m30s", 0.3 is "300ms", 3600.0 is "1h0m0s"."""
    nanoseconds = min(round(abs(seconds) * 10**9), _MAX_DURATION)  # a float may round the longest ones up
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


# Numbers. A Go literal: 0x1f, 0o17, 017, 0b11, 1_000.
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
            raise ValueError(f"must be {_DURATION}, with its unit")
        return parse(value)

    def text(value: object) -> str:
        return duration_text(cast("float", value))

    return ValueKind("DURATION", read, parse, text, text, nullable=nullable)


def not_negative(text: str) -> float:
    """Return the seconds of a duration that is 0 or more."""
    seconds = parse_duration(text)
    if seconds < 0:
        raise ValueError("must be 0 or more")
    return seconds


DURATION = _duration(not_negative)
OPTIONAL_DURATION = _duration(not_negative, nullable=True)
ANY_DURATION = _duration(parse_duration)


# Kinds that only klog has, the logging library of Kubernetes.
_DIGITS = re.compile("[0-9]{1,100}")


def _parse_verbosity(text: str) -> object:
    return COUNT.read(int(text) if _DIGITS.fullmatch(text) else None)


VERBOSITY = replace(COUNT, parse=_parse_verbosity)


def _flush_frequency(value: object) -> object:
    """Return a duration in seconds, or an integer of nanoseconds as it is."""
    if isinstance(value, bool) or not isinstance(value, int):
        return DURATION.read(value)
    if not 0 <= value < 2**63:
        raise ValueError(f"must be {_DURATION}")
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


# Addresses, networks and interfaces. IP addresses may have leading zeros, which are decimal, and an IPv4-mapped IPv6
# address is IPv4, as in kube-proxy.

# The node's own addresses, which only the rules know.
PRIMARY = "primary"
# Those of Kubernetes 1.37 (kubernetes/kubernetes#138427); 1.36 has "primary" only, and alone.
_KEYWORDS = {
    PRIMARY: [PRIMARY],
    "localhost": ["127.0.0.0/8", "::1/128"],
    "all": ["0.0.0.0/0", "::/0"],
}


def _ip(text: str) -> str:
    try:
        return check.address(text, "")
    except check.Invalid:
        raise ValueError("must be an IP address") from None


def _cidr(text: str) -> str:
    try:
        return check.cidr(text, "")
    except check.Invalid:
        raise ValueError("must be a CIDR such as 10.244.0.0/16 or fd00:10:244::/56") from None


def cluster_cidrs(items: tuple[str, ...]) -> tuple[str, ...]:
    """Return the CIDRs of mode ClusterCIDR in canonical form."""
    cidrs = tuple(map(_cidr, items))
    if len({":" in cidr for cidr in cidrs}) != len(cidrs):
        raise ValueError("must hold at most one CIDR for each address family")
    return cidrs


def _node_port_addresses(items: tuple[str, ...] | None) -> tuple[str, ...]:
    try:
        return tuple(cidr for item in items or () for cidr in _KEYWORDS.get(item) or (_cidr(item),))
    except ValueError:
        raise ValueError("must be CIDRs such as 10.244.0.0/16, primary, localhost or all") from None


def split_address(text: str) -> tuple[str, int | None]:
    """Return IP and port of "IP", "IPv4:port" or "[IPv6]:port"; the port is None if missing. Raises ValueError."""
    match = re.fullmatch(r"(?:\[([^\]]*)\]|([^:\[\]]*)):\+?([0-9]{1,100})", text)
    host, port = (match[1] or match[2] or "", int(match[3])) if match else (text, None)
    if port is not None and not 1 <= port <= 65535:
        raise ValueError("must have a port from 1 to 65535")
    try:
        return _ip(host), port
    except ValueError:
        raise ValueError(
            "must be an IP address, or one with a port such as 0.0.0.0:10256 or [::]:10256"
        ) from None


def _address(text: str) -> ListenAddress | None:
    host, port = split_address(text) if text else ("", 0)
    return ListenAddress(host, port or 0) if host else None


def interface(mode: DetectLocalMode, longest: int) -> Callable[[str], str]:
    """Return a check for the interface name that a mode requires, of at most `longest` bytes.

    Interface names have up to 15 bytes; a prefix has 14, since iptables appends "+". A final "+" and quotes are rejected
    because the name becomes part of a rule.
    """

    def check(text: str) -> str:
        if not text:
            raise ValueError(f"must name an interface in mode {mode}")
        usual = re.fullmatch(r"[!#-&(-.0-9;-\[\]-~]*", text) and text not in (".", "..")
        if not usual or len(text) > longest or text.endswith("+"):
            raise ValueError(
                f'must be an interface name of at most {longest} characters, without a "+" at its end'
            )
        return text

    return check


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _read_cluster_cidrs(value: object) -> tuple[str, ...]:
    text = string(value)
    return _split(text) if text else ()


IP = of_text("IP", effective=_ip)
ADDRESS = of_text("IP:PORT", effective=_address)
# Kept as given: only mode ClusterCIDR checks them. kube-proxy reads an empty flag as one invalid CIDR.
CLUSTER_CIDRS = ValueKind("CIDR[,CIDR]", _read_cluster_cidrs, _split, plain_text, plain_text)
NODE_PORT_ADDRESSES = list_of("CIDR,...|primary|localhost|all", _node_port_addresses)
TEXTS = list_of("TEXT,...")
