"""Traces of packets through one Ruleset, reports about them, and comparisons of two Rulesets."""

from pykubeproxy.inspect.connection import Directory, Place, ResolvedConnection
from pykubeproxy.inspect.meaning.comparison import MeaningChange, MeaningComparison
from pykubeproxy.inspect.node import NodeRules, NodeState, Origin
from pykubeproxy.inspect.packets.iptables import IptablesRules
from pykubeproxy.inspect.packets.packet import NodeNetwork, Packet
from pykubeproxy.inspect.packets.walk import NodeTrace, walk
from pykubeproxy.inspect.targets import parse_source
from pykubeproxy.inspect.trace.question import THIS_NODE, trace_on_node
from pykubeproxy.inspect.trace.report import TraceReport, report
from pykubeproxy.objects import Node, Protocol
from pykubeproxy.report.text import text
from pykubeproxy.rules.ruleset import Ruleset


def trace_packet(ruleset: Ruleset, packet: Packet, network: NodeNetwork) -> NodeTrace:
    """Trace a packet with all steps."""
    return walk(IptablesRules(ruleset), packet, network, record=True)


def report_of(ruleset: Ruleset, packet: Packet, network: NodeNetwork) -> TraceReport:
    """Return the report about a packet on one node, without objects."""
    state = NodeState(Node(THIS_NODE), Origin("rules"), {ruleset.family: NodeRules(ruleset)}, network)
    source = parse_source(packet.source)
    ends = ResolvedConnection(
        packet.source,
        packet.destination,
        packet.port,
        Protocol(packet.protocol.upper()),
        Place(source, (packet.source,)),
    )
    return report(trace_on_node(state, ends, Directory(""), interface=packet.received_by))


def trace_text(ruleset: Ruleset, packet: Packet, network: NodeNetwork, *, steps: bool = False) -> str:
    """Return the text of the report."""
    return text(report_of(ruleset, packet, network).blocks(wide=steps))


def compare_meaning(before: Ruleset, after: Ruleset, network: NodeNetwork) -> tuple[MeaningChange, ...]:
    """Compare for all destinations that either state knows. Raises TooManyRules."""
    return tuple(MeaningComparison().changes(before, after, network))
