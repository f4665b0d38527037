"""Resolve service ports to the endpoints this node uses, by readiness, termination, hints and traffic policy."""

import enum
from collections.abc import Container, Iterable, Sequence

import msgspec

from pykubeproxy.objects import Endpoint, Family, Key
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.endpoints import ResolvedEndpoint, Skipped, resolve_endpoints, slice_ports
from pykubeproxy.services.ports import (
    PortName,
    ReservedAddresses,
    ServicePort,
    ServiceSkipReason,
    service_ports,
)


class NodeTopology(msgspec.Struct, frozen=True):
    """The name of this node and its zone (label topology.kubernetes.io/zone), "" if unknown."""

    node_name: str
    zone: str = ""


class Reason(enum.Enum):
    """Why an endpoint is used or not."""

    READY = "ready"
    LAST_RESORT = "terminating, but still serving, and no other is ready"
    NOT_READY = "not ready"
    TERMINATING = "terminating while others are ready"
    STOPPED = "terminating and no longer serving"
    OTHER_NODE_HINTED = "hinted for other nodes, and this node has endpoints of its own"
    OTHER_ZONE_HINTED = "hinted for other zones, and this zone has endpoints of its own"
    NOT_LOCAL = "on another node, and the traffic policy is Local"

    def __init__(self, _: str) -> None:
        # Not a property: with many endpoints, calling it would take half of the time.
        self.used = self.name in ("READY", "LAST_RESORT")


class TopologyMode(enum.Enum):
    """The topology hints that policy Cluster follows among ready endpoints."""

    ALL = "all"
    SAME_NODE = "same node"
    SAME_ZONE = "same zone"


class IgnoredHints(msgspec.Struct, frozen=True):
    """Why the hints of one topology mode are ignored.

    `unhinted` are the targets of ready endpoints without such a hint. If it is empty, no hint is for `domain`: the name
    or zone of this node, "" if its zone is unknown.
    """

    mode: TopologyMode
    domain: str
    unhinted: tuple[str, ...]


class EndpointVerdict(msgspec.Struct, frozen=True, gc=False):
    """The reason why one endpoint is used or not under each traffic policy; None if the port never uses that policy."""

    endpoint: ResolvedEndpoint
    cluster: Reason | None
    local: Reason | None


class Selection(msgspec.Struct, frozen=True, gc=False):
    """The endpoints this node uses for a service port.

    `cluster` and `local` are the endpoints in use under each traffic policy, `reachable` those under either.
    `any_usable` tells whether any node has a usable endpoint; if not, rules reject clients. If only other nodes have one,
    rules drop packets under policy Local, because a load balancer may retry on another node.
    """

    cluster: tuple[ResolvedEndpoint, ...]
    local: tuple[ResolvedEndpoint, ...]
    reachable: tuple[ResolvedEndpoint, ...]
    any_usable: bool
    topology: TopologyMode
    verdicts: tuple[EndpointVerdict, ...]


def select(port: ServicePort, endpoints: tuple[ResolvedEndpoint, ...], node: NodeTopology) -> Selection:
    """Select among all endpoints of a service port."""
    mode = topology_mode(endpoints, node)
    unused = [None] * len(endpoints)
    cluster = _cluster_reasons(endpoints, node, mode) if port.uses_cluster_endpoints else unused
    local = _local_reasons(endpoints) if port.uses_local_endpoints else unused
    either = (one if one and one.used else other for one, other in zip(cluster, local, strict=True))
    used_by_cluster = _used(endpoints, cluster)
    return Selection(
        cluster=used_by_cluster,
        local=_used(endpoints, local) if port.uses_local_endpoints else (),
        reachable=_used(endpoints, either) if port.uses_local_endpoints else used_by_cluster,
        any_usable=any(
            resolved.endpoint.ready or (resolved.endpoint.serving and resolved.endpoint.terminating)
            for resolved in endpoints
        ),
        topology=mode,
        verdicts=tuple(map(EndpointVerdict, endpoints, cluster, local)),
    )


def _used(
    endpoints: tuple[ResolvedEndpoint, ...], reasons: Iterable[Reason | None]
) -> tuple[ResolvedEndpoint, ...]:
    return tuple(
        [
            resolved
            for resolved, reason in zip(endpoints, reasons, strict=True)
            if reason is not None and reason.used
        ]
    )


def topology_mode(endpoints: tuple[ResolvedEndpoint, ...], node: NodeTopology) -> TopologyMode:
    """Return the hints to follow: node hints first (KEP-3015), then zone hints (KEP-2433).

    Hints are followed if every ready endpoint has one and at least one is for this node or zone.
    """
    ready = [resolved for resolved in endpoints if resolved.endpoint.ready]
    return next((mode for mode in _MODES_WITH_HINTS if _follows_hints(mode, ready, node)), TopologyMode.ALL)


def ignored_hints(endpoints: tuple[ResolvedEndpoint, ...], node: NodeTopology) -> tuple[IgnoredHints, ...]:
    """Return the hints of ready endpoints that `topology_mode` ignores, and why."""
    ready = [resolved for resolved in endpoints if resolved.endpoint.ready]
    ignored = []
    for mode in _MODES_WITH_HINTS:
        if _follows_hints(mode, ready, node):
            break
        unhinted = tuple(resolved.target for resolved in ready if not _hints(mode, resolved.endpoint))
        if len(unhinted) < len(ready):
            ignored.append(IgnoredHints(mode, _domain(mode, node), unhinted))
    return tuple(ignored)


# In order of precedence.
_MODES_WITH_HINTS = (TopologyMode.SAME_NODE, TopologyMode.SAME_ZONE)


def _follows_hints(mode: TopologyMode, ready: Sequence[ResolvedEndpoint], node: NodeTopology) -> bool:
    domain = _domain(mode, node)
    return all(_hints(mode, resolved.endpoint) for resolved in ready) and any(
        domain in _hints(mode, resolved.endpoint) for resolved in ready
    )  # false if no endpoint is ready


def _hints(mode: TopologyMode, endpoint: Endpoint) -> tuple[str, ...]:
    return endpoint.node_hints if mode is TopologyMode.SAME_NODE else endpoint.zone_hints


def _domain(mode: TopologyMode, node: NodeTopology) -> str:
    return node.node_name if mode is TopologyMode.SAME_NODE else node.zone


def _cluster_reasons(
    endpoints: tuple[ResolvedEndpoint, ...], node: NodeTopology, mode: TopologyMode
) -> list[Reason]:
    if mode is TopologyMode.ALL and all(resolved.endpoint.ready for resolved in endpoints):
        return [Reason.READY] * len(endpoints)
    none_ready = not any(resolved.endpoint.ready for resolved in endpoints)
    return [
        _hint_reason(resolved.endpoint, node, mode)
        if resolved.endpoint.ready
        else _unready_reason(resolved.endpoint, none_ready)
        for resolved in endpoints
    ]


def _hint_reason(endpoint: Endpoint, node: NodeTopology, mode: TopologyMode) -> Reason:
    if mode is TopologyMode.ALL or _domain(mode, node) in _hints(mode, endpoint):
        return Reason.READY
    return Reason.OTHER_NODE_HINTED if mode is TopologyMode.SAME_NODE else Reason.OTHER_ZONE_HINTED


def _local_reasons(endpoints: tuple[ResolvedEndpoint, ...]) -> list[Reason]:
    """Return a reason for each endpoint; the last resort depends on local endpoints only (KEP-1669)."""
    none_ready = not any(resolved.local and resolved.endpoint.ready for resolved in endpoints)
    return [_local_reason(resolved, none_ready) for resolved in endpoints]


def _local_reason(resolved: ResolvedEndpoint, none_ready: bool) -> Reason:
    if not resolved.local:
        return Reason.NOT_LOCAL
    return Reason.READY if resolved.endpoint.ready else _unready_reason(resolved.endpoint, none_ready)


def _unready_reason(endpoint: Endpoint, none_ready: bool) -> Reason:
    if not endpoint.terminating:
        return Reason.NOT_READY
    if not endpoint.serving:
        return Reason.STOPPED
    return Reason.LAST_RESORT if none_ready else Reason.TERMINATING


class ResolvedPort(msgspec.Struct, frozen=True, gc=False):
    """A service port, its endpoints on this node, and the skipped entries of its EndpointSlices."""

    port: ServicePort
    selection: Selection
    skipped: tuple[Skipped, ...] = ()


def resolve_ports(
    cluster: Cluster,
    key: Key,
    family: Family,
    node: NodeTopology,
    allow_external_ips: bool = True,
    reserved: ReservedAddresses | None = None,
    unkept_lists: int = 0,
    only: Container[PortName] | None = None,
) -> tuple[ResolvedPort, ...]:
    """Return the resolved ports of one Service in one family; none if the Service is missing or skipped.

    `only`: return just these ports. See `service_ports` for the three arguments before.
    """
    service = cluster.service(key)
    if service is None:
        return ()
    if only is not None:
        chosen = tuple(
            port for port in service.ports if PortName(*key, port.name, port.protocol.value) in only
        )
        service = msgspec.structs.replace(service, ports=chosen)
    ports = service_ports(service, family, allow_external_ips, reserved, unkept_lists)
    if isinstance(ports, ServiceSkipReason):
        return ()
    slices = [slice_ports(slice_) for slice_ in cluster.slices_of(key, family)]
    resolved = []
    for port in ports:
        endpoints, skipped = resolve_endpoints(slices, port.name, node.node_name)
        resolved.append(ResolvedPort(port, select(port, endpoints, node), skipped))
    return tuple(resolved)
