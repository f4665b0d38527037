"""Explain which endpoints a Service uses on each node, and why.

The services package decides and gives the reasons; this module adds frontends, chains and shares. Nodes with the same
answer form a group. Rules of a node agree with that, or they do not.
"""

import enum
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from pykubeproxy.inspect.explain import sentences
from pykubeproxy.inspect.node import NodeRules
from pykubeproxy.inspect.routes import PacketVerdict, Policy
from pykubeproxy.inspect.targets import ServiceFilter
from pykubeproxy.objects import EndpointSlice, Family, Key, Node, Service, address_and_port
from pykubeproxy.rules import names
from pykubeproxy.rules.context import RuleContext
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
from pykubeproxy.wording import listed, suggestion

_SUGGESTIONS = 3


class ExplainedNode(msgspec.Struct, frozen=True, rename="camel"):
    """A node for which the Service is explained.

    - `zone`: its topology zone; null if unknown
    """

    name: str
    zone: str | None = None

    @property
    def title(self) -> str:
        """Return text such as "node1 in zone-a"."""
        name = self.name or "a node without a name"
        return f"{name} in {self.zone}" if self.zone else f"{name}, zone unknown"


class ExplainedEndpoint(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """An endpoint of a service port under a policy.

    - `node`, `zone`, `pod`: where it runs, "" if unknown
    - `share`: its part of new connections, 0 to 1
    - `used`: new connections may reach it
    - `reason`: why it is used or not, such as "not-ready"
    - `message`: the reason as a phrase
    """

    address: str
    port: int
    node: str
    zone: str
    pod: str
    share: float
    used: bool
    reason: str
    message: str

    @property
    def target(self) -> str:
        """Return "ip:port", or "[ip]:port" for IPv6."""
        return address_and_port(self.address, self.port)


class ExplainedHints(msgspec.Struct, frozen=True, rename="camel"):
    """Topology hints that are ignored.

    - `kind`: "node" or "zone"
    - `value`: the name or zone of the node
    - `endpoints_without`: "ip:port" of ready endpoints without such a hint
    """

    kind: str
    value: str
    endpoints_without: tuple[str, ...]
    message: str


class ExplainedGroup(msgspec.Struct, frozen=True, rename="camel"):
    """The nodes that use the same endpoints of a service port under a policy.

    - `verdict`: "dnat", or "reject" or "drop" without endpoints
    - `message`: why there are no endpoints; null if there are
    - `topology`: "all", "same node" or "same zone"; null if hints do not apply
    """

    nodes: tuple[ExplainedNode, ...]
    verdict: PacketVerdict
    message: str | None
    topology: TopologyMode | None
    ignored_hints: tuple[ExplainedHints, ...]
    endpoints: tuple[ExplainedEndpoint, ...]

    @property
    def serves(self) -> bool:
        """Whether these nodes send packets to endpoints."""
        return self.verdict is PacketVerdict.DNAT


class ExplainedPolicy(msgspec.Struct, frozen=True, rename="camel"):
    """A service port under one traffic policy.

    - `policy`: "Cluster" or "Local"
    - `chain`: the balancing chain of table nat; null without endpoints
    - `frontends`: the addresses under this policy
    - `from_this_node`: frontends that lead here only for packets of the same node and its pods
    - `groups`: one for all nodes that use the same endpoints
    """

    policy: Policy
    chain: str | None
    frontends: tuple[Frontend, ...]
    from_this_node: tuple[Frontend, ...]
    groups: tuple[ExplainedGroup, ...]


class PortExplanation(msgspec.Struct, frozen=True):
    """One service port in one family. All but the groups of its policies is that of the first node."""

    family: Family
    context: RuleContext
    port: ServicePort
    policies: tuple[ExplainedPolicy, ...]
    skipped: tuple[Skipped, ...]

    @property
    def name(self) -> PortName:
        return self.port.name


class Explanation(msgspec.Struct, frozen=True):
    """A Service on one or several nodes: its ports by family, or the reason why a family has none."""

    service: Service
    ports: tuple[PortExplanation, ...]
    skipped: Mapping[Family, ServiceSkipReason]


def _similar(cluster: Cluster, name: str) -> str:
    """Return advice to a name of which there is no Service."""
    known = sorted(str(service.key) for service in cluster.services())
    return suggestion(name, known) or "check its name and namespace"


def explain_all(
    cluster: Cluster,
    filter_: ServiceFilter,
    contexts: Mapping[Family, RuleContext],
    nodes: tuple[ExplainedNode, ...] = (),
) -> tuple[Explanation, ...]:
    """Explain the matching Services and ports for nodes with the same answer, by namespace.

    Raises LookupError with one line if none matches.
    """
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
    explained = [explain(cluster, service, contexts, nodes) for service in services]
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


def explain(
    cluster: Cluster,
    service: Service,
    contexts: Mapping[Family, RuleContext],
    nodes: tuple[ExplainedNode, ...] = (),
) -> Explanation:
    """Explain a Service for nodes with the same answer, in each family that has a context."""
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
            has_slices = bool(cluster.slices_of(service.key, family))
            ignored = tuple(_ignored_slices(cluster.all_slices_of(service.key), family, skipped))
            for port in resolved[family]:
                policies = tuple(_policies(port, context, nodes, has_slices=has_slices))
                ports.append(PortExplanation(family, context, port.port, policies, (*port.skipped, *ignored)))
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


def _policies(
    resolved: ResolvedPort, context: RuleContext, nodes: tuple[ExplainedNode, ...], *, has_slices: bool
) -> Iterator[ExplainedPolicy]:
    port, selection = resolved.port, resolved.selection
    rejected = PacketVerdict.DROP if selection.any_usable else PacketVerdict.REJECT
    applies = {Policy.CLUSTER: port.uses_cluster_endpoints, Policy.LOCAL: port.uses_local_endpoints}
    for policy in (policy for policy in Policy if applies[policy]):
        local = policy is Policy.LOCAL
        reasons = [
            (one.endpoint, reason)
            for one in selection.verdicts
            if (reason := one.local if local else one.cluster)
        ]
        used = sum(reason.used for _, reason in reasons)
        verdict = PacketVerdict.DNAT if used else rejected
        endpoints = tuple(verdict.endpoint for verdict in selection.verdicts)
        group = ExplainedGroup(
            nodes=nodes,
            verdict=verdict,
            message=None if used else sentences.rejection(verdict, bool(reasons), has_slices=has_slices),
            topology=None if local else selection.topology,
            ignored_hints=() if local else tuple(map(_hints, ignored_hints(endpoints, context.node))),
            endpoints=tuple(_endpoint(one, reason, used) for one, reason in reasons),
        )
        chain = names.local_chain(port.name) if local else names.cluster_chain(port.name)
        yield ExplainedPolicy(
            policy=policy,
            chain=chain if used else None,
            frontends=policy_frontends(port, local),
            from_this_node=frontends(port)[1:] if port.external_local and not local else (),
            groups=(group,),
        )


def _hints(ignored: IgnoredHints) -> ExplainedHints:
    kind = "node" if ignored.mode is TopologyMode.SAME_NODE else "zone"
    return ExplainedHints(kind, ignored.domain, ignored.unhinted, sentences.ignored_hints_message(ignored))


def _endpoint(resolved: ResolvedEndpoint, reason: Reason, used: int) -> ExplainedEndpoint:
    endpoint = resolved.endpoint
    return ExplainedEndpoint(
        address=endpoint.address,
        port=resolved.port,
        node=endpoint.node_name,
        zone=endpoint.zone,
        pod=endpoint.pod,
        share=round(1 / used, 9) if reason.used else 0.0,
        used=reason.used,
        reason=word(reason),
        message=sentences.endpoint_reason(reason, endpoint),
    )


def word(reason: enum.Enum) -> str:
    """Return a stable word for programs."""
    return reason.name.lower().replace("_", "-")


# Only the comparison with rules needs the modules that read them.
if TYPE_CHECKING:
    from pykubeproxy.inspect.dump.model import ServiceView

# How many endpoints a sentence names.
_TARGETS = 3
# The contexts of a node, by family.
ContextsOf = Callable[[Node], Mapping[Family, RuleContext]]


class RulesAgreement(msgspec.Struct, frozen=True, rename="camel"):
    """Whether the rules of a node agree with what is explained.

    - `agree`: the rules are as explained; null if they are unknown
    - `differences`: what the rules have that is not explained, or lack; a sentence each
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
) -> tuple[Explanation, ...]:
    """Explain the matching Services on these nodes, which are at least one. Raises LookupError if none matches.

    Contexts are of both families, as the one matters to the other; the answer is about `families`.
    """
    named = _named_nodes(cluster, query)
    found: dict[Key, list[Explanation]] = {}
    for some in _alike(nodes, named):
        for explanation in explain_all(cluster, query, contexts_of(some[0]), explained_nodes(some)):
            found.setdefault(explanation.service.key, []).append(explanation)
    return tuple(_on_all_nodes(answers, families) for answers in found.values())


def explained_nodes(nodes: Iterable[Node]) -> tuple[ExplainedNode, ...]:
    """Return nodes as the report names them."""
    return tuple(ExplainedNode(node.name, node.zone or None) for node in nodes)


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


def _on_all_nodes(answers: Sequence[Explanation], families: Collection[Family]) -> Explanation:
    first = answers[0]
    ports: dict[tuple[PortName, Family], list[PortExplanation]] = {}
    for port in (port for answer in answers for port in answer.ports if port.family in families):
        ports.setdefault((port.name, port.family), []).append(port)
    skipped = {family: reason for family, reason in first.skipped.items() if family in families}
    return Explanation(first.service, tuple(map(_port_on_all_nodes, ports.values())), skipped)


def _port_on_all_nodes(answers: Sequence[PortExplanation]) -> PortExplanation:
    policies: dict[Policy, list[ExplainedPolicy]] = {}
    for policy in (policy for port in answers for policy in port.policies):
        policies.setdefault(policy.policy, []).append(policy)
    return msgspec.structs.replace(answers[0], policies=tuple(map(_policy_on_all_nodes, policies.values())))


def _policy_on_all_nodes(answers: Sequence[ExplainedPolicy]) -> ExplainedPolicy:
    """Join nodes that use the same endpoints; put those that serve first, and then large groups."""
    nodes: dict[ExplainedGroup, list[ExplainedNode]] = {}
    for group in (group for policy in answers for group in policy.groups):
        nodes.setdefault(msgspec.structs.replace(group, nodes=()), []).extend(group.nodes)
    groups = [msgspec.structs.replace(group, nodes=tuple(some)) for group, some in nodes.items()]
    groups.sort(key=lambda group: (not group.serves, -len(group.nodes)))
    chain = next((policy.chain for policy in answers if policy.chain), None)
    return msgspec.structs.replace(answers[0], chain=chain, groups=tuple(groups))


def agreement(
    node: str, services: Iterable[Explanation], rules: Mapping[Family, NodeRules]
) -> RulesAgreement:
    """Compare each service port. `services` are explained for this node alone; families without rules are left out."""
    found = tuple(sentence for service in services for sentence in _of_service(service, rules))
    return RulesAgreement(node, not found, found)


def _of_service(explanation: Explanation, rules: Mapping[Family, NodeRules]) -> Iterator[str]:
    from pykubeproxy.inspect.dump.model import node_views

    query = ServiceFilter(explanation.service.namespace, explanation.service.name)
    found = {
        (view.name, view.family, view.policy): view
        for family_rules in rules.values()
        for view in node_views(family_rules, query)
    }
    names = {(name, family) for name, family, _ in found}
    for port in (port for port in explanation.ports if port.family in rules):
        title = f"{port.name} {port.name.protocol} {port.family.value}"
        if (port.name, port.family) not in names:
            yield f"{title}: the rules do not have it."
            continue
        for policy in port.policies:
            view = found.get((port.name, port.family, policy.policy))
            if difference := _difference(port, policy, view):
                yield f"{title}, policy {policy.policy.value}: {difference}."


def _difference(port: PortExplanation, policy: ExplainedPolicy, view: "ServiceView | None") -> str:
    expected = {endpoint.target for group in policy.groups for endpoint in group.endpoints if endpoint.used}
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


def _is_in_rules(port: PortExplanation, policy: ExplainedPolicy) -> bool:
    """Return whether rules show the endpoints of a policy: that of cluster IPs, or that of other frontends."""
    return bool(policy.frontends or (policy.policy is Policy.CLUSTER and port.port.external_local))


def _named(what: str, targets: Iterable[str]) -> str:
    some = sorted(targets)
    return f"{what} {listed(some, _TARGETS)}" if some else ""
