"""Which backends serve from this node: readiness, termination, topology and traffic policy, with reasons."""

import enum
from collections.abc import Sequence

import msgspec

from pykubeproxy.objects import Endpoint
from pykubeproxy.services.endpoints import ResolvedEndpoint
from pykubeproxy.services.ports import ServicePort


class NodeTopology(msgspec.Struct, frozen=True):
    """Where this proxy runs: the node's name, and its zone by the label topology.kubernetes.io/zone, or ""."""

    node_name: str
    zone: str = ""


class Reason(enum.Enum):
    """Why a backend is used, or is not."""

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


class Topology(enum.Enum):
    """By which hints the Cluster policy picks among ready backends."""

    ALL = "all"
    SAME_NODE = "same node"
    SAME_ZONE = "same zone"


class IgnoredHints(msgspec.Struct, frozen=True):
    """Why the hints of one topology, here called `hints`, are not heeded.

    `lacking` are the targets of ready backends without such a hint; if there are none, then none is hinted for `here`:
    this node's name or its zone, "" for a node whose zone is not known.
    """

    hints: Topology
    here: str
    lacking: tuple[str, ...]


class Verdict(msgspec.Struct, frozen=True, gc=False):
    """What became of one backend under each traffic policy; None where the service port never uses that policy."""

    backend: ResolvedEndpoint
    cluster: Reason | None
    local: Reason | None


class Selection(msgspec.Struct, frozen=True):
    """Who serves a service port from this node.

    `cluster` and `local` are the backends under the traffic policies Cluster and Local. `reachable` are those of
    either. `any_usable` tells whether there is one anywhere in the cluster: without, clients are refused; with one
    elsewhere only, packets under policy Local are dropped, for a load balancer may still send them to another node.
    """

    cluster: tuple[ResolvedEndpoint, ...]
    local: tuple[ResolvedEndpoint, ...]
    reachable: tuple[ResolvedEndpoint, ...]
    any_usable: bool
    topology: Topology
    verdicts: tuple[Verdict, ...]


def select(port: ServicePort, backends: tuple[ResolvedEndpoint, ...], place: NodeTopology) -> Selection:
    """Choose among all backends of a service port."""
    topology = topology_of(backends, place)
    cluster = _cluster_reasons(backends, place, topology) if port.uses_cluster_endpoints else None
    local = _local_reasons(backends) if port.uses_local_endpoints else None
    verdicts = tuple(
        Verdict(backend, cluster[i] if cluster else None, local[i] if local else None)
        for i, backend in enumerate(backends)
    )
    return Selection(
        cluster=tuple(v.backend for v in verdicts if v.cluster and v.cluster.used),
        local=tuple(v.backend for v in verdicts if v.local and v.local.used),
        reachable=tuple(
            v.backend for v in verdicts if (v.cluster and v.cluster.used) or (v.local and v.local.used)
        ),
        any_usable=any(_ready(b) or _last_resort(b) for b in backends),
        topology=topology,
        verdicts=verdicts,
    )


def topology_of(backends: tuple[ResolvedEndpoint, ...], place: NodeTopology) -> Topology:
    """Hints count only if every ready backend has them and one is for here; others' hints do not matter (KEP-2433).

    Hints for nodes are looked at first (KEP-3015).
    """
    ready = [b for b in backends if _ready(b)]
    if ready:
        for topology in _BY_HINTS:
            if _heeded(topology, ready, place):
                return topology
    return Topology.ALL


def ignored_hints(backends: tuple[ResolvedEndpoint, ...], place: NodeTopology) -> tuple[IgnoredHints, ...]:
    """Of the hints that some ready backend has, those that `topology_of` does not go by, and why."""
    ready = [b for b in backends if _ready(b)]
    unheeded = []
    for topology in _BY_HINTS:
        if ready and _heeded(topology, ready, place):
            break
        lacking = tuple(b.target for b in ready if not _hints(topology, b.endpoint))
        if len(lacking) < len(ready):
            unheeded.append(IgnoredHints(topology, _here(topology, place), lacking))
    return tuple(unheeded)


# In the order in which they are looked at.
_BY_HINTS = (Topology.SAME_NODE, Topology.SAME_ZONE)


def _heeded(topology: Topology, ready: Sequence[ResolvedEndpoint], place: NodeTopology) -> bool:
    here = _here(topology, place)
    return all(_hints(topology, b.endpoint) for b in ready) and any(
        here in _hints(topology, b.endpoint) for b in ready
    )


def _hints(topology: Topology, endpoint: Endpoint) -> tuple[str, ...]:
    return endpoint.node_hints if topology is Topology.SAME_NODE else endpoint.zone_hints


def _here(topology: Topology, place: NodeTopology) -> str:
    return place.node_name if topology is Topology.SAME_NODE else place.zone


def _cluster_reasons(
    backends: tuple[ResolvedEndpoint, ...], place: NodeTopology, topology: Topology
) -> list[Reason]:
    none_ready = not any(_ready(b) for b in backends)
    return [_unready_reason(b, none_ready) or _hint_reason(b, place, topology) for b in backends]


def _hint_reason(backend: ResolvedEndpoint, place: NodeTopology, topology: Topology) -> Reason:
    if topology is Topology.ALL or _here(topology, place) in _hints(topology, backend.endpoint):
        return Reason.READY
    return Reason.OTHER_NODE_HINTED if topology is Topology.SAME_NODE else Reason.OTHER_ZONE_HINTED


def _local_reasons(backends: tuple[ResolvedEndpoint, ...]) -> list[Reason]:
    """Under policy Local the last resort is decided among this node's own backends (KEP-1669)."""
    none_ready = not any(b.local and _ready(b) for b in backends)
    return [
        Reason.NOT_LOCAL if not b.local else _unready_reason(b, none_ready) or Reason.READY for b in backends
    ]


def _unready_reason(backend: ResolvedEndpoint, none_ready: bool) -> Reason | None:
    """The reason that readiness alone gives, or None for a backend that is ready."""
    if _ready(backend):
        return None
    if not backend.endpoint.terminating:
        return Reason.NOT_READY
    if not backend.endpoint.serving:
        return Reason.STOPPED
    return Reason.LAST_RESORT if none_ready else Reason.TERMINATING


def _ready(backend: ResolvedEndpoint) -> bool:
    return backend.endpoint.ready


def _last_resort(backend: ResolvedEndpoint) -> bool:
    return backend.endpoint.serving and backend.endpoint.terminating
