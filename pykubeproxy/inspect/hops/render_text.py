"""The text of `kubectl pykubeproxy trace`."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from pykubeproxy.inspect.hops.answer import Answer, Way
from pykubeproxy.inspect.hops.conclusion import Verdict, conclusion, is_good, verdict
from pykubeproxy.inspect.hops.decisions import Decision, decisions
from pykubeproxy.inspect.hops.journey import Journey, Outcome, Result, Visit
from pykubeproxy.inspect.hops.notes import next_step, notes
from pykubeproxy.inspect.targets import LocationKind
from pykubeproxy.inspect.trace.render import path_lines
from pykubeproxy.objects import address_and_port
from pykubeproxy.wording import SafeText, listed, percent, styled, text_of, tied, wrapped

_COLORS = {
    Verdict.LIKELY: "green",
    Verdict.REACHED: "green",
    Verdict.PARTLY: "yellow",
    Verdict.NOT_REACHED: "red",
    Verdict.UNKNOWN: "yellow",
}
_INDENT = "  "
# How many outcomes, endpoints of a node and nodes are listed.
_OUTCOMES, _ENDPOINTS, _NODES = 20, 4, 4


def text(answer: Answer, *, with_steps: bool = False) -> SafeText:
    """Return the answer in 80 columns, the conclusion first.

    `with_steps` lists the rules that the packet meets on each node.
    """
    lines = [
        *(
            styled(line, _COLORS[verdict(answer)], bold=True)
            for line in wrapped(conclusion(answer), "", _INDENT)
        ),
        *wrapped(_packet(answer), _INDENT, _INDENT),
        "",
    ]
    for way in answer.ways:
        lines += _way(way, answer)
    for journey in answer.journeys:
        for title, lines_about in _nodes_on_the_way(journey, with_steps):
            lines += [
                "",
                *(styled(line, "cyan") for line in wrapped(title, "", _INDENT)),
                *lines_about,
            ]
    if remarks := notes(answer):
        lines += ["", *(line for note in remarks for line in wrapped(note, "Note: ", " " * 6))]
    if command := next_step(answer):
        lines += ["", f"Next: {command}"]
    return text_of(lines)


def _packet(answer: Answer) -> str:
    source, destination = answer.source, answer.destination
    where = f" on {source.node}" if source.kind is not LocationKind.OUTSIDE else ""
    return f"{source.address}{where} to {destination}, {destination.protocol}"


def _way(way: Way, answer: Answer) -> Iterator[str]:
    """Yield how packets end, with the nodes that receive them if there are several ways."""
    receivers, journey = way.receivers, way.journey
    indent = _INDENT if len(answer.ways) > 1 else ""
    if journey is None:
        serve = "have endpoints of their own" if receivers.serve else "should drop it"
        nodes = listed(receivers.others, _NODES)
        yield from wrapped(
            f"through {nodes}: not read; by the EndpointSlices they {serve}", indent, _INDENT * 2
        )
        return
    if indent:
        yield f"{indent}through {receivers.read}"
    if journey.starts_unread:
        yield from wrapped(f"its rules are unknown: {journey.visits[0].unread}", _INDENT * 2)
        return
    for outcome in journey.outcomes[:_OUTCOMES]:
        start = f"{indent}{percent(outcome.probability):>7}  "
        yield from wrapped(_described(outcome, journey, answer), start, " " * len(start))
    if more := journey.outcomes[_OUTCOMES:]:
        share = percent(sum(one.probability for one in more))
        yield f"{indent}{share:>7}  {len(more)} more (-o json lists all)"
    if receivers.others:
        nodes = listed(receivers.others, _NODES)
        yield from wrapped(f"likewise through {nodes}, by the EndpointSlices; not read", _INDENT, _INDENT * 2)


def _described(outcome: Outcome, journey: Journey, answer: Answer) -> str:
    node = outcome.route[-1]
    at = tied(address_and_port(outcome.location.address, outcome.port))
    if outcome.step:
        verb = "dropped" if outcome.result is Result.DROPPED else "rejected"
        goal = f", on the way to {at}" if outcome.translated else ""
        return f"{verb} on {node} in {outcome.step.table} {outcome.step.chain}{goal}"
    if not outcome.translated and not is_good(outcome, journey, answer):
        return f"no rule on {node} matches; the packet goes on to {at} itself"
    pod = f" ({outcome.location.pod})" if outcome.location.pod else ""
    where = f"{at} on {outcome.location.node}{pod}" if outcome.location.node else at
    match outcome.result:
        case Result.SENT:
            return f"{where}; whether this node lets it through is unknown"
        case Result.LOST:
            return f"{where}; goes from node to node: {', '.join(outcome.route)}"
        case Result.LEFT:
            return f"{where}, outside the cluster; {_client(outcome)}"
        case _:
            return f"{where}; {_client(outcome)}"


def _client(outcome: Outcome) -> str:
    if not outcome.masqueraded_on:
        return f"sees client {outcome.client}"
    return f"masqueraded: sees {outcome.client or 'an address'} of {outcome.masqueraded_on}"


def _nodes_on_the_way(journey: Journey, with_steps: bool) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield a title and the lines about one node; nodes with the same lines come together."""
    nodes: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for _, group in groupby(journey.visits, lambda visit: (visit.node, visit.route)):
        visits = [*group]
        nodes.setdefault((_role(journey, visits[0]), tuple(_on_node(visits, with_steps))), []).append(
            visits[0].node
        )
    for (role, lines), names in nodes.items():
        yield f"On {listed(names, _NODES)}, {role}:", lines


def _role(journey: Journey, visit: Visit) -> str:
    if visit.route:
        return f"after {visit.route[-1]}"
    if visit.packet.starts_here or journey.entry.from_pod:
        return "where the packet starts"
    return "which receives the packet"


def _on_node(visits: Sequence[Visit], with_steps: bool) -> Iterator[str]:
    """Yield what happens on one node to the packets that come the same way."""
    if visits[0].trace is None:
        yield from wrapped(f"rules unknown: {visits[0].unread}", _INDENT)
        return
    if with_steps:
        traces = (visit.trace for visit in visits if visit.trace)
        yield from (f"{_INDENT}{line}" for trace in traces for line in path_lines(trace))
        return
    found = list(dict.fromkeys(decision for visit in visits for decision in decisions(visit)))
    yield from _decisions(found)
    if not found:
        yield f"{_INDENT}no rule changes or stops it"


def _decisions(found: Sequence[Decision]) -> Iterator[str]:
    """Yield a line for each decision; of many endpoints, the first."""
    endpoints = 0
    for decision in found:
        endpoints += bool(decision.endpoint)
        if decision.endpoint and endpoints > _ENDPOINTS:
            continue
        yield from wrapped(f"{decision.table} {decision.chain}: {decision.what}", _INDENT, _INDENT * 3)
    if endpoints > _ENDPOINTS:
        yield f"{_INDENT}and {endpoints - _ENDPOINTS} more endpoints"
