"""Trace the connection that a user names: on one node, or over the nodes of a cluster."""

from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec

from pykubeproxy.config import Config, DetectLocalMode
from pykubeproxy.inspect.connection import (
    Directory,
    Location,
    LocationKind,
    ResolvedConnection,
    TracedDestination,
)
from pykubeproxy.inspect.node import NodeState, UnknownNode
from pykubeproxy.inspect.packets.packet import NodeNetwork, Packet
from pykubeproxy.inspect.targets import TargetKind
from pykubeproxy.inspect.trace.journey import Follower, ReadNodes, TracedWay, address_of
from pykubeproxy.inspect.trace.report import TraceReport, report
from pykubeproxy.inspect.trace.tracked import not_read, tracked
from pykubeproxy.objects import Node, family_of
from pykubeproxy.services.ports import ANY_LOCAL, FrontendKind
from pykubeproxy.wording import listed

_NAMED = 3
_NOT_READ = "not read; use `kubectl pykubeproxy trace`"


class NowhereToStart(ValueError):
    """No node of the cluster is known to get the packet first. str() is one line."""


def trace_on_node(
    state: NodeState,
    ends: ResolvedConnection,
    directory: Directory,
    *,
    origin: LocationKind | None = None,
    interface: str = "",
    with_flows: bool = False,
) -> TraceReport:
    """Trace a connection that this node gets first, through its rules only.

    `origin` says where the source is, and `interface` by which the packet comes in, if the user says so. `with_flows`
    adds the flows that the node tracks. Raises TooManyRules.
    """
    name = directory.here or name_at(state.network, directory)
    packet = _packet(ends, state, origin, interface)
    source = ends.client
    if packet.starts_here:
        source = msgspec.structs.replace(source, kind=LocationKind.NODE, node=name, pod=None)

    def read(names: Collection[str]) -> Mapping[str, NodeState | UnknownNode]:
        return {other: state if other == name else UnknownNode(Node(other), _NOT_READ) for other in names}

    follower = Follower(source, ends.destination, directory, read)
    ways = follower.follow([TracedWay(name)], [packet])
    found = report(source, ends.destination, ways, alone=True)
    ends = msgspec.structs.replace(ends, client=source)
    return _with_flows(found, ends, directory, read) if with_flows else found


def _with_flows(
    found: TraceReport, ends: ResolvedConnection, directory: Directory, read: ReadNodes
) -> TraceReport:
    more = not_read(found.ways)
    note = f"Connections through {listed(more, _NAMED)} are not shown; use --via-node."
    return msgspec.structs.replace(
        found,
        tracked=tracked(ends, directory, found.ways, read),
        notes=(*found.notes, note) if more else found.notes,
    )


def trace_in_cluster(
    ends: ResolvedConnection,
    directory: Directory,
    entrances: Sequence[TracedWay],
    read: ReadNodes,
    *,
    via: str = "",
    with_flows: bool = False,
) -> TraceReport:
    """Trace a connection over the nodes on its way; `via` is the node that receives it, else all of `entrances` may.

    `with_flows` adds the flows that these nodes track. Raises NowhereToStart, TooManyRules.
    """
    source, destination = ends.client, ends.destination
    if not via and ends.receiver.kind is TargetKind.SERVICE and destination.kind is FrontendKind.NODE_PORT:
        destination = msgspec.structs.replace(destination, address=ANY_LOCAL)
    ways = _ways(source, destination, directory, [TracedWay(via)] if via else entrances)
    nodes = {node.name: node for node in directory.nodes}
    packets: list[Packet] = []
    for way in ways:
        address = destination.address
        if address == ANY_LOCAL and way.node is not None:
            address = address_of(nodes[way.node], source.address)
            if not address:
                family = family_of(source.address).value
                raise NowhereToStart(f"Node {way.node} has no {family} address")
        starts_here = source.kind is LocationKind.NODE
        packets.append(
            Packet(destination.protocol.lower(), source.address, address, destination.port, starts_here)
        )
    follower = Follower(source, destination, directory, read)
    followed = follower.follow(ways, packets, from_pod=source.kind is LocationKind.POD)
    found = report(source, destination, followed, alone=False)
    ends = msgspec.structs.replace(ends, destination=destination)
    return _with_flows(found, ends, directory, read) if with_flows else found


def _ways(
    source: Location, destination: TracedDestination, directory: Directory, entrances: Sequence[TracedWay]
) -> Sequence[TracedWay]:
    """Return the nodes whose rules the packet meets first."""
    if source.kind is not LocationKind.OUTSIDE:
        if source.node:
            return [TracedWay(source.node)]
        pod = source.pod or source.address
        raise NowhereToStart(f"the node of pod {pod} is unknown; is the pod scheduled?")
    if destination.address != ANY_LOCAL and (node := directory.find(destination.address).node):
        return [TracedWay(node)]
    if entrances:
        return entrances
    if destination.unserved:
        raise NowhereToStart(f"{destination.unserved}, so no node serves clients from outside there")
    raise NowhereToStart(
        f"no node is known to receive packets from {source.address} to {destination}; name one with --via-node"
    )


def misplaced(ends: ResolvedConnection, directory: Directory) -> Iterator[str]:
    """Yield a sentence if packets of the source start on another node than this one."""
    client = ends.client
    if not client.node or client.node == directory.here or not directory.here:
        return
    if directory.nodes and not directory.node(directory.here):
        yield (
            f"packets of {ends.sender} start on node {client.node}, and there is no Node {directory.here}. If these"
            f" are the rules of {client.node}, add --hostname-override {client.node}."
        )
    else:
        yield (
            f"packets of {ends.sender} start on node {client.node}, and these are the rules of {directory.here}. Run"
            f" this on {client.node}, or use `kubectl pykubeproxy trace`."
        )


def name_at(network: NodeNetwork, directory: Directory) -> str:
    """Return the name of the Node that has one of these addresses; "" if there is none."""
    return next(
        (node.name for node in directory.nodes if not network.addresses.isdisjoint(node.addresses)), ""
    )


def _packet(
    ends: ResolvedConnection, state: NodeState, origin: LocationKind | None, interface: str
) -> Packet:
    """Return the packet with the interface by which it comes in, if it does not start on the node."""
    network = state.network
    is_named = ends.sender.kind is not TargetKind.ADDRESS
    kind = origin or (ends.client.kind if is_named else None)
    if kind is LocationKind.POD and not network.routes and state.config:
        interface = interface or _pod_interface(state.config)
    if kind in (LocationKind.POD, LocationKind.OUTSIDE):
        starts_here = False
    else:
        # A node's name may be that of another node; without addresses, take it for this one.
        is_here = (is_named and not network.addresses) or network.is_local(ends.client.address)
        starts_here = bool(origin) or (is_here and not interface)
    return Packet(
        ends.destination.protocol.lower(),
        ends.client.address,
        ends.destination.address,
        ends.destination.port,
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
