"""Trace the connection that a user names: on one node, or over the nodes of a cluster."""

from collections.abc import Collection, Iterator, Mapping, Sequence

from pykubeproxy.config import Config, DetectLocalMode
from pykubeproxy.inspect.connection import Directory, LocationKind, ResolvedConnection
from pykubeproxy.inspect.node import NodeState, UnknownNode
from pykubeproxy.inspect.packets.packet import NodeNetwork, Packet
from pykubeproxy.inspect.targets import TargetKind
from pykubeproxy.inspect.trace.journey import (
    JourneyStart,
    Location,
    Locations,
    ReadNodes,
    Receivers,
    TraceAnswer,
    TraceDestination,
    follow_connection,
    follow_on_node,
)
from pykubeproxy.objects import Node
from pykubeproxy.services.ports import ANY_LOCAL, FrontendKind

# The name of a node that has none.
THIS_NODE = "this node"
_NOT_READ = "not read; use `kubectl pykubeproxy trace`"


def trace_on_node(
    state: NodeState,
    ends: ResolvedConnection,
    directory: Directory,
    *,
    origin: LocationKind | None = None,
    interface: str = "",
) -> TraceAnswer:
    """Trace a connection that this node gets first, through its rules only.

    `origin` says where the source is, and `interface` by which the packet comes in, if the user says so. Raises
    TooManyRules.
    """
    name = directory.here or _name_at(state.network, directory) or THIS_NODE
    packet = _packet(ends, state, origin, interface)
    client = ends.client
    kind = LocationKind.NODE if packet.starts_here else origin or client.kind
    if packet.starts_here or (kind is LocationKind.NODE and not client.node):
        source = Location(kind, ends.source, name)
    else:
        source = Location(kind, ends.source, client.node, str(client.pod.key) if client.pod else "")

    def read(names: Collection[str]) -> Mapping[str, NodeState | UnknownNode]:
        return {other: state if other == name else UnknownNode(Node(other), _NOT_READ) for other in names}

    locations = Locations(directory.nodes, directory.slices, directory.pods.values(), complete=False)
    return follow_on_node(JourneyStart(name, packet), source, _destination(ends, directory), locations, read)


def trace_in_cluster(
    ends: ResolvedConnection,
    directory: Directory,
    entrances: Sequence[Receivers],
    read: ReadNodes,
    *,
    via: str = "",
) -> TraceAnswer:
    """Trace a connection over the nodes on its way; `via` is the node that receives it, else all of `entrances` may.

    Raises NowhereToStart, TooManyRules.
    """
    locations = locations_of(directory)
    client = ends.client
    if client.target.kind is TargetKind.ADDRESS:
        source = locations.find(ends.source)
    else:
        kind = LocationKind.NODE if client.kind is LocationKind.NODE else LocationKind.POD
        source = Location(kind, ends.source, client.node, str(client.pod.key) if client.pod else "")
    destination = _destination(ends, directory, at_each_node=not via)
    found = [Receivers(via)] if via else entrances
    return follow_connection(source, destination, found, locations, read)


def locations_of(directory: Directory) -> Locations:
    """Return the locations in a cluster."""
    return Locations(directory.nodes, directory.slices, directory.pods.values())


def misplaced(ends: ResolvedConnection, directory: Directory) -> Iterator[str]:
    """Yield a sentence if packets of the source start on another node than this one."""
    client = ends.client
    if not client.node or client.node == directory.here or not directory.here:
        return
    if directory.nodes and not directory.node(directory.here):
        yield (
            f"packets of {client.target} start on node {client.node}, and there is no Node {directory.here}. If these"
            f" are the rules of {client.node}, add --hostname-override {client.node}."
        )
    else:
        yield (
            f"packets of {client.target} start on node {client.node}, and these are the rules of {directory.here}. Run"
            f" this on {client.node}, or use `kubectl pykubeproxy trace`."
        )


def _name_at(network: NodeNetwork, directory: Directory) -> str:
    """Return the name of the Node that has one of these addresses; "" if there is none."""
    return next(
        (node.name for node in directory.nodes if not network.addresses.isdisjoint(node.addresses)), ""
    )


def _packet(
    ends: ResolvedConnection, state: NodeState, origin: LocationKind | None, interface: str
) -> Packet:
    """Return the packet with the interface by which it comes in, if it does not start on the node."""
    network = state.network
    is_named = ends.client.target.kind is not TargetKind.ADDRESS
    kind = origin or (ends.client.kind if is_named else None)
    if kind is LocationKind.POD and not network.routes and state.config:
        interface = interface or _pod_interface(state.config)
    if kind in (LocationKind.POD, LocationKind.OUTSIDE):
        starts_here = False
    else:
        # A node's name may be that of another node; without addresses, take it for this one.
        is_here = (is_named and not network.addresses) or network.is_local(ends.source)
        starts_here = bool(origin) or (is_here and not interface)
    return Packet(
        ends.protocol.value.lower(),
        ends.source,
        ends.destination,
        ends.port,
        starts_here=starts_here,
        received_by=interface,
    )


def _pod_interface(config: Config) -> str:
    """Return the incoming interface of pod traffic, if the configuration detects pods by interface."""
    detect = config.detect_local
    match detect.mode:
        case DetectLocalMode.BRIDGE_INTERFACE:
            return detect.bridge_interface
        case DetectLocalMode.INTERFACE_NAME_PREFIX:
            return detect.interface_name_prefix
        case _:
            return ""


def _destination(
    ends: ResolvedConnection, directory: Directory, *, at_each_node: bool = False
) -> TraceDestination:
    """Return the destination; with `at_each_node`, a Service's node port is one of each node."""
    kind = ends.frontend.kind if ends.frontend else None
    everywhere = at_each_node and ends.server is None and kind is FrontendKind.NODE_PORT
    return TraceDestination(
        ends.protocol.value,
        ANY_LOCAL if everywhere else ends.destination,
        ends.port,
        str(ends.service or ""),
        kind,
        "" if ends.service else _unserved(ends, directory),
    )


def _unserved(ends: ResolvedConnection, directory: Directory) -> str:
    """Return why the Service with this address has no frontend there; "" if there is no such Service."""
    for service in directory.services:
        if ends.destination in (*service.cluster_ips, *service.external_ips, *service.load_balancer_ips):
            return f"Service {service.key} has no port {ends.port}/{ends.protocol.value}"
    return ""
