"""From the objects that are there to who serves whom, one Service at a time."""

from collections.abc import Iterable

import msgspec

from pykubeproxy.objects import Family, Key
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.endpoints import Skipped, SlicePorts, resolve_endpoints, slice_ports
from pykubeproxy.services.ports import ServicePort, ServiceSkipReason, service_ports
from pykubeproxy.services.selection import NodeTopology, Selection, select


class ResolvedPort(msgspec.Struct, frozen=True):
    """A service port, who serves it from this node, and what in its EndpointSlices was passed over."""

    port: ServicePort
    selection: Selection
    passed: tuple[Skipped, ...] = ()


def resolve_ports(
    cluster: Cluster, key: Key, family: Family, place: NodeTopology, allow_external_ips: bool = True
) -> tuple[ResolvedPort, ...]:
    """Each port of one Service in one family with its backends; none if the Service is not there or left out."""
    service = cluster.service(key)
    if service is None:
        return ()
    ports = service_ports(service, family, allow_external_ips)
    if isinstance(ports, ServiceSkipReason):
        return ()
    offers = [slice_ports(slice_) for slice_ in cluster.slices_of(key, family)]
    return tuple(_serve(port, offers, place) for port in ports)


def _serve(port: ServicePort, offers: Iterable[SlicePorts], place: NodeTopology) -> ResolvedPort:
    passed: list[Skipped] = []
    found = resolve_endpoints(offers, port.name, place.node_name, passed)
    return ResolvedPort(port, select(port, found, place), tuple(passed))
