"""The report of `trace`: where a connection goes, over one or several nodes."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import msgspec

from pykubeproxy.inspect.connection import LocationKind
from pykubeproxy.inspect.packets.packet import Packet
from pykubeproxy.inspect.packets.walk import Step
from pykubeproxy.inspect.trace.conclusion import (
    RuleDecision,
    TraceVerdict,
    conclusion,
    decisions,
    is_good,
    next_step,
    notes,
    verdict,
)
from pykubeproxy.inspect.trace.journey import (
    EndResult,
    Journey,
    JourneyEnd,
    NodeVisit,
    TraceAnswer,
    TraceWay,
)
from pykubeproxy.objects import address_and_port
from pykubeproxy.report.document import Report
from pykubeproxy.report.text import GAP, Block, Heading, Row, Section, Sentence, Table, Tone, Verbatim, lines
from pykubeproxy.rules.iptables_save import parse_rule, without_comment
from pykubeproxy.wording import TIE, listed, percent, tied

_TONES: dict[TraceVerdict, Tone] = {
    TraceVerdict.LIKELY: "good",
    TraceVerdict.REACHED: "good",
    TraceVerdict.PARTLY: "warning",
    TraceVerdict.NOT_REACHED: "bad",
    TraceVerdict.UNKNOWN: "warning",
}
# How many ends, endpoints of a node, nodes, and paths to endpoints the text lists.
_ENDS, _ENDPOINTS, _NODES, _PATHS = 20, 4, 4, 4
# iptables keeps probabilities in 31 bits.
_DIGITS = 9


class TracedSource(msgspec.Struct, frozen=True, rename="camel"):
    """Where the connection starts.

    - `kind`: "pod", "node" or "outside"; null if unknown
    - `node`: its node, or null
    - `pod`: NAMESPACE/NAME, or null
    """

    kind: LocationKind | None
    address: str
    node: str | None
    pod: str | None


class TracedDestination(msgspec.Struct, frozen=True, rename="camel"):
    """What the client connects to.

    - `protocol`: "TCP", "UDP" or "SCTP"
    - `address`: "*" for a node port that is asked at each node
    - `service`: NAMESPACE/NAME:PORT, or null
    - `kind`: "cluster-ip", "external-ip", "load-balancer-ip", "node-port", or null
    """

    protocol: str
    address: str
    port: int
    service: str | None
    kind: str | None


class DecidingRule(msgspec.Struct, frozen=True, rename="camel"):
    """A rule that drops or rejects the packet, as iptables-save prints it, or "policy DROP"."""

    table: str
    chain: str
    rule: str


class TracedEnd(msgspec.Struct, frozen=True, rename="camel"):
    """One end of the packet.

    - `text`: the same as a phrase
    - `result`: "reached", "dropped", "rejected", "left" if it leaves the cluster, "sent" if it goes to a place whose rules
      are unknown, "lost" if nodes forward it in a loop
    - `good`: the connection works as far as rules are known
    - `node`, `pod`: those of the address, or null
    - `endpoint`: rules have chosen it
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
    node: str | None
    pod: str | None
    endpoint: bool
    client: str | None
    client_assumed: bool
    masqueraded_on: str | None
    route: tuple[str, ...]
    rule: DecidingRule | None


class TracedVisit(msgspec.Struct, frozen=True, rename="camel"):
    """The packet on one node.

    - `role`: "where the packet starts", "which receives the packet", or "after node1"
    - `route`: the nodes before this one
    - `interface`: by which the packet comes in, or null
    - `probability`: of getting here
    - `unread`: why the rules are unknown, or null
    - `decisions`: the rules that decide about the packet
    - `steps`: the rules that it meets, in the order of its path, with alternatives one after the other; rules for other
      destinations, ports and protocols are left out
    """

    node: str
    role: str
    route: tuple[str, ...]
    interface: str | None
    probability: float
    unread: str | None
    decisions: tuple[RuleDecision, ...]
    steps: tuple[Step, ...]


class TracedWay(msgspec.Struct, frozen=True, rename="camel"):
    """One way into the cluster.

    - `node`: the first node whose rules count, "this node" if its name is unknown; null if none of the group is read
    - `others`: nodes that should do the same, not read
    - `serves`: these nodes should have endpoints
    - `ends`: their probabilities add up to 1
    """

    node: str | None
    others: tuple[str, ...]
    serves: bool
    ends: tuple[TracedEnd, ...]
    visits: tuple[TracedVisit, ...]


class TraceReport(Report, frozen=True, kw_only=True):
    """Where a connection goes.

    - `verdict`: "reached", "likely" if rules choose an endpoint, but those of its node are unknown, "partly" if it depends
      on chance or on the node that receives the connection, "not-reached", or "unknown". A connection that "reached" an
      endpoint fails if replies bypass the node that chose the endpoint, or if no EndpointSlice of the Service names it
    - `message`: the verdict as a sentence
    - `packet`: source and destination in a line
    - `ways`: one, or one for each group of nodes that may receive the connection
    - `notes`: assumptions, and what no rules show, a sentence each
    - `next`: a command that tells more, or null
    """

    verdict: TraceVerdict
    message: str
    source: TracedSource
    destination: TracedDestination
    packet: str
    ways: tuple[TracedWay, ...]
    notes: tuple[str, ...]
    next: str | None

    def blocks(self, *, wide: bool) -> Iterator[Block]:
        """Return the conclusion, the ends, and the rules that decide; `wide` shows each rule that the packet meets."""
        yield Section(Sentence(self.message, _TONES[self.verdict]), [Sentence(self.packet)])
        yield GAP
        for way in self.ways:
            if len(self.ways) > 1 and way.node:
                yield Section(Heading(f"through {way.node}", ""), list(_ends(way)))
            else:
                yield from _ends(way)
        for way in self.ways:
            yield from _nodes_on_the_way(way, wide)
        yield GAP
        for note in self.notes:
            yield Sentence(note, start="Note: ")
        if self.next:
            yield GAP
            yield Verbatim(f"Next: {self.next}")

    def names(self) -> Iterator[str]:
        """Return the pods, nodes and addresses that the connection reaches."""
        good = (end for way in self.ways for end in way.ends if end.good)
        return iter(dict.fromkeys(f"pod/{end.pod}" if end.pod else f"{end.address}" for end in good))


def report(answer: TraceAnswer) -> TraceReport:
    """Return the report of a followed connection."""
    source, destination = answer.source, answer.destination
    return TraceReport(
        verdict=verdict(answer),
        message=conclusion(answer),
        source=TracedSource(source.kind, source.address, source.node or None, source.pod or None),
        destination=TracedDestination(
            destination.protocol,
            destination.address,
            destination.port,
            destination.service or None,
            destination.kind.value if destination.kind else None,
        ),
        packet=_packet(answer),
        ways=tuple(_way(way, answer) for way in answer.ways),
        notes=notes(answer),
        next=next_step(answer) or None,
    )


def _packet(answer: TraceAnswer) -> str:
    source, destination = answer.source, answer.destination
    where = f" on {source.node}" if source.node else ""
    interfaces = {_arrived(journey.visits[0]).received_by for journey in answer.journeys}
    arriving = f", arriving on {next(iter(interfaces))}" if len(interfaces) == 1 and all(interfaces) else ""
    return f"{source.address}{where} to {destination}, {destination.protocol}{arriving}"


def _way(way: TraceWay, answer: TraceAnswer) -> TracedWay:
    journey, receivers = way.journey, way.receivers
    ends = () if journey is None or journey.starts_unread else journey.outcomes
    return TracedWay(
        receivers.read or None,
        receivers.others,
        receivers.serve,
        tuple(_end(end, journey, answer) for end in ends if journey),
        tuple(_visit(visit, journey) for visit in journey.visits) if journey else (),
    )


def _end(end: JourneyEnd, journey: Journey, answer: TraceAnswer) -> TracedEnd:
    step = end.step
    return TracedEnd(
        text=_described(end, journey, answer),
        result=end.result,
        good=is_good(end, journey, answer),
        probability=round(end.probability, _DIGITS),
        address=end.location.address,
        port=end.port,
        node=end.location.node or None,
        pod=end.location.pod or None,
        endpoint=end.translated,
        client=end.client or None,
        client_assumed=end.client_assumed,
        masqueraded_on=end.masqueraded_on or None,
        route=end.route,
        rule=DecidingRule(step.table, step.chain, step.rule) if step else None,
    )


def _visit(visit: NodeVisit, journey: Journey) -> TracedVisit:
    return TracedVisit(
        node=visit.node,
        role=_role(journey, visit),
        route=visit.route,
        interface=_arrived(visit).received_by or None,
        probability=round(visit.probability, _DIGITS),
        unread=visit.unread or None,
        decisions=decisions(visit),
        steps=visit.trace.steps if visit.trace else (),
    )


def _arrived(visit: NodeVisit) -> Packet:
    """Return the packet with the interface by which it comes in, as far as known."""
    return visit.trace.packet if visit.trace else visit.packet


def _role(journey: Journey, visit: NodeVisit) -> str:
    if visit.route:
        return f"after {visit.route[-1]}"
    if visit.packet.starts_here or journey.entry.from_pod:
        return "where the packet starts"
    return "which receives the packet"


def _described(end: JourneyEnd, journey: Journey, answer: TraceAnswer) -> str:
    node = end.route[-1]
    location = end.location
    at = tied(address_and_port(location.address, end.port))
    if end.step:
        verb = "dropped" if end.result is EndResult.DROPPED else "rejected"
        goal = f", on the way to {at}" if end.translated else ""
        return f"{verb} on {node} in {end.step.table} {end.step.chain}{goal}"
    if not end.translated and not is_good(end, journey, answer):
        return f"no rule on {node} matches; the packet goes on to {at} itself"
    where = f"{at} on {location.node}" if location.node else at
    if location.pod:
        where += f" ({location.pod})"
    if end.result is EndResult.LOST:
        return f"{where}; goes from node to node: {', '.join(end.route)}"
    if end.result is EndResult.LEFT:
        where += ", outside the cluster"
    return f"{where}; {_client(end)}"


def _client(end: JourneyEnd) -> str:
    if not end.masqueraded_on:
        return f"sees client {end.client}"
    return f"masqueraded: sees {end.client or 'an address'} of {end.masqueraded_on}"


def _ends(way: TracedWay) -> Iterator[Block]:
    """Yield how packets end, and which nodes should do the same."""
    nodes = listed(way.others, _NODES)
    if not way.node:
        serve = "have endpoints of their own" if way.serves else "should drop it"
        yield Sentence(f"through {nodes}: not read; by the EndpointSlices they {serve}")
        return
    if way.visits[0].unread:
        yield Section(Sentence(f"the rules of {way.node} are unknown: {way.visits[0].unread}"))
        return
    rows = [Row((percent(end.probability), end.text)) for end in way.ends[:_ENDS]]
    if more := way.ends[_ENDS:]:
        share = percent(sum(end.probability for end in more))
        rows.append(Row((share, f"{len(more)} more (-o json lists all)")))
    yield Table(rows, right=frozenset({0}))
    if way.others:
        yield Sentence(f"also through {nodes} (from EndpointSlices; rules not read)")


def _nodes_on_the_way(way: TracedWay, with_steps: bool) -> Iterator[Block]:
    """Yield a section about each node; nodes with the same answer come together."""
    visits: dict[tuple[str, str], list[TracedVisit]] = {}
    for visit in way.visits:
        visits.setdefault((visit.node, visit.role), []).append(visit)
    sections: dict[tuple[str, ...], tuple[list[str], str, list[Block]]] = {}
    for (node, role), some in visits.items():
        blocks = list(_on_node(some, with_steps))
        sections.setdefault((role, *lines(blocks)), ([], role, blocks))[0].append(node)
    for nodes, role, blocks in sections.values():
        yield GAP
        yield Section(Heading(f"On {listed(nodes, _NODES)}, {role}:", "part"), blocks)


def _on_node(visits: Sequence[TracedVisit], with_steps: bool) -> Iterator[Block]:
    """Yield what happens on one node to the packets that come the same way."""
    if visits[0].unread:
        yield Sentence(f"rules unknown: {visits[0].unread}")
        return
    if with_steps:
        for steps in dict.fromkeys(visit.steps for visit in visits):
            yield from _path(steps)
        return
    found = list(dict.fromkeys(decision for visit in visits for decision in visit.decisions))
    if not found:
        yield Sentence("no rule changes or stops it")
    chosen = [decision for decision in found if decision.endpoint]
    for decision in found:
        if decision not in chosen[_ENDPOINTS:]:
            yield Sentence(f"{decision.table} {decision.chain}: {decision.what}")
    if more := chosen[_ENDPOINTS:]:
        yield Sentence(f"and {len(more)} more endpoints")


def _path(steps: Sequence[Step]) -> Iterator[Block]:
    """Yield the steps by chain; with many endpoints only some of the paths to them."""
    dnat = [number for number, step in enumerate(steps, 1) if "-j DNAT " in step.rule and step.matched]
    if len(dnat) <= _PATHS:
        yield from _chains(steps)
        return
    yield from _chains(steps[: dnat[_PATHS - 1]])
    yield Sentence(f"and {len(dnat) - _PATHS} more endpoints (-o json lists all)")
    yield from _chains(steps[dnat[-1] :])


def _chains(steps: Iterable[Step]) -> Iterator[Block]:
    for (table, chain), group in groupby(steps, lambda step: (step.table, step.chain)):
        found: list[Block] = []
        for _, alike in groupby(group, lambda step: step if step.matched else step.reason):
            first, *others = alike
            found += _step(first)
            if others:
                found.append(Sentence(f"not used: {len(others)} more, same reason", "aside"))
        yield Section(Heading(f"{table} {chain}", "part"), found)


def _step(step: Step) -> Iterator[Block]:
    bare = without_comment(step.rule) or "(only counts packets)"
    rule = bare.replace(" -j ", f" -j{TIE}").replace(" -g ", f" -g{TIE}")
    # Some comments continue with a remark for authors of rules.
    comment = parse_rule(step.rule).comment.partition(";")[0]
    reason = f"{step.reason} ({comment})" if comment else step.reason
    yield Section(
        Sentence(rule, "" if step.matched else "aside", "yes  " if step.matched else " no  "),
        [Sentence(reason, "aside")],
    )
