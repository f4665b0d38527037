"""Render the desired rules of many nodes. Services with the same rules on several nodes are rendered once."""

from collections.abc import Mapping

import msgspec

from pykubeproxy.objects import Family, Key
from pykubeproxy.rules.context import RuleContext
from pykubeproxy.rules.options import LARGE_CLUSTER_ENDPOINTS, RuleOptions
from pykubeproxy.rules.render import assemble, installed
from pykubeproxy.rules.ruleset import Entries, Rules, Ruleset
from pykubeproxy.rules.service import port_rules
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.ports import PortName
from pykubeproxy.services.selection import NodeTopology, resolve_ports

# Services times kinds of nodes.
_MOST_RENDERED = 1 << 14
# Each takes a few megabytes.
_MOST_RULESETS = 16
# A node without endpoints, in a zone without endpoints.
_NOWHERE = NodeTopology("")


class _Rendered(msgspec.Struct, frozen=True):
    """The rules of a service port. See PortRules."""

    entries: Entries
    own: tuple[tuple[str, Rules], ...]

    def chains(self) -> tuple[tuple[str, Rules], ...]:
        return self.own


class _Scope(msgspec.Struct, frozen=True):
    """The nodes and zones for which the endpoints of a Service are not those of all others."""

    nodes: frozenset[str]
    zones: frozenset[str]

    def narrow(self, node: NodeTopology) -> NodeTopology:
        """Return a node for which the Service has the same endpoints."""
        return NodeTopology(
            node.node_name if node.node_name in self.nodes else "",
            node.zone if node.zone in self.zones else "",
        )


# The rules of the ports of one Service.
_Ports = dict[PortName, _Rendered]


class DesiredRules:
    """Renders the rules of nodes for the objects of a cluster, which must not change meanwhile."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._rendered: dict[tuple[Key, NodeTopology, RuleOptions, int], _Ports] = {}
        self._rulesets: dict[tuple[object, ...], Ruleset] = {}
        scopes = {service.key: self._find_scope(service.key) for service in cluster.services()}
        self._scopes = {key: scope for key, scope in scopes.items() if scope.nodes or scope.zones}
        # The rules of these depend on the address of the node.
        self._with_ranges = frozenset(service.key for service in cluster.services() if service.source_ranges)
        self._large: dict[Family, bool] = {}

    def ruleset(self, context: RuleContext, unkept_lists: Mapping[Key, int]) -> Ruleset:
        """Return what a proxy leaves in tables that were empty; the same value for nodes with the same rules.

        `unkept_lists` has the Services without the session affinity that they ask for. See ServicePort.
        """
        options = msgspec.structs.replace(
            context.options, large_cluster=self._is_large(context.options.family)
        )
        special = {key: scope.narrow(context.node) for key, scope in self._scopes.items()}
        usual = msgspec.structs.replace(options, node_ip="")
        case = (
            options if self._with_ranges else usual,
            context.node_port_jumps,
            tuple(special.items()),
            frozenset(unkept_lists),
        )
        if (known := self._rulesets.get(case)) is None:
            ports: _Ports = {}
            for service in self._cluster.services():
                key = service.key
                node = special.get(key, _NOWHERE)
                own_options = options if key in self._with_ranges else usual
                ports |= self._service(key, node, own_options, unkept_lists.get(key, 0))
            known = installed(assemble(ports, usual, context.node_port_jumps), options)
            if len(self._rulesets) >= _MOST_RULESETS:
                self._rulesets.clear()
            self._rulesets[case] = known
        return known

    def _service(self, key: Key, node: NodeTopology, options: RuleOptions, unkept_lists: int) -> _Ports:
        case = (key, node, options, unkept_lists)
        if (known := self._rendered.get(case)) is None:
            if len(self._rendered) >= _MOST_RENDERED:
                self._rendered.clear()
            known = self._rendered[case] = self._render(*case)
        return known

    def _render(self, key: Key, node: NodeTopology, options: RuleOptions, unkept_lists: int) -> _Ports:
        found: _Ports = {}
        for port in resolve_ports(self._cluster, key, options.family, node, unkept_lists=unkept_lists):
            rules = port_rules(port.port, port.selection, options)
            found[port.port.name] = _Rendered(rules.entries, tuple(rules.chains()))
        return found

    def _find_scope(self, key: Key) -> _Scope:
        service = self._cluster.service(key)
        endpoints = [endpoint for slice_ in self._cluster.all_slices_of(key) for endpoint in slice_.endpoints]
        nodes = {hint for endpoint in endpoints for hint in endpoint.node_hints}
        if service and (service.internal_local or service.external_local):
            nodes |= {endpoint.node_name for endpoint in endpoints}
        return _Scope(
            frozenset(nodes), frozenset(hint for endpoint in endpoints for hint in endpoint.zone_hints)
        )

    def _is_large(self, family: Family) -> bool:
        if (known := self._large.get(family)) is None:
            endpoints = sum(
                len(port.selection.verdicts)
                for service in self._cluster.services()
                for port in resolve_ports(self._cluster, service.key, family, _NOWHERE)
            )
            known = self._large[family] = endpoints > LARGE_CLUSTER_ENDPOINTS
        return known
