"""Checks and canonical forms of the values inside objects; each raises ValueError with a short reason."""

import ipaddress
import re

from pykubeproxy.objects.values import Family, Protocol

_LABEL = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")
_LEADING_ZEROS = re.compile(r"(?<![0-9])0+(?=[0-9])")
_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_CANONICAL_IPV4 = re.compile(rf"{_OCTET}(?:\.{_OCTET}){{3}}")
_SUBDOMAIN = re.compile(r"[a-z0-9](?:[-.a-z0-9]{0,251}[a-z0-9])?")
# The beginnings, or the whole, of addresses in canonical form.
_SPECIAL = re.compile(
    r"(?P<unspecified>0\.0\.0\.0$|::$)"
    r"|(?P<loopback>127\.|::1$)"
    r"|(?P<linklocal>169\.254\.|fe[89ab][0-9a-f]:)"
    r"|(?P<multicast>2(?:2[4-9]|3[0-9])\.|ff[0-9a-f]{2}:)"
    r"|(?P<broadcast>255\.255\.255\.255$)"
)


def label(text: str, what: str) -> str:
    """A DNS label: at most 63 of a-z, 0-9 and '-'; so a comment made of three of them fits iptables' 255 characters."""
    if not _LABEL.fullmatch(text):
        raise ValueError(f"{what} is {text!r}, not a DNS label")
    return text


def subdomain(text: str, what: str) -> str:
    """A DNS subdomain name: at most 253 of a-z, 0-9, '-' and '.'."""
    if not _SUBDOMAIN.fullmatch(text):
        raise ValueError(f"{what} is {text!r}, not a DNS subdomain name")
    return text


def port(number: int | None, what: str) -> int:
    """A port from 1 to 65535; None and 0 both mean that there is none, and give 0."""
    if number is None or 0 <= number <= 65535:
        return number or 0
    raise ValueError(f"{what} is {number}, not a port from 1 to 65535")


def protocol(text: str | None, what: str) -> Protocol:
    """A protocol; one that is missing is TCP."""
    try:
        return Protocol(text or "TCP")
    except ValueError:
        raise ValueError(f"{what} is {text!r}, not TCP, UDP or SCTP") from None


def address(text: str, what: str) -> str:
    """An IP address in canonical form.

    As in Go's net package, leading zeros of IPv4 octets are dropped rather than read as octal, and an IPv4-mapped IPv6
    address is that IPv4 address.
    """
    if _CANONICAL_IPV4.fullmatch(text):
        return text
    try:
        ip = ipaddress.ip_address(_without_leading_zeros(text))
    except ValueError:
        raise ValueError(f"{what} is {text!r}, not an IP address") from None
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.scope_id:
            raise ValueError(f"{what} is {text!r}, with a zone that no rule can hold")
        if ip.ipv4_mapped:
            return str(ip.ipv4_mapped)
    return str(ip)


def special(canonical: str, link_local_too: bool) -> str:
    """Why an address is nobody's to serve, such as "a loopback address"; "" for any that may be.

    With `link_local_too` it is what the API server refuses in externalIPs and EndpointSlices, and multicast and
    broadcast addresses besides.
    """
    match = _SPECIAL.match(canonical)
    match match.lastgroup if match else None:
        case None:
            return ""
        case "linklocal":
            return "a link-local address" if link_local_too else ""
        case "unspecified":
            return "the unspecified address"
        case "broadcast":
            return "the broadcast address"
        case kind:
            return f"a {kind} address"


def address_of(family: Family, text: str, what: str) -> str:
    """An IP address of one family, in canonical form."""
    canonical = address(text, what)
    if (":" in canonical) is not (family is Family.IPV6):
        raise ValueError(f"{what} is {text!r}, not an {family.value} address")
    return canonical


def cidr(text: str, what: str) -> str:
    """A network in canonical form, host bits cleared; white space around it is dropped, as kube-proxy does."""
    host, slash, prefix = text.strip().partition("/")
    # Python would take a zone ("fe80::%eth0") into the network, whatever characters it is made of.
    if slash and "%" not in host and prefix.isascii() and prefix.isdigit():
        try:
            return str(ipaddress.ip_network(f"{_without_leading_zeros(host)}/{prefix}", strict=False))
        except ValueError:
            pass
    raise ValueError(f"{what} is {text!r}, not a network such as 10.0.0.0/8")


def _without_leading_zeros(text: str) -> str:
    """Drop them where Python would refuse them: in IPv4, also at the end of an IPv6 address."""
    head, colon, quad = text.rpartition(":")
    return head + colon + _LEADING_ZEROS.sub("", quad) if "." in quad else text
