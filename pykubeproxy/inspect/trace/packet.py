"""A packet, and the host whose rules it passes."""

import ipaddress
from functools import lru_cache

import msgspec

NEW, UNTRACKED, DNAT, SNAT = "NEW", "UNTRACKED", "DNAT", "SNAT"
LOCAL = "LOCAL"
LOOPBACK = ("127.0.0.0/8", "::1/128")
_MULTICAST = ("224.0.0.0/4", "ff00::/8")


class Packet(msgspec.Struct, frozen=True):
    """The first packet of a connection at one point of its path.

    - `protocol`: "tcp", "udp" or "sctp"
    - `port`: the destination port; the source port is unknown
    - `starts_here`: sent by the host itself
    - `received_by`, `sent_by`: interfaces; "" if there is none yet or it is unknown
    - `states`: NEW or UNTRACKED, then DNAT and SNAT after a translation
    """

    protocol: str
    source: str
    destination: str
    port: int
    starts_here: bool = False
    received_by: str = ""
    sent_by: str = ""
    mark: int = 0
    states: tuple[str, ...] = (NEW,)


class Route(msgspec.Struct, frozen=True):
    """The interface to a network."""

    network: str
    interface: str


class Host(msgspec.Struct, frozen=True):
    """The host's own addresses, in canonical form, and its routes; without routes all interfaces are unknown."""

    addresses: frozenset[str] = frozenset()
    routes: tuple[Route, ...] = ()

    def is_local(self, address: str) -> bool:
        """Return whether the address is the host's own, as all of 127.0.0.0/8 is."""
        return address in self.addresses or any(contains(network, address) for network in LOOPBACK)

    def address_type(self, address: str) -> str:
        """Return the address type as iptables names it: LOCAL, MULTICAST, BROADCAST or UNICAST."""
        if self.is_local(address):
            return LOCAL
        if any(contains(network, address) for network in _MULTICAST):
            return "MULTICAST"
        return "BROADCAST" if address == "255.255.255.255" else "UNICAST"

    def interface_to(self, address: str) -> str:
        """Return the interface to an address, which is usually also the one from it; "" if unknown."""
        if self.is_local(address):
            return "lo"
        matching = [route for route in self.routes if contains(route.network, address)]
        return max(matching, key=lambda route: _parsed(route.network)[1]).interface if matching else ""


def contains(network: str, address: str) -> bool:
    """Return whether "address", "address/length" or "address/mask" contains an address; masks may have gaps."""
    if (":" in network) is not (":" in address):
        return False
    bits, mask = _parsed(network)
    return number(address) & mask == bits


@lru_cache(maxsize=65536)
def number(address: str) -> int:
    """Return an address as a number."""
    return int(ipaddress.ip_address(address))


@lru_cache(maxsize=65536)
def _parsed(network: str) -> tuple[int, int]:
    """Return the network bits and the mask."""
    address, _, length = network.partition("/")
    width = 128 if ":" in address else 32
    if length.isdecimal() or not length:
        mask = (1 << width) - (1 << (width - int(length or width)))
    else:
        mask = number(length)
    return number(address) & mask, mask
