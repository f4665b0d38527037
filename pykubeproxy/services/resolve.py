"""Resolve the service ports of a Service to the endpoints this node uses."""

import msgspec

from pykubeproxy.objects import Family, Key
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.endpoints import Skipped, resolve_endpoints, slice_ports
from pykubeproxy.services.ports import ServicePort, ServiceSkipReason, service_ports
from pykubeproxy.services.selection import NodeTopology, Selection, select


class ResolvedPort(msgspec.Struct, frozen=True):
    """A service port, its endpoints on this node, and the skipped entries of its EndpointSlices."""

    port: ServicePort
    selection: Selection
    skipped: tuple[Skipped, ...] = ()


def resolve_ports(
    cluster: Cluster, key: Key, family: Family, node: NodeTopology, allow_external_ips: bool = True
) -> tuple[ResolvedPort, ...]:
    """Return the resolved ports of one Service in one family; none if the Service is missing or skipped."""
    service = cluster.service(key)
    if service is None:
        return ()
    ports = service_ports(service, family, allow_external_ips)
    if isinstance(ports, ServiceSkipReason):
        return ()
    slices = [slice_ports(slice_) for slice_ in cluster.slices_of(key, family)]
    resolved = []
    for port in ports:
        endpoints, skipped = resolve_endpoints(slices, port.name, node.node_name)
        resolved.append(ResolvedPort(port, select(port, endpoints, node), skipped))
    return tuple(resolved)
