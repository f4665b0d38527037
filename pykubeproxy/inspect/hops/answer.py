"""Answer where a connection goes: the journeys of its first packet."""

from collections.abc import Sequence

import msgspec

from pykubeproxy.inspect.hops.follow import address_of, follow
from pykubeproxy.inspect.hops.journey import Entry, Journey, ReadNodes
from pykubeproxy.inspect.hops.locations import Location, Locations
from pykubeproxy.inspect.hops.receivers import Receivers
from pykubeproxy.inspect.targets import LocationKind
from pykubeproxy.inspect.trace.packet import Packet
from pykubeproxy.objects import Node, address_and_port, family_of
from pykubeproxy.services.frontend import ANY_LOCAL, Frontend, FrontendKind


class Destination(msgspec.Struct, frozen=True):
    """What a client connects to.

    - `protocol`: as Kubernetes writes it
    - `address`: ANY_LOCAL for a node port of the node that gets the packet first
    - `service`: "namespace/name:port" of the service port that has this frontend, "" if there is none
    - `kind`: the kind of frontend
    - `unserved`: why a Service with this address has no frontend there, such as "default/web has no port 81/TCP"
    """

    protocol: str
    address: str
    port: int
    service: str = ""
    kind: FrontendKind | None = None
    unserved: str = ""

    def __str__(self) -> str:
        """Such as "cluster IP 10.96.0.10:80"."""
        if self.kind is None:
            return address_and_port(self.address, self.port)
        return str(Frontend(self.kind, self.address, self.port))

    @property
    def title(self) -> str:
        """The service port, else the address and port."""
        return self.service or address_and_port(self.address, self.port)


class Way(msgspec.Struct, frozen=True):
    """One way into the cluster, and the journey from there; None if no node of the group is read."""

    receivers: Receivers
    journey: Journey | None


class Answer(msgspec.Struct, frozen=True):
    """Where a connection goes. It has one way, or one for each group of nodes that may receive it.

    - `endpoints`: the addresses in the EndpointSlices of the Service; None if the destination is not that of a Service
    """

    source: Location
    destination: Destination
    ways: tuple[Way, ...]
    endpoints: frozenset[str] | None = None

    @property
    def journeys(self) -> tuple[Journey, ...]:
        """The journeys of the ways that are read."""
        return tuple(way.journey for way in self.ways if way.journey)


class NowhereToStart(ValueError):
    """No node of the cluster is known to get the packet first. str() is one line."""


def answer(
    source: Location,
    destination: Destination,
    entrances: Sequence[Receivers],
    locations: Locations,
    read: ReadNodes,
) -> Answer:
    """Follow a packet from its source.

    `entrances` are the nodes that may receive a packet from outside, for destinations that no node has. Raises
    NowhereToStart, TooManyRules.
    """
    ways = _ways(source, destination, entrances, locations)
    entries = [_entry(source, destination, way.read, locations) for way in ways if way.read]
    journeys = iter(follow(entries, locations, read))
    followed = tuple(Way(way, next(journeys) if way.read else None) for way in ways)
    service = destination.service.partition(":")[0]
    return Answer(source, destination, followed, locations.endpoints(service) if service else None)


def _entry(source: Location, destination: Destination, node: str, locations: Locations) -> Entry:
    address = destination.address
    if address == ANY_LOCAL:
        address = address_of(locations.nodes.get(node, Node(node)), source.address)
        if not address:
            raise NowhereToStart(f"Node {node} has no {family_of(source.address).value} address")
    starts_here = source.kind is LocationKind.NODE
    packet = Packet(destination.protocol.lower(), source.address, address, destination.port, starts_here)
    return Entry(node, packet, source.kind is LocationKind.POD)


def _ways(
    source: Location, destination: Destination, entrances: Sequence[Receivers], locations: Locations
) -> Sequence[Receivers]:
    """Return the nodes whose rules the packet meets first."""
    if source.kind is not LocationKind.OUTSIDE:
        if source.node:
            return [Receivers(source.node)]
        raise NowhereToStart(f"the node of {source} is unknown; is the pod scheduled?")
    if destination.address != ANY_LOCAL and (node := locations.find(destination.address).node):
        return [Receivers(node)]
    if entrances:
        return entrances
    if destination.unserved:
        raise NowhereToStart(f"{destination.unserved}, so no node serves clients from outside there")
    raise NowhereToStart(
        f"no node is known to receive packets from {source.address} to {destination}; name one with --via-node"
    )
