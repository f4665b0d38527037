"""Traces of packets through one Ruleset, reports about them, and comparisons of two Rulesets."""

from typing import NamedTuple

from pykubeproxy.inspect.connection import Directory, Location, ResolvedConnection, TracedDestination
from pykubeproxy.inspect.meaning.comparison import MeaningChange, MeaningComparison
from pykubeproxy.inspect.node import NodeRules, NodeState, Origin
from pykubeproxy.inspect.packets.packet import SNAT, NodeNetwork, Packet
from pykubeproxy.inspect.packets.walk import Step, WalkEnd, walk
from pykubeproxy.inspect.routes import PacketVerdict
from pykubeproxy.inspect.targets import parse_source
from pykubeproxy.inspect.trace.question import trace_on_node
from pykubeproxy.inspect.trace.report import TraceReport
from pykubeproxy.objects import Node
from pykubeproxy.report.text import text
from pykubeproxy.rules.nft_list import NftRuleset
from pykubeproxy.rules.ruleset import Ruleset


class TracedEndpoint(NamedTuple):
    """An endpoint that the packet may reach, and whether it is masqueraded on all ways there."""

    address: str
    port: int
    probability: float
    masquerade: bool


class PacketTrace:
    """What happens to a packet on one node, summed up."""

    def __init__(self, packet: Packet, ends: tuple[WalkEnd, ...], steps: tuple[Step, ...]) -> None:
        self.packet = packet
        self.ends = ends
        self.steps = steps
        self.rejections = [end for end in ends if end.step]
        found: dict[tuple[str, int], list[WalkEnd]] = {}
        for end in ends:
            if end.verdict is PacketVerdict.DNAT:
                found.setdefault((end.packet.destination, end.packet.port), []).append(end)
        self.endpoints = tuple(
            TracedEndpoint(*to, sum(end.probability for end in some), _all_masqueraded(some))
            for to, some in found.items()
        )

    @property
    def masquerade(self) -> bool:
        """Whether the source is replaced, whichever destination the packet reaches."""
        return _all_masqueraded([end for end in self.ends if end not in self.rejections])

    @property
    def verdict(self) -> PacketVerdict:
        """DNAT if the packet may reach an endpoint; else the most probable verdict."""
        if self.endpoints:
            return PacketVerdict.DNAT
        totals = {PacketVerdict.PASS: 0.0}
        for end in self.ends:
            totals[end.verdict] = totals.get(end.verdict, 0.0) + end.probability
        return max(totals, key=lambda verdict: totals[verdict])


def _all_masqueraded(ends: list[WalkEnd]) -> bool:
    return bool(ends) and all(SNAT in end.packet.states for end in ends)


def trace_packet(
    ruleset: Ruleset, packet: Packet, network: NodeNetwork, nftables: NftRuleset | None = None
) -> PacketTrace:
    """Trace a packet with all steps."""
    rules = NodeRules(ruleset, nftables=nftables).rule_sets
    trace = walk(rules, packet, network, record=True)
    return PacketTrace(trace.packet, trace.ends, trace.steps)


def report_of(ruleset: Ruleset, packet: Packet, network: NodeNetwork) -> TraceReport:
    """Return the report about a packet on one node, without objects."""
    state = NodeState(Node(""), Origin("rules"), {ruleset.family: NodeRules(ruleset)}, network)
    source = parse_source(packet.source)
    to = TracedDestination(packet.protocol.upper(), packet.destination, packet.port)
    ends = ResolvedConnection(source, source, Location(None, packet.source), to)
    return trace_on_node(state, ends, Directory(""), interface=packet.received_by)


def trace_text(ruleset: Ruleset, packet: Packet, network: NodeNetwork, *, steps: bool = False) -> str:
    """Return the text of the report."""
    return text(report_of(ruleset, packet, network).blocks(wide=steps))


def compare_meaning(before: Ruleset, after: Ruleset, network: NodeNetwork) -> tuple[MeaningChange, ...]:
    """Compare for all destinations that either state knows. Raises TooManyRules."""
    return tuple(MeaningComparison().changes(before, after, network))
