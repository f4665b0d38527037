"""Explain which endpoints a Service uses, and why.

The services package decides and gives the reasons; this module adds frontends, chains and shares.
"""

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches

import msgspec

from pykubeproxy.inspect.filter import ServiceFilter
from pykubeproxy.inspect.routes import PacketVerdict, Policy
from pykubeproxy.objects import EndpointSlice, Family, Service
from pykubeproxy.rules import names
from pykubeproxy.rules.context import RuleContext
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.endpoints import ResolvedEndpoint, Skipped, SkipReason, slice_skip_reason
from pykubeproxy.services.frontend import Frontend, frontends, policy_frontends
from pykubeproxy.services.ports import PortName, ServicePort, ServiceSkipReason, service_ports
from pykubeproxy.services.selection import (
    IgnoredHints,
    Reason,
    ResolvedPort,
    TopologyMode,
    ignored_hints,
)
from pykubeproxy.services.size import Oversized

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
    - `quarantined`: why an agent quarantined it; "" if it did not, or no agent was asked
    """

    family: Family
    context: RuleContext
    port: ServicePort
    policies: tuple[PolicyExplanation, ...]
    topology: TopologyMode | None
    ignored_hints: tuple[IgnoredHints, ...]
    skipped: tuple[Skipped, ...]
    slices: int
    quarantined: str = ""

    @property
    def name(self) -> PortName:
        return self.port.name


class Explanation(msgspec.Struct, frozen=True):
    """A Service with its ports by family, or the reason why a family has none."""

    service: Service
    ports: tuple[PortExplanation, ...]
    skipped: Mapping[Family, ServiceSkipReason]


class Difference(msgspec.Struct, frozen=True):
    """An endpoint that only one of two nodes uses under a policy, with the reasons on either."""

    name: PortName
    family: Family
    policy: Policy
    resolved: ResolvedEndpoint
    here: Reason
    there: Reason


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


def all_ports(explanations: Iterable[Explanation]) -> Iterator[PortExplanation]:
    """Yield the ports of all explanations."""
    return (port for explanation in explanations for port in explanation.ports)


def differences(here: Iterable[Explanation], there: Iterable[Explanation]) -> tuple[Difference, ...]:
    """Return the endpoints that are used on only one of two nodes; both have the same policies."""
    elsewhere = {(port.name, port.family): port for port in all_ports(there)}
    return tuple(
        Difference(port.name, port.family, ours.policy, one.resolved, one.reason, other.reason)
        for port in all_ports(here)
        if (match := elsewhere.get((port.name, port.family)))
        for ours, theirs in zip(port.policies, match.policies, strict=True)
        for one, other in zip(ours.endpoints, theirs.endpoints, strict=True)
        if one.reason.used != other.reason.used
    )


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
