"""Explain which endpoints a Service uses on each node; nodes with the same answer form a group."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from pykubeproxy.inspect.explain.model import Explanation, PolicyExplanation, PortExplanation, explain_all
from pykubeproxy.inspect.filter import ServiceFilter
from pykubeproxy.inspect.routes import PacketVerdict, Policy
from pykubeproxy.objects import Family, Key, Node
from pykubeproxy.rules.context import RuleContext
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.ports import PortName

# The contexts of a node, by family.
ContextsOf = Callable[[Node], Mapping[Family, RuleContext]]


class NodeGroup(msgspec.Struct, frozen=True):
    """Nodes that use the same endpoints of a service port under a policy; `port` and `policy` are those of the first."""

    nodes: tuple[str, ...]
    port: PortExplanation
    policy: PolicyExplanation

    @property
    def serves(self) -> bool:
        """Whether these nodes send packets to endpoints."""
        return self.policy.verdict is PacketVerdict.DNAT


class PortOnNodes(msgspec.Struct, frozen=True):
    """A service port on all nodes. `first` is its explanation on one of them."""

    first: PortExplanation
    policies: Mapping[Policy, tuple[NodeGroup, ...]]


class ServiceOnNodes(msgspec.Struct, frozen=True):
    """A Service on all nodes. `first` is its explanation on one of them."""

    first: Explanation
    ports: tuple[PortOnNodes, ...]


def explain_nodes(
    cluster: Cluster, query: ServiceFilter, nodes: Iterable[Node], contexts_of: ContextsOf
) -> tuple[ServiceOnNodes, ...]:
    """Explain the matching Services on these nodes, which are at least one. Raises LookupError if none matches."""
    named = _named_nodes(cluster, query)
    found: dict[Key, list[tuple[tuple[str, ...], Explanation]]] = {}
    for some in _alike(nodes, named):
        names = tuple(node.name for node in some)
        for explanation in explain_all(cluster, query, contexts_of(some[0])):
            found.setdefault(explanation.service.key, []).append((names, explanation))
    return tuple(_service(answers) for answers in found.values())


def _named_nodes(cluster: Cluster, query: ServiceFilter) -> frozenset[str]:
    """Return the nodes that EndpointSlices of the Services name: those with endpoints, and those in hints."""
    return frozenset(
        name
        for service in cluster.services()
        if service.name == query.name and query.namespace in ("", service.namespace)
        for slice_ in cluster.all_slices_of(service.key)
        for endpoint in slice_.endpoints
        for name in (endpoint.node_name, *endpoint.node_hints)
    )


def _alike(nodes: Iterable[Node], named: Collection[str]) -> Iterable[Sequence[Node]]:
    """Group nodes that must get the same answer: those in one zone that no EndpointSlice names."""
    groups: dict[tuple[str, str], list[Node]] = {}
    for node in nodes:
        groups.setdefault((node.zone, node.name if node.name in named else ""), []).append(node)
    return groups.values()


def _service(answers: Sequence[tuple[tuple[str, ...], Explanation]]) -> ServiceOnNodes:
    _, first = answers[0]
    ports: dict[tuple[PortName, Family], list[tuple[tuple[str, ...], PortExplanation]]] = {}
    for names, explanation in answers:
        for port in explanation.ports:
            ports.setdefault((port.name, port.family), []).append((names, port))
    return ServiceOnNodes(first, tuple(_port(some) for some in ports.values()))


def _port(answers: Sequence[tuple[tuple[str, ...], PortExplanation]]) -> PortOnNodes:
    groups: dict[Policy, dict[object, NodeGroup]] = {}
    for names, port in answers:
        for policy in port.policies:
            known = groups.setdefault(policy.policy, {})
            key = _key(port, policy)
            group = known.get(key) or NodeGroup((), port, policy)
            known[key] = msgspec.structs.replace(group, nodes=(*group.nodes, *names))
    _, first = answers[0]
    return PortOnNodes(first, {policy: _sorted(some.values()) for policy, some in groups.items()})


def _key(port: PortExplanation, policy: PolicyExplanation) -> object:
    reasons = tuple((one.resolved.target, one.reason) for one in policy.endpoints)
    return policy.verdict, reasons, policy.policy is Policy.CLUSTER and port.ignored_hints


def _sorted(groups: Iterable[NodeGroup]) -> tuple[NodeGroup, ...]:
    """Put nodes that serve first, and then large groups."""
    return tuple(sorted(groups, key=lambda group: (not group.serves, -len(group.nodes), group.nodes)))
