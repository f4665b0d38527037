"""The size of a Service, which decides what its rules cost.

Nothing in Kubernetes limits it: ports, endpoints and addresses multiply, up to millions of rules for one Service.
"""

import msgspec

from pykubeproxy.objects import Family, Key, family_of
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.ports import ServiceSkipReason, service_ports

# iptables takes twice as long for an endpoint with session affinity, and five times beside 4000 lists of clients.
AFFINITY_COST = 3


class Oversized(msgspec.Struct, frozen=True):
    """A Service that is not served in one family, because it has more `pairs` than `limit`.

    Each port counts once for each endpoint and each address.
    """

    service: Key
    cluster_ip: str
    pairs: int
    limit: int

    @property
    def reason(self) -> str:
        return f"it has {self.pairs} pairs of a port and an endpoint or address, more than maxServicePairs, {self.limit}"


def count_pairs(cluster: Cluster, key: Key, family: Family) -> int:
    """Return the cost of a Service in one family: its pairs of a port and an endpoint, or of a port and an address.

    A pair with an endpoint counts AFFINITY_COST times if the Service asks for session affinity. Addresses are external IPs,
    load balancer IPs and source ranges. Each EndpointSlice counts as if it had all ports of the Service, and an endpoint: a
    sync visits all slices for every port. Rejected endpoints count too. Without any, the cluster IP is one more address: a
    port has a rule that rejects at each. 0 if there is no such Service.
    """
    service = cluster.service(key)
    affinity = service is not None and service.affinity_seconds is not None
    return _pairs(cluster, key, family, AFFINITY_COST if affinity else 1)


def _pairs(cluster: Cluster, key: Key, family: Family, per_endpoint: int = 1) -> int:
    service = cluster.service(key)
    if service is None:
        return 0
    given = (*service.external_ips, *service.load_balancer_ips, *service.source_ranges)
    addresses = sum(family_of(address) is family for address in given)
    ports = len(service.ports)
    endpoints = sum(
        max(ports, len(slice_.ports)) * max(1, len(slice_.endpoints) + len(slice_.rejected))
        for slice_ in cluster.slices_of(key, family)
    )
    return addresses * ports + max(ports, per_endpoint * endpoints)


def count_endpoints(cluster: Cluster, key: Key, family: Family) -> int:
    """Return about how many endpoints the ports of a Service have in one family, each counted for every port."""
    service = cluster.service(key)
    ports = len(service.ports) if service else 0
    slices = cluster.slices_of(key, family) if ports else ()
    return sum(min(ports, len(slice_.ports)) * len(slice_.endpoints) for slice_ in slices)


def oversized(cluster: Cluster, key: Key, family: Family, limit: int) -> Oversized | None:
    """Return why a Service is too large to be served; None if it is not. A `limit` of 0 allows any size."""
    pairs = _pairs(cluster, key, family) if limit else 0
    service = cluster.service(key)
    if pairs <= limit or service is None:
        return None
    ports = service_ports(service, family)
    if isinstance(ports, ServiceSkipReason) or not ports:
        return None
    return Oversized(key, ports[0].cluster_ip, pairs, limit)
