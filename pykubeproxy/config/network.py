"""Network values: addresses, CIDRs, interfaces.

IP addresses may have leading zeros, which are decimal, and an IPv4-mapped IPv6 address is IPv4, as in kube-proxy.
"""

import ipaddress
import re
from collections.abc import Callable

from pykubeproxy.config.kinds import ValueKind, list_of, of_text, plain_text, string
from pykubeproxy.config.model import Address, DetectLocalMode

# The node's own addresses, which only the rules know.
PRIMARY = "primary"
# Those of Kubernetes 1.37 (kubernetes/kubernetes#138427); 1.36 has "primary" only, and alone.
_KEYWORDS = {
    PRIMARY: [PRIMARY],
    "localhost": ["127.0.0.0/8", "::1/128"],
    "all": ["0.0.0.0/0", "::/0"],
}
_LEADING_ZEROS = re.compile("(?<![0-9a-fA-F])0+(?=[0-9a-fA-F])")


def _ip(text: str) -> str:
    # Python accepts a zone ("fe80::1%eth0"); Go and iptables do not.
    try:
        if "%" not in text:
            ip = ipaddress.ip_address(_LEADING_ZEROS.sub("", text))
            return str(getattr(ip, "ipv4_mapped", None) or ip)
    except ValueError:
        pass
    raise ValueError("must be an IP address")


def _cidr(text: str) -> str:
    address, slash, length = text.partition("/")
    # Python also accepts a bare address, a zone and a netmask.
    if slash and "%" not in address and re.fullmatch("[0-9]{1,100}", length):
        try:
            network = ipaddress.ip_network((_LEADING_ZEROS.sub("", address), int(length)), strict=False)
            mapped = getattr(network.network_address, "ipv4_mapped", None)
            return f"{mapped}/{network.prefixlen - 96}" if mapped else str(network)
        except ValueError:
            pass
    raise ValueError("must be a CIDR such as 10.244.0.0/16 or fd00:10:244::/56")


def cluster_cidrs(items: tuple[str, ...]) -> tuple[str, ...]:
    """Return the CIDRs of mode ClusterCIDR in canonical form."""
    cidrs = tuple(map(_cidr, items))
    if len({":" in cidr for cidr in cidrs}) != len(cidrs):
        raise ValueError("must hold at most one CIDR for each address family")
    return cidrs


def _node_port_addresses(items: tuple[str, ...] | None) -> tuple[str, ...]:
    try:
        return tuple(it for item in items or () for it in _KEYWORDS.get(item) or (_cidr(item),))
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


def _address(text: str) -> Address | None:
    host, port = split_address(text) if text else ("", 0)
    return Address(host, port or 0) if host else None


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
