"""Sync reports without a sync."""

from collections.abc import Iterable

from pykubeproxy.agent.notices import SyncReport
from pykubeproxy.objects import EndpointSlice, Family, Key, Service, Updated
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.ports import PortName, ReservedAddresses
from pykubeproxy.services.selection import NodeTopology, ResolvedPort, resolve_ports

HERE, ELSEWHERE = "node1", "node2"


def report(
    *objects: Service | EndpointSlice,
    family: Family = Family.IPV4,
    full: bool = False,
    seconds: float = 0.01,
    gone: Iterable[PortName] = (),
    rules_written: dict[str, int] | None = None,
    rules: dict[str, int] | None = None,
    reserved: ReservedAddresses | None = None,
) -> SyncReport:
    """Return the report of a sync on node1 for these Services."""
    resolved = _resolved(objects, family, reserved)
    return SyncReport(
        family=family,
        full=full,
        services=len({item.port.name.service_key for item in resolved}),
        endpoints=sum(len(item.selection.verdicts) for item in resolved),
        chains_written=0,
        chains_deleted=0,
        rules_written=rules_written or {},
        rules=rules or {},
        seconds={"plan": seconds / 2, "apply": seconds / 2},
        resolved=resolved,
        gone=tuple(gone),
        wrote=True,
    )


def port_names(*objects: Service | EndpointSlice, family: Family = Family.IPV4) -> list[PortName]:
    """Return the service ports of these Services."""
    return [item.port.name for item in _resolved(objects, family)]


def _resolved(
    objects: Iterable[Service | EndpointSlice], family: Family, reserved: ReservedAddresses | None = None
) -> tuple[ResolvedPort, ...]:
    cluster = Cluster()
    keys: set[Key] = set()
    for object_ in objects:
        keys.update(cluster.apply(Updated(object_)))
    here = NodeTopology(HERE)
    return tuple(
        item for key in sorted(keys) for item in resolve_ports(cluster, key, family, here, reserved=reserved)
    )
