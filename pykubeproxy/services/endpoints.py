"""EndpointSlices to the backends of a service port: each address and port once, in a fixed order."""

import enum
from collections.abc import Iterable, Mapping

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
    """Why an endpoint, a port or all of an EndpointSlice is no backend at all."""

    HEADLESS = "its slice is labelled service.kubernetes.io/headless, which proxies have to ignore"
    FQDN = "its slice holds names, not addresses"
    OTHER_FAMILY = "its slice is of the other address family"
    NO_ADDRESS = "it has no address"
    SPECIAL = "a loopback, link-local, multicast, broadcast or unspecified address is no endpoint's"
    NO_PORT = "its slice gives the port no number"
    NO_PORT_NAME = "its slice leaves the port's name out, which proxies have to ignore"
    OTHER_PORT = "its slice has no port of this name and protocol"
    DUPLICATE = "another entry for the same address and port is used"


class Skipped(msgspec.Struct, frozen=True):
    """An entry of an EndpointSlice that was passed over: the slice, the address ("" for all of it), and why."""

    slice_name: str
    address: str
    reason: SkipReason


def belongs(slice_: EndpointSlice, family: Family) -> bool:
    """Whether a slice is one that a proxy for this family takes notice of."""
    return bool(slice_.service) and unnoticed(slice_, family) is None


def unnoticed(slice_: EndpointSlice, family: Family) -> SkipReason | None:
    """Why a proxy for this family takes no notice of a slice of some Service; None if it does."""
    if slice_.headless:
        return SkipReason.HEADLESS
    if slice_.family is None:
        return SkipReason.FQDN
    return None if slice_.family is family else SkipReason.OTHER_FAMILY


class SlicePorts(msgspec.Struct, frozen=True):
    """What an EndpointSlice has for the service ports of its Service: made once, for there may be many of them.

    `numbers` are those of its ports by name and protocol; None for a port without a number. `nameless` tells of ports
    without a name. The addresses `refused` are not to be used.
    """

    slice_: EndpointSlice
    numbers: Mapping[tuple[str, str], list[int | None]]
    nameless: bool
    refused: frozenset[str]


def slice_ports(slice_: EndpointSlice) -> SlicePorts:
    """Look through the ports of a slice that `belongs` accepts."""
    numbers: dict[tuple[str, str], list[int | None]] = {}
    for port in slice_.ports:
        if port.name is not None:
            numbers.setdefault((port.name, port.protocol.value), []).append(port.port)
    nameless = any(port.name is None for port in slice_.ports)
    return SlicePorts(slice_, numbers, nameless, frozenset(it.address for it in slice_.refused))


def resolve_endpoints(
    offers: Iterable[SlicePorts], name: PortName, node_name: str, passed: list[Skipped]
) -> tuple[ResolvedEndpoint, ...]:
    """The backends of one service port, sorted by target.

    `offers` are those of its Service, in the order of the slices' names. What was passed over is added to the list
    `passed`.
    """
    found: dict[str, ResolvedEndpoint] = {}
    for it in offers:
        slice_name = it.slice_.name
        for port in _numbers(it, name, passed):
            for endpoint in it.slice_.endpoints:
                if not endpoint.address:
                    passed.append(Skipped(slice_name, "", SkipReason.NO_ADDRESS))
                    continue
                if endpoint.address in it.refused:
                    passed.append(Skipped(slice_name, endpoint.address, SkipReason.SPECIAL))
                    continue
                backend = ResolvedEndpoint(
                    address_and_port(endpoint.address, port),
                    endpoint,
                    port,
                    bool(node_name) and endpoint.node_name == node_name,
                )
                known = found.get(backend.target)
                if known is None or _counts(endpoint):
                    found[backend.target] = backend
                if known is not None:
                    passed.append(Skipped(slice_name, endpoint.address, SkipReason.DUPLICATE))
    return tuple(found[target] for target in sorted(found))


def _numbers(it: SlicePorts, name: PortName, passed: list[Skipped]) -> Iterable[int]:
    """The numbers that a slice gives this service port; as a rule one."""
    if it.nameless:
        passed.append(Skipped(it.slice_.name, "", SkipReason.NO_PORT_NAME))
    numbers = it.numbers.get((name.port, name.protocol))
    if numbers is None:
        passed.append(Skipped(it.slice_.name, "", SkipReason.OTHER_PORT))
    for number in numbers or ():
        if number is None:
            passed.append(Skipped(it.slice_.name, "", SkipReason.NO_PORT))
        else:
            yield number


def _counts(later: Endpoint) -> bool:
    """Which of two entries for one target counts: a pod that starts beats one that ends, else the later one.

    Among two that end the earlier one stays, as in kube-proxy.
    """
    return not later.terminating
