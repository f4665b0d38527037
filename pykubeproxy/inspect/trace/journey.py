"""Follow the first packet of a connection from node to node, through the rules of each."""

import enum
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import msgspec

from pykubeproxy.inspect.connection import LocationKind
from pykubeproxy.inspect.explain.model import ExplainedGroup, Explanation
from pykubeproxy.inspect.node import NodeState, UnknownNode
from pykubeproxy.inspect.packets.addresses import contains
from pykubeproxy.inspect.packets.iptables import IptablesRules
from pykubeproxy.inspect.packets.packet import DNAT, NEW, SNAT, Packet
from pykubeproxy.inspect.packets.walk import NodeTrace, Path, Step, WalkEnd, walk
from pykubeproxy.inspect.routes import PacketVerdict, Policy
from pykubeproxy.objects import EndpointSlice, Family, Node, address_and_port, family_of
from pykubeproxy.objects.pods import Pod
from pykubeproxy.rules.iptables_save import parse_rule, parse_target
from pykubeproxy.rules.names import CLUSTER_PREFIX, EXTERNAL_PREFIX, LOCAL_PREFIX, is_owned
from pykubeproxy.rules.ruleset import Ruleset
from pykubeproxy.services.ports import ANY_LOCAL, Frontend, FrontendKind, PortName


class Location(msgspec.Struct, frozen=True):
    """Where an address is.

    - `kind`: None if the objects that are known do not tell
    - `node`: the name of its node; "" outside, or if the node is unknown
    - `pod`: "namespace/name"; "" if there is none or it is unknown; a pod on the host network has `kind` NODE
    - `assumed`: the node follows from podCIDRs alone, which some networks do not use
    """

    kind: LocationKind | None
    address: str
    node: str = ""
    pod: str = ""
    assumed: bool = False

    def __str__(self) -> str:
        """Return text such as "pod default/web on node1", "node1" or "203.0.113.7"."""
        if self.kind in (LocationKind.OUTSIDE, None):
            return self.address
        if self.kind is LocationKind.NODE and not self.pod:
            return self.node
        pod = f"pod {self.pod}" if self.pod else f"pod {self.address}"
        return f"{pod} on {self.node}" if self.node else pod


class Locations:
    """The addresses of Nodes, of pods and of the endpoints in EndpointSlices. `complete`: those of a whole cluster."""

    def __init__(
        self,
        nodes: Iterable[Node],
        slices: Iterable[EndpointSlice] = (),
        pods: Iterable[Pod] = (),
        *,
        complete: bool = True,
    ) -> None:
        self.complete = complete
        known = tuple(nodes)
        self.nodes = {node.name: node for node in known}
        self._nodes = {address: node.name for node in known for address in node.addresses}
        self._networks = [(network, node.name) for node in known for network in node.pod_cidrs]
        self._pods: dict[str, tuple[str, str]] = {}
        self._endpoints: dict[str, set[str]] = {}
        for slice_ in slices:
            self._endpoints.setdefault(str(slice_.service_key), set()).update(
                endpoint.address for endpoint in slice_.endpoints
            )
            for endpoint in slice_.endpoints:
                pod = f"{slice_.namespace}/{endpoint.pod}" if endpoint.pod else ""
                if endpoint.node_name:
                    self._pods[endpoint.address] = (endpoint.node_name, pod)
        for one in pods:
            # All pods on the host network have the node's addresses.
            for address in () if one.host_network else one.addresses:
                self._pods[address] = (one.node, str(one.key))

    def endpoints(self, service: str) -> frozenset[str]:
        """Return the addresses in the EndpointSlices of the Service "namespace/name"."""
        return frozenset(self._endpoints.get(service, ()))

    def find(self, address: str) -> Location:
        """Return the location of a canonical address; OUTSIDE, or unknown, if no object names it."""
        node, pod = self._pods.get(address, ("", ""))
        if address in self._nodes:
            return Location(LocationKind.NODE, address, self._nodes[address], pod)
        if node or pod:
            return Location(LocationKind.POD, address, node, pod)
        for network, name in self._networks:
            if contains(network, address):
                return Location(LocationKind.POD, address, name, assumed=True)
        return Location(LocationKind.OUTSIDE if self.complete else None, address)


# Reads these nodes, side by side if it can. Names every node that it is asked for.
ReadNodes = Callable[[Collection[str]], Mapping[str, NodeState | UnknownNode]]


class JourneyStart(msgspec.Struct, frozen=True):
    """A packet, and the node whose rules it meets first.

    - `from_pod`: it comes in from a pod of this node, by the interface that the rules name
    """

    node: str
    packet: Packet
    from_pod: bool = False


class NodeVisit(msgspec.Struct, frozen=True):
    """A packet on one node.

    - `route`: the nodes before this one
    - `probability`: of getting here
    - `trace`: the packet in the rules of this node; None if they are unknown, and `unread` says why
    """

    node: str
    route: tuple[str, ...]
    packet: Packet
    probability: float
    trace: NodeTrace | None
    unread: str = ""


class EndResult(enum.Enum):
    """How a packet ends.

    - REACHED: it gets to its destination, a pod or a node
    - LEFT: it leaves the cluster
    - SENT: it is on its way to a node whose rules are unknown, or to an unknown place
    - LOST: it goes to more nodes than a packet of a sound cluster does
    """

    REACHED = "reached"
    DROPPED = "dropped"
    REJECTED = "rejected"
    LEFT = "left"
    SENT = "sent"
    LOST = "lost"


class JourneyEnd(msgspec.Struct, frozen=True):
    """One end of a packet.

    - `location`: of the destination that it has then, and `port`
    - `translated`: a rule has replaced the destination, usually by an endpoint
    - `by_proxy`: the last rule to do so is one of a service proxy
    - `client`: the source that its receiver sees; "" if it is an unknown address of the node `masqueraded_on`
    - `client_assumed`: the node may also have picked another of its addresses
    - `masqueraded_on`: the node that replaced its source last; "" if the source is kept
    - `route`: the nodes on its way, the last one where it ends
    - `step`: the rule that drops or rejects it
    """

    result: EndResult
    location: Location
    port: int
    translated: bool
    by_proxy: bool
    client: str
    client_assumed: bool
    masqueraded_on: str
    route: tuple[str, ...]
    probability: float
    step: Step | None = None


class Journey(msgspec.Struct, frozen=True):
    """A packet from the first node to all its ends, whose probabilities add up to 1. `visits` are in order of time."""

    entry: JourneyStart
    visits: tuple[NodeVisit, ...]
    outcomes: tuple[JourneyEnd, ...]

    @property
    def unread(self) -> Mapping[str, str]:
        """The nodes whose rules are unknown, with the reasons."""
        return {visit.node: visit.unread for visit in self.visits if visit.trace is None}

    @property
    def starts_unread(self) -> bool:
        """Whether the rules of the first node are unknown."""
        return self.visits[0].trace is None


# How many nodes that may receive a packet are read, if their endpoints differ.
MOST_RECEIVERS = 10


class Receivers(msgspec.Struct, frozen=True):
    """Nodes that receive packets to a frontend, and should treat them alike.

    - `read`: the node whose rules to read; "" if there are too many
    - `others`: nodes that should do the same, by the Service and its EndpointSlices
    - `serve`: whether these nodes should send packets to endpoints
    """

    read: str
    others: tuple[str, ...] = ()
    serve: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """All these nodes."""
        return (self.read, *self.others) if self.read else self.others


def receivers(
    services: Iterable[Explanation], name: PortName, family: Family, kind: FrontendKind
) -> Sequence[Receivers]:
    """Return the nodes that may receive packets to a frontend of a service port; none if nodes do not serve it."""
    for port in (port for service in services for port in service.ports):
        if (port.name, port.family) == (name, family):
            internal = kind is FrontendKind.CLUSTER_IP
            local = port.port.internal_local if internal else port.port.external_local
            policies = {policy.policy: policy.groups for policy in port.policies}
            return _read_some(policies[Policy.LOCAL if local else Policy.CLUSTER])
    return ()


def _read_some(groups: Sequence[ExplainedGroup]) -> Sequence[Receivers]:
    """Choose a node of each group to read, but not of all groups that serve, if these are many."""
    found = [_receivers(group) for group in groups]
    serving = [one for one in found if one.serve]
    unread = tuple(name for one in serving[MOST_RECEIVERS:] for name in one.names)
    return (
        *serving[:MOST_RECEIVERS],
        *([Receivers("", unread)] if unread else []),
        *(one for one in found if not one.serve),
    )


def _receivers(group: ExplainedGroup) -> Receivers:
    first, *others = (node.name for node in group.nodes)
    return Receivers(first, tuple(others), group.serves)


class TraceDestination(msgspec.Struct, frozen=True):
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
        """Return text such as "cluster IP 10.96.0.10:80"."""
        if self.kind is None:
            return address_and_port(self.address, self.port)
        return str(Frontend(self.kind, self.address, self.port))

    @property
    def title(self) -> str:
        """The service port, else the address and port."""
        return self.service or address_and_port(self.address, self.port)


class TraceWay(msgspec.Struct, frozen=True):
    """One way into the cluster, and the journey from there; None if no node of the group is read."""

    receivers: Receivers
    journey: Journey | None


class TraceAnswer(msgspec.Struct, frozen=True):
    """Where a connection goes. It has one way, or one for each group of nodes that may receive it.

    - `endpoints`: the addresses in the EndpointSlices of the Service; None if they are unknown, or there is no Service
    - `alone`: no other node can be read than the first
    """

    source: Location
    destination: TraceDestination
    ways: tuple[TraceWay, ...]
    endpoints: frozenset[str] | None = None
    alone: bool = False

    @property
    def journeys(self) -> tuple[Journey, ...]:
        """The journeys of the ways that are read."""
        return tuple(way.journey for way in self.ways if way.journey)


class NowhereToStart(ValueError):
    """No node of the cluster is known to get the packet first. str() is one line."""


def follow_connection(
    source: Location,
    destination: TraceDestination,
    entrances: Sequence[Receivers],
    locations: Locations,
    read: ReadNodes,
) -> TraceAnswer:
    """Follow a packet from its source.

    `entrances` are the nodes that may receive a packet from outside, for destinations that no node has. Raises
    NowhereToStart, TooManyRules.
    """
    ways = _ways(source, destination, entrances, locations)
    entries = [_entry(source, destination, way.read, locations) for way in ways if way.read]
    journeys = iter(follow(entries, locations, read))
    followed = tuple(TraceWay(way, next(journeys) if way.read else None) for way in ways)
    service = destination.service.partition(":")[0]
    return TraceAnswer(
        source,
        destination,
        followed,
        locations.endpoints(service) if service and locations.complete else None,
    )


def follow_on_node(
    start: JourneyStart,
    source: Location,
    destination: TraceDestination,
    locations: Locations,
    read: ReadNodes,
) -> TraceAnswer:
    """Follow a packet from the node that gets it first. Raises TooManyRules."""
    (journey,) = follow([start], locations, read)
    return TraceAnswer(source, destination, (TraceWay(Receivers(start.node), journey),), alone=True)


def _entry(source: Location, destination: TraceDestination, node: str, locations: Locations) -> JourneyStart:
    address = destination.address
    if address == ANY_LOCAL:
        address = address_of(locations.nodes.get(node, Node(node)), source.address)
        if not address:
            raise NowhereToStart(f"Node {node} has no {family_of(source.address).value} address")
    starts_here = source.kind is LocationKind.NODE
    packet = Packet(destination.protocol.lower(), source.address, address, destination.port, starts_here)
    return JourneyStart(node, packet, source.kind is LocationKind.POD)


def _ways(
    source: Location, destination: TraceDestination, entrances: Sequence[Receivers], locations: Locations
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


# A packet goes to the node of a node port, from there to an endpoint; one more is a loop.
_MOST_NODES = 5
# How many nodes are read at a time: a Service may have endpoints on all of them.
MOST_READ = 20
_TOO_MANY = f"more than {MOST_READ} nodes come next; trace to one of their endpoints to see its rules"
_RESULTS = {PacketVerdict.DROP: EndResult.DROPPED, PacketVerdict.REJECT: EndResult.REJECTED}


class _Leg(msgspec.Struct, frozen=True):
    """A packet on its way to a node."""

    journey: int
    node: str
    route: tuple[str, ...]
    packet: Packet
    probability: float
    translated: bool = False
    by_proxy: bool = False
    masqueraded_on: str = ""
    client_assumed: bool = False
    from_pod: bool = False


def follow(entries: Sequence[JourneyStart], locations: Locations, read: ReadNodes) -> tuple[Journey, ...]:
    """Return a journey for each entry. Read only the nodes on the way, together where several come next.

    Raises TooManyRules.
    """
    visits: list[list[NodeVisit]] = [[] for _ in entries]
    outcomes: list[list[JourneyEnd]] = [[] for _ in entries]
    legs = [
        _Leg(number, entry.node, (), entry.packet, 1.0, from_pod=entry.from_pod)
        for number, entry in enumerate(entries)
    ]
    while legs:
        names = list(dict.fromkeys(leg.node for leg in legs))
        states: dict[str, NodeState | UnknownNode] = {
            name: UnknownNode(Node(name), _TOO_MANY) for name in names
        }
        states |= read(names[:MOST_READ])
        onward: list[_Leg] = []
        for leg in legs:
            state = states[leg.node]
            visit = _visit(leg, state)
            visits[leg.journey].append(visit)
            for one in _results(leg, visit, state, locations):
                if isinstance(one, JourneyEnd):
                    outcomes[leg.journey].append(one)
                else:
                    onward.append(one)
        legs = onward
    return tuple(
        Journey(entry, tuple(some), tuple(ends))
        for entry, some, ends in zip(entries, visits, outcomes, strict=True)
    )


def _visit(leg: _Leg, state: NodeState | UnknownNode) -> NodeVisit:
    visit = NodeVisit(leg.node, leg.route, leg.packet, leg.probability, None)
    family = family_of(leg.packet.destination)
    if isinstance(state, UnknownNode):
        return msgspec.structs.replace(visit, unread=state.reason)
    if family not in state.rules:
        return msgspec.structs.replace(visit, unread=f"has no {family.value} tables")
    ruleset, packet = state.rules[family].ruleset, leg.packet
    if leg.from_pod and not packet.received_by:
        packet = msgspec.structs.replace(packet, received_by=pod_interface(ruleset))
    trace = walk(IptablesRules(ruleset), packet, state.network, record=True)
    return msgspec.structs.replace(visit, packet=packet, trace=trace)


def _results(
    leg: _Leg, visit: NodeVisit, state: NodeState | UnknownNode, locations: Locations
) -> Iterator[JourneyEnd | _Leg]:
    """Yield how the packet ends on a node, and the legs on which it goes on."""
    if visit.trace is None or isinstance(state, UnknownNode):
        yield _outcome(
            leg, EndResult.SENT, leg.packet, locations.find(leg.packet.destination), leg.probability
        )
        return
    onward: dict[tuple[str, Packet], _Leg] = {}
    for outcome in visit.trace.ends:
        result = _result(leg, outcome, state, locations)
        if isinstance(result, _Leg):
            key = (result.node, result.packet)
            if key in onward:
                total = onward[key].probability + result.probability
                result = msgspec.structs.replace(result, probability=total)
            onward[key] = result
        else:
            yield result
    yield from onward.values()


def _result(leg: _Leg, outcome: WalkEnd, state: NodeState, locations: Locations) -> JourneyEnd | _Leg:
    packet = outcome.packet
    leg = msgspec.structs.replace(
        leg,
        probability=leg.probability * outcome.probability,
        translated=leg.translated or DNAT in packet.states,
        by_proxy=_translated_by_proxy(outcome.path) if DNAT in packet.states else leg.by_proxy,
        masqueraded_on=leg.node if SNAT in packet.states else leg.masqueraded_on,
    )
    if state.network.is_local(packet.destination) or packet.destination in state.node.addresses:
        known = locations.find(packet.destination)
        location = Location(LocationKind.NODE, packet.destination, leg.node, known.pod)
    else:
        location = locations.find(packet.destination)
    if result := _RESULTS.get(outcome.verdict):
        last = outcome.path[-1]
        step = last if isinstance(last, Step) else None
        return _outcome(leg, result, packet, location, leg.probability, step)
    # A masquerade does not tell which address it picks.
    masqueraded = SNAT in packet.states and packet.source == leg.packet.source
    if result := _here(leg, location):
        packet = msgspec.structs.replace(packet, source="") if masqueraded else packet
        return _outcome(leg, result, packet, location, leg.probability)
    if masqueraded:
        packet = msgspec.structs.replace(
            packet, source=address_of(state.node, packet.destination) or packet.source
        )
        leg = msgspec.structs.replace(leg, client_assumed=True)
    if len(leg.route) + 1 >= _MOST_NODES:
        return _outcome(leg, EndResult.LOST, packet, location, leg.probability)
    return msgspec.structs.replace(
        leg,
        node=location.node,
        route=(*leg.route, leg.node),
        packet=Packet(packet.protocol, packet.source, packet.destination, packet.port, states=(NEW,)),
        from_pod=False,
    )


def _here(leg: _Leg, location: Location) -> EndResult | None:
    """Return how a packet ends that goes to no other node; None if it goes to one."""
    if location.kind is None:
        return EndResult.SENT
    if location.kind is LocationKind.OUTSIDE:
        return EndResult.LEFT
    return EndResult.REACHED if location.node in ("", leg.node) else None


def _outcome(
    leg: _Leg,
    result: EndResult,
    packet: Packet,
    location: Location,
    probability: float,
    step: Step | None = None,
) -> JourneyEnd:
    return JourneyEnd(
        result=result,
        location=location,
        port=packet.port,
        translated=leg.translated,
        by_proxy=leg.by_proxy,
        client=packet.source,
        client_assumed=leg.client_assumed and bool(packet.source),
        masqueraded_on=leg.masqueraded_on,
        route=(*leg.route, leg.node),
        probability=probability,
        step=step,
    )


def address_of(node: Node, other: str) -> str:
    """Return the first address of a node in the family of another address; "" if it has none."""
    family = family_of(other)
    return next((address for address in node.addresses if family_of(address) is family), "")


def _translated_by_proxy(path: Path) -> bool:
    """Return whether a chain of a service proxy has replaced the destination, not that of another program."""
    return any(
        isinstance(point, Step) and is_owned(point.chain) and parse_target(point.rule) == "DNAT"
        for point in path
    )


def pod_interface(ruleset: Ruleset) -> str:
    """Return an interface by which packets of pods come in, if the rules detect pods by interface; else ""."""
    for key in ruleset.chains:
        if key.table == "nat" and key.chain.startswith((CLUSTER_PREFIX, EXTERNAL_PREFIX, LOCAL_PREFIX)):
            for rule in map(parse_rule, ruleset.chains[key]):
                if "-i" in rule.options:
                    return rule.options["-i"].removeprefix("! ").removesuffix("+")
                if "-s" in rule.options:
                    return ""
    return ""
