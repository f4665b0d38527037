"""Validate single values and lists of them, and return them in canonical form.

Each function that checks one value raises Invalid with a short reason; `field` names the value in that reason.
"""

import re
from collections.abc import Callable, Iterable
from socket import AF_INET, AF_INET6, inet_ntop, inet_pton
from typing import TypeVar

from pykubeproxy.objects.values import Family, Protocol, RejectedValue, family_of

# The longest name of an object, and the longest value of a label.
LONGEST_NAME, LONGEST_VALUE = 253, 63
_LABEL = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")
# libc rejects those of IPv4 octets, and groups of more than four digits.
_LEADING_ZEROS = re.compile(r"(?<![0-9a-fA-F])0+(?=[0-9a-fA-F])")
# All characters of names, values and keys of labels.
_NAME = re.compile(r"[-./_a-zA-Z0-9]*")
_SUBDOMAIN = re.compile(r"[a-z0-9](?:[-.a-z0-9]{0,251}[a-z0-9])?")
# Match the start of a canonical address, or all of it.
_SPECIAL = re.compile(
    r"(?P<unspecified>0\.0\.0\.0$|::$)"
    r"|(?P<loopback>127\.|::1$)"
    r"|(?P<local>169\.254\.|fe[89ab][0-9a-f]:)"
    r"|(?P<multicast>2(?:2[4-9]|3[0-9])\.|ff[0-9a-f]{2}:)"
    r"|(?P<broadcast>255\.255\.255\.255$)"
)
_OCTET = r"(?:[1-9]?[0-9]|1[0-9][0-9]|2[0-4][0-9]|25[0-5])"
_IPV4 = re.compile(r"\.".join([_OCTET] * 4))
_ORDINARY = re.compile(f"(?!{_SPECIAL.pattern}){_IPV4.pattern}")
_PREFIX = re.compile("0*[0-9]{1,3}")
# How the 16 bytes of an IPv4-mapped IPv6 address begin.
_MAPPED = bytes(10) + b"\xff\xff"
_SPECIAL_TYPES = {
    "unspecified": "the unspecified address",
    "loopback": "a loopback address",
    "local": "a link-local address",
    "multicast": "a multicast address",
    "broadcast": "the broadcast address",
}


class Invalid(ValueError):
    """A field has an invalid value; str() is one line. `reason`, e.g. "not an IP address"."""

    def __init__(self, field: str, value: str | int, reason: str) -> None:
        super().__init__(f"{field} is {value!r}, {reason}")
        self.field = field
        self.value = value
        self.reason = reason


def label(text: str, field: str) -> str:
    """Check a DNS label: at most 63 of a-z, 0-9 and '-'. Three labels fit an iptables comment of 255 characters."""
    if not _LABEL.fullmatch(text):
        raise Invalid(field, text, "not a DNS label")
    return text


def subdomain(text: str, field: str) -> str:
    """Check a DNS subdomain name: at most 253 of a-z, 0-9, '-' and '.'."""
    if not _SUBDOMAIN.fullmatch(text):
        raise Invalid(field, text, "not a DNS subdomain name")
    return text


def optional_name(text: str | None, longest: int = LONGEST_NAME) -> str:
    """Return an optional name; "" if it is missing, too long, or has characters that no name has, such as spaces."""
    return text if text and len(text) <= longest and _NAME.fullmatch(text) else ""


def port(number: int | None, field: str) -> int:
    """Check a port from 1 to 65535. Return 0 for None and 0, which both mean unset."""
    if number is None or 0 <= number <= 65535:
        return number or 0
    raise Invalid(field, number, "not a port from 1 to 65535")


def protocol(text: str | None, field: str) -> Protocol:
    """Return a protocol, TCP if missing."""
    try:
        return Protocol(text or "TCP")
    except ValueError:
        raise Invalid(field, text or "", "not TCP, UDP or SCTP") from None


def address(text: str, field: str) -> str:
    """Return an IP address in canonical form.

    As Kubernetes' ParseIPSloppy does, drop leading zeros of IPv4 octets, and return an IPv4-mapped IPv6 address as IPv4.
    """
    if _IPV4.fullmatch(text):
        return text
    packed = _packed(text)
    if not packed:
        zone = "%" in text
        raise Invalid(field, text, "with a zone, which rules cannot match" if zone else "not an IP address")
    return _text(packed[12:] if packed.startswith(_MAPPED) else packed)


def _packed(text: str) -> bytes:
    """Return the bytes of an address, none if it is invalid.

    A Service may have a hundred thousand addresses and networks, for which the module ipaddress takes a second.
    """
    family = AF_INET6 if ":" in text else AF_INET
    try:
        return inet_pton(family, _LEADING_ZEROS.sub("", text))
    except (OSError, ValueError):
        return b""


def _text(packed: bytes) -> str:
    text = inet_ntop(AF_INET6 if len(packed) > 4 else AF_INET, packed)
    if len(packed) > 4 and "." in text:  # libc ends some IPv6 addresses like IPv4
        high, low = (int.from_bytes(packed[at : at + 2], "big") for at in (12, 14))
        return f"{text.rpartition(':')[0]}:{high:x}:{low:x}"
    return text


def servable(text: str, field: str, *, family: Family | None = None, reject_link_local: bool = False) -> str:
    """Return an IP address that the proxy may serve in canonical form, of one family if given.

    Rules for 127.0.0.1 or 0.0.0.0 would redirect connections of the node itself. `reject_link_local` applies the API
    server's rules for externalIPs and EndpointSlices. Multicast and broadcast addresses are always rejected.
    """
    if _ORDINARY.fullmatch(text) and (family is None or family_of(text) is family):
        return text
    canonical = address_of(family, text, field) if family else address(text, field)
    if (match := _SPECIAL.match(canonical)) and (reject_link_local or not match["local"]):
        raise Invalid(field, canonical, _SPECIAL_TYPES[match.lastgroup or ""])
    return canonical


def address_of(family: Family, text: str, field: str) -> str:
    """Return an IP address of one family in canonical form."""
    canonical = address(text, field)
    if family_of(canonical) is not family:
        raise Invalid(field, text, f"not an {family.value} address")
    return canonical


def cidr(text: str, field: str) -> str:
    """Return a network in canonical form: host bits cleared, one of IPv4-mapped addresses as IPv4."""
    host, _, prefix = text.partition("/")
    if _PREFIX.fullmatch(prefix) and (packed := _packed(host)):
        length = int(prefix[-3:])
        if (rest := 8 * len(packed) - length) >= 0:
            network = (int.from_bytes(packed, "big") >> rest << rest).to_bytes(len(packed), "big")
            if network.startswith(_MAPPED) and length >= 96:
                network, length = network[12:], length - 96
            return f"{_text(network)}/{length}"
    raise Invalid(field, text, "not a network such as 10.0.0.0/8")


_LONGEST_VALUE = 160
# Keep this many invalid entries of a list: a list may have a hundred thousand.
_MOST_REJECTED = 100

_In = TypeVar("_In")
_Out = TypeVar("_Out")


def accepted(
    field: str,
    entries: Iterable[tuple[int, _In]],
    read: Callable[[_In], _Out],
    rejected: list[RejectedValue],
    skipped: str = "it",
) -> tuple[_Out, ...]:
    """Return what `read` makes of each numbered entry of a list; add the first hundred invalid ones to `rejected`.

    `field` is the path of the list, such as "spec.ports". `read` raises Invalid with the path below the entry, such as
    ".port"; `skipped` says what is skipped then.
    """
    found = []
    first, more = len(rejected), 0
    for number, entry in entries:
        try:
            found.append(read(entry))
        except Invalid as error:
            if len(rejected) - first < _MOST_REJECTED:
                rejected.append(_rejected(f"{field}[{number}]{error.field}", error, skipped))
            else:
                more += 1
    if more:
        last = rejected[-1]
        rejected[-1] = last._replace(reason=f"{last.reason} ({more} more entries are invalid)")
    return tuple(found)


def accepted_or(
    default: _Out, field: str, value: _In, read: Callable[[_In, str], _Out], rejected: list[RejectedValue]
) -> _Out:
    """Return what `read` makes of a value and its field, or the default if the value is invalid."""
    try:
        return read(value, field)
    except Invalid as error:
        rejected.append(_rejected(error.field, error, "it"))
        return default


def _rejected(field: str, error: Invalid, skipped: str) -> RejectedValue:
    value = shortened(error.value, _LONGEST_VALUE) if isinstance(error.value, str) else error.value
    return RejectedValue(field, value, error.reason, skipped)


def shortened(text: str, longest: int) -> str:
    """Cut the middle out of a long text: its end may say what is wrong."""
    return text if len(text) <= longest else f"{text[: longest - 80]} ... {text[-75:]}"
