"""Which UDP flows are stale: those that conntrack still takes to where their service is no longer served.

TCP and SCTP notice by themselves. A UDP client that keeps its source port keeps its flow alive, and with it the NAT
that was chosen for its first packet: to a pod that is gone, or to none, from before there was one.
"""

import ipaddress
from collections.abc import Callable, Collection, Iterable, Mapping, Set

import msgspec

from pykubeproxy.objects import Family, Protocol
from pykubeproxy.services.ports import PortName
from pykubeproxy.services.resolve import ResolvedPort

# An address in network order, of 4 or 16 bytes, and a port. As something that leads to a service port, an empty address
# stands for all of this node's at which node ports are served.
End = tuple[bytes, int]
_THIS_NODE = b""


class UdpPort(msgspec.Struct, frozen=True):
    """A UDP service port: what leads to it, and who may answer for it."""

    frontends: frozenset[End]
    backends: frozenset[End]


class NodePortAddresses(msgspec.Struct, frozen=True):
    """Where node ports are served: this node's addresses in `networks`, or all of them if there are none.

    Loopback addresses are among them only if `loopback` says so (localhostNodePorts, on IPv4).
    """

    networks: tuple[str, ...] = ()
    loopback: bool = False

    def include(self, address: bytes) -> bool:
        """Whether a node port would be served at this address if it is one of the node's."""
        at = ipaddress.ip_address(address)
        if at.is_loopback and not self.loopback:
            return False
        return not self.networks or any(at in ipaddress.ip_network(network) for network in self.networks)


class Flush(msgspec.Struct, frozen=True):
    """A request to look through the flows of a family.

    `ports` are all UDP service ports there are now, `gone` is what led to one until now and may still have flows.
    """

    family: Family
    ports: Mapping[PortName, UdpPort]
    gone: frozenset[End]
    node_port_addresses: NodePortAddresses

    def after(self, earlier: "Flush | None") -> "Flush":
        """This request, with what an earlier one would still have looked for."""
        return msgspec.structs.replace(self, gone=self.gone | earlier.gone) if earlier else self


class UdpPorts:
    """The UDP service ports of one family as the last sync left them, by which it is known what changed."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._ports: dict[PortName, UdpPort] = {}
        self._at = NodePortAddresses()

    def follow(
        self,
        served: Iterable[ResolvedPort],
        gone: Iterable[PortName],
        at: NodePortAddresses,
        repaired: bool = False,
        installed: Collection[tuple[str, int]] = (),
    ) -> Flush | None:
        """Take in what a sync looked at; returns what to flush, None if no UDP service port has changed.

        `repaired` means that rules may have been missing for a while, in which flows went undirected: then everything
        is to be looked at. `installed` is what a full sync found to lead to UDP services, as addresses, empty for node
        ports, and ports.
        """
        changed = self._changed(served, gone)
        before = [self._ports.pop(name) for name in changed if name in self._ports]
        self._ports |= {name: port for name, port in changed.items() if port}
        left = {end for port in before for end in port.frontends}
        left |= {(_packed(address) if address else _THIS_NODE, number) for address, number in installed}
        if left:
            left = left.difference(*(port.frontends for port in self._ports.values()))
        moved, self._at = at != self._at, at
        if not (changed or left or (self._ports and (repaired or moved))):
            return None
        return Flush(self._family, dict(self._ports), frozenset(left), at)

    def _changed(
        self, served: Iterable[ResolvedPort], gone: Iterable[PortName]
    ) -> dict[PortName, UdpPort | None]:
        """The UDP service ports that differ from before; None for one that is no more."""
        now: dict[PortName, UdpPort | None] = dict.fromkeys(name for name in gone if name in self._ports)
        now |= {item.port.name: udp_port(item) for item in served if item.port.protocol is Protocol.UDP}
        return {name: port for name, port in now.items() if port != self._ports.get(name)}


class Frontends:
    """Who is to answer for what leads to a UDP service port, and by it which flows are stale.

    `is_local` tells whether an address is one of this node's; it is asked once for each that is in question.
    """

    def __init__(self, flush: Flush, is_local: Callable[[bytes], bool]) -> None:
        self._gone = flush.gone
        self._at = flush.node_port_addresses
        self._is_local = is_local
        self._node_addresses: dict[bytes, bool] = {}
        self._backends: dict[End, Set[End]] = {}
        for port in flush.ports.values():
            for end in port.frontends:
                # Any number of Services may claim one external address; whose rule comes first is not for here to know.
                others = self._backends.get(end)
                if isinstance(others, set):
                    others |= port.backends
                else:
                    self._backends[end] = {*others, *port.backends} if others else port.backends

    def is_stale(self, destination: End, reply_source: End) -> bool:
        """Whether a UDP flow has to go: sent to `destination`, and answered, as its NAT has it, by `reply_source`."""
        frontend = self._frontend(destination)
        if frontend is None:
            return False
        backends = self._backends.get(frontend)
        if backends is not None:
            return reply_source not in backends
        # What led to a service port until now may be anybody's: flows that were not DNATed are left alone.
        return reply_source != destination

    def _frontend(self, destination: End) -> End | None:
        """What a flow came in by: a service address or else, as in the rules, a node port; those there are first."""
        node_port = (_THIS_NODE, destination[1])
        for known in (self._backends, self._gone):
            if destination in known:
                return destination
            if node_port in known and self._serves_node_ports(destination[0]):
                return node_port
        return None

    def _serves_node_ports(self, address: bytes) -> bool:
        if address not in self._node_addresses:
            self._node_addresses[address] = self._at.include(address) and self._is_local(address)
        return self._node_addresses[address]


def udp_port(served: ResolvedPort) -> UdpPort:
    """What flows to a UDP service port are held against.

    A backend that other traffic prefers not to use - it terminates, or is hinted for elsewhere - but that still
    serves keeps the flows it has.
    """
    port = served.port
    addresses = {_packed(it) for it in (port.cluster_ip, *port.external_ips, *port.load_balancer_ips)}
    node_port = {(_THIS_NODE, port.node_port)} if port.node_port else set()
    return UdpPort(
        frontends=frozenset({(address, port.port) for address in addresses} | node_port),
        backends=frozenset(
            (_packed(backend.endpoint.address), backend.port)
            for backend in (verdict.backend for verdict in served.selection.verdicts)
            if backend.endpoint.ready or backend.endpoint.serving
        ),
    )


def _packed(address: str) -> bytes:
    return ipaddress.ip_address(address).packed
