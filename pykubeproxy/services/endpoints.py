"""Resolve EndpointSlices to the endpoints of a service port: each address and port once, sorted."""

import enum
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from pykubeproxy.objects import Endpoint, EndpointSlice, Family, address_and_port
from pykubeproxy.services.ports import PortName


class ResolvedEndpoint(msgspec.Struct, frozen=True, gc=False):
    """An endpoint at one port. `target` is "ip:port", or "[ip]:port" for IPv6; `local` means it runs on this node."""

    target: str
    endpoint: Endpoint
    port: int
    local: bool


class SkipReason(enum.Enum):
    """Why an endpoint, a port or a whole EndpointSlice is skipped."""

    HEADLESS = "its slice has the label service.kubernetes.io/headless, which proxies must ignore"
    FQDN = "its slice has addressType FQDN"
    OTHER_FAMILY = "its slice is of the other address family"
    NO_ADDRESS = "it has no address"
    INVALID_ADDRESS = "its address is malformed, of the other family, loopback, link-local, multicast, broadcast or unspecified"
    NO_PORT = "its slice has no number for this port"
    INVALID_PORT = "its slice has an invalid port"
    NO_PORT_NAME = "its slice has a port without a name, which proxies must ignore"
    OTHER_PORT = "its slice has no port of this name and protocol"
    DUPLICATE = "another entry for the same address and port is used"


class Skipped(msgspec.Struct, frozen=True, gc=False):
    """A skipped entry of an EndpointSlice; `address` is "" if the whole slice or port is skipped."""

    slice_name: str
    address: str
    reason: SkipReason


def slice_skip_reason(slice_: EndpointSlice, family: Family) -> SkipReason | None:
    """Return why a proxy for this family skips a slice of a Service, or None if it does not."""
    if slice_.headless:
        return SkipReason.HEADLESS
    if slice_.family is None:
        return SkipReason.FQDN
    return None if slice_.family is family else SkipReason.OTHER_FAMILY


class SlicePorts(msgspec.Struct, frozen=True, gc=False):
    """An EndpointSlice with its ports indexed once for all service ports of its Service.

    `numbers` maps name and protocol to port numbers, None for a port without a number. `invalid_addresses` are those of
    rejected endpoints.
    """

    slice_: EndpointSlice
    numbers: Mapping[tuple[str, str], list[int | None]]
    has_unnamed_port: bool
    has_invalid_port: bool
    invalid_addresses: tuple[str, ...]


def slice_ports(slice_: EndpointSlice) -> SlicePorts:
    """Index the ports of a usable slice."""
    numbers: dict[tuple[str, str], list[int | None]] = {}
    for port in slice_.ports:
        if port.name is not None:
            numbers.setdefault((port.name, port.protocol.value), []).append(port.port)
    has_unnamed_port = any(port.name is None for port in slice_.ports)
    has_invalid_port = any(rejected.is_in("ports") for rejected in slice_.rejected)
    invalid_addresses = tuple(
        str(rejected.value) for rejected in slice_.rejected if rejected.is_in("endpoints")
    )
    return SlicePorts(slice_, numbers, has_unnamed_port, has_invalid_port, invalid_addresses)


def resolve_endpoints(
    slices: Iterable[SlicePorts], name: PortName, node_name: str
) -> tuple[tuple[ResolvedEndpoint, ...], tuple[Skipped, ...]]:
    """Return the endpoints of one service port, sorted by target, and the skipped entries.

    `slices` are the usable slices of the Service, sorted by name.
    """
    resolved: dict[str, ResolvedEndpoint] = {}
    skipped: list[Skipped] = []
    for ports in slices:
        slice_name = ports.slice_.name
        for number in _port_numbers(ports, name, skipped):
            skipped += (
                Skipped(slice_name, address, SkipReason.INVALID_ADDRESS)
                for address in ports.invalid_addresses
            )
            for endpoint in ports.slice_.endpoints:
                if not endpoint.address:
                    skipped.append(Skipped(slice_name, "", SkipReason.NO_ADDRESS))
                    continue
                target = address_and_port(endpoint.address, number)
                duplicate = target in resolved
                if duplicate:
                    skipped.append(Skipped(slice_name, endpoint.address, SkipReason.DUPLICATE))
                # As in kube-proxy: of two entries for one target the later one wins, unless it is terminating.
                if not duplicate or not endpoint.terminating:
                    local = bool(node_name) and endpoint.node_name == node_name
                    resolved[target] = ResolvedEndpoint(target, endpoint, number, local)
    return tuple([resolved[target] for target in sorted(resolved)]), tuple(skipped)


def _port_numbers(ports: SlicePorts, name: PortName, skipped: list[Skipped]) -> Iterator[int]:
    if ports.has_unnamed_port:
        skipped.append(Skipped(ports.slice_.name, "", SkipReason.NO_PORT_NAME))
    if ports.has_invalid_port:
        skipped.append(Skipped(ports.slice_.name, "", SkipReason.INVALID_PORT))
    numbers = ports.numbers.get((name.port, name.protocol))
    if (
        numbers is None and ports.slice_.endpoints
    ):  # the controller's slice of a Service without pods has no ports
        skipped.append(Skipped(ports.slice_.name, "", SkipReason.OTHER_PORT))
    for number in numbers or ():
        if number is None:
            skipped.append(Skipped(ports.slice_.name, "", SkipReason.NO_PORT))
        else:
            yield number
