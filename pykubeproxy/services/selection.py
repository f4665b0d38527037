"""Which backends serve from this node: readiness, termination, topology and traffic policy, with reasons."""

import enum

import msgspec

from pykubeproxy.services.backends import Backend
from pykubeproxy.services.ports import ServicePort


class Place(msgspec.Struct, frozen=True):
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


class Verdict(msgspec.Struct, frozen=True, gc=False):
    """What became of one backend under each traffic policy; None where the service port never uses that policy."""

    backend: Backend
    cluster: Reason | None
    local: Reason | None


class Selection(msgspec.Struct, frozen=True):
    """Who serves a service port from this node.

    `cluster` and `local` are the backends under the traffic policies Cluster and Local. `reachable` are those of
    either. `any_usable` tells whether there is one anywhere in the cluster: without, clients are refused; with one
    elsewhere only, packets under policy Local are dropped, for a load balancer may still send them to another node.
    """

    cluster: tuple[Backend, ...]
    local: tuple[Backend, ...]
    reachable: tuple[Backend, ...]
    any_usable: bool
    topology: Topology
    verdicts: tuple[Verdict, ...]


def select(port: ServicePort, backends: tuple[Backend, ...], place: Place) -> Selection:
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


def topology_of(backends: tuple[Backend, ...], place: Place) -> Topology:
    """Hints count only if every ready backend has them and one is for here; others' hints do not matter (KEP-2433).

    Hints for nodes are looked at first (KEP-3015).
    """
    ready = [b.endpoint for b in backends if _ready(b)]
    if not ready:
        return Topology.ALL
    if all(e.node_hints for e in ready) and any(place.node_name in e.node_hints for e in ready):
        return Topology.SAME_NODE
    if all(e.zone_hints for e in ready) and any(place.zone in e.zone_hints for e in ready):
        return Topology.SAME_ZONE
    return Topology.ALL


def _cluster_reasons(backends: tuple[Backend, ...], place: Place, topology: Topology) -> list[Reason]:
    none_ready = not any(_ready(b) for b in backends)
    return [_unready_reason(b, none_ready) or _hint_reason(b, place, topology) for b in backends]


def _hint_reason(backend: Backend, place: Place, topology: Topology) -> Reason:
    if topology is Topology.SAME_NODE and place.node_name not in backend.endpoint.node_hints:
        return Reason.OTHER_NODE_HINTED
    if topology is Topology.SAME_ZONE and place.zone not in backend.endpoint.zone_hints:
        return Reason.OTHER_ZONE_HINTED
    return Reason.READY


def _local_reasons(backends: tuple[Backend, ...]) -> list[Reason]:
    """Under policy Local the last resort is decided among this node's own backends (KEP-1669)."""
    none_ready = not any(b.local and _ready(b) for b in backends)
    return [
        Reason.NOT_LOCAL if not b.local else _unready_reason(b, none_ready) or Reason.READY for b in backends
    ]


def _unready_reason(backend: Backend, none_ready: bool) -> Reason | None:
    """The reason that readiness alone gives, or None for a backend that is ready."""
    if _ready(backend):
        return None
    if not backend.endpoint.terminating:
        return Reason.NOT_READY
    if not backend.endpoint.serving:
        return Reason.STOPPED
    return Reason.LAST_RESORT if none_ready else Reason.TERMINATING


def _ready(backend: Backend) -> bool:
    return backend.endpoint.ready


def _last_resort(backend: Backend) -> bool:
    return backend.endpoint.serving and backend.endpoint.terminating
