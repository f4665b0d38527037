"""Service ports: one per port of a Service and address family, with the frontends at which clients reach them."""

import enum
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from pykubeproxy.objects import Family, Key, Port, Protocol, Service, address_and_port, of_family

# Canonical IP addresses and the TCP ports at which this node reaches its API servers.
ApiServers = frozenset[tuple[str, int]]


class Reserved(enum.Enum):
    """Why no external IP and no load balancer IP is served at an address and TCP port."""

    API_SERVER = "this node reaches the API server there"
    OWN_PAGES = "the agent serves its health or metrics there"


# By canonical IP address and TCP port.
ReservedAddresses = Mapping[tuple[str, int], Reserved]


class SkippedIP(NamedTuple):
    """An external IP or load balancer IP that gets no rules at the port of a Service."""

    address: str
    reason: Reserved


class PortName(msgspec.Struct, frozen=True, order=True, gc=False):
    """The identity of a service port. Two ports may share a name if their protocols differ."""

    namespace: str
    service: str
    port: str
    protocol: str

    def __str__(self) -> str:
        """Return `namespace/service:port`, or `namespace/service` for an unnamed port, as rules and logs do."""
        return (
            f"{self.namespace}/{self.service}:{self.port}"
            if self.port
            else f"{self.namespace}/{self.service}"
        )

    @property
    def service_key(self) -> Key:
        return Key(self.namespace, self.service)


def whole_service(service: Key) -> PortName:
    """Return the name under which a Service is treated as one, without a port and a protocol."""
    return PortName(service.namespace, service.name, "", "")


class ServicePort(msgspec.Struct, frozen=True, gc=False):
    """One port of a Service in one family: its frontends and traffic policies.

    - `node_port`, `health_check_node_port`: 0 if unset
    - `source_ranges`: the clients allowed at load balancer IPs; None for all
    - `external_local`: false where external traffic cannot reach the Service
    - `skipped_ips`: external IPs and load balancer IPs that get no rules, because that address and port are reserved
    - `unkept_lists`: how many lists of clients session affinity of the Service needs, if it is not kept; else 0
    """

    name: PortName
    protocol: Protocol
    cluster_ip: str
    port: int
    node_port: int
    external_ips: tuple[str, ...]
    load_balancer_ips: tuple[str, ...]
    source_ranges: tuple[str, ...] | None
    internal_local: bool
    external_local: bool
    affinity_seconds: int | None
    health_check_node_port: int
    skipped_ips: tuple[SkippedIP, ...] = ()
    unkept_lists: int = 0

    @property
    def externally_accessible(self) -> bool:
        """Return whether the port has a frontend other than the cluster IP."""
        return bool(self.node_port or self.external_ips or self.load_balancer_ips)

    @property
    def uses_cluster_endpoints(self) -> bool:
        """Return whether some traffic may use endpoints on any node.

        Even under external policy Local, traffic from pods of this node may.
        """
        return not self.internal_local or self.externally_accessible

    @property
    def uses_local_endpoints(self) -> bool:
        """Return whether some traffic may only use endpoints on this node."""
        return self.internal_local or (self.external_local and self.externally_accessible)


class ServiceSkipReason(enum.Enum):
    """Why a Service has no service ports in a family."""

    OTHER_PROXY = "its label service.kubernetes.io/service-proxy-name selects another proxy"
    EXTERNAL_NAME = "it is of type ExternalName, which only DNS serves"
    HEADLESS = "it is headless, so clients go to its pods directly"
    NO_CLUSTER_IP = "it has no cluster IP yet"
    REJECTED_CLUSTER_IP = "its cluster IP is not a valid service address"
    OTHER_FAMILY = "it has no cluster IP of this family"
    OVERSIZED = "it has more pairs of a port and an endpoint or address than maxServicePairs allows"


def service_ports(
    service: Service,
    family: Family,
    allow_external_ips: bool = True,
    reserved: ReservedAddresses | None = None,
    unkept_lists: int = 0,
) -> tuple[ServicePort, ...] | ServiceSkipReason:
    """Return the service ports of a Service in one family, or why there are none.

    Skip external IPs and load balancer IPs that with their port are `reserved`: a Service could redirect the agent's own
    connection to the API server, and the agent would never hear that the Service is gone; or the probes of the agent's
    health. Cluster IPs are never skipped, because the API server allocates them, one of them for itself. See ServicePort
    for `unkept_lists`.
    """
    reserved = reserved or {}
    found = cluster_ip(service, family)
    if isinstance(found, ServiceSkipReason):
        return found
    external_ips = of_family(service.external_ips, family) if allow_external_ips else ()
    load_balancer_ips = of_family(service.load_balancer_ips, family)
    source_ranges = _source_ranges(service, family)
    # The object may keep externalTrafficPolicy from an earlier type.
    external = service.type in ("NodePort", "LoadBalancer") or (
        service.type == "ClusterIP" and bool(service.external_ips)
    )
    external_local = service.external_local and external
    has_health_check = service.type == "LoadBalancer" and external_local

    def reason(ip: str, port: Port) -> Reserved | None:
        return reserved.get((ip, port.port)) if port.protocol is Protocol.TCP else None

    return tuple(
        ServicePort(
            name=PortName(service.namespace, service.name, port.name, port.protocol.value),
            protocol=port.protocol,
            cluster_ip=found,
            port=port.port,
            node_port=port.node_port,
            external_ips=tuple([ip for ip in external_ips if not reason(ip, port)]),
            load_balancer_ips=tuple([ip for ip in load_balancer_ips if not reason(ip, port)]),
            source_ranges=source_ranges,
            internal_local=service.internal_local,
            external_local=external_local,
            affinity_seconds=service.affinity_seconds if not unkept_lists else None,
            health_check_node_port=service.health_check_node_port if has_health_check else 0,
            skipped_ips=tuple(
                [
                    SkippedIP(ip, why)
                    for ip in dict.fromkeys((*external_ips, *load_balancer_ips))
                    if (why := reason(ip, port))
                ]
            ),
            unkept_lists=unkept_lists,
        )
        for port in service.ports
    )


def cluster_ip(service: Service, family: Family) -> str | ServiceSkipReason:
    """Return the cluster IP of a Service in one family, or why it is not served there."""
    if service.proxy_name is not None:
        return ServiceSkipReason.OTHER_PROXY
    if service.type == "ExternalName":
        return ServiceSkipReason.EXTERNAL_NAME
    if service.headless:
        return ServiceSkipReason.HEADLESS
    if addresses := of_family(service.cluster_ips, family):
        return addresses[0]
    if any(rejected.is_in("spec.clusterIPs") for rejected in service.rejected):
        return ServiceSkipReason.REJECTED_CLUSTER_IP
    return ServiceSkipReason.OTHER_FAMILY if service.cluster_ips else ServiceSkipReason.NO_CLUSTER_IP


def _source_ranges(service: Service, family: Family) -> tuple[str, ...] | None:
    """Return the ranges of this family; None if every client is allowed.

    Without a valid range, an invalid one must not admit every client: it may have been meant for this family.
    """
    ranges = of_family(service.source_ranges, family)
    if any(cidr.endswith("/0") for cidr in ranges):
        return None
    invalid = any(rejected.is_in("spec.loadBalancerSourceRanges") for rejected in service.rejected)
    return ranges if ranges or invalid else None


# The address of a node port that answers at all of the node's own addresses.
ANY_LOCAL = "*"


class FrontendKind(enum.Enum):
    """The kind of address."""

    CLUSTER_IP = "cluster-ip"
    EXTERNAL_IP = "external-ip"
    LOAD_BALANCER_IP = "load-balancer-ip"
    NODE_PORT = "node-port"


_LABELS = {
    FrontendKind.CLUSTER_IP: "cluster IP",
    FrontendKind.EXTERNAL_IP: "external IP",
    FrontendKind.LOAD_BALANCER_IP: "load balancer",
    FrontendKind.NODE_PORT: "node port",
}


class Frontend(msgspec.Struct, frozen=True):
    """An address and port where clients reach a Service.

    - `kind`: what the address is
    - `address`: that of a node port is one of the node's, or "*" for all of them
    - `port`: 0 for all ports of the cluster IP of a quarantined Service
    """

    kind: FrontendKind
    address: str
    port: int

    def __str__(self) -> str:
        """Return text such as "cluster IP 10.96.0.10:80" or "node port 30080"."""
        if not self.port:
            return f"{_LABELS[self.kind]} {self.address}, all ports"
        at = str(self.port) if self.address == ANY_LOCAL else address_and_port(self.address, self.port)
        return f"{_LABELS[self.kind]} {at}"


def frontends(port: ServicePort) -> tuple[Frontend, ...]:
    """Return all frontends of a service port; the first is the cluster IP, the only internal one."""
    addresses = (
        (FrontendKind.CLUSTER_IP, (port.cluster_ip,)),
        (FrontendKind.EXTERNAL_IP, port.external_ips),
        (FrontendKind.LOAD_BALANCER_IP, port.load_balancer_ips),
    )
    by_address = (Frontend(kind, address, port.port) for kind, group in addresses for address in group)
    node_port = [Frontend(FrontendKind.NODE_PORT, ANY_LOCAL, port.node_port)] if port.node_port else []
    return (*by_address, *node_port)


def policy_frontends(port: ServicePort, local: bool) -> tuple[Frontend, ...]:
    """Return the frontends under traffic policy Local, or those under Cluster."""
    internal, *external = frontends(port)
    return (
        *([internal] if port.internal_local is local else ()),
        *(external if port.external_local is local else ()),
    )
