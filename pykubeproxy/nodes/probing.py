"""Send the probes of `trace --live`, and read what the nodes on their way show of them: this one, or those of a cluster."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple, Protocol

import msgspec

from pykubeproxy.inspect.connection import LocationKind
from pykubeproxy.inspect.flows import Flow, parse_flows
from pykubeproxy.inspect.node import NodeSource, NodeState, Question, ReadError, UnknownNode
from pykubeproxy.inspect.trace.journey import TracedEnd
from pykubeproxy.inspect.trace.observed import (
    Listening,
    NodeView,
    Observations,
    counts,
    find_flows,
    met,
    next_tuples,
    rises,
    visited_chains,
)
from pykubeproxy.inspect.trace.report import TraceReport
from pykubeproxy.kernel import KernelError, NotPermitted, conntrack, probes
from pykubeproxy.kernel.conntrack import FirstPacket
from pykubeproxy.kernel.hits import HitTrace, RuleHit
from pykubeproxy.kernel.network import namespace_of_pod, source_to
from pykubeproxy.kernel.probes import Probe, ProbeOutcome, ProbeRequest, Sender
from pykubeproxy.nodes.ending import exit_on_signals
from pykubeproxy.objects import Protocol as IpProtocol
from pykubeproxy.objects import address_and_port, family_of

# Sends SYN twice.
_LISTENING_SECONDS = 1.5


class ProbeOrder(msgspec.Struct, frozen=True):
    """What a node shall do: send probes, from the pod with the source address if `in_pod`, or `forget` flows.

    `rules_hit`: trace the rules of nftables that the probes meet, too
    """

    request: ProbeRequest | None = None
    in_pod: bool = False
    rules_hit: bool = False
    forget: tuple[FirstPacket, ...] = ()


class SentProbes(msgspec.Struct, frozen=True):
    """Probes and the entries of conntrack on the node that sent them, as in NodeView."""

    probes: tuple[Probe, ...] = ()
    flows: tuple[Flow | None, ...] = ()
    delays: tuple[float | None, ...] = ()
    hits: tuple[RuleHit, ...] = ()
    failures: Mapping[str, int] = {}
    unread: str | None = None


class ProbedNodes(Protocol):
    """The nodes on the way of probes."""

    def carry_out(self, node: str, order: ProbeOrder) -> SentProbes:
        """Have a node carry out an order. Raises ReadError."""

    def read(self, names: Collection[str], *, flows: bool) -> Mapping[str, NodeState | UnknownNode]:
        """Read nodes again, with their flows if probes came from elsewhere. Raises ReadError."""


class ThisNode(NamedTuple):
    """This node alone."""

    source: NodeSource
    question: Question

    def carry_out(self, node: str, order: ProbeOrder) -> SentProbes:  # noqa: ARG002
        return carry_out(order)

    def read(self, names: Collection[str], *, flows: bool) -> Mapping[str, NodeState | UnknownNode]:  # noqa: ARG002
        return dict.fromkeys(names, next(iter(self.source.nodes(self.question))))


def carry_out(order: ProbeOrder) -> SentProbes:
    """Carry out an order on this node. No entry of conntrack stays. Raises ReadError, NotPermitted."""
    for flow in order.forget:
        with suppress(OSError):
            flow.delete()
    request = order.request
    if request is None:
        return SentProbes()
    try:
        if not request.source:
            request = msgspec.structs.replace(request, source=source_to(request.destination))
        namespace = namespace_of_pod(request.source) if order.in_pod else ""
        with _opened(request, namespace) as sender:
            failed = conntrack.failure_counts()
            watch = conntrack.FlowWatch(sender.flows)
            try:
                traced = HitTrace(sender.flows) if order.rules_hit else None
                try:
                    found = sender.send()
                finally:
                    hits = traced.end() if traced else ()
            finally:
                ended = watch.end()
            failures = {kind: number - failed[kind] for kind, number in conntrack.failure_counts().items()}
    except NotPermitted:
        raise
    except KernelError as error:
        raise ReadError(str(error)) from None
    except OSError as error:
        raise ReadError(f"cannot follow conntrack: {error.strerror}") from None
    flows = tuple(next(iter(parse_flows(line)), None) for line, _ in ended)
    delays = tuple(
        max(0.0, round(began - probe.started, 6)) if line else None
        for probe, (line, began) in zip(found, ended, strict=True)
    )
    unread = "conntrack reported no changes, or too many" if watch.lost and not all(flows) else None
    return SentProbes(found, flows, delays, hits, failures, unread)


@contextmanager
def _opened(request: ProbeRequest, namespace: str) -> Iterator[Sender]:
    """Open the sockets of probes, and at the end remove their entries of conntrack."""
    flows: Sequence[FirstPacket] = ()
    try:
        with exit_on_signals(), probes.opened(request, namespace) as sender:
            flows = sender.flows
            yield sender
    finally:
        for flow in flows:
            with suppress(OSError):
                flow.delete()


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
    if here:
        sent = SentProbes(_sent_here(request))
    else:
        sent = nodes.carry_out(first, ProbeOrder(request, trace.source.kind is LocationKind.POD, rules_hit))
    flows: dict[str, tuple[Flow | None, ...]] = {} if here else {first: sent.flows}
    views = []
    # The order is that of the way: a node comes after those that send to it.
    again = nodes.read(known, flows=here or len(known) > 1)
    try:
        for name in known:
            after = again.get(name)
            if not isinstance(after, NodeState):
                continue
            unread, delays, hits, failures = sent.unread, sent.delays, sent.hits, sent.failures
            if name not in flows:
                flows[name], unread = _onward(trace, name, flows, after, sent.probes)
                delays, hits, failures = (), (), {}
            counted = counts(after.rules[family], chains[name])
            risen = rises(before[name], counted)
            passed = met(way, name, before[name], counted)
            changed = counted.keys() != before[name].keys()
            views.append(NodeView(name, flows[name], delays, unread, risen, passed, changed, hits, failures))
        return Observations(sent.probes, tuple(views), tuple(_listening(trace, sent, known, nodes)))
    finally:
        for name, some in flows.items():
            if (here or name != first) and (gone := tuple(_first_packet(flow) for flow in some if flow)):
                nodes.carry_out(name, ProbeOrder(forget=gone))


def _sent_here(request: ProbeRequest) -> tuple[Probe, ...]:
    """Send probes from this machine; its conntrack does not count. Raises ReadError."""
    try:
        with exit_on_signals(), probes.opened(request) as sender:
            return sender.send()
    except KernelError as error:
        raise ReadError(str(error)) from None


def _onward(
    trace: TraceReport,
    name: str,
    flows: Mapping[str, tuple[Flow | None, ...]],
    state: NodeState,
    sent: Sequence[Probe],
) -> tuple[tuple[Flow | None, ...], str | None]:
    """Return the entries of the probes on a node that has not sent them, and why they are unknown."""
    visits = [visit for visit in trace.ways[0].visits if visit.node == name]
    earlier = [flows.get(visit.route[-1], ()) for visit in visits if visit.route]
    before = [next(filter(None, some), None) for some in zip(*filter(None, earlier), strict=True)]
    table = state.flows
    if table is None or table.unread:
        return (), table.unread if table else "its conntrack is not read"
    to = trace.destination
    first = [(probe.source, probe.source_port, to.address, to.port) for probe in sent]
    tuples = next_tuples(before) if name != trace.ways[0].node else first
    return find_flows(table.flows, IpProtocol(to.protocol), tuples), None


def _ends(trace: TraceReport) -> dict[str, list[TracedEnd]]:
    found: dict[str, list[TracedEnd]] = {}
    for end in trace.ways[0].ends:
        found.setdefault(address_and_port(end.address, end.port), []).append(end)
    return found


def _target(flow: Flow | None) -> str:
    return address_and_port(flow.reply.source, flow.reply.source_port) if flow else ""


def _first_packet(flow: Flow) -> FirstPacket:
    side = flow.original
    number = probes.protocol_number(flow.protocol)
    return FirstPacket(number, side.source, side.source_port, side.destination, side.destination_port)


def _listening(
    trace: TraceReport, sent: SentProbes, known: Collection[str], nodes: ProbedNodes
) -> Iterator[Listening]:
    """Connect to the endpoints that failed, each from its own node."""
    protocol = IpProtocol(trace.destination.protocol)
    ends = _ends(trace)
    failed = dict.fromkeys(
        _target(flow)
        for probe, flow in zip(sent.probes, sent.flows, strict=False)
        if flow and probe.outcome is not ProbeOutcome.CONNECTED
    )
    for target in failed if protocol is IpProtocol.TCP else ():
        for end in ends.get(target, ())[:1]:
            if end.node is not None and end.node in known:
                request = ProbeRequest(protocol, "", end.address, end.port, seconds=_LISTENING_SECONDS)
                with suppress(ReadError):
                    (probe,) = nodes.carry_out(end.node, ProbeOrder(request)).probes
                    yield Listening(end.address, end.port, end.node, probe)
