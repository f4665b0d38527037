"""A packet, and the network of the node whose rules it meets."""

from functools import lru_cache

import msgspec

from pykubeproxy.inspect.packets.addresses import Addresses, bits_and_mask, contains, parse_addresses, union
from pykubeproxy.objects import Family, family_of

NEW, UNTRACKED, DNAT, SNAT = "NEW", "UNTRACKED", "DNAT", "SNAT"
LOCAL = "LOCAL"
LOOPBACK = ("127.0.0.0/8", "::1/128")
_MULTICAST = ("224.0.0.0/4", "ff00::/8")


class AffinityList(msgspec.Struct, frozen=True):
    """A list of clients, by the name that `recent` gives it, and for how many seconds it counts."""

    name: str
    seconds: int


class Packet(msgspec.Struct, frozen=True):
    """The first packet of a connection at one point of its path, or those of many clients.

    - `protocol`: "tcp", "udp" or "sctp"
    - `source`: an address; "" for any of `clients`
    - `port`: the destination port; the source port is unknown
    - `starts_here`: sent by the node itself
    - `received_by`, `sent_by`: interfaces; "" if there is none yet or it is unknown
    - `mark`, `connection_mark`: that of the packet, and that of its connection, which rules of nftables copy
    - `states`: NEW or UNTRACKED, then DNAT and SNAT after a translation
    - `clients`: the addresses of many clients, new ones and known ones; empty for one client, which is new

    Of packets of many clients only:

    - `remembered_in`: the affinity list that contains them from now on; "" for none
    - `recalled`: the affinity list that sent a known client here; None for a new client
    - `accepted`: a rule accepts them in chain FORWARD, so the policy of that chain does not count
    """

    protocol: str
    source: str
    destination: str
    port: int
    starts_here: bool = False
    received_by: str = ""
    sent_by: str = ""
    mark: int = 0
    connection_mark: int = 0
    states: tuple[str, ...] = (NEW,)
    clients: Addresses = ()
    remembered_in: str = ""
    recalled: AffinityList | None = None
    accepted: bool = False


LO = "lo"


class NodeRoute(msgspec.Struct, frozen=True):
    """The interface to a network."""

    network: str
    interface: str


class NodeNetwork(msgspec.Struct, frozen=True):
    """The node's own addresses, in canonical form, and its routes; without routes all interfaces are unknown."""

    addresses: frozenset[str] = frozenset()
    routes: tuple[NodeRoute, ...] = ()

    def is_local(self, address: str) -> bool:
        """Return whether the address is the node's own, as all of 127.0.0.0/8 is."""
        return address in self.addresses or any(contains(network, address) for network in LOOPBACK)

    def own_addresses(self, family: Family) -> Addresses:
        """Return the node's own addresses of a family, with those of loopback."""
        return _own_addresses(self.addresses, family)

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
            return LO
        matching = [route for route in self.routes if contains(route.network, address)]
        return max(matching, key=lambda route: bits_and_mask(route.network)[1]).interface if matching else ""


@lru_cache(maxsize=1024)
def _own_addresses(addresses: frozenset[str], family: Family) -> Addresses:
    return union(
        parse_addresses(address) for address in (*addresses, *LOOPBACK) if family_of(address) is family
    )
