"""Find stale flows: conntrack entries whose NAT leads to a pod that no longer serves their destination.

Only those of UDP are deleted: TCP and SCTP clients reconnect. A UDP client that keeps its source port keeps its conntrack
entry, with the NAT of its first packet: to a pod that may be deleted, or to none if the service had no endpoint.
"""

import ipaddress
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Set
from functools import lru_cache

import msgspec

from pykubeproxy.objects import Family, Protocol
from pykubeproxy.services.ports import PortName
from pykubeproxy.services.selection import ResolvedPort

# An address in network byte order, 4 or 16 bytes, and a port. As a frontend, an empty address stands for every
# address of this node that serves node ports.
AddressAndPort = tuple[bytes, int]
_THIS_NODE = b""
_KNOWN_ADDRESSES = 10_000


class UdpPort(msgspec.Struct, frozen=True):
    """The frontends of a UDP service port and the endpoints that may answer.

    - `cluster_ip`: the frontend whose rule comes before those of other Services
    - `dispatched`: the frontends with a rule in table nat; other ones are rejected or dropped
    - `partial`: frontends whose rule redirects the packets of some clients only; those of others meet the rules after it
    """

    frontends: frozenset[AddressAndPort]
    endpoints: frozenset[AddressAndPort]
    cluster_ip: AddressAndPort
    dispatched: frozenset[AddressAndPort]
    partial: frozenset[AddressAndPort]


class NodePortAddresses(msgspec.Struct, frozen=True):
    """The addresses that serve node ports: this node's in `networks`, or all of them if that is empty.

    `loopback` includes loopback addresses (localhostNodePorts, IPv4 only).
    """

    networks: tuple[str, ...] = ()
    loopback: bool = False

    def include(self, address: bytes) -> bool:
        """Return whether node ports are served at an address of this node."""
        ip = ipaddress.ip_address(address)
        if ip.is_loopback and not self.loopback:
            return False
        return not self.networks or any(ip in ipaddress.ip_network(network) for network in self.networks)


class Flush(msgspec.Struct, frozen=True):
    """A request to delete the stale flows of a family.

    `ports` are all UDP service ports; `gone` are removed frontends that may still have flows.
    """

    family: Family
    ports: Mapping[PortName, UdpPort]
    gone: frozenset[AddressAndPort]
    node_port_addresses: NodePortAddresses

    def merged_with(self, earlier: "Flush | None") -> "Flush":
        """Return this request with the removed frontends of an earlier one added."""
        return msgspec.structs.replace(self, gone=self.gone | earlier.gone) if earlier else self


class UdpPorts:
    """Track the UDP service ports of one family from sync to sync."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._ports: dict[PortName, UdpPort] = {}
        self._node_port_addresses = NodePortAddresses()

    def update(
        self,
        resolved: Iterable[ResolvedPort],
        gone: Iterable[PortName],
        node_port_addresses: NodePortAddresses,
        repaired: bool = False,
        installed: Collection[tuple[str, int]] = (),
        rejected: Container[PortName] = (),
    ) -> Flush | None:
        """Apply the result of a sync. Return the flush it requires, or None if no UDP service port changed.

        `repaired` means that rules may have been missing, so flows may have started without NAT. `installed` are the UDP
        frontends in the tables before a full sync: address, "" for node ports, and port. `rejected` are quarantined ports.
        """
        changed = self._changed(resolved, gone, rejected)
        before = [self._ports.pop(name) for name in changed if name in self._ports]
        self._ports |= {name: port for name, port in changed.items() if port}
        removed = {frontend for port in before for frontend in port.frontends}
        removed |= {(_packed(address) if address else _THIS_NODE, number) for address, number in installed}
        if removed:
            removed = removed.difference(*(port.frontends for port in self._ports.values()))
        moved = node_port_addresses != self._node_port_addresses
        self._node_port_addresses = node_port_addresses
        if not (changed or removed or (self._ports and (repaired or moved))):
            return None
        return Flush(self._family, dict(self._ports), frozenset(removed), node_port_addresses)

    def _changed(
        self, resolved: Iterable[ResolvedPort], gone: Iterable[PortName], rejected: Container[PortName]
    ) -> dict[PortName, UdpPort | None]:
        """Return the UDP service ports that differ from before; None for a removed one."""
        now: dict[PortName, UdpPort | None] = dict.fromkeys(name for name in gone if name in self._ports)
        now |= {
            item.port.name: _udp_port(item, item.port.name in rejected)
            for item in resolved
            if item.port.protocol is Protocol.UDP
        }
        return {name: port for name, port in now.items() if port != self._ports.get(name)}


class StaleFlowFilter:
    """Find stale flows by the endpoints that answer packets to each frontend.

    `is_local` tells whether an address is one of this node's.
    """

    def __init__(self, flush: Flush, is_local: Callable[[bytes], bool]) -> None:
        # No port has a removed frontend.
        self._claimants: dict[AddressAndPort, list[UdpPort]] = {frontend: [] for frontend in flush.gone}
        for _, port in sorted(flush.ports.items()):
            for frontend in port.frontends:
                self._claimants.setdefault(frontend, []).append(port)
        self._answering: dict[AddressAndPort, list[Set[AddressAndPort]]] = {}
        at = flush.node_port_addresses
        # Anybody may send packets with the number of a node port to any number of addresses.
        self._has_node_ports = lru_cache(_KNOWN_ADDRESSES)(lambda ip: at.include(ip) and is_local(ip))

    def is_stale(self, destination: AddressAndPort, reply_source: AddressAndPort) -> bool:
        """Return whether to delete a UDP flow to `destination` whose NAT expects replies from `reply_source`."""
        answering = self._answering.get(destination)
        if answering is None:
            frontends = self._frontends(destination)
            if not frontends:
                return False
            claims = [(frontend, port) for frontend in frontends for port in self._claimants[frontend]]
            answering = self._answering[destination] = _answering(claims)
        if any(reply_source in endpoints for endpoints in answering):
            return False
        # Where no endpoint answers, another program may use the address: keep flows without DNAT.
        return reply_source != destination or any(answering)

    def _frontends(self, destination: AddressAndPort) -> list[AddressAndPort]:
        """Return the frontends of a flow, in the order of their rules: a service address, a node port."""
        found = [destination] if destination in self._claimants else []
        node_port = (_THIS_NODE, destination[1])
        if node_port in self._claimants and self._has_node_ports(destination[0]):
            found.append(node_port)
        return found


def _answering(claims: list[tuple[AddressAndPort, UdpPort]]) -> list[Set[AddressAndPort]]:
    """Return the endpoints of each port that answers packets; `claims` are frontends that they meet, with their ports.

    Only the first rule that redirects a packet counts. The rules of cluster IPs come first, then all in order of names.
    """
    # One set of all endpoints would take the memory of many if many Services have the same addresses.
    found: list[Set[AddressAndPort]] = []
    in_order = sorted(claims, key=lambda claim: claim[0] != claim[1].cluster_ip)
    dispatching = [(frontend, port) for frontend, port in in_order if frontend in port.dispatched]
    for frontend, port in dispatching or in_order[:1]:
        found.append(port.endpoints)
        if frontend not in port.partial:
            break
    return found


def _udp_port(resolved: ResolvedPort, is_rejected: bool) -> UdpPort:
    """Return the frontends of a UDP service port and the endpoints that keep their flows.

    An endpoint without new traffic (terminating, or hinted for another node or zone) keeps its flows while it serves.
    """
    port, selection = resolved.port, resolved.selection

    def frontends(addresses: Iterable[str]) -> frozenset[AddressAndPort]:
        return frozenset((_packed(address), port.port) for address in addresses)

    cluster_ip = (_packed(port.cluster_ip), port.port)
    external, balanced = frontends(port.external_ips), frontends(port.load_balancer_ips)
    outside = external | balanced | ({(_THIS_NODE, port.node_port)} if port.node_port else frozenset())
    dispatched = outside if selection.any_usable else frozenset()
    if selection.local if port.internal_local else selection.cluster:
        dispatched |= {cluster_ip}
    # Source ranges exclude clients; policy Local without local endpoints excludes those outside this node.
    partial = balanced - external if port.source_ranges is not None else frozenset()
    if port.external_local and not selection.local:
        partial |= outside
    endpoints = (verdict.endpoint for verdict in selection.verdicts)
    return UdpPort(
        frontends=outside | {cluster_ip},
        endpoints=frozenset(
            (_packed(each.endpoint.address), each.port)
            for each in endpoints
            if each.endpoint.ready or each.endpoint.serving
        ),
        cluster_ip=cluster_ip,
        dispatched=dispatched if not is_rejected else frozenset(),
        partial=partial - {cluster_ip},
    )


def _packed(address: str) -> bytes:
    return ipaddress.ip_address(address).packed
