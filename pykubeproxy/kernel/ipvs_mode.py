"""What kube-proxy creates in ipvs mode besides rules: ipsets, virtual servers, and an interface with their addresses."""

from collections.abc import Collection
from typing import NamedTuple

from pykubeproxy.objects import Family

INTERFACE = "kube-ipvs0"

_SET_NAME_LENGTH = 31  # of ipset, at most
_ADDRESS_SETS = (
    *("LOOP-BACK", "CLUSTER-IP", "EXTERNAL-IP", "EXTERNAL-IP-LOCAL", "LOAD-BALANCER", "LOAD-BALANCER-LOCAL"),
    *("LOAD-BALANCER-FW", "LOAD-BALANCER-SOURCE-IP", "LOAD-BALANCER-SOURCE-CIDR", "IPVS-IPS"),
    "HEALTH-CHECK-NODE-PORT",
)
_NODE_PORT_SETS = {"TCP": "NODE-PORT-TCP", "UDP": "NODE-PORT-UDP", "SCTP": "NODE-PORT-SCTP-HASH"}
_LOCAL_NODE_PORT_SETS = ("NODE-PORT-LOCAL-TCP", "NODE-PORT-LOCAL-UDP", "NODE-PORT-LOCAL-SCTP-HASH")


class VirtualServer(NamedTuple):
    """A virtual server of IPVS: TCP, 10.96.0.1, 443."""

    protocol: str
    address: str
    port: int

    @property
    def family(self) -> Family:
        return Family.IPV6 if ":" in self.address else Family.IPV4

    def __str__(self) -> str:
        address = f"[{self.address}]" if self.family is Family.IPV6 else self.address
        return f"{self.protocol} {address}:{self.port}"


def set_names() -> frozenset[str]:
    """Return the names of all ipsets of ipvs mode.

    Other names with the same prefix belong to other programs, such as kube-router.
    """
    names = (*_ADDRESS_SETS, *_NODE_PORT_SETS.values(), *_LOCAL_NODE_PORT_SETS)
    return frozenset(_set_name(family, name) for family in Family for name in names)


def node_port_sets() -> dict[tuple[Family, str], str]:
    """Return the name of the ipset with the node ports of each family and protocol."""
    return {
        (family, protocol): _set_name(family, name)
        for family in Family
        for protocol, name in _NODE_PORT_SETS.items()
    }


def is_from_kube_proxy(
    server: VirtualServer,
    service_addresses: Collection[str],
    node_ports: Collection[tuple[Family, str, int]],
) -> bool:
    """Return whether kube-proxy created a virtual server, not another user of IPVS such as keepalived.

    `service_addresses` are those of kube-ipvs0. Node ports have virtual servers at the node's own addresses.
    """
    return server.address in service_addresses or (server.family, server.protocol, server.port) in node_ports


def _set_name(family: Family, name: str) -> str:
    return f"{'KUBE-6' if family is Family.IPV6 else 'KUBE'}-{name}"[:_SET_NAME_LENGTH]
