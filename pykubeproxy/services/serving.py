"""From the objects that are there to who serves whom, one Service at a time."""

from collections.abc import Iterable

import msgspec

from pykubeproxy.objects import Family, Key
from pykubeproxy.services.backends import Offer, Passed, backends, offer
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.ports import LeftOut, ServicePort, service_ports
from pykubeproxy.services.selection import Place, Selection, select


class Served(msgspec.Struct, frozen=True):
    """A service port, who serves it from this node, and what in its EndpointSlices was passed over."""

    port: ServicePort
    selection: Selection
    passed: tuple[Passed, ...] = ()


def served_ports(
    cluster: Cluster, key: Key, family: Family, place: Place, allow_external_ips: bool = True
) -> tuple[Served, ...]:
    """Each port of one Service in one family with its backends; none if the Service is not there or left out."""
    service = cluster.service(key)
    if service is None:
        return ()
    ports = service_ports(service, family, allow_external_ips)
    if isinstance(ports, LeftOut):
        return ()
    offers = [offer(slice_) for slice_ in cluster.slices_of(key, family)]
    return tuple(_serve(port, offers, place) for port in ports)


def _serve(port: ServicePort, offers: Iterable[Offer], place: Place) -> Served:
    passed: list[Passed] = []
    found = backends(offers, port.name, place.node_name, passed)
    return Served(port, select(port, found, place), tuple(passed))
