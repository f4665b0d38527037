"""Select the endpoints this node uses, by readiness, termination, topology hints and traffic policy."""

import enum
from collections.abc import Sequence

import msgspec

from pykubeproxy.objects import Endpoint
from pykubeproxy.services.endpoints import ResolvedEndpoint
from pykubeproxy.services.ports import ServicePort


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

    @property
    def used(self) -> bool:
        return self in (Reason.READY, Reason.LAST_RESORT)


class TopologyMode(enum.Enum):
    """The topology hints that policy Cluster follows among ready endpoints."""

    ALL = "all"
    SAME_NODE = "same node"
    SAME_ZONE = "same zone"


class IgnoredHints(msgspec.Struct, frozen=True):
    """Why the hints of one topology mode are ignored.

    `unhinted` are the targets of ready endpoints without such a hint. If all have one, none is for `domain`: the name
    or zone of this node, "" if its zone is unknown.
    """

    mode: TopologyMode
    domain: str
    unhinted: tuple[str, ...]


class Verdict(msgspec.Struct, frozen=True, gc=False):
    """Whether and why one endpoint is used under each traffic policy; None if the port never uses that policy."""

    endpoint: ResolvedEndpoint
    cluster: Reason | None
    local: Reason | None


class Selection(msgspec.Struct, frozen=True):
    """The endpoints this node uses for a service port.

    `cluster` and `local` are the endpoints in use under each traffic policy, `reachable` those under either.
    `any_usable` tells whether any node has a usable endpoint: if not, clients are rejected. If only other nodes do,
    packets under policy Local are dropped, because a load balancer may retry them at another node.
    """

    cluster: tuple[ResolvedEndpoint, ...]
    local: tuple[ResolvedEndpoint, ...]
    reachable: tuple[ResolvedEndpoint, ...]
    any_usable: bool
    topology: TopologyMode
    verdicts: tuple[Verdict, ...]


def select(port: ServicePort, endpoints: tuple[ResolvedEndpoint, ...], node: NodeTopology) -> Selection:
    """Select among all endpoints of a service port."""
    mode = topology_mode(endpoints, node)
    unused = [None] * len(endpoints)
    cluster = _cluster_reasons(endpoints, node, mode) if port.uses_cluster_endpoints else unused
    local = _local_reasons(endpoints) if port.uses_local_endpoints else unused
    verdicts = tuple(map(Verdict, endpoints, cluster, local))
    return Selection(
        cluster=tuple(it.endpoint for it in verdicts if it.cluster and it.cluster.used),
        local=tuple(it.endpoint for it in verdicts if it.local and it.local.used),
        reachable=tuple(
            it.endpoint for it in verdicts if any(reason and reason.used for reason in (it.cluster, it.local))
        ),
        any_usable=any(
            it.endpoint.ready or (it.endpoint.serving and it.endpoint.terminating) for it in endpoints
        ),
        topology=mode,
        verdicts=verdicts,
    )


def topology_mode(endpoints: tuple[ResolvedEndpoint, ...], node: NodeTopology) -> TopologyMode:
    """Return the hints to follow: node hints first (KEP-3015), then zone hints (KEP-2433).

    Hints are followed if every ready endpoint has one and at least one is for this node or zone.
    """
    ready = [it for it in endpoints if it.endpoint.ready]
    return next((mode for mode in _MODES_WITH_HINTS if _follows_hints(mode, ready, node)), TopologyMode.ALL)


def ignored_hints(endpoints: tuple[ResolvedEndpoint, ...], node: NodeTopology) -> tuple[IgnoredHints, ...]:
    """Return the hints of ready endpoints that `topology_mode` ignores, and why."""
    ready = [it for it in endpoints if it.endpoint.ready]
    ignored = []
    for mode in _MODES_WITH_HINTS:
        if _follows_hints(mode, ready, node):
            break
        unhinted = tuple(it.target for it in ready if not _hints(mode, it.endpoint))
        if len(unhinted) < len(ready):
            ignored.append(IgnoredHints(mode, _domain(mode, node), unhinted))
    return tuple(ignored)


# In order of precedence.
_MODES_WITH_HINTS = (TopologyMode.SAME_NODE, TopologyMode.SAME_ZONE)


def _follows_hints(mode: TopologyMode, ready: Sequence[ResolvedEndpoint], node: NodeTopology) -> bool:
    hints = [_hints(mode, it.endpoint) for it in ready]
    domain = _domain(mode, node)
    return all(hints) and any(domain in each for each in hints)  # false if no endpoint is ready


def _hints(mode: TopologyMode, endpoint: Endpoint) -> tuple[str, ...]:
    return endpoint.node_hints if mode is TopologyMode.SAME_NODE else endpoint.zone_hints


def _domain(mode: TopologyMode, node: NodeTopology) -> str:
    return node.node_name if mode is TopologyMode.SAME_NODE else node.zone


def _cluster_reasons(
    endpoints: tuple[ResolvedEndpoint, ...], node: NodeTopology, mode: TopologyMode
) -> list[Reason]:
    none_ready = not any(it.endpoint.ready for it in endpoints)
    return [
        _unready_reason(it.endpoint, none_ready) or _hint_reason(it.endpoint, node, mode) for it in endpoints
    ]


def _hint_reason(endpoint: Endpoint, node: NodeTopology, mode: TopologyMode) -> Reason:
    if mode is TopologyMode.ALL or _domain(mode, node) in _hints(mode, endpoint):
        return Reason.READY
    return Reason.OTHER_NODE_HINTED if mode is TopologyMode.SAME_NODE else Reason.OTHER_ZONE_HINTED


def _local_reasons(endpoints: tuple[ResolvedEndpoint, ...]) -> list[Reason]:
    """Return a reason for each endpoint; only local endpoints decide on the last resort (KEP-1669)."""
    none_ready = not any(it.local and it.endpoint.ready for it in endpoints)
    return [
        _unready_reason(it.endpoint, none_ready) or Reason.READY if it.local else Reason.NOT_LOCAL
        for it in endpoints
    ]


def _unready_reason(endpoint: Endpoint, none_ready: bool) -> Reason | None:
    """Return the reason given by readiness alone, or None for a ready endpoint."""
    if endpoint.ready:
        return None
    if not endpoint.terminating:
        return Reason.NOT_READY
    if not endpoint.serving:
        return Reason.STOPPED
    return Reason.LAST_RESORT if none_ready else Reason.TERMINATING
