"""The evidence beside a trace: the flows between its ends that the nodes on the way track now, and session affinity.

Flows are found where they begin, and followed to the next nodes by the addresses and ports after NAT.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from pykubeproxy.inspect.connection import Directory, LocationKind, ResolvedConnection
from pykubeproxy.inspect.flows import Flow, FlowProblem, FlowTable, flow_problem, served_endpoints
from pykubeproxy.inspect.node import NodeState, UnknownNode
from pykubeproxy.inspect.packets.walk import Step
from pykubeproxy.inspect.trace.journey import MOST_READ, ReadNodes, TracedVisit, TracedWay
from pykubeproxy.objects import address_and_port
from pykubeproxy.rules.nft_list import SetKey, element_key
from pykubeproxy.services.ports import ANY_LOCAL

# The list of a rule of iptables, and the set of a rule of kube-proxy's nftables mode.
_LIST = re.compile(r"--name (\S+)")
_SET = re.compile(r"@(affinity-\S+)")


class TracedFlow(msgspec.Struct, frozen=True, rename="camel"):
    """A tracked connection on one node. Addresses have ports.

    - `protocol`: "TCP", "UDP" or "SCTP"
    - `source`, `destination`: of the client's packets before this node's NAT
    - `endpoint`: the destination after it
    - `pod`: NAMESPACE/NAME at the endpoint, or null
    - `client`: the source that the receiver sees
    - `state`: of TCP and SCTP, such as "ESTABLISHED"; "" for UDP
    - `seconds_left`: until the entry ends if no packet comes; null if hardware forwards the packets
    - `problem`: "stale" if the endpoint no longer serves, "not-translated" if rules should have chosen an endpoint,
      "unanswered", or null
    """

    protocol: str
    source: str
    destination: str
    endpoint: str
    pod: str | None
    client: str
    state: str
    seconds_left: int | None
    problem: FlowProblem | None


class AffinityEntry(msgspec.Struct, frozen=True, rename="camel"):
    """A client that session affinity sends to one endpoint.

    - `client`: its address
    - `endpoint`: IP:PORT
    - `list`: the list of iptables or the set of nftables that remembers the client
    - `seconds_left`: until it forgets the client, if no connection comes; null if unknown
    """

    client: str
    endpoint: str
    list: str
    seconds_left: int | None


class NodeFlows(msgspec.Struct, frozen=True, rename="camel"):
    """What one node remembers of connections between the two ends.

    - `node`: its name, "" if unknown
    - `flows`: the connections, those with a problem first
    - `affinity`: where session affinity sends the client
    - `unread`, `affinity_unread`: why this is unknown, and what to do; or null
    """

    node: str
    flows: tuple[TracedFlow, ...] = ()
    affinity: tuple[AffinityEntry, ...] = ()
    unread: str | None = None
    affinity_unread: str | None = None


def tracked(
    ends: ResolvedConnection, directory: Directory, ways: Sequence[TracedWay], read: ReadNodes
) -> tuple[NodeFlows, ...]:
    """Return what each node remembers that may receive the packet, or that it visits. Raises ReadError."""
    chosen = {
        address_and_port(end.address, end.port)
        for way in ways
        for end in way.ends
        if end.translated_on is not None
    }
    served = _served(directory, ends)
    if served is None and chosen:
        served = frozenset(chosen)  # without objects, rules tell
    visits: dict[str, list[TracedVisit]] = {}
    for visit in (visit for way in ways for visit in way.visits):
        visits.setdefault(visit.node, []).append(visit)
    entrances = [name for name, some in visits.items() if not some[0].route]
    entrances += [name for way in ways for name in way.others if name not in visits][:MOST_READ]
    names = dict.fromkeys((*entrances, *visits))
    unread = {name: some[0].unread for name, some in visits.items() if some[0].unread}
    states = read([name for name in names if name not in unread])
    entrance_unread = bool(not_read(ways)) or not all(_has_flows(states.get(name)) for name in entrances)
    tracer = _Tracer(ends, directory, served, chosen | (served or set()), entrance_unread)

    def flows(name: str) -> NodeFlows:
        if name in unread:
            return NodeFlows(name, unread=unread[name])
        return tracer.on(name, states[name], visits.get(name, ()), is_entrance=name in entrances)

    found: dict[str, NodeFlows] = {}
    for name in (*names, *names):  # a node may get packets from one after it
        found[name] = flows(name)
    return tuple(found.values())


def _has_flows(state: NodeState | UnknownNode | None) -> bool:
    return isinstance(state, NodeState) and state.flows is not None and not state.flows.unread


def not_read(ways: Sequence[TracedWay]) -> Sequence[str]:
    """Return the nodes that may receive the packet too, and whose flows are not read, as there are many."""
    visited = {visit.node for way in ways for visit in way.visits}
    return [name for way in ways for name in way.others if name not in visited][MOST_READ:]


class _Hop(NamedTuple):
    """The packets of a flow after a node's NAT, as the next node gets them."""

    source: str
    destination: str


class _Tracer:
    """Finds the flows of a connection from node to node; it remembers those that it has seen.

    If `entrance_unread`, a flow to an endpoint may have come through a node whose flows are unknown.
    """

    def __init__(
        self,
        ends: ResolvedConnection,
        directory: Directory,
        served: Collection[str] | None,
        endpoints: Collection[str],
        entrance_unread: bool,
    ) -> None:
        self._ends = ends
        self._directory = directory
        self._served = served
        self._endpoints = endpoints
        self._entrance_unread = entrance_unread
        self._seen: set[_Hop] = set()

    def on(
        self, name: str, state: NodeState | UnknownNode, visits: Sequence[TracedVisit], *, is_entrance: bool
    ) -> NodeFlows:
        """Return what a node remembers, as far as the nodes that sent packets to it have been looked at."""
        if isinstance(state, UnknownNode):
            return NodeFlows(name, unread=state.reason)
        table = state.flows or FlowTable(unread="its flows have not been read")
        found = sorted(self._traced(table.flows, state, is_entrance), key=_interest)
        steps = tuple(dict.fromkeys(step for visit in visits for step in visit.steps))
        with_affinity = any(step.affinity for step in steps)
        return NodeFlows(
            name,
            tuple(found),
            tuple(dict.fromkeys(self._affinity(state, table, steps))),
            table.unread or None,
            (table.unread_lists or table.unread or None) if with_affinity else None,
        )

    def _traced(self, flows: Iterable[Flow], state: NodeState, is_entrance: bool) -> Iterator[TracedFlow]:
        protocol, clients = self._ends.destination.protocol, self._clients(state)
        frontends = self._frontends(state)
        for flow in flows:
            if flow.protocol.value != protocol:
                continue
            source, destination = _ends(flow)
            begins = flow.original.source in clients and destination in (
                self._endpoints if self._entrance_unread and not is_entrance else frontends
            )
            if not begins and _Hop(source, destination) not in self._seen:
                continue
            endpoint = flow.translated_to or destination
            self._seen.add(_Hop(flow.source_seen, endpoint))
            yield TracedFlow(
                protocol,
                source,
                destination,
                endpoint,
                self._directory.find(flow.reply.source).pod,
                flow.source_seen,
                flow.state,
                flow.timeout,
                flow_problem(flow, self._served if destination in frontends else None),
            )

    def _clients(self, state: NodeState) -> Collection[str]:
        """Return the addresses of the client; a node uses any of its own."""
        client = self._ends.client
        if client.kind is LocationKind.NODE and client.node == state.name:
            return {client.address, *state.node.addresses, *state.network.addresses}
        return {client.address}

    def _frontends(self, state: NodeState) -> Collection[str]:
        to = self._ends.destination
        anywhere = {*state.node.addresses, *state.network.addresses}
        return {
            address_and_port(address, to.port)
            for address in (anywhere if to.address == ANY_LOCAL else {to.address})
        }

    def _affinity(self, state: NodeState, table: FlowTable, steps: Sequence[Step]) -> Iterator[AffinityEntry]:
        """Yield where this node's rules would send the client again."""
        clients = self._clients(state)
        known = [entry for entry in table.remembered if entry.client in clients]
        endpoints = {step.chain: step.to for step in steps if step.does == "dnat"}
        for step in steps:
            if not step.affinity:
                continue
            endpoint = endpoints.get(step.rule.split()[-1], "")  # the rule jumps to the chain of the endpoint
            if found := _LIST.search(step.rule):
                for entry in known:
                    if entry.list == found[1]:
                        left = None if entry.age is None else step.affinity - entry.age
                        if left is None or left > 0:  # the kernel may keep a client for longer
                            yield AffinityEntry(entry.client, endpoint, entry.list, left)
            elif found := _SET.search(step.rule):
                yield from self._in_set(state, SetKey(step.table, found[1]), endpoint, clients)

    def _in_set(
        self, state: NodeState, key: SetKey, endpoint: str, clients: Collection[str]
    ) -> Iterator[AffinityEntry]:
        nftables = state.rules[self._ends.family].nftables
        elements = nftables.sets[key].elements if nftables and key in nftables.sets else ()
        for element in elements:
            client = element_key(element)
            if isinstance(client, str) and client in clients:
                match element:
                    case {"elem": {"expires": int(left)}}:
                        yield AffinityEntry(client, endpoint, key.name, left)
                    case _:
                        yield AffinityEntry(client, endpoint, key.name, None)


def _served(directory: Directory, ends: ResolvedConnection) -> frozenset[str] | None:
    """Return the endpoints of the service port; None if no EndpointSlices are known, as where names come from rules."""
    if ends.name is None or not directory.slices:
        return None
    slices = [slice_ for slice_ in directory.slices if slice_.service_key == ends.name.service_key]
    return served_endpoints(slices, ends.name, ends.family)


def _interest(flow: TracedFlow) -> tuple[int, bool, str, str]:
    """Return a key that sorts flows with a problem first, then established ones."""
    rank = list(FlowProblem).index(flow.problem) if flow.problem else len(FlowProblem)
    return rank, flow.state != "ESTABLISHED", flow.endpoint, flow.source


def _ends(flow: Flow) -> _Hop:
    side = flow.original
    return _Hop(
        address_and_port(side.source, side.source_port),
        address_and_port(side.destination, side.destination_port),
    )
