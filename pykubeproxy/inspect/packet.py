"""A packet as rules see it, and the host whose rules it meets."""

import ipaddress
from functools import lru_cache

import msgspec

NEW, UNTRACKED, DNAT, SNAT = "NEW", "UNTRACKED", "DNAT", "SNAT"
LOCAL = "LOCAL"
_LOOPBACK = ("127.0.0.0/8", "::1/128")
_MULTICAST = ("224.0.0.0/4", "ff00::/8")


class Packet(msgspec.Struct, frozen=True):
    """The first packet of a connection at one point of its way.

    - `protocol`: "tcp", "udp" or "sctp"
    - `port`: the destination's; the source's is any that the sender's kernel picked, so nothing here knows it
    - `starts_here`: sent by the host itself, rather than received by it
    - `received_by`, `sent_by`: interfaces; "" before there is one, or where it is not known
    - `states`: NEW or UNTRACKED, then DNAT and SNAT once an address was translated
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
    """By which interface the addresses of a network are reached; "" if they are not."""

    network: str
    interface: str


class Host(msgspec.Struct, frozen=True):
    """What decides, besides rules, where a packet goes: the host's own addresses, in canonical form, and its routes.

    Without routes no interfaces are known.
    """

    addresses: frozenset[str] = frozenset()
    routes: tuple[Route, ...] = ()

    def is_local(self, address: str) -> bool:
        """Whether the host itself is meant; all of 127.0.0.0/8 is."""
        return address in self.addresses or any(contains(network, address) for network in _LOOPBACK)

    def kind_of(self, address: str) -> str:
        """The address type in the words of iptables: LOCAL, MULTICAST, BROADCAST or UNICAST."""
        if self.is_local(address):
            return LOCAL
        if any(contains(network, address) for network in _MULTICAST):
            return "MULTICAST"
        return "BROADCAST" if address == "255.255.255.255" else "UNICAST"

    def interface_to(self, address: str) -> str:
        """The interface by which an address is reached, which as a rule is also the one it sends by; "" if unknown."""
        if self.is_local(address):
            return "lo"
        matching = [route for route in self.routes if contains(route.network, address)]
        return max(matching, key=lambda route: _parsed(route.network)[1]).interface if matching else ""


def contains(network: str, address: str) -> bool:
    """Whether an address lies in a network, "address", "address/length" or "address/mask"; masks may have gaps."""
    if (":" in network) is not (":" in address):
        return False
    bits, mask = _parsed(network)
    return number(address) & mask == bits


@lru_cache(maxsize=65536)
def number(address: str) -> int:
    """An address as a number."""
    return int(ipaddress.ip_address(address))


@lru_cache(maxsize=65536)
def _parsed(network: str) -> tuple[int, int]:
    """The bits that count, and the mask that says which do."""
    address, _, length = network.partition("/")
    width = 128 if ":" in address else 32
    if length.isdecimal() or not length:
        mask = (1 << width) - (1 << (width - int(length or width)))
    else:
        mask = number(length)
    return number(address) & mask, mask
