"""Send probes from this node, and read and remove their entries of conntrack.

Each order to a pod of ours starts a program that imports this, so this imports little.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec

from pykubeproxy.inspect.flows import Flow, parse_flows
from pykubeproxy.kernel import KernelError, conntrack, probes
from pykubeproxy.kernel.conntrack import FirstPacket
from pykubeproxy.kernel.hits import HitTrace, RuleHit
from pykubeproxy.kernel.network import namespace_of_pod, source_to
from pykubeproxy.kernel.probes import Probe, ProbeRequest
from pykubeproxy.nodes.ending import exit_on_signals


class ProbeOrder(msgspec.Struct, frozen=True):
    """What a node shall do: send probes, from the pod with the source address if `in_pod`, or `take` flows.

    - `rules_hit`: trace the rules of nftables that the probes meet, too
    - `take`: return the flows with these first packets, and remove them; None where a packet is unknown
    """

    request: ProbeRequest | None = None
    in_pod: bool = False
    rules_hit: bool = False
    take: tuple[FirstPacket | None, ...] = ()


class SentProbes(msgspec.Struct, frozen=True):
    """Probes and the entries of conntrack on the node that carried out an order, as in NodeView."""

    probes: tuple[Probe, ...] = ()
    flows: tuple[Flow | None, ...] = ()
    delays: tuple[float | None, ...] = ()
    hits: tuple[RuleHit, ...] = ()
    failures: Mapping[str, int] = {}
    unread: str | None = None


def carry_out(order: ProbeOrder) -> SentProbes:
    """Carry out an order on this node. No entry of conntrack stays. Raises KernelError."""
    try:
        if order.request is None:
            return SentProbes(flows=_take(order.take))
        return _send(order, order.request)
    except OSError as error:
        raise KernelError(f"cannot follow conntrack: {error.strerror}") from None


def _send(order: ProbeOrder, request: ProbeRequest) -> SentProbes:
    if not request.source:
        request = msgspec.structs.replace(request, source=source_to(request.destination))
    namespace = namespace_of_pod(request.source) if order.in_pod else ""
    with exit_on_signals(), probes.opened(request, namespace) as sender:
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
        missed = _tracked([*sender.flows]) if not all(line for line, _ in ended) else [None] * len(ended)
        failures = {kind: number - failed[kind] for kind, number in conntrack.failure_counts().items()}
    # The kernel may drop events of single entries.
    flows = tuple(
        next(iter(parse_flows(line)), later) for (line, _), later in zip(ended, missed, strict=True)
    )
    delays = tuple(
        max(0.0, round(began - probe.started, 6)) if line else None
        for probe, (line, began) in zip(found, ended, strict=True)
    )
    unread = "conntrack reported no changes, or too many" if watch.lost and not all(flows) else None
    return SentProbes(found, flows, delays, hits, failures, unread)


def _take(packets: Sequence[FirstPacket | None]) -> tuple[Flow | None, ...]:
    found = _tracked(packets)
    for packet in filter(None, packets):
        with suppress(OSError):
            packet.delete()
    return found


def _tracked(packets: Sequence[FirstPacket | None]) -> tuple[Flow | None, ...]:
    ends = {(one.protocol, one.source, one.destination, one.port) for one in packets if one}
    lines = (line for some in ends for line in conntrack.flow_lines_of(*some))
    return find_flows(parse_flows("\n".join(lines)), packets)


def find_flows(flows: Sequence[Flow], packets: Sequence[FirstPacket | None]) -> tuple[Flow | None, ...]:
    """Return the flow of each first packet."""
    known = {first_packet(flow): flow for flow in flows}
    return tuple(known.get(packet) if packet else None for packet in packets)


def first_packet(flow: Flow) -> FirstPacket:
    """Return the first packet of a flow as it came to the node."""
    side, number = flow.original, probes.protocol_number(flow.protocol)
    return FirstPacket(number, side.source, side.source_port, side.destination, side.destination_port)


def next_packet(flow: Flow | None) -> FirstPacket | None:
    """Return the same packet after the NAT of the node; None if that is unknown."""
    if flow is None:
        return None
    side, number = flow.reply, probes.protocol_number(flow.protocol)
    return FirstPacket(number, side.destination, side.destination_port, side.source, side.source_port)
