"""Kinds of network values in canonical form: addresses, CIDRs, interfaces."""

import ipaddress
import re

from pykubeproxy.config.kinds import ValueKind, joined, list_of, of_text
from pykubeproxy.config.model import Address


def _ip(text: str) -> str:
    # Python accepts a zone ("fe80::1%eth0"); Go and iptables do not.
    try:
        if "%" not in text:
            return str(ipaddress.ip_address(text))
    except ValueError:
        pass
    raise ValueError("must be an IP address")


def _cidr(text: str) -> str:
    address, slash, length = text.partition("/")
    # Python also accepts a bare address and a netmask.
    if slash and re.fullmatch("[0-9]{1,3}", length):
        try:
            return str(ipaddress.ip_network((_ip(address), int(length)), strict=False))
        except ValueError:
            pass
    raise ValueError("must be a CIDR such as 10.244.0.0/16 or fd00:10:244::/56")


def _cluster_cidrs(items: tuple[str, ...]) -> tuple[str, ...]:
    cidrs = tuple(_cidr(item) for item in items)
    if len({":" in cidr for cidr in cidrs}) != len(cidrs):
        raise ValueError("must hold at most one CIDR for each address family")
    return cidrs


def _node_port_addresses(items: tuple[str, ...]) -> tuple[str, ...]:
    if "primary" not in items:
        return tuple(_cidr(item) for item in items)
    if len(items) > 1:
        raise ValueError("must be CIDRs, or primary alone")
    return items


def split_address(text: str) -> tuple[str, int | None]:
    """Return IP and port of "IP", "IPv4:port" or "[IPv6]:port"; the port is None if missing. Raises ValueError."""
    match = re.fullmatch(r"(?:\[([^\]]*)\]|([^:\[\]]*)):([0-9]{1,5})", text)
    host, port = (match[1] or match[2] or "", int(match[3])) if match else (text, None)
    if port is not None and not 1 <= port <= 65535:
        raise ValueError("must have a port from 1 to 65535")
    try:
        return _ip(host), port
    except ValueError:
        raise ValueError(
            "must be an IP address, or one with a port such as 0.0.0.0:10256 or [::]:10256"
        ) from None


def address(default_port: int) -> ValueKind:
    """Return the kind for an IP address with an optional port; empty text is None: no server."""

    def check(text: str) -> Address | None:
        if not text:
            return None
        host, port = split_address(text)
        return Address(host, port or default_port)

    return of_text("IP:PORT", check)


def interface(longest: int) -> ValueKind:
    """Return the kind for an interface name of at most `longest` bytes, or empty text.

    Interface names have up to 15 bytes; a prefix has 14, since iptables appends "+". A final "+" and quotes are rejected
    because the name becomes part of a rule.
    """

    def check(text: str) -> str:
        usual = re.fullmatch(r"[!#-&(-.0-9;-\[\]-~]*", text) and text not in (".", "..")
        if not usual or len(text) > longest or text.endswith("+"):
            raise ValueError(
                f'must be an interface name of at most {longest} characters, without a "+" at its end'
            )
        return text

    return of_text("NAME", check)


IP = of_text("IP", _ip)
CLUSTER_CIDRS = joined("CIDR[,CIDR]", _cluster_cidrs)
NODE_PORT_ADDRESSES = list_of("CIDR,...|primary", _node_port_addresses)
CIDRS = list_of("CIDR,...", lambda items: tuple(_cidr(item) for item in items))
