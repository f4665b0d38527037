"""Find the addresses of both ends of a connection in a directory of objects.

    connection = resolve(parse_source("pod/default/client"), parse_destination("svc/default/web:http"), directory)

Pure: the caller reads the objects. Plain addresses need none.
"""

import enum
import ipaddress
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import NamedTuple, TypeVar

import msgspec

from pykubeproxy.inspect.targets import Target, TargetKind
from pykubeproxy.objects import (
    EndpointPort,
    EndpointSlice,
    Family,
    Key,
    Node,
    Port,
    Protocol,
    Service,
    address_and_port,
    family_of,
)
from pykubeproxy.objects.pods import Pod
from pykubeproxy.services.ports import Frontend, FrontendKind, PortName
from pykubeproxy.wording import listed, suggestion


class Directory(msgspec.Struct, frozen=True, dict=True):
    """Objects at one place, at least those that the targets name.

    - `place`: where they come from, in a sentence: "on the API server"
    - `advice`: what to do if an object of a kind is missing there: "add --kubeconfig to ask the API server"
    - `listed_pods`: Pods of the API; those that serve a Service are also known from `slices`
    - `pod_networks`: the CIDRs of all pods, as far as the configuration tells
    - `here`: the name of the node whose rules are inspected, "" if unknown
    - `complete`: `nodes` and `slices` are those of a whole cluster
    """

    place: str
    advice: Mapping[TargetKind, str] = {}
    services: tuple[Service, ...] = ()
    slices: tuple[EndpointSlice, ...] = ()
    nodes: tuple[Node, ...] = ()
    listed_pods: tuple[Pod, ...] = ()
    pod_networks: tuple[str, ...] = ()
    here: str = ""
    complete: bool = False

    def service(self, key: Key) -> Service | None:
        """Return a Service by name."""
        return next((service for service in self.services if service.key == key), None)

    def node(self, name: str) -> Node | None:
        """Return a Node by name."""
        return next((node for node in self.nodes if node.name == name), None)

    @cached_property
    def pods(self) -> dict[Key, Pod]:
        """All known Pods: those of the API, and those that EndpointSlices name."""
        return {**_pods_of(self.slices), **{pod.key: pod for pod in self.listed_pods}}

    @cached_property
    def _locations(self) -> dict[str, "Location"]:
        """What has an address of its own; Nodes last, as pods on the host network have the Node's addresses."""
        found: dict[str, Location] = {}
        for slice_ in self.slices:
            for endpoint in slice_.endpoints:
                if endpoint.node_name or endpoint.pod:
                    pod = f"{slice_.namespace}/{endpoint.pod}" if endpoint.pod else None
                    found[endpoint.address] = Location(
                        LocationKind.POD, endpoint.address, endpoint.node_name or None, pod
                    )
        for one in self.listed_pods:
            for address in () if one.finished or one.host_network else one.addresses:
                found[address] = Location(LocationKind.POD, address, one.node or None, str(one.key))
        for node in self.nodes:
            for address in node.addresses:
                on_host = found[address].pod if address in found else None
                found[address] = Location(LocationKind.NODE, address, node.name, on_host)
        return found

    def find(self, address: str) -> "Location":
        """Return the location of a canonical address; OUTSIDE, or unknown, if no object names it."""
        if known := self._locations.get(address):
            return known
        for node in self.nodes:
            if _is_in(address, node.pod_cidrs):
                return Location(LocationKind.POD, address, node.name, assumed=True)
        if _is_in(address, self.pod_networks):
            return Location(LocationKind.POD, address)
        return Location(LocationKind.OUTSIDE if self.complete else None, address)

    def endpoints(self, service: str) -> frozenset[str]:
        """Return the addresses in the EndpointSlices of the Service "namespace/name"."""
        own = (slice_ for slice_ in self.slices if str(slice_.service_key) == service)
        return frozenset(endpoint.address for slice_ in own for endpoint in slice_.endpoints)

    def pods_of(self, service: Key) -> tuple[Pod, ...]:
        """Return the Pods that the EndpointSlices of a Service name."""
        named = _pods_of(slice_ for slice_ in self.slices if slice_.service_key == service)
        return tuple(self.pods[key] for key in sorted(named))


def _pods_of(slices: Iterable[EndpointSlice]) -> dict[Key, Pod]:
    """Return what EndpointSlices tell about the Pods they name; a slice for each family names a Pod."""
    found: dict[Key, list[Pod]] = {}
    for pod in _named(slices):
        found.setdefault(pod.key, []).append(pod)
    return {key: _merged(some) for key, some in found.items()}


def _named(slices: Iterable[EndpointSlice]) -> Iterator[Pod]:
    for slice_ in slices:
        ports = tuple(port for port in slice_.ports if port.port)
        for endpoint in slice_.endpoints:
            if endpoint.pod and endpoint.address:
                yield Pod(
                    slice_.namespace,
                    endpoint.pod,
                    (endpoint.address,),
                    endpoint.node_name,
                    ready=endpoint.ready and not endpoint.terminating,
                    ports=ports,
                )


def _merged(pods: list[Pod]) -> Pod:
    ports: dict[tuple[str, int | None], EndpointPort] = {}
    for pod in pods:
        for port in pod.ports:
            ports.setdefault((port.protocol.value, port.port), port)
    return msgspec.structs.replace(
        pods[0],
        addresses=tuple(dict.fromkeys(address for pod in pods for address in pod.addresses)),
        ready=all(pod.ready for pod in pods),
        ports=tuple(ports.values()),
    )


def _is_in(address: str, networks: Iterable[str]) -> bool:
    """Return whether networks contain an address. Those of an agent are not checked: ignore invalid ones."""
    ip = ipaddress.ip_address(address)
    for network in networks:
        with suppress(ValueError):
            if ip in ipaddress.ip_network(network):
                return True
    return False


_MOST_MATCHES = 3


class Unresolved(LookupError):
    """A target has no address; str() is one line that says why and what to do."""


class LocationKind(enum.Enum):
    """What has an address, as --from names it: a pod, a node, or something outside the cluster."""

    POD = "pod"
    NODE = "node"
    OUTSIDE = "outside"


class Location(msgspec.Struct, frozen=True, rename="camel"):
    """Where an address is.

    - `kind`: "pod", "node" or "outside"; null if unknown. A pod with the network of its node counts as the node
    - `node`: its node, "" if only the name of the node is unknown; null outside, or if the node is unknown
    - `pod`: NAMESPACE/NAME, or null
    - `assumed`: the node follows from podCIDRs alone, which some networks do not use
    """

    kind: LocationKind | None
    address: str
    node: str | None = None
    pod: str | None = None
    assumed: bool = False


class _End(NamedTuple):
    """One end of a connection: its addresses, the primary one first, and where they are."""

    target: Target
    addresses: tuple[str, ...]
    location: Location
    pod: Pod | None = None


def _find(target: Target, directory: Directory) -> _End:
    """Find a target other than a Service. Raises Unresolved."""
    match target.kind:
        case TargetKind.POD:
            return _pod(target, directory)
        case TargetKind.NODE:
            return _node(target, directory)
        case _:
            return _End(target, (target.name,), directory.find(target.name))


def _pod(target: Target, directory: Directory) -> _End:
    pod = directory.pods.get(target.key)
    if pod is None:
        raise missing(target, (f"pod/{key}" for key in directory.pods), directory)
    if pod.finished:
        raise Unresolved(f"{target.without_port} has ended (phase {pod.phase}); name a running pod")
    if not pod.addresses:
        phase = f"phase {pod.phase}" if pod.phase else "not started"
        raise Unresolved(f"{target.without_port} has no address yet ({phase}); wait until it runs")
    on_host = pod.host_network or directory.find(pod.addresses[0]).kind is LocationKind.NODE
    kind = LocationKind.NODE if on_host else LocationKind.POD
    return _End(target, pod.addresses, Location(kind, pod.addresses[0], pod.node or None, str(pod.key)), pod)


def _node(target: Target, directory: Directory) -> _End:
    node = directory.node(target.name)
    if node is None:
        raise missing(target, (f"node/{node.name}" for node in directory.nodes), directory)
    if not node.addresses:
        raise Unresolved(f"{target.without_port} has no address {directory.place}; give an address instead")
    return _End(target, node.addresses, Location(LocationKind.NODE, node.addresses[0], node.name))


def missing(target: Target, known: Iterable[str], directory: Directory) -> Unresolved:
    """Return the error about an object that the directory lacks, with similar names first."""
    names = sorted(known)
    suggested = suggestion(target.without_port, names)
    parts = [
        f"there is no {target.without_port} {directory.place}",
        suggested,
        directory.advice.get(target.kind, ""),
        f"known: {listed(names, _MOST_MATCHES)}" if names and not suggested else "",
    ]
    return Unresolved("; ".join(filter(None, parts)))


# How many ports an error names.
_MOST_PORTS = 6

_AnyPort = TypeVar("_AnyPort", Port, EndpointPort)


def _service_port(service: Service, target: Target, protocol: Protocol | None) -> Port:
    """Return the port of a Service that a target and a protocol name; without a port, the only one."""
    if not service.ports:
        raise Unresolved(f"{target.without_port} has no ports, so nothing is served; check its spec.ports")
    if target.port and not any(_is(port, target.port) for port in service.ports):
        for port in service.ports:
            if target.port == str(port.node_port):
                raise Unresolved(
                    f"{target.port} is the node port of {target.without_port}; use node/NAME:{target.port}, or"
                    f" {target.without_port}:{port.name or port.port}"
                )
    return _choose(service.ports, target, protocol)


def _pod_port(pod: Pod, target: Target, protocol: Protocol | None) -> tuple[int, Protocol]:
    """Return the number and protocol of a pod's port; a number may be one that the Pod does not declare."""
    number = int(target.port) if target.port.isdecimal() else 0
    declared = [port.protocol for port in pod.ports if port.port == number]
    # A declaration is only information: the process may listen with both protocols.
    if number and (not declared or (protocol and protocol not in declared)):
        return number, protocol or Protocol.TCP
    if not pod.ports:
        raise Unresolved(f"{target.without_port} declares no ports; use {target.without_port}:NUMBER")
    chosen = _choose(pod.ports, target, protocol)
    assert chosen.port is not None, "ports without a number are left out"
    return chosen.port, chosen.protocol


def _choose(ports: Sequence[_AnyPort], target: Target, protocol: Protocol | None) -> _AnyPort:
    named = [port for port in ports if _is(port, target.port)] if target.port else list(ports)
    if not named:
        raise Unresolved(f"{target.without_port} has no port {target.port}; it has {_names(ports)}")
    matching = [port for port in named if protocol in (None, port.protocol)]
    if not matching:
        assert protocol is not None, "a protocol filters"
        others = " and ".join(dict.fromkeys(port.protocol.value for port in named))
        what = f"port {target.port} of {target.without_port}" if target.port else str(target)
        raise Unresolved(f"{what} has protocol {others}, not {protocol.value}; remove --proto")
    if len(matching) > 1:
        first = matching[0]
        raise Unresolved(
            f"{target} has several ports: {_names(matching)}; name one, such as"
            f" {target.without_port}:{first.name or first.port}"
            + (" --proto " + (first.protocol.value.lower()) if _same_names(matching) else "")
        )
    return matching[0]


def _is(port: Port | EndpointPort, text: str) -> bool:
    return text in (port.name, str(port.port))


def _same_names(ports: Iterable[Port | EndpointPort]) -> bool:
    names = [port.name or str(port.port) for port in ports]
    return len(set(names)) < len(names)


def _names(ports: Sequence[Port | EndpointPort]) -> str:
    """Return text such as "http (80/TCP) and 9090/UDP"."""

    def text(port: Port | EndpointPort) -> str:
        number = f"{port.port}/{port.protocol.value}"
        return f"{port.name} ({number})" if port.name else number

    return listed(map(text, ports), _MOST_PORTS)


# How many pods an error names.
_MOST_PODS = 3
_PREFERRED_OUTSIDE = (
    FrontendKind.LOAD_BALANCER_IP,
    FrontendKind.EXTERNAL_IP,
    FrontendKind.NODE_PORT,
    FrontendKind.CLUSTER_IP,
)


class TracedDestination(msgspec.Struct, frozen=True, rename="camel"):
    """What the client connects to.

    - `protocol`: "TCP", "UDP" or "SCTP"
    - `address`: "*" for a node port that is asked at each node
    - `service`: NAMESPACE/NAME:PORT of the service port that has this frontend, or null
    - `kind`: "cluster-ip", "external-ip", "load-balancer-ip", "node-port", or null
    - `unserved`: why a Service with this address has no frontend there, or null
    """

    protocol: str
    address: str
    port: int
    service: str | None = None
    kind: FrontendKind | None = None
    unserved: str | None = None

    def __str__(self) -> str:
        """Return text such as "cluster IP 10.96.0.10:80"."""
        if self.kind is None:
            return address_and_port(self.address, self.port)
        return str(Frontend(self.kind, self.address, self.port))

    @property
    def title(self) -> str:
        """The service port, else the address and port."""
        return self.service or address_and_port(self.address, self.port)

    @property
    def service_key(self) -> str:
        """NAMESPACE/NAME of the Service; "" if there is none."""
        return (self.service or "").partition(":")[0]


class ResolvedConnection(msgspec.Struct, frozen=True):
    """The first packet of a connection, and what its ends are.

    - `client`: where it starts; its address and that of `destination` are canonical and of one family
    - `sender`, `receiver`: what the user names
    - `name`: the service port at the destination, None if there is none or it is unknown
    - `notes`: facts about the ends that a user should know, a sentence each
    """

    sender: Target
    receiver: Target
    client: Location
    destination: TracedDestination
    name: PortName | None = None
    notes: tuple[str, ...] = ()

    @property
    def family(self) -> Family:
        return family_of(self.client.address)


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
    source is. Clients outside use a load balancer address, an external IP, or a node port at the Node `entry`, or
    at the first of a whole cluster; others use the cluster IP. Raises Unresolved.
    """
    start = _find(source, directory)
    kind = client or start.location.kind or (LocationKind.OUTSIDE if directory.pod_networks else None)
    start = start._replace(location=msgspec.structs.replace(start.location, kind=kind))
    if destination.kind is TargetKind.SERVICE:
        return _to_service(start, destination, directory, family, protocol, entry)
    end = _find(destination, directory)
    sender, address = _addresses(start, destination, end.addresses, family)
    if end.pod:
        number, chosen = _pod_port(end.pod, destination, protocol)
        to = TracedDestination(chosen.value, address, number)
        unready = f"{destination.without_port} is not ready, so Services do not send to it."
        return ResolvedConnection(source, destination, sender, to, notes=() if end.pod.ready else (unready,))
    number = int(destination.port)
    default = Protocol.TCP if destination.kind is TargetKind.ADDRESS else None
    found = _service_at(address, number, protocol or default, directory)
    if found is None:
        used = (protocol or Protocol.TCP).value
        to = TracedDestination(used, address, number, unserved=_unserved(address, number, used, directory))
        return ResolvedConnection(source, destination, sender, to)
    name, frontend = found
    to = TracedDestination(name.protocol, address, number, str(name), frontend.kind)
    return ResolvedConnection(source, destination, sender, to, name)


def _to_service(
    start: _End,
    target: Target,
    directory: Directory,
    family: Family | None,
    protocol: Protocol | None,
    entry: str,
) -> ResolvedConnection:
    service = directory.service(target.key)
    if service is None:
        raise missing(target, (f"svc/{service.key}" for service in directory.services), directory)
    _check_served(service, target, directory)
    port = _service_port(service, target, protocol)
    outside = start.location.kind is LocationKind.OUTSIDE
    frontends = _frontends(service, port, outside, directory, entry)
    if not frontends or (outside and port.node_port and frontends[0].kind is FrontendKind.CLUSTER_IP):
        raise _no_frontend(target, port)
    client, address = _addresses(start, target, tuple(frontend.address for frontend in frontends), family)
    frontend = next(frontend for frontend in frontends if frontend.address == address)
    name = PortName(service.namespace, service.name, port.name, port.protocol.value)
    to = TracedDestination(name.protocol, address, frontend.port, str(name), frontend.kind)
    notes = tuple(_notes_about_service(service, target, frontend, outside))
    return ResolvedConnection(start.target, target, client, to, name, notes)


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
            f"{target.without_port} is headless: clients connect to its pods, without a proxy; trace to one of"
            f" {names or 'its pods'}, with :PORT"
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
    nodes = [node for node in directory.nodes if node.name == entry or (directory.complete and not entry)]
    at_nodes = [address for node in nodes for address in node.addresses]
    every = tuple(_all_frontends(service, port, at_nodes))
    if not outside:
        return tuple(frontend for frontend in every if frontend.kind is FrontendKind.CLUSTER_IP)
    return tuple(sorted(every, key=lambda frontend: _PREFERRED_OUTSIDE.index(frontend.kind)))


def _addresses(
    start: _End, target: Target, destinations: Sequence[str], family: Family | None
) -> tuple[Location, str]:
    """Return the first source and the first destination of one family. Raises Unresolved."""
    for to in destinations:
        for at in start.addresses:
            if family_of(at) is family_of(to) and family in (None, family_of(to)):
                address = _checked(start.target, at)
                return msgspec.structs.replace(start.location, address=address), _checked(target, to)
    for end, addresses in ((start.target, start.addresses), (target, destinations)):
        if family and not any(family_of(address) is family for address in addresses):
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
    return " and ".join(dict.fromkeys(family_of(address).value for address in addresses))


def _service_at(
    address: str, number: int, protocol: Protocol | None, directory: Directory
) -> tuple[PortName, Frontend] | None:
    """Return the service port at an address and port; without a protocol, TCP is preferred."""
    wanted = [protocol] if protocol else list(Protocol)
    at_node = (address,) if directory.find(address).kind is LocationKind.NODE else ()
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
        yield from (Frontend(kind, address, port.port) for address in addresses)
    if port.node_port:
        yield from (Frontend(FrontendKind.NODE_PORT, address, port.node_port) for address in node_addresses)


def _unserved(address: str, number: int, protocol: str, directory: Directory) -> str | None:
    """Return why the Service with this address has no frontend there; None if there is no such Service."""
    for service in directory.services:
        if address in (*service.cluster_ips, *service.external_ips, *service.load_balancer_ips):
            return f"Service {service.key} has no port {number}/{protocol}"
    return None


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
