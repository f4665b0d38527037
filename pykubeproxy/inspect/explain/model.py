"""Explain which endpoints a Service uses on each node, and why.

The services package decides and gives the reasons; this module adds frontends, chains and shares. Nodes with the same
answer form a group. Rules of a node agree with that, or they do not.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Self

import msgspec

from pykubeproxy.inspect.routes import PacketVerdict, Policy
from pykubeproxy.inspect.targets import ServiceFilter
from pykubeproxy.objects import EndpointSlice, Family, Key, Node, Service, address_and_port
from pykubeproxy.rules import names
from pykubeproxy.rules.context import RuleContext
from pykubeproxy.rules.ruleset import Ruleset
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.endpoints import ResolvedEndpoint, Skipped, SkipReason, slice_skip_reason
from pykubeproxy.services.ports import (
    Frontend,
    PortName,
    ServicePort,
    ServiceSkipReason,
    frontends,
    policy_frontends,
    service_ports,
)
from pykubeproxy.services.selection import (
    IgnoredHints,
    Reason,
    ResolvedPort,
    TopologyMode,
    ignored_hints,
)
from pykubeproxy.services.size import Oversized
from pykubeproxy.wording import listed

_SUGGESTIONS = 3


class EndpointExplanation(msgspec.Struct, frozen=True, gc=False):
    """An endpoint under one policy, why it is used or not, and its share of new connections."""

    resolved: ResolvedEndpoint
    reason: Reason
    share: float


class PolicyExplanation(msgspec.Struct, frozen=True):
    """A service port under one traffic policy.

    - `chain`: the balancing chain of table nat; "" without endpoints
    - `frontends`: the frontends under this policy
    - `from_this_node`: the frontends that lead here only for packets of this node and its pods
    """

    policy: Policy
    verdict: PacketVerdict
    chain: str
    frontends: tuple[Frontend, ...]
    from_this_node: tuple[Frontend, ...]
    endpoints: tuple[EndpointExplanation, ...]


class PortExplanation(msgspec.Struct, frozen=True):
    """One service port in one family.

    - `topology`: None if policy Cluster, the only one that uses hints, does not apply
    - `slices`: the number of EndpointSlices considered
    """

    family: Family
    context: RuleContext
    port: ServicePort
    policies: tuple[PolicyExplanation, ...]
    topology: TopologyMode | None
    ignored_hints: tuple[IgnoredHints, ...]
    skipped: tuple[Skipped, ...]
    slices: int

    @property
    def name(self) -> PortName:
        return self.port.name


class Explanation(msgspec.Struct, frozen=True):
    """A Service with its ports by family, or the reason why a family has none."""

    service: Service
    ports: tuple[PortExplanation, ...]
    skipped: Mapping[Family, ServiceSkipReason]

    def only(self, families: Collection[Family]) -> Self:
        """Return what is explained about these families."""
        return msgspec.structs.replace(
            self,
            ports=tuple(port for port in self.ports if port.family in families),
            skipped={family: reason for family, reason in self.skipped.items() if family in families},
        )


def _similar(cluster: Cluster, name: str) -> str:
    """Return advice to a name of which there is no Service: those with this name or a similar one elsewhere."""
    names = {service.name for service in cluster.services()}
    close = {name} & names or set(get_close_matches(name, names))
    keys = sorted(str(service.key) for service in cluster.services() if service.name in close)
    return f"did you mean {' or '.join(keys[:_SUGGESTIONS])}?" if keys else "check its name and namespace"


def explain_all(
    cluster: Cluster, filter_: ServiceFilter, contexts: Mapping[Family, RuleContext]
) -> tuple[Explanation, ...]:
    """Explain the matching Services and ports, by namespace. Raises LookupError with one line if none matches."""
    service_filter = msgspec.structs.replace(filter_, port="")
    matching = (
        service
        for service in cluster.services()
        if filter_.namespace in ("", service.namespace) and service.name == filter_.name
    )
    services = sorted(matching, key=lambda service: service.key)
    if not services:
        where = "" if filter_.namespace else " in any namespace"
        raise LookupError(f"there is no Service {service_filter}{where}; {_similar(cluster, filter_.name)}")
    explained = [explain(cluster, service, contexts) for service in services]
    if not filter_.port:
        return tuple(explained)
    found = tuple(one for each in explained if (one := _matching(each, filter_)).ports or not each.ports)
    if not found:
        ports = dict.fromkeys(
            f"{port.port} ({port.name})" if port.name else str(port.port)
            for service in services
            for port in service.ports
        )
        raise LookupError(
            f'Service {service_filter} has no port "{filter_.port}"; it has {", ".join(ports) or "none"}'
        )
    return found


def explain(cluster: Cluster, service: Service, contexts: Mapping[Family, RuleContext]) -> Explanation:
    """Explain a Service in each family that has a context."""
    ports: list[PortExplanation] = []
    found = {
        family: service_ports(service, family, on.allow_external_ips, on.reserved)
        for family, on in contexts.items()
    }
    skipped = {family: reason for family, reason in found.items() if isinstance(reason, ServiceSkipReason)}
    resolved: dict[Family, tuple[ResolvedPort, ...]] = {}
    for family in [family for family in contexts if family not in skipped]:
        result = contexts[family].resolve(cluster, service.key)
        if isinstance(result, Oversized):
            skipped[family] = ServiceSkipReason.OVERSIZED
        else:
            resolved[family] = result
    for family, context in contexts.items():
        if family in resolved:
            slices = cluster.slices_of(service.key, family)
            ignored = tuple(_ignored_slices(cluster.all_slices_of(service.key), family, skipped))
            ports += (_port(family, context, port, ignored, len(slices)) for port in resolved[family])
    return Explanation(service, tuple(ports), skipped)


def _matching(explanation: Explanation, filter_: ServiceFilter) -> Explanation:
    ports = tuple(
        port
        for port in explanation.ports
        if filter_.matches(port.name, {frontend.port for frontend in frontends(port.port)})
    )
    return msgspec.structs.replace(explanation, ports=ports)


def _ignored_slices(
    slices: Iterable[EndpointSlice], family: Family, skipped: Mapping[Family, ServiceSkipReason]
) -> Iterator[Skipped]:
    """Yield the slices that a proxy ignores; those of the other family only if the Service is skipped there."""
    for slice_ in slices:
        reason = slice_skip_reason(slice_, family)
        if reason and (reason is not SkipReason.OTHER_FAMILY or slice_.family in skipped):
            yield Skipped(slice_.name, "", reason)


def _port(
    family: Family, context: RuleContext, resolved: ResolvedPort, ignored: tuple[Skipped, ...], slices: int
) -> PortExplanation:
    port, selection = resolved.port, resolved.selection
    endpoints = tuple(verdict.endpoint for verdict in selection.verdicts)
    policies = ((Policy.CLUSTER, port.uses_cluster_endpoints), (Policy.LOCAL, port.uses_local_endpoints))
    return PortExplanation(
        family=family,
        context=context,
        port=port,
        policies=tuple(_policy(resolved, policy) for policy, applies in policies if applies),
        topology=selection.topology if port.uses_cluster_endpoints else None,
        ignored_hints=ignored_hints(endpoints, context.node) if port.uses_cluster_endpoints else (),
        skipped=(*resolved.skipped, *ignored),
        slices=slices,
    )


def _policy(resolved: ResolvedPort, policy: Policy) -> PolicyExplanation:
    port, selection = resolved.port, resolved.selection
    local = policy is Policy.LOCAL
    reasons = [
        (v.endpoint, reason) for v in selection.verdicts if (reason := v.local if local else v.cluster)
    ]
    used = sum(reason.used for _, reason in reasons)
    rejection = PacketVerdict.DROP if selection.any_usable else PacketVerdict.REJECT
    chain = names.local_chain(port.name) if local else names.cluster_chain(port.name)
    return PolicyExplanation(
        policy=policy,
        verdict=PacketVerdict.DNAT if used else rejection,
        chain=chain if used else "",
        frontends=policy_frontends(port, local),
        from_this_node=frontends(port)[1:] if port.external_local and not local else (),
        endpoints=tuple(
            EndpointExplanation(endpoint, reason, 1 / used if reason.used else 0.0)
            for endpoint, reason in reasons
        ),
    )


# Only the comparison with rules needs the modules that read them.
if TYPE_CHECKING:
    from pykubeproxy.inspect.dump.model import ServiceView

# How many endpoints a sentence names.
_TARGETS = 3
# The contexts of a node, by family.
ContextsOf = Callable[[Node], Mapping[Family, RuleContext]]


class NodeGroup(msgspec.Struct, frozen=True):
    """Nodes that use the same endpoints of a service port under a policy; `port` and `policy` are those of the first."""

    nodes: tuple[str, ...]
    zones: tuple[str, ...]
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


class RulesAgreement(msgspec.Struct, frozen=True, rename="camel"):
    """Whether the rules of a node agree with what is explained.

    - `agree`: null if the rules are unknown
    - `differences`: a sentence each
    - `unread`: why the rules are unknown; null if they are known
    """

    node: str
    agree: bool | None
    differences: Sequence[str] = ()
    unread: str | None = None


def explain_nodes(
    cluster: Cluster,
    query: ServiceFilter,
    nodes: Iterable[Node],
    contexts_of: ContextsOf,
    families: Collection[Family] = tuple(Family),
) -> tuple[ServiceOnNodes, ...]:
    """Explain the matching Services on these nodes, which are at least one. Raises LookupError if none matches.

    Contexts are of both families, as the one matters to the other; the answer is about `families`.
    """
    named = _named_nodes(cluster, query)
    found: dict[Key, list[tuple[Sequence[Node], Explanation]]] = {}
    for some in _alike(nodes, named):
        for explanation in explain_all(cluster, query, contexts_of(some[0])):
            kept = explanation.only(families)
            found.setdefault(explanation.service.key, []).append((some, kept))
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


def _service(answers: Sequence[tuple[Sequence[Node], Explanation]]) -> ServiceOnNodes:
    _, first = answers[0]
    ports: dict[tuple[PortName, Family], list[tuple[Sequence[Node], PortExplanation]]] = {}
    for nodes, explanation in answers:
        for port in explanation.ports:
            ports.setdefault((port.name, port.family), []).append((nodes, port))
    return ServiceOnNodes(first, tuple(_port_on_nodes(some) for some in ports.values()))


def _port_on_nodes(answers: Sequence[tuple[Sequence[Node], PortExplanation]]) -> PortOnNodes:
    groups: dict[Policy, dict[object, NodeGroup]] = {}
    for nodes, port in answers:
        names, zones = tuple(node.name for node in nodes), tuple(node.zone for node in nodes)
        for policy in port.policies:
            known = groups.setdefault(policy.policy, {})
            key = _key(port, policy)
            group = known.get(key) or NodeGroup((), (), port, policy)
            known[key] = msgspec.structs.replace(
                group, nodes=(*group.nodes, *names), zones=(*group.zones, *zones)
            )
    _, first = answers[0]
    return PortOnNodes(first, {policy: _sorted(some.values()) for policy, some in groups.items()})


def _key(port: PortExplanation, policy: PolicyExplanation) -> object:
    reasons = tuple((one.resolved.target, one.reason) for one in policy.endpoints)
    hints = (port.topology, port.ignored_hints) if policy.policy is Policy.CLUSTER else None
    return policy.verdict, reasons, hints


def _sorted(groups: Iterable[NodeGroup]) -> tuple[NodeGroup, ...]:
    """Put nodes that serve first, and then large groups."""
    return tuple(sorted(groups, key=lambda group: (not group.serves, -len(group.nodes))))


def agreement(
    node: str, services: Iterable[ServiceOnNodes], rulesets: Mapping[Family, Ruleset]
) -> RulesAgreement:
    """Compare each service port. `services` are explained for this node alone; families without rules are left out."""
    found = tuple(sentence for service in services for sentence in _of_service(service, rulesets))
    return RulesAgreement(node, not found, found)


def _of_service(service: ServiceOnNodes, rulesets: Mapping[Family, Ruleset]) -> Iterator[str]:
    from pykubeproxy.inspect.dump.model import views

    query = ServiceFilter(service.first.service.namespace, service.first.service.name)
    found = {
        (view.name, view.family, view.policy): view
        for ruleset in rulesets.values()
        for view in views(ruleset, {}, query)
    }
    names = {(name, family) for name, family, _ in found}
    for port in (
        port_on_nodes.first for port_on_nodes in service.ports if port_on_nodes.first.family in rulesets
    ):
        title = f"{port.name} {port.name.protocol} {port.family.value}"
        if (port.name, port.family) not in names:
            yield f"{title}: the rules do not have it."
            continue
        for policy in port.policies:
            view = found.get((port.name, port.family, policy.policy))
            if difference := _difference(port, policy, view):
                yield f"{title}, policy {policy.policy.value}: {difference}."


def _difference(port: PortExplanation, policy: PolicyExplanation, view: "ServiceView | None") -> str:
    expected = {endpoint.resolved.target for endpoint in policy.endpoints if endpoint.reason.used}
    actual = (
        {address_and_port(endpoint.address, endpoint.port) for endpoint in view.endpoints} if view else set()
    )
    if expected and not actual and view and view.verdict is not PacketVerdict.DNAT:
        return f"the rules {view.verdict.value} its packets"
    if not _is_in_rules(port, policy):
        return ""
    parts = (
        _named("the rules lack", expected - actual),
        _named("the rules have, but the objects do not,", actual - expected),
    )
    return "; ".join(filter(None, parts))


def _is_in_rules(port: PortExplanation, policy: PolicyExplanation) -> bool:
    """Return whether rules show the endpoints of a policy: that of cluster IPs, or that of other frontends."""
    return bool(policy.frontends or (policy.policy is Policy.CLUSTER and port.port.external_local))


def _named(what: str, targets: Iterable[str]) -> str:
    some = sorted(targets)
    return f"{what} {listed(some, _TARGETS)}" if some else ""
