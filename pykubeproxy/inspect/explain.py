"""Why a Service is served as it is: each endpoint with its reason, the ways that lead there, and what is passed over.

All reasons come from the services room; here they are put beside the frontends, the chains and the shares.
"""

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from pykubeproxy.inspect.dump import Verdict
from pykubeproxy.inspect.frontends import ANY_LOCAL, Frontend, FrontendKind
from pykubeproxy.inspect.routes import Policy
from pykubeproxy.inspect.wanted import Wanted
from pykubeproxy.objects import EndpointSlice, Family, Service
from pykubeproxy.rules import names
from pykubeproxy.rules.context import RuleContext
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.endpoints import ResolvedEndpoint, Skipped, SkipReason, unnoticed
from pykubeproxy.services.ports import PortName, ServicePort, ServiceSkipReason, service_ports
from pykubeproxy.services.resolve import ResolvedPort, resolve_ports
from pykubeproxy.services.selection import IgnoredHints, Reason, Topology, ignored_hints


class EndpointWhy(msgspec.Struct, frozen=True, gc=False):
    """An endpoint under one policy: why it is used or not, and its share of new connections, 0 if it is not."""

    backend: ResolvedEndpoint
    reason: Reason
    share: float


class PolicyWhy(msgspec.Struct, frozen=True):
    """What one traffic policy comes to.

    - `chain`: the chain of table nat that balances; "" if there is none, for want of endpoints
    - `frontends`: what leads here; `from_this_node`: what leads here only for packets of this node and its pods
    """

    policy: Policy
    verdict: Verdict
    chain: str
    frontends: tuple[Frontend, ...]
    from_this_node: tuple[Frontend, ...]
    endpoints: tuple[EndpointWhy, ...]


class PortWhy(msgspec.Struct, frozen=True):
    """One service port in one family, as it is served on the terms of one place.

    `topology` is None where the policy Cluster, which alone goes by hints, is not used; `unheeded` says of hints why
    they are not gone by. `slices` is the number of EndpointSlices that were looked at. `set_aside`: an agent does not serve
    it, for iptables refuses its rules, with these words; "" if that is not so, or no agent was asked.
    """

    family: Family
    terms: RuleContext
    port: ServicePort
    policies: tuple[PolicyWhy, ...]
    topology: Topology | None
    unheeded: tuple[IgnoredHints, ...]
    passed: tuple[Skipped, ...]
    slices: int
    set_aside: str = ""

    @property
    def name(self) -> PortName:
        return self.port.name


class Explanation(msgspec.Struct, frozen=True):
    """A Service with its ports, by family and then as the Service has them, or why it has none in a family."""

    service: Service
    ports: tuple[PortWhy, ...]
    left_out: Mapping[Family, ServiceSkipReason]


class Difference(msgspec.Struct, frozen=True):
    """An endpoint that is used under a policy in one of two places only: why, here and there."""

    name: PortName
    family: Family
    policy: Policy
    backend: ResolvedEndpoint
    here: Reason
    there: Reason


def explain_all(
    cluster: Cluster, wanted: Wanted, terms: Mapping[Family, RuleContext]
) -> tuple[Explanation, ...]:
    """Explain the Services and ports that are asked for, by namespace.

    Raises LookupError with a line that says what there is instead, if there is no such Service or port.
    """
    anywhere = msgspec.structs.replace(wanted, port="")
    services = [
        service
        for service in sorted(cluster.services(), key=lambda service: service.key)
        if wanted.namespace in ("", service.namespace) and service.name == wanted.name
    ]
    if not services:
        where = "" if wanted.namespace else " in any namespace"
        raise LookupError(f"there is no Service {anywhere}{where}")
    explained = [explain(cluster, service, terms) for service in services]
    if not wanted.port:
        return tuple(explained)
    found = tuple(it for each in explained if (it := _only(each, wanted)).ports or not each.ports)
    if not found:
        raise LookupError(_no_port(services, wanted))
    return found


def explain(cluster: Cluster, service: Service, terms: Mapping[Family, RuleContext]) -> Explanation:
    """Explain a Service of a cluster in each of the families that there are terms for."""
    ports: list[PortWhy] = []
    left_out: dict[Family, ServiceSkipReason] = {}
    for family, on in terms.items():
        kept = service_ports(service, family, on.allow_external_ips)
        if isinstance(kept, ServiceSkipReason):
            left_out[family] = kept
    for family, on in terms.items():
        if family not in left_out:
            slices = cluster.slices_of(service.key, family)
            unseen = tuple(_unseen(cluster.all_slices_of(service.key), family, left_out))
            ports += (
                _port(family, on, served, unseen, len(slices))
                for served in resolve_ports(cluster, service.key, family, on.place, on.allow_external_ips)
            )
    return Explanation(service, tuple(ports), left_out)


def differences(here: Iterable[PortWhy], there: Iterable[PortWhy]) -> tuple[Difference, ...]:
    """The endpoints that are used here and not there, or there and not here; a policy is the same in all places."""
    elsewhere = {(port.name, port.family): port for port in there}
    return tuple(
        Difference(port.name, port.family, ours.policy, one.backend, one.reason, other.reason)
        for port in here
        if (match := elsewhere.get((port.name, port.family)))
        for ours, theirs in zip(port.policies, match.policies, strict=True)
        for one, other in zip(ours.endpoints, theirs.endpoints, strict=True)
        if one.reason.used != other.reason.used
    )


def _only(explanation: Explanation, wanted: Wanted) -> Explanation:
    """An explanation of those ports alone that are asked for."""
    ports = tuple(
        port
        for port in explanation.ports
        if wanted.matches(port.name, {frontend.port for frontend in frontends(port.port)})
    )
    return msgspec.structs.replace(explanation, ports=ports)


def _no_port(services: Iterable[Service], wanted: Wanted) -> str:
    ports = dict.fromkeys(
        f"{port.port} ({port.name})" if port.name else str(port.port)
        for service in services
        for port in service.ports
    )
    name = msgspec.structs.replace(wanted, port="")
    return f'Service {name} has no port "{wanted.port}"; it has {", ".join(ports) or "none"}'


def frontends(port: ServicePort) -> tuple[Frontend, ...]:
    """All that leads to a service port; the first is the cluster IP, the only internal one."""
    external = (
        *((FrontendKind.EXTERNAL_IP, address, port.port) for address in port.external_ips),
        *((FrontendKind.LOAD_BALANCER_IP, address, port.port) for address in port.load_balancer_ips),
        *([(FrontendKind.NODE_PORT, ANY_LOCAL, port.node_port)] if port.node_port else []),
    )
    return tuple(
        Frontend(*each) for each in ((FrontendKind.CLUSTER_IP, port.cluster_ip, port.port), *external)
    )


def _unseen(
    slices: Iterable[EndpointSlice], family: Family, left_out: Mapping[Family, ServiceSkipReason]
) -> Iterator[Skipped]:
    """Slices that a proxy takes no notice of; those of the other family only where it has no rules."""
    for slice_ in slices:
        reason = unnoticed(slice_, family)
        if reason and (reason is not SkipReason.OTHER_FAMILY or slice_.family in left_out):
            yield Skipped(slice_.name, "", reason)


def _port(
    family: Family, terms: RuleContext, served: ResolvedPort, unseen: tuple[Skipped, ...], slices: int
) -> PortWhy:
    port, selection = served.port, served.selection
    hints_matter = port.uses_cluster_endpoints
    backends = tuple(verdict.backend for verdict in selection.verdicts)
    return PortWhy(
        family=family,
        terms=terms,
        port=port,
        policies=tuple(_policies(served)),
        topology=selection.topology if hints_matter else None,
        unheeded=ignored_hints(backends, terms.place) if hints_matter else (),
        passed=(*served.passed, *unseen),
        slices=slices,
    )


def _policies(served: ResolvedPort) -> Iterator[PolicyWhy]:
    """The policies that some traffic of a service port goes by."""
    port, selection = served.port, served.selection
    internal, *external = frontends(port)
    to_local = (
        *([internal] if port.internal_local else []),
        *(external if port.external_local else []),
    )
    to_cluster = tuple(it for it in (internal, *external) if it not in to_local)
    if port.uses_cluster_endpoints:
        reasons = [(v.backend, v.cluster) for v in selection.verdicts if v.cluster]
        shortcut = tuple(external) if port.external_local else ()
        chain = names.cluster_chain(port.name)
        yield _policy(Policy.CLUSTER, chain, to_cluster, shortcut, reasons, selection.any_usable)
    if port.uses_local_endpoints:
        reasons = [(v.backend, v.local) for v in selection.verdicts if v.local]
        chain = names.local_chain(port.name)
        yield _policy(Policy.LOCAL, chain, to_local, (), reasons, selection.any_usable)


def _policy(
    policy: Policy,
    chain: str,
    to: tuple[Frontend, ...],
    from_this_node: tuple[Frontend, ...],
    reasons: list[tuple[ResolvedEndpoint, Reason]],
    any_usable: bool,
) -> PolicyWhy:
    used = sum(reason.used for _, reason in reasons)
    refusal = Verdict.DROP if any_usable else Verdict.REJECT
    return PolicyWhy(
        policy=policy,
        verdict=Verdict.DNAT if used else refusal,
        chain=chain if used else "",
        frontends=to,
        from_this_node=from_this_node,
        endpoints=tuple(
            EndpointWhy(backend, reason, 1 / used if reason.used else 0.0) for backend, reason in reasons
        ),
    )
