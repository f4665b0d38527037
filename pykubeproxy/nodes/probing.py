"""Send the probes of `trace --live`, and read what the nodes on their way show of them: this one, or those of a cluster."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple, Protocol

from pykubeproxy.inspect.connection import LocationKind
from pykubeproxy.inspect.node import NodeSource, NodeState, Question, ReadError, UnknownNode
from pykubeproxy.inspect.trace.journey import TracedEnd
from pykubeproxy.inspect.trace.observed import (
    Listening,
    NodeView,
    Observations,
    counts,
    met,
    rises,
    visited_chains,
)
from pykubeproxy.inspect.trace.report import TraceReport
from pykubeproxy.kernel import KernelError, NotPermitted, probes
from pykubeproxy.kernel.conntrack import FirstPacket
from pykubeproxy.kernel.probes import Probe, ProbeOutcome, ProbeRequest
from pykubeproxy.nodes.ending import deferring, exit_on_signals
from pykubeproxy.nodes.sending import ProbeOrder, SentProbes, carry_out, next_packet
from pykubeproxy.objects import Protocol as IpProtocol
from pykubeproxy.objects import family_of

# Sends SYN twice.
_LISTENING_SECONDS = 1.5
_AT_ONCE = 16
_ENDING = "Ending as soon as the probes have ended and their conntrack entries are removed, within 10 s."


class ProbedNodes(Protocol):
    """The nodes on the way of probes. Threads may share them."""

    def carry_out(self, node: str, order: ProbeOrder) -> SentProbes:
        """Have a node carry out an order. Raises ReadError."""

    def read(self, names: Collection[str]) -> Mapping[str, NodeState | UnknownNode]:
        """Read nodes again. Raises ReadError."""


class ThisNode(NamedTuple):
    """This node alone."""

    source: NodeSource
    question: Question

    def carry_out(self, node: str, order: ProbeOrder) -> SentProbes:  # noqa: ARG002
        try:
            return carry_out(order)
        except NotPermitted:
            raise
        except KernelError as error:
            raise ReadError(str(error)) from None

    def read(self, names: Collection[str]) -> Mapping[str, NodeState | UnknownNode]:
        return dict.fromkeys(names, next(iter(self.source.nodes(self.question))))


def observe(
    trace: TraceReport,
    states: Mapping[str, NodeState | UnknownNode],
    nodes: ProbedNodes,
    *,
    count: int,
    payload: bytes,
    size: int = 0,
    rules_hit: bool = False,
    here: bool = False,
) -> Observations:
    """Send probes along a trace of one way, and return what the nodes on it show. Raises ReadError, NotPermitted.

    `states` are those that the trace has read. With `here`, this machine sends the probes, which is not the first node.
    Signals end the program when no entry of the probes is left.
    """
    (way,) = trace.ways
    first, family = way.node or "", family_of(trace.source.address)
    request = ProbeRequest(
        IpProtocol(trace.destination.protocol),
        trace.source.address,
        trace.destination.address,
        trace.destination.port,
        count,
        payload,
        size=size,
    )
    known = {name: state for name, state in states.items() if isinstance(state, NodeState)}
    chains = {name: visited_chains(way, name) for name in known}
    before = {name: counts(state.rules[family], chains[name]) for name, state in known.items()}
    with deferring(_ENDING) as ends, ThreadPoolExecutor(_AT_ONCE) as threads:
        if here:
            shown: dict[str, SentProbes] = {}
            sent = SentProbes(_sent_here(request))
        else:
            order = ProbeOrder(request, trace.source.kind is LocationKind.POD, rules_hit)
            sent = nodes.carry_out(first, order)
            shown = {first: sent}
        reading = None if ends() else threads.submit(nodes.read, [*known])
        for some in _by_distance(trace, known.keys() - shown.keys()):
            orders = [ProbeOrder(take=_coming(trace, name, shown, sent.probes)) for name in some]
            shown |= zip(some, threads.map(lambda *one: _taken(nodes, *one), some, orders), strict=True)
        if reading is None or ends():
            return Observations(sent.probes)
        again, views = reading.result(), []
        # The order is that of the way: a node comes after those that send to it.
        for name, state in known.items():
            after = again.get(name)
            if not isinstance(after, NodeState):
                continue
            seen, counted = shown[name], counts(after.rules[family], chains[name])
            view = NodeView(
                name,
                seen.flows,
                seen.delays,
                seen.unread,
                rises(before[name], counted),
                met(way, name, before[name], counted),
                counted.keys() != before[name].keys(),
                seen.hits,
                seen.failures or _more(state.conntrack_failures, after.conntrack_failures),
            )
            views.append(view)
        listened = threads.map(
            lambda end: _listening(nodes, request, end), _failed(trace, sent.probes, views)
        )
        return Observations(sent.probes, tuple(views), tuple(filter(None, listened)))


def _sent_here(request: ProbeRequest) -> tuple[Probe, ...]:
    """Send probes from this machine; its conntrack does not count. Raises ReadError."""
    try:
        with exit_on_signals(), probes.opened(request) as sender:
            return sender.send()
    except KernelError as error:
        raise ReadError(str(error)) from None


def _by_distance(trace: TraceReport, names: Collection[str]) -> Iterable[Sequence[str]]:
    """Return nodes after those that send to them, side by side those that do not send to each other."""
    levels: dict[int, list[str]] = {}
    for name in names:
        routes = (visit.route for visit in trace.ways[0].visits if visit.node == name)
        levels.setdefault(max(map(len, routes)), []).append(name)
    return (levels[level] for level in sorted(levels))


def _coming(
    trace: TraceReport, name: str, shown: Mapping[str, SentProbes], sent: Sequence[Probe]
) -> tuple[FirstPacket | None, ...]:
    """Return the probes as they come to a node that has not sent them; None where that is unknown."""
    if name == trace.ways[0].node:
        to = trace.destination
        number = probes.protocol_number(IpProtocol(to.protocol))
        return tuple(FirstPacket(number, one.source, one.source_port, to.address, to.port) for one in sent)
    visits = (visit for visit in trace.ways[0].visits if visit.node == name and visit.route)
    earlier = [shown[visit.route[-1]].flows for visit in visits if visit.route[-1] in shown]
    before = (next(filter(None, some), None) for some in zip(*filter(None, earlier), strict=True))
    return tuple(map(next_packet, before))


def _taken(nodes: ProbedNodes, name: str, order: ProbeOrder) -> SentProbes:
    try:
        return nodes.carry_out(name, order)
    except ReadError as error:
        return SentProbes(unread=str(error))


def _more(before: Mapping[str, int], after: Mapping[str, int]) -> Mapping[str, int]:
    return {kind: number - before[kind] for kind, number in after.items() if kind in before}


def _failed(trace: TraceReport, sent: Sequence[Probe], views: Sequence[NodeView]) -> Iterable[TracedEnd]:
    """Return the endpoints on nodes with a view that did not accept connections."""
    if IpProtocol(trace.destination.protocol) is not IpProtocol.TCP:
        return ()
    nodes = {view.node for view in views}
    failed = {
        (flow.reply.source, flow.reply.source_port)
        for view in views
        for probe, flow in zip(sent, view.flows, strict=False)
        if flow and probe.outcome is not ProbeOutcome.CONNECTED
    }
    ends = {(end.address, end.port): end for end in trace.ways[0].ends if end.node in nodes}
    return (end for address, end in ends.items() if address in failed)


def _listening(nodes: ProbedNodes, request: ProbeRequest, end: TracedEnd) -> Listening | None:
    """Connect to an endpoint from its own node."""
    order = ProbeOrder(ProbeRequest(request.protocol, "", end.address, end.port, seconds=_LISTENING_SECONDS))
    node = end.node or ""
    with suppress(ReadError):
        (probe,) = nodes.carry_out(node, order).probes
        return Listening(end.address, end.port, node, probe)
    return None
