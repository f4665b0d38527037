"""A Service to its service ports: what one family of it looks like from outside."""

import enum

import msgspec

from pykubeproxy.objects import Family, Key, Protocol, Service, family_of


class PortName(msgspec.Struct, frozen=True, order=True):
    """What identifies a service port; two ports may share a name when their protocols differ."""

    namespace: str
    service: str
    port: str
    protocol: str

    def __str__(self) -> str:
        """As rules and logs name it: `namespace/service:port`, without the colon for a port that has no name."""
        return (
            f"{self.namespace}/{self.service}:{self.port}"
            if self.port
            else f"{self.namespace}/{self.service}"
        )

    @property
    def service_key(self) -> Key:
        return Key(self.namespace, self.service)


class ServicePort(msgspec.Struct, frozen=True):
    """One port of a Service in one family, with all that leads to it and how it is to be treated.

    `external_local` is true only where the Service can be reached from outside at all; `health_check_node_port` is 0
    unless a load balancer is to ask this node. `source_ranges` empty means that everybody may come.
    """

    name: PortName
    protocol: Protocol
    cluster_ip: str
    port: int
    node_port: int
    external_ips: tuple[str, ...]
    load_balancer_ips: tuple[str, ...]
    source_ranges: tuple[str, ...]
    internal_local: bool
    external_local: bool
    affinity_seconds: int | None
    health_check_node_port: int

    @property
    def externally_accessible(self) -> bool:
        """Whether anything but the cluster IP leads here."""
        return bool(self.node_port or self.external_ips or self.load_balancer_ips)

    @property
    def uses_cluster_endpoints(self) -> bool:
        """Whether endpoints anywhere may be used: under external policy Local too, for pods of this node."""
        return not self.internal_local or self.externally_accessible

    @property
    def uses_local_endpoints(self) -> bool:
        """Whether some traffic may only go to endpoints of this node."""
        return self.internal_local or (self.external_local and self.externally_accessible)


class ServiceSkipReason(enum.Enum):
    """Why a Service has no service ports in a family."""

    OTHER_PROXY = "its label service.kubernetes.io/service-proxy-name gives it to another proxy"
    EXTERNAL_NAME = "it is of type ExternalName, which DNS serves"
    HEADLESS = "it is headless, so clients go to its pods directly"
    NO_CLUSTER_IP = "it has no cluster IP yet"
    REFUSED_CLUSTER_IP = "its cluster IP is none that may be served"
    OTHER_FAMILY = "it has no cluster IP of this family"


def service_ports(
    service: Service, family: Family, allow_external_ips: bool = True
) -> tuple[ServicePort, ...] | ServiceSkipReason:
    """The service ports of a Service in one family, or why there are none."""
    cluster_ip = _cluster_ip(service, family)
    if isinstance(cluster_ip, ServiceSkipReason):
        return cluster_ip
    external_ips = _of_family(service.external_ips, family) if allow_external_ips else ()
    load_balancer_ips = _of_family(service.load_balancer_ips, family)
    source_ranges = _source_ranges(service, family)
    external_local = service.external_local and _takes_external_traffic(service)
    return tuple(
        ServicePort(
            name=PortName(service.namespace, service.name, port.name, port.protocol.value),
            protocol=port.protocol,
            cluster_ip=cluster_ip,
            port=port.port,
            node_port=port.node_port,
            external_ips=external_ips,
            load_balancer_ips=load_balancer_ips,
            source_ranges=source_ranges,
            internal_local=service.internal_local,
            external_local=external_local,
            affinity_seconds=service.affinity_seconds,
            health_check_node_port=_health_check_node_port(service, external_local),
        )
        for port in service.ports
    )


def _cluster_ip(service: Service, family: Family) -> str | ServiceSkipReason:
    if service.proxy_name is not None:
        return ServiceSkipReason.OTHER_PROXY
    if service.type == "ExternalName":
        return ServiceSkipReason.EXTERNAL_NAME
    if service.headless:
        return ServiceSkipReason.HEADLESS
    if not service.cluster_ips:
        refused = any(it.field.startswith("spec.clusterIPs") for it in service.refused)
        return ServiceSkipReason.REFUSED_CLUSTER_IP if refused else ServiceSkipReason.NO_CLUSTER_IP
    return next(iter(_of_family(service.cluster_ips, family)), ServiceSkipReason.OTHER_FAMILY)


def _takes_external_traffic(service: Service) -> bool:
    """External policy means something for these alone; elsewhere the field may be left over from another type."""
    return service.type in ("NodePort", "LoadBalancer") or (
        service.type == "ClusterIP" and bool(service.external_ips)
    )


def _health_check_node_port(service: Service, external_local: bool) -> int:
    return service.health_check_node_port if service.type == "LoadBalancer" and external_local else 0


def _source_ranges(service: Service, family: Family) -> tuple[str, ...]:
    """The ranges of this family; one that covers everything makes the others moot."""
    ranges = _of_family(service.source_ranges, family)
    return () if any(cidr.endswith("/0") for cidr in ranges) else ranges


def _of_family(addresses: tuple[str, ...], family: Family) -> tuple[str, ...]:
    return tuple(address for address in addresses if family_of(address) is family)
