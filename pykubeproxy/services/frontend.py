"""The frontends of a service port: the addresses and ports at which clients reach it."""

import enum

import msgspec

from pykubeproxy.objects import address_and_port
from pykubeproxy.services.ports import ServicePort

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
    """An address and port; the address of a node port is one of the node's, or `ANY_LOCAL`.

    The port is 0 for all ports of the cluster IP of a quarantined Service.
    """

    kind: FrontendKind
    address: str
    port: int

    def __str__(self) -> str:
        """Such as "cluster IP 10.96.0.10:80" or "node port 30080"."""
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
