"""Follow the first packet of a connection from node to node, through the rules of each."""

import enum
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from pykubeproxy.inspect.connection import Directory, Location, LocationKind, TracedDestination
from pykubeproxy.inspect.explain.model import ExplainedGroup, Explanation
from pykubeproxy.inspect.node import NodeRules, NodeState, UnknownNode
from pykubeproxy.inspect.packets.packet import DNAT, NEW, SNAT, Packet
from pykubeproxy.inspect.packets.walk import Step, WalkEnd, walk
from pykubeproxy.inspect.routes import PacketVerdict, Policy
from pykubeproxy.inspect.trace.decisions import RuleDecision, decisions
from pykubeproxy.objects import Family, Node, address_and_port, family_of
from pykubeproxy.rules.iptables_save import parse_rule
from pykubeproxy.rules.names import CLUSTER_PREFIX, EXTERNAL_PREFIX, LOCAL_PREFIX, NFT_TABLES
from pykubeproxy.rules.nft_list import incoming_interfaces
from pykubeproxy.rules.ownership import is_ours
from pykubeproxy.rules.ruleset import ChainKey
from pykubeproxy.services.ports import FrontendKind, PortName
from pykubeproxy.wording import tied

# Reads these nodes, side by side if it can. Names every node that it is asked for.
ReadNodes = Callable[[Collection[str]], Mapping[str, NodeState | UnknownNode]]


def shown_node(name: str) -> str:
    """Return the name of a node for text."""
    return name or "this node"


def is_of_proxy(chain: ChainKey | None) -> bool:
    """Return whether a chain is of a service proxy in any mode."""
    return chain is not None and (chain.table in NFT_TABLES or is_ours(chain))


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


class TracedEnd(msgspec.Struct, frozen=True, rename="camel"):
    """Where the packet may end: at an address, or at a rule that drops it.

    - `text`: all of this as a phrase
    - `result`: "reached", "dropped", "rejected", "left" if it leaves the cluster, "sent" if it goes to a place whose rules
      are unknown, "lost" if nodes forward it in a loop
    - `good`: the connection works as far as rules are known: it ends where it should, and the reply comes back
    - `probability`: of this end, 0 to 1
    - `kind`, `node`, `pod`: those of the address, as for the source
    - `node_assumed`: the node follows from podCIDRs alone
    - `endpoint`: rules have chosen it
    - `translated_on`: the node that chose the endpoint last, or null
    - `stale`: rules of a service proxy chose it, but no EndpointSlice of the Service names it
    - `client`: the source that the receiver sees; null if it is any address of a node
    - `client_assumed`: the node may pick another address
    - `masqueraded_on`: the node that replaced the source, or null
    - `route`: the nodes on the way
    - `rule`: the one that drops or rejects it, or null
    """

    text: str
    result: EndResult
    good: bool
    probability: float
    address: str
    port: int
    kind: LocationKind | None
    node: str | None
    pod: str | None
    node_assumed: bool
    endpoint: bool
    translated_on: str | None
    stale: bool
    client: str | None
    client_assumed: bool
    masqueraded_on: str | None
    route: tuple[str, ...]
    rule: Step | None


class TracedVisit(msgspec.Struct, frozen=True, rename="camel"):
    """What happens to the packet on one node.

    - `role`: "where the packet starts", "which receives the packet", or "after node1"
    - `route`: the nodes before this one
    - `interface`: by which the packet comes in, or null
    - `interface_assumed`: the interface is one that the rules name for pods
    - `probability`: that the packet gets here, 0 to 1
    - `unread`: why the rules are unknown, or null
    - `decisions`: the rules that decide about the packet
    - `steps`: the rules that it meets, in the order of its path, with alternatives one after the other; rules for other
      destinations, ports and protocols are left out
    """

    node: str
    role: str
    route: tuple[str, ...]
    interface: str | None
    interface_assumed: bool
    probability: float
    unread: str | None
    decisions: tuple[RuleDecision, ...] = ()
    steps: tuple[Step, ...] = ()


class TracedWay(msgspec.Struct, frozen=True, rename="camel"):
    """One way into the cluster. The name of a node is "" if it is unknown.

    - `node`: the first node whose rules count; null if none of the group is read
    - `others`: nodes that should do the same, by the Service and its EndpointSlices; not read, so what rules of other
      programs do there is unknown
    - `serves`: these nodes should have endpoints
    - `ends`: their probabilities add up to 1; none if the rules of the first node are unknown
    """

    node: str | None
    others: tuple[str, ...] = ()
    serves: bool = True
    ends: tuple[TracedEnd, ...] = ()
    visits: tuple[TracedVisit, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All these nodes."""
        return self.others if self.node is None else (self.node, *self.others)

    @property
    def follows_objects(self) -> bool:
        """Whether only current rules of a service proxy decide, so that the other nodes should do the same."""
        final = (ChainKey(end.rule.table, end.rule.chain) for end in self.ends if end.rule)
        return not any(end.stale for end in self.ends) and all(map(is_of_proxy, final))

    @property
    def unread(self) -> str | None:
        """Why the rules of the first node are unknown; None if they are known, or no node of the group is read."""
        return self.visits[0].unread if self.visits else None


# How many nodes that may receive a packet are read, if their endpoints differ.
MOST_RECEIVERS = 10


def receivers(
    services: Iterable[Explanation], name: PortName, family: Family, kind: FrontendKind
) -> Sequence[TracedWay]:
    """Return the nodes that may receive packets to a frontend of a service port; none if nodes do not serve it."""
    for port in (port for service in services for port in service.ports):
        if (port.name, port.family) == (name, family):
            internal = kind is FrontendKind.CLUSTER_IP
            local = port.port.internal_local if internal else port.port.external_local
            policies = {policy.policy: policy.groups for policy in port.policies}
            return _read_some(policies[Policy.LOCAL if local else Policy.CLUSTER])
    return ()


def _read_some(groups: Sequence[ExplainedGroup]) -> Sequence[TracedWay]:
    """Choose a node of each group to read, but not of all groups that serve, if these are many."""
    found = [_way(group) for group in groups]
    serving = [way for way in found if way.serves]
    unread = tuple(name for way in serving[MOST_RECEIVERS:] for name in way.names)
    return (
        *serving[:MOST_RECEIVERS],
        *([TracedWay(None, unread)] if unread else []),
        *(way for way in found if not way.serves),
    )


def _way(group: ExplainedGroup) -> TracedWay:
    first, *others = (node.name for node in group.nodes)
    return TracedWay(first, tuple(others), group.serves)


# A packet goes to the node of a node port, from there to an endpoint; one more is a loop.
_MOST_NODES = 5
# How many nodes are read at a time: a Service may have endpoints on all of them.
MOST_READ = 20
_TOO_MANY = f"more than {MOST_READ} nodes come next; trace to one of their endpoints to see its rules"
_RESULTS = {PacketVerdict.DROP: EndResult.DROPPED, PacketVerdict.REJECT: EndResult.REJECTED}
# iptables keeps probabilities in 31 bits.
_DIGITS = 9


class _Leg(msgspec.Struct, frozen=True):
    """A packet on its way to a node.

    - `from_pod`: it comes in from a pod of this node, by the interface that the rules name
    - `by_proxy`: the last rule to replace the destination is one of a service proxy
    """

    way: int
    node: str
    packet: Packet
    from_pod: bool = False
    probability: float = 1.0
    route: tuple[str, ...] = ()
    translated_on: str | None = None
    by_proxy: bool = False
    masqueraded_on: str | None = None
    client_assumed: bool = False


class Follower:
    """Follows packets of one connection. It reads only the nodes on the way, together where several come next."""

    def __init__(
        self, source: Location, destination: TracedDestination, directory: Directory, read: ReadNodes
    ) -> None:
        self._source = source
        self._destination = destination
        self._directory = directory
        self._read = read
        known = directory.complete and destination.service_key
        self._endpoints = directory.endpoints(destination.service_key) if known else None

    def follow(
        self, ways: Sequence[TracedWay], packets: Sequence[Packet], *, from_pod: bool = False
    ) -> tuple[TracedWay, ...]:
        """Return ways with what happens to the packet that each node receives. Raises TooManyRules."""
        visits: list[list[TracedVisit]] = [[] for _ in ways]
        ends: list[list[TracedEnd]] = [[] for _ in ways]
        legs = [
            _Leg(number, way.node, packet, from_pod)
            for number, (way, packet) in enumerate(zip(ways, packets, strict=True))
            if way.node is not None
        ]
        while legs:
            names = list(dict.fromkeys(leg.node for leg in legs))
            states: dict[str, NodeState | UnknownNode] = {
                name: UnknownNode(Node(name), _TOO_MANY) for name in names
            }
            states |= self._read(names[:MOST_READ])
            onward: list[_Leg] = []
            for leg in legs:
                visit, ended, going = self._visit(leg, states[leg.node])
                visits[leg.way].append(visit)
                ends[leg.way] += ended
                onward += going
            legs = onward
        return tuple(
            msgspec.structs.replace(way, ends=tuple(some), visits=tuple(there))
            for way, some, there in zip(ways, ends, visits, strict=True)
        )

    def _visit(
        self, leg: _Leg, state: NodeState | UnknownNode
    ) -> tuple[TracedVisit, Sequence[TracedEnd], Sequence[_Leg]]:
        """Return what happens on a node, how the packet ends there, and the legs on which it goes on."""
        packet = leg.packet
        family = family_of(packet.destination)
        if leg.route:
            role = f"after {shown_node(leg.route[-1])}"
        else:
            starts = packet.starts_here or leg.from_pod
            role = "where the packet starts" if starts else "which receives the packet"
        visit = TracedVisit(
            leg.node,
            role,
            leg.route,
            packet.received_by or None,
            False,
            round(leg.probability, _DIGITS),
            None,
        )
        if isinstance(state, UnknownNode) or family not in state.rules:
            unread = state.reason if isinstance(state, UnknownNode) else f"has no {family.value} tables"
            location = self._directory.find(packet.destination)
            ends = [self._end(leg, EndResult.SENT, packet, location)] if leg.route else []
            return msgspec.structs.replace(visit, unread=unread), ends, ()
        rules = state.rules[family]
        named = pod_interface(rules) if leg.from_pod and not packet.received_by else ""
        if named:
            packet = msgspec.structs.replace(packet, received_by=named)
        trace = walk(rules.rule_sets, packet, state.network, record=True)
        visit = msgspec.structs.replace(
            visit,
            interface=trace.packet.received_by or None,
            interface_assumed=bool(named),
            decisions=decisions(trace.steps, shown_node(leg.node)),
            steps=trace.steps,
        )
        return visit, *self._results(leg, trace.ends, state)

    def _results(
        self, leg: _Leg, walked: Iterable[WalkEnd], state: NodeState
    ) -> tuple[Sequence[TracedEnd], Sequence[_Leg]]:
        ends: list[TracedEnd] = []
        onward: dict[tuple[str, Packet], _Leg] = {}
        for one in walked:
            result = self._result(leg, one, state)
            if isinstance(result, TracedEnd):
                ends.append(result)
                continue
            key = (result.node, result.packet)
            if key in onward:
                total = onward[key].probability + result.probability
                result = msgspec.structs.replace(result, probability=total)
            onward[key] = result
        return ends, [*onward.values()]

    def _result(self, leg: _Leg, walked: WalkEnd, state: NodeState) -> TracedEnd | _Leg:
        packet = walked.packet
        leg = msgspec.structs.replace(leg, probability=leg.probability * walked.probability)
        if DNAT in packet.states:
            leg = msgspec.structs.replace(
                leg, translated_on=leg.node, by_proxy=is_of_proxy(walked.translated_in)
            )
        if SNAT in packet.states:
            leg = msgspec.structs.replace(leg, masqueraded_on=leg.node)
        location = self._directory.find(packet.destination)
        if state.network.is_local(packet.destination) or packet.destination in state.node.addresses:
            location = Location(LocationKind.NODE, packet.destination, leg.node, location.pod)
        if result := _RESULTS.get(walked.verdict):
            return self._end(leg, result, packet, location, walked.step)
        # A masquerade does not tell which address it picks.
        masqueraded = SNAT in packet.states and packet.source == leg.packet.source
        node = location.node
        if node is None or node == leg.node:
            packet = msgspec.structs.replace(packet, source="") if masqueraded else packet
            left = EndResult.LEFT if location.kind is LocationKind.OUTSIDE else EndResult.SENT
            return self._end(leg, left if node is None else EndResult.REACHED, packet, location)
        if masqueraded:
            packet = msgspec.structs.replace(
                packet, source=address_of(state.node, packet.destination) or packet.source
            )
            leg = msgspec.structs.replace(leg, client_assumed=True)
        if len(leg.route) + 1 >= _MOST_NODES:
            return self._end(leg, EndResult.LOST, packet, location)
        return msgspec.structs.replace(
            leg,
            node=node,
            route=(*leg.route, leg.node),
            packet=Packet(packet.protocol, packet.source, packet.destination, packet.port, states=(NEW,)),
            from_pod=False,
        )

    def _end(
        self, leg: _Leg, result: EndResult, packet: Packet, location: Location, step: Step | None = None
    ) -> TracedEnd:
        end = TracedEnd(
            text="",
            result=result,
            good=False,
            probability=round(leg.probability, _DIGITS),
            address=location.address,
            port=packet.port,
            kind=location.kind,
            node=location.node,
            pod=location.pod,
            node_assumed=location.assumed,
            endpoint=leg.translated_on is not None,
            translated_on=leg.translated_on,
            stale=leg.by_proxy and self._endpoints is not None and location.address not in self._endpoints,
            client=packet.source or None,
            client_assumed=leg.client_assumed and bool(packet.source),
            masqueraded_on=leg.masqueraded_on,
            route=(*leg.route, leg.node),
            rule=step,
        )
        end = msgspec.structs.replace(end, good=self._is_good(end))
        return msgspec.structs.replace(end, text=_described(end))

    def _is_good(self, end: TracedEnd) -> bool:
        if end.stale or is_bypassed(end, self._source):
            return False
        if end.result is EndResult.SENT and end.node is not None:
            return True
        chosen = end.endpoint or not (self._destination.service or self._destination.unserved)
        return chosen and end.result in (EndResult.REACHED, EndResult.LEFT, EndResult.SENT)


def is_bypassed(end: TracedEnd, source: Location) -> bool:
    """Return whether a node replaced the destination and kept the source, but is not on the way back."""
    return (
        end.endpoint
        and end.masqueraded_on is None
        and end.result is EndResult.REACHED
        and end.translated_on not in (end.route[-1], source.node)
    )


def _described(end: TracedEnd) -> str:
    node = shown_node(end.route[-1])
    at = tied(address_and_port(end.address, end.port))
    if end.rule:
        verb = "dropped" if end.result is EndResult.DROPPED else "rejected"
        goal = f", on the way to {at}" if end.endpoint else ""
        return f"{verb} on {node} in {end.rule.table} {end.rule.chain}{goal}"
    if not end.endpoint and not end.good:
        return f"no rule on {node} matches; the packet goes on to {at} itself"
    where = at if end.node is None else f"{at} on {shown_node(end.node)}"
    if end.pod:
        where += f" ({end.pod})"
    if end.result is EndResult.LOST:
        return f"{where}; goes from node to node: {', '.join(map(shown_node, end.route))}"
    if end.result is EndResult.LEFT:
        where += ", outside the cluster"
    if end.masqueraded_on is None:
        return f"{where}; sees client {end.client}"
    return f"{where}; masqueraded " + (
        f"as {end.client}" if end.client else f"by {shown_node(end.masqueraded_on)}"
    )


def address_of(node: Node, other: str) -> str:
    """Return the first address of a node in the family of another address; "" if it has none."""
    family = family_of(other)
    return next((address for address in node.addresses if family_of(address) is family), "")


def pod_interface(rules: NodeRules) -> str:
    """Return an interface by which packets of pods come in, if the rules detect pods by interface; else ""."""
    ruleset = rules.ruleset
    for nft_key, chain in rules.nftables.chains.items() if rules.nftables else ():
        if nft_key.table in NFT_TABLES:
            for interface in (found for rule in chain.rules for found in incoming_interfaces(rule)):
                return interface
    for key in ruleset.chains:
        if key.table == "nat" and key.chain.startswith((CLUSTER_PREFIX, EXTERNAL_PREFIX, LOCAL_PREFIX)):
            for rule in map(parse_rule, ruleset.chains[key]):
                if "-i" in rule.options:
                    return rule.options["-i"].removeprefix("! ").removesuffix("+")
                if "-s" in rule.options:
                    return ""
    return ""
