"""Follow packets from node to node, through the rules of each."""

from collections.abc import Iterator, Sequence

import msgspec

from pykubeproxy.inspect.hops.journey import (
    Entry,
    Journey,
    Outcome,
    ReadNodes,
    Result,
    Unread,
    Visit,
)
from pykubeproxy.inspect.hops.locations import Location, Locations
from pykubeproxy.inspect.node_tables import NodeTables
from pykubeproxy.inspect.routes import PacketVerdict
from pykubeproxy.inspect.targets import LocationKind
from pykubeproxy.inspect.trace.model import Outcome as NodeOutcome
from pykubeproxy.inspect.trace.model import trace_packet
from pykubeproxy.inspect.trace.packet import DNAT, LOOPBACK, NEW, SNAT, Host, Packet, contains
from pykubeproxy.inspect.trace.walk import Path, Step
from pykubeproxy.objects import Node, family_of
from pykubeproxy.rules.names import CLUSTER_PREFIX, EXTERNAL_PREFIX, LOCAL_PREFIX, is_owned
from pykubeproxy.rules.parse import parse_rule, parse_target
from pykubeproxy.rules.ruleset import Ruleset

# A packet goes to the node of a node port, from there to an endpoint; one more is a loop.
_MOST_NODES = 5
# How many nodes are read at a time: a Service may have endpoints on all of them.
MOST_READ = 20
_TOO_MANY = Unread(f"more than {MOST_READ} nodes come next; trace to one of their endpoints to see its rules")
_RESULTS = {PacketVerdict.DROP: Result.DROPPED, PacketVerdict.REJECT: Result.REJECTED}


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


def follow(entries: Sequence[Entry], locations: Locations, read: ReadNodes) -> tuple[Journey, ...]:
    """Return a journey for each entry. Read only the nodes on the way, together where several come next.

    Raises TooManyRules.
    """
    visits: list[list[Visit]] = [[] for _ in entries]
    outcomes: list[list[Outcome]] = [[] for _ in entries]
    legs = [
        _Leg(number, entry.node, (), entry.packet, 1.0, from_pod=entry.from_pod)
        for number, entry in enumerate(entries)
    ]
    while legs:
        names = list(dict.fromkeys(leg.node for leg in legs))
        tables = {**dict.fromkeys(names, _TOO_MANY), **read(names[:MOST_READ])}
        onward: list[_Leg] = []
        for leg in legs:
            visit = _visit(leg, tables[leg.node])
            visits[leg.journey].append(visit)
            for one in _results(leg, visit, locations):
                if isinstance(one, Outcome):
                    outcomes[leg.journey].append(one)
                else:
                    onward.append(one)
        legs = onward
    return tuple(
        Journey(entry, tuple(some), tuple(ends))
        for entry, some, ends in zip(entries, visits, outcomes, strict=True)
    )


def _visit(leg: _Leg, tables: NodeTables | Unread) -> Visit:
    visit = Visit(leg.node, leg.route, leg.packet, leg.probability, None)
    family = family_of(leg.packet.destination)
    if isinstance(tables, Unread):
        return msgspec.structs.replace(visit, unread=tables.reason)
    if family not in tables.rulesets:
        return msgspec.structs.replace(visit, unread=f"has no {family.value} tables")
    ruleset, packet = tables.rulesets[family], leg.packet
    if leg.from_pod:
        packet = msgspec.structs.replace(packet, received_by=pod_interface(ruleset))
    trace = trace_packet(ruleset, packet, Host(frozenset(tables.node.addresses)))
    return msgspec.structs.replace(visit, packet=packet, trace=trace)


def _results(leg: _Leg, visit: Visit, locations: Locations) -> Iterator[Outcome | _Leg]:
    """Yield how the packet ends on a node, and the legs on which it goes on."""
    if visit.trace is None:
        yield _outcome(leg, Result.SENT, leg.packet, locations.find(leg.packet.destination), leg.probability)
        return
    onward: dict[tuple[str, Packet], _Leg] = {}
    for outcome in visit.trace.outcomes:
        result = _result(leg, outcome, locations)
        if isinstance(result, _Leg):
            key = (result.node, result.packet)
            if key in onward:
                total = onward[key].probability + result.probability
                result = msgspec.structs.replace(result, probability=total)
            onward[key] = result
        else:
            yield result
    yield from onward.values()


def _result(leg: _Leg, outcome: NodeOutcome, locations: Locations) -> Outcome | _Leg:
    packet = outcome.packet
    node = locations.nodes.get(leg.node, Node(leg.node))
    leg = msgspec.structs.replace(
        leg,
        probability=leg.probability * outcome.probability,
        translated=leg.translated or DNAT in packet.states,
        by_proxy=_translated_by_proxy(outcome.path) if DNAT in packet.states else leg.by_proxy,
        masqueraded_on=leg.node if SNAT in packet.states else leg.masqueraded_on,
    )
    if packet.destination in node.addresses or any(contains(it, packet.destination) for it in LOOPBACK):
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
    if location.kind is LocationKind.OUTSIDE or location.node in ("", leg.node):
        result = Result.REACHED if location.kind is not LocationKind.OUTSIDE else Result.LEFT
        packet = msgspec.structs.replace(packet, source="") if masqueraded else packet
        return _outcome(leg, result, packet, location, leg.probability)
    if masqueraded:
        packet = msgspec.structs.replace(packet, source=address_of(node, packet.destination) or packet.source)
        leg = msgspec.structs.replace(leg, client_assumed=True)
    if len(leg.route) + 1 >= _MOST_NODES:
        return _outcome(leg, Result.LOST, packet, location, leg.probability)
    return msgspec.structs.replace(
        leg,
        node=location.node,
        route=(*leg.route, leg.node),
        packet=Packet(packet.protocol, packet.source, packet.destination, packet.port, states=(NEW,)),
        from_pod=False,
    )


def _outcome(
    leg: _Leg,
    result: Result,
    packet: Packet,
    location: Location,
    probability: float,
    step: Step | None = None,
) -> Outcome:
    return Outcome(
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
    return any(isinstance(it, Step) and is_owned(it.chain) and parse_target(it.rule) == "DNAT" for it in path)


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
