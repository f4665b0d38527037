"""Resolve the two ends of a connection to addresses, a port and a protocol."""

import ipaddress
from collections.abc import Iterator, Sequence

import msgspec

from pykubeproxy.inspect.targets.directory import Directory
from pykubeproxy.inspect.targets.parse import Target, TargetKind
from pykubeproxy.inspect.targets.places import LocationKind, Place, Unresolved, find_place, missing
from pykubeproxy.inspect.targets.port_choice import choose_pod_port, choose_service_port
from pykubeproxy.objects import Family, Port, Protocol, Service, family_of
from pykubeproxy.services.frontend import Frontend, FrontendKind
from pykubeproxy.services.ports import PortName
from pykubeproxy.wording import listed

# How many pods an error names.
_MOST_PODS = 3
_PREFERRED_OUTSIDE = (
    FrontendKind.LOAD_BALANCER_IP,
    FrontendKind.EXTERNAL_IP,
    FrontendKind.NODE_PORT,
    FrontendKind.CLUSTER_IP,
)


class ResolvedConnection(msgspec.Struct, frozen=True):
    """The first packet of a connection, and what its ends are.

    - `source`, `destination`: canonical addresses of one family
    - `client`: where it starts
    - `server`: the pod, node or address it goes to; None for an address of a Service
    - `service`, `frontend`: the service port at the destination, None if there is none or it is unknown
    - `notes`: facts about the ends that a user should know, a sentence each
    """

    source: str
    destination: str
    port: int
    protocol: Protocol
    client: Place
    server: Place | None = None
    service: PortName | None = None
    frontend: Frontend | None = None
    notes: tuple[str, ...] = ()

    @property
    def family(self) -> Family:
        return family_of(self.destination)


def resolve(
    source: Target,
    destination: Target,
    directory: Directory,
    *,
    family: Family | None = None,
    protocol: Protocol | None = None,
    client: LocationKind | None = None,
    entry: str = "",
) -> ResolvedConnection:
    """Resolve both ends to addresses of one family.

    Without `family`, take one that both ends have: that of the Service's first address or the pod's primary one, if the
    source has it. Without `protocol`, take that of the port, TCP for a plain address. `client` overrides where the
    source is. Clients outside use a load balancer address, an external IP, or a node port at the Node `entry`; others
    use the cluster IP. Raises Unresolved.
    """
    start = find_place(source, directory)
    if client is not None:
        start = msgspec.structs.replace(start, kind=client)
    if destination.kind is TargetKind.SERVICE:
        return _to_service(start, destination, directory, family, protocol, entry)
    end = find_place(destination, directory)
    at, to = _addresses(start, destination, end.addresses, family)
    notes = tuple(_notes_about(end))
    if end.pod and destination.kind is TargetKind.POD:
        number, chosen = choose_pod_port(end.pod, destination, protocol)
        return ResolvedConnection(at, to, number, chosen, start, end, notes=notes)
    number = int(destination.port)
    default = Protocol.TCP if destination.kind is TargetKind.ADDRESS else None
    found = _service_at(to, number, protocol or default, directory)
    if found is None:
        return ResolvedConnection(at, to, number, protocol or Protocol.TCP, start, end, notes=notes)
    service, frontend = found
    return ResolvedConnection(
        at, to, number, Protocol(service.protocol), start, end, service, frontend, notes
    )


def _to_service(
    start: Place,
    target: Target,
    directory: Directory,
    family: Family | None,
    protocol: Protocol | None,
    entry: str,
) -> ResolvedConnection:
    service = directory.service(target.key)
    if service is None:
        raise missing(target, (f"svc/{it.key}" for it in directory.services), directory)
    _check_served(service, target, directory)
    port = choose_service_port(service, target, protocol)
    outside = start.kind is LocationKind.OUTSIDE
    frontends = _frontends(service, port, outside, directory, entry)
    if not frontends or (outside and port.node_port and frontends[0].kind is FrontendKind.CLUSTER_IP):
        raise _no_frontend(target, port)
    at, to = _addresses(start, target, tuple(it.address for it in frontends), family)
    frontend = next(it for it in frontends if it.address == to)
    name = PortName(service.namespace, service.name, port.name, port.protocol.value)
    notes = tuple(_notes_about_service(service, target, frontend, outside))
    return ResolvedConnection(at, to, frontend.port, port.protocol, start, None, name, frontend, notes)


def _check_served(service: Service, target: Target, directory: Directory) -> None:
    """Raise Unresolved for a Service that no proxy serves by design."""
    if service.type == "ExternalName":
        raise Unresolved(
            f"{target.without_port} is an ExternalName Service: DNS answers with another name, which no rule knows;"
            " trace to an address of that name"
        )
    if service.headless:
        pods = [pod for pod in directory.pods_of(service.key) if pod.ready]
        names = listed([f"pod/{pod.key}" for pod in pods], _MOST_PODS)
        raise Unresolved(
            f"{target.without_port} is headless: clients connect to its pods, without a proxy; trace to"
            f" {names or 'one of its pods'}"
        )


def _no_frontend(target: Target, port: Port) -> Unresolved:
    if port.node_port:
        return Unresolved(
            f"clients outside reach {target} at its node port on any node; use node/NAME:{port.node_port}"
        )
    return Unresolved(f"{target.without_port} has no cluster IP yet; check its events with kubectl describe")


def _frontends(
    service: Service, port: Port, outside: bool, directory: Directory, entry: str
) -> tuple[Frontend, ...]:
    """Return the frontends for a client, the preferred ones first."""
    node = directory.node(entry)
    every = tuple(_all_frontends(service, port, node.addresses if node else ()))
    if not outside:
        return tuple(it for it in every if it.kind is FrontendKind.CLUSTER_IP)
    return tuple(sorted(every, key=lambda it: _PREFERRED_OUTSIDE.index(it.kind)))


def _addresses(
    start: Place, target: Target, destinations: Sequence[str], family: Family | None
) -> tuple[str, str]:
    """Return the first destination and the first source of one family. Raises Unresolved."""
    for to in destinations:
        for at in start.addresses:
            if family_of(at) is family_of(to) and family in (None, family_of(to)):
                return _checked(start.target, at), _checked(target, to)
    for end, addresses in ((start.target, start.addresses), (target, destinations)):
        if family and not any(family_of(it) is family for it in addresses):
            raise Unresolved(f"{end.without_port} has no {family.value} address; remove --family")
    raise Unresolved(
        f"{start.target} ({_families(start.addresses)}) and {target.without_port} ({_families(destinations)}) are of"
        " different address families; choose ends that share one"
    )


def _checked(target: Target, address: str) -> str:
    """Return an address. Raises Unresolved if it is invalid, as may be what an agent answers."""
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        raise Unresolved(
            f"{target.without_port} has an invalid address, {address!r}; check where the objects come from"
        ) from None


def _families(addresses: Sequence[str]) -> str:
    return " and ".join(dict.fromkeys(family_of(it).value for it in addresses))


def _service_at(
    address: str, number: int, protocol: Protocol | None, directory: Directory
) -> tuple[PortName, Frontend] | None:
    """Return the service port at an address and port; without a protocol, TCP is preferred."""
    wanted = [protocol] if protocol else list(Protocol)
    at_node = (address,) if directory.node_at(address) else ()
    for one in wanted:
        for service in directory.services:
            for port in service.ports:
                if port.protocol is not one:
                    continue
                for frontend in _all_frontends(service, port, at_node):
                    if (frontend.address, frontend.port) == (address, number):
                        return PortName(service.namespace, service.name, port.name, one.value), frontend
    return None


def _all_frontends(service: Service, port: Port, node_addresses: Sequence[str]) -> Iterator[Frontend]:
    """Yield the frontends of a port in the order in which rules match them; node ports at these addresses."""
    kinds = (
        (FrontendKind.CLUSTER_IP, service.cluster_ips),
        (FrontendKind.EXTERNAL_IP, service.external_ips),
        (FrontendKind.LOAD_BALANCER_IP, service.load_balancer_ips),
    )
    for kind, addresses in kinds:
        yield from (Frontend(kind, it, port.port) for it in addresses)
    if port.node_port:
        yield from (Frontend(FrontendKind.NODE_PORT, it, port.node_port) for it in node_addresses)


def _notes_about(end: Place) -> Iterator[str]:
    if end.pod and not end.pod.ready and end.target.kind is TargetKind.POD:
        yield f"{end.target.without_port} is not ready, so Services do not send to it."


def _notes_about_service(
    service: Service, target: Target, frontend: Frontend, outside: bool
) -> Iterator[str]:
    if service.proxy_name is not None:
        yield (
            f"{target.without_port} has the label service.kubernetes.io/service-proxy-name: another proxy serves it."
        )
    if outside and frontend.kind is FrontendKind.CLUSTER_IP:
        yield (
            f"{target.without_port} has no address for clients outside; this traces to its cluster IP, which they reach"
            " only with a route to it."
        )
