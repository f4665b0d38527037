"""A cluster of three nodes, with the rules that our renderer writes for each from the objects of a conformance case."""

from collections.abc import Collection, Mapping, Sequence

import msgspec

from pykubeproxy.inspect.connection import (
    Directory,
    Location,
    LocationKind,
    ResolvedConnection,
    TracedDestination,
)
from pykubeproxy.inspect.explain.model import Explanation, explain_nodes
from pykubeproxy.inspect.node import NodeRules, NodeState, Origin, UnknownNode
from pykubeproxy.inspect.packets.packet import NodeNetwork
from pykubeproxy.inspect.targets import Target, TargetKind, parse_filter
from pykubeproxy.inspect.trace.journey import TracedWay, receivers
from pykubeproxy.inspect.trace.question import trace_in_cluster
from pykubeproxy.inspect.trace.report import TraceReport
from pykubeproxy.objects import Family, Node, family_of
from pykubeproxy.rules.context import KernelFacts, RuleContext, rule_context
from pykubeproxy.rules.render import installed, render
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from pykubeproxy.services.ports import ANY_LOCAL, PortName
from tests.cases import cluster_of, config_of, load_case, node_of

OUTSIDE = "203.0.113.77"


class ThreeNodes:
    """Nodes node1, node2 and node3. Most cases have an endpoint on node1 and one on node2.

    `read` records in `asked` which nodes are read; `unread` are those that cannot be, with the reasons.
    """

    def __init__(self, case: str) -> None:
        loaded = load_case(case)
        self.config = config_of(loaded)
        self.cluster = cluster_of(loaded)
        first = node_of(loaded)
        self.nodes = [
            first,
            Node(
                "node2", ("192.168.99.20", "fd00:99::20"), ("10.244.2.0/24", "fd00:10:244:2::/64"), "zone-b"
            ),
            Node(
                "node3", ("192.168.99.30", "fd00:99::30"), ("10.244.3.0/24", "fd00:10:244:3::/64"), "zone-c"
            ),
        ]
        # Some cases have endpoints on more nodes.
        self.unread = {"node4": "there is no Node node4", "node5": "there is no Node node5"}
        self.asked: list[str] = []
        self._changed: dict[tuple[str, Family], Ruleset] = {}

    @property
    def directory(self) -> Directory:
        slices = [it for service in self.cluster.services() for it in self.cluster.all_slices_of(service.key)]
        return Directory("", slices=tuple(slices), nodes=tuple(self.nodes), complete=True)

    def contexts(self, node: Node) -> Mapping[Family, RuleContext]:
        facts = KernelFacts(addresses=node.addresses)
        return {it: rule_context(self.config, node.name, node, facts, it) for it in Family}

    def rules(self, name: str, family: Family) -> Ruleset:
        """Return the rules of a node in tables that were empty."""
        if (name, family) in self._changed:
            return self._changed[name, family]
        (node,) = (it for it in self.nodes if it.name == name)
        context = self.contexts(node)[family]
        return installed(render(self.cluster, context), context.options)

    def add_rules(self, name: str, key: ChainKey, *rules: str, family: Family = Family.IPV4) -> None:
        """Put foreign rules before those of a node."""
        before = self.rules(name, family)
        chains = {**before.chains, key: (*rules, *before.chains.get(key, ()))}
        self._changed[name, family] = msgspec.structs.replace(before, chains=chains)

    def read(self, names: Collection[str]) -> Mapping[str, NodeState | UnknownNode]:
        self.asked += names
        nodes = {it.name: it for it in self.nodes}
        return {name: self._state(nodes.get(name, Node(name))) for name in names}

    def _state(self, node: Node) -> NodeState | UnknownNode:
        if node.name in self.unread:
            return UnknownNode(node, self.unread[node.name])
        rules = {it: NodeRules(self.rules(node.name, it)) for it in Family}
        return NodeState(node, Origin("rules"), rules, NodeNetwork(frozenset(node.addresses)))

    def explained(self, service: str) -> Explanation:
        (found,) = explain_nodes(self.cluster, parse_filter(service), self.nodes, self.contexts)
        return found

    def trace(
        self,
        source: str | Location,
        destination: TracedDestination,
        via: str = "",
        entrances: Sequence[TracedWay] = (),
    ) -> TraceReport:
        """Trace where packets go; those from outside enter by `via` or `entrances`, or by any node."""
        start = source if isinstance(source, Location) else self.directory.find(source)
        service, _, port = (destination.service or "").partition(":")
        namespace, _, service_name = service.partition("/")
        name = PortName(namespace, service_name, port, destination.protocol) if service else None
        # A node port of any node is that of a Service which the user names.
        kind = TargetKind.SERVICE if destination.address == ANY_LOCAL else TargetKind.ADDRESS
        ends = ResolvedConnection(
            Target(TargetKind.ADDRESS, start.address), Target(kind, "web"), start, destination, name
        )
        if start.kind is LocationKind.OUTSIDE and name and destination.kind and not (via or entrances):
            entrances = receivers([self.explained(service)], name, family_of(start.address), destination.kind)
        return trace_in_cluster(ends, self.directory, entrances, self.read, via=via)
