"""The report of `trace`: where a connection goes, over one or several nodes."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from pykubeproxy.inspect.connection import Location, TracedDestination
from pykubeproxy.inspect.flows import FlowProblem
from pykubeproxy.inspect.packets.walk import Step
from pykubeproxy.inspect.trace.conclusion import (
    Answer,
    TraceVerdict,
    conclusion,
    next_step,
    notes,
    verdict,
)
from pykubeproxy.inspect.trace.journey import TracedVisit, TracedWay, shown_node
from pykubeproxy.inspect.trace.tracked import NodeFlows, TracedFlow
from pykubeproxy.report.document import Report
from pykubeproxy.report.text import GAP, Block, Heading, Row, Section, Sentence, Table, Tone, Verbatim, lines
from pykubeproxy.rules.iptables_save import without_comment
from pykubeproxy.wording import TIE, counted, duration, listed, percent, tied

_TONES: dict[TraceVerdict, Tone] = {
    TraceVerdict.LIKELY: "good",
    TraceVerdict.REACHED: "good",
    TraceVerdict.PARTLY: "warning",
    TraceVerdict.NOT_REACHED: "bad",
    TraceVerdict.UNKNOWN: "warning",
}
# How many ends, endpoints of a node, nodes, and paths to endpoints the text lists.
_ENDS, _ENDPOINTS, _NODES, _PATHS = 20, 4, 4, 4
_FLOWS = 5
_PROBLEMS: dict[FlowProblem, tuple[str, Tone]] = {
    FlowProblem.STALE: ("stale: this endpoint no longer serves", "bad"),
    FlowProblem.NOT_TRANSLATED: ("not translated: older than the rules", "warning"),
    FlowProblem.UNANSWERED: ("no answer yet", "warning"),
}


class TraceReport(Report, frozen=True, kw_only=True):
    """Where a connection goes.

    - `verdict`: "reached", "likely" if rules choose an endpoint, but those of its node, or of a node that may receive the
      connection, are unknown, "partly" if it depends on chance or on the node that receives the connection,
      "not-reached", or "unknown". A connection that "reached" an endpoint fails if replies bypass the node that chose the
      endpoint, or if no EndpointSlice of the Service names it
    - `message`: the verdict as a sentence
    - `packet`: source and destination in a line
    - `ways`: one, or one for each group of nodes that may receive the connection
    - `notes`: assumptions, and what no rules show, a sentence each
    - `next`: a command that tells more, or null
    - `tracked`: with --conntrack, what each node on the way remembers of connections between these ends; else null
    """

    verdict: TraceVerdict
    message: str
    source: Location
    destination: TracedDestination
    packet: str
    ways: tuple[TracedWay, ...]
    notes: tuple[str, ...]
    next: str | None
    tracked: tuple[NodeFlows, ...] | None = None

    def blocks(self, *, wide: bool) -> Iterator[Block]:
        """Return the conclusion, the ends, and the rules that decide; `wide` shows each rule that the packet meets."""
        yield Section(Sentence(self.message, _TONES[self.verdict]), [Sentence(self.packet)])
        yield GAP
        for way in self.ways:
            if len(self.ways) > 1 and way.node is not None:
                yield Section(Heading(f"through {way.node}", ""), list(ends_of_way(way)))
            else:
                yield from ends_of_way(way)
        for way in self.ways:
            yield from _nodes_on_the_way(way, wide)
        if self.tracked is not None:
            yield GAP
            yield Section(Heading("Tracked now:", "part"), list(_tracked(self.tracked, wide)))
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


def report(
    source: Location, destination: TracedDestination, ways: tuple[TracedWay, ...], *, alone: bool
) -> TraceReport:
    """Return the report of a followed connection; `alone`: no other node can be read than the first."""
    answer = Answer(source, destination, ways, alone)
    where = f" on {shown_node(source.node)}" if source.node is not None else ""
    interfaces = {way.visits[0].interface for way in ways if way.visits}
    arriving = f", arriving on {next(iter(interfaces))}" if len(interfaces) == 1 and all(interfaces) else ""
    return TraceReport(
        verdict=verdict(answer),
        message=conclusion(answer),
        source=source,
        destination=destination,
        packet=f"{source.address}{where} to {destination}, {destination.protocol}{arriving}",
        ways=ways,
        notes=notes(answer),
        next=next_step(answer),
    )


def ends_of_way(way: TracedWay) -> Iterator[Block]:
    """Yield how packets end, and which nodes should do the same."""
    nodes = listed(way.others, _NODES)
    if way.node is None:
        serve = "have endpoints of their own" if way.serves else "should drop it"
        yield Sentence(f"through {nodes}: they {serve} (from EndpointSlices; rules not read)")
        return
    if way.unread:
        yield Sentence(f"unknown: the rules of {shown_node(way.node)}")
        return
    rows = [Row((percent(end.probability), end.text)) for end in way.ends[:_ENDS]]
    if more := way.ends[_ENDS:]:
        share = percent(sum(end.probability for end in more))
        rows.append(Row((share, f"{len(more)} more (-o json lists all)")))
    yield Table(rows, right=frozenset({0}))
    if way.others:
        source = "from EndpointSlices; " if way.follows_objects else ""
        yield Sentence(f"also through {nodes} ({source}rules not read)")


def _nodes_on_the_way(way: TracedWay, wide: bool) -> Iterator[Block]:
    """Yield a section about each node that is read; the conclusion names the others. Equal answers come together."""
    visits: dict[tuple[str, str], list[TracedVisit]] = {}
    for visit in way.visits:
        if visit.unread is None:
            visits.setdefault((visit.node, visit.role), []).append(visit)
    sections: dict[tuple[str, ...], tuple[list[str], str, list[Block]]] = {}
    for (node, role), some in visits.items():
        blocks = list(on_node(some, wide))
        sections.setdefault((role, *lines(blocks)), ([], role, blocks))[0].append(shown_node(node))
    for nodes, role, blocks in sections.values():
        yield GAP
        yield Section(Heading(f"On {listed(nodes, _NODES)}, {role}:", "part"), blocks)


def on_node(visits: Sequence[TracedVisit], wide: bool) -> Iterator[Block]:
    """Yield what happens on one node to the packets that come the same way."""
    if visits[0].unread:
        yield Sentence(f"rules unknown: {visits[0].unread}")
        return
    if wide:
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


def _tracked(nodes: Sequence[NodeFlows], wide: bool) -> Iterator[Block]:
    """Yield what nodes remember of connections: a line for those alike, or for each if `wide`."""
    for node in nodes:
        where = shown_node(node.node)
        if node.unread:
            yield Sentence(f"{where}: unknown: {node.unread}", "warning")
            continue
        alike: dict[object, list[TracedFlow]] = {}
        for flow in node.flows:
            key = (
                flow.source if wide else (flow.endpoint, flow.state, flow.problem, flow.client == flow.source)
            )
            alike.setdefault(key, []).append(flow)
        rows = [_flows_row(flows) for flows in alike.values()]
        blocks: list[Block] = [Table(rows if wide else rows[:_FLOWS], right=frozenset({0}))] if rows else []
        if not wide and (more := sum(map(len, [*alike.values()][_FLOWS:]))):
            blocks.append(Sentence(f"and {more} more (--steps and -o json list all)"))
        for entry in node.affinity:
            left = "" if entry.seconds_left is None else f" for {duration(entry.seconds_left)} more"
            held = f"session affinity sends {entry.client} to {entry.endpoint}{left} ({entry.list})"
            blocks.append(Sentence(held, "warning"))
        if node.affinity_unread:
            blocks.append(
                Sentence(f"clients with session affinity are unknown: {node.affinity_unread}", "warning")
            )
        yield Section(Sentence(f"{where}: {counted(len(node.flows), 'connection')}"), blocks)
    if any(flow.problem is FlowProblem.STALE for node in nodes for flow in node.flows):
        yield Sentence(
            "A stale connection stays until one end closes it: restart the client, or delete its entry."
        )


def _flows_row(flows: Sequence[TracedFlow]) -> Row:
    """Return a row about flows that differ in their sources only."""
    first = flows[0]
    problem, tone = _PROBLEMS[first.problem] if first.problem else ("", "")
    left = [flow.seconds_left for flow in flows if flow.seconds_left is not None]
    seen = f" (seen as {first.client})" if first.client != first.source else ""
    parts = (
        f"to {tied(first.endpoint)}{f' ({first.pod})' if first.pod else ''}",
        first.state,
        problem,
        f"from {first.source}{seen}{f' and {len(flows) - 1} more' if len(flows) > 1 else ''}",
        tied(f"{duration(max(left))} left") if left else "",
    )
    return Row((str(len(flows)), ", ".join(filter(None, parts))), tone)


def _path(steps: Sequence[Step]) -> Iterator[Block]:
    """Yield the steps by chain; with many endpoints only some of the paths to them."""
    dnat = [number for number, step in enumerate(steps, 1) if step.does == "dnat"]
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
    bare = without_comment(step.rule).removesuffix(f'comment "{step.comment}"') or "(only counts packets)"
    rule = bare.replace(" -j ", f" -j{TIE}").replace(" -g ", f" -g{TIE}")
    # Some comments continue with a remark for authors of rules.
    comment = step.comment.partition(";")[0]
    reason = f"{step.reason} ({comment})" if comment else step.reason
    yield Section(
        Sentence(rule, "" if step.matched else "aside", "yes  " if step.matched else " no  "),
        [Sentence(reason, "aside")],
    )
