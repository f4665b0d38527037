"""The context of a family's rules: what they depend on besides Services and EndpointSlices."""

import ipaddress
from collections.abc import Container, Iterator, Mapping

import msgspec

from pykubeproxy.config import PRIMARY, Config, DetectLocalMode
from pykubeproxy.objects import Family, Key, Node, family_of, of_family
from pykubeproxy.rules.dispatch import node_port_jumps, serves_loopback
from pykubeproxy.rules.options import LocalTraffic, RuleOptions
from pykubeproxy.rules.text import host
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.ports import (
    ApiServers,
    PortName,
    Reserved,
    ReservedAddresses,
)
from pykubeproxy.services.selection import NodeTopology, ResolvedPort, resolve_ports
from pykubeproxy.services.size import Oversized, oversized

_UNSPECIFIED = ("0.0.0.0", "::")  # noqa: S104 - only compared
_FALLBACK = {Family.IPV4: "127.0.0.1", Family.IPV6: "::1"}


class KernelFacts(msgspec.Struct, frozen=True):
    """The facts about this node's kernel that rules depend on.

    `addresses` are those of the node's interfaces, of both families. `tcp_be_liberal` is the sysctl
    nf_conntrack_tcp_be_liberal. `nfacct` tells whether the counters exist, `sctp` whether rules can match SCTP ports.
    """

    addresses: tuple[str, ...] = ()
    random_fully: bool = True
    nfacct: bool = True
    tcp_be_liberal: bool = False
    sctp: bool = True


class RuleContext(msgspec.Struct, frozen=True):
    """The context of the rules of one family, from the configuration, the Node object and the kernel.

    A Service with more than `max_service_pairs` is not served; 0 means any number. Nor are ports of SCTP without `sctp`.
    See `AffinityShares.unkept_lists` for `max_affinity_lists`, and `service_ports` for `reserved`.
    """

    node: NodeTopology
    options: RuleOptions
    node_port_jumps: tuple[str, ...]
    allow_external_ips: bool = True
    max_service_pairs: int = 0
    max_affinity_lists: int = 0
    reserved: ReservedAddresses = {}
    sctp: bool = True

    def resolve(
        self, cluster: Cluster, service: Key, only: Container[PortName] | None = None, is_small: bool = False
    ) -> tuple[ResolvedPort, ...] | Oversized:
        """Return the resolved ports of one Service, or just some, or why it is too large to be served.

        `is_small`: the caller knows that it is not too large.
        """
        family = self.options.family
        too_large = None if is_small else oversized(cluster, service, family, self.max_service_pairs)
        return too_large or resolve_ports(
            cluster,
            service,
            family,
            self.node,
            self.allow_external_ips,
            self.reserved,
            cluster.affinity.unkept_lists(service, self.max_affinity_lists),
            only,
        )


def rule_context(
    config: Config,
    node_name: str,
    node: Node | None,
    kernel: KernelFacts,
    family: Family,
    api_servers: ApiServers = frozenset(),
) -> RuleContext:
    """Return the context for one family; `node` is None while the Node object is not known.

    `api_servers` may have any spelling, and addresses of both families.
    """
    node_ip = node_ips(config, node)[family]
    networks = node_port_networks(config, node_ip, family)
    options = RuleOptions(
        family=family,
        masquerade_bit=config.iptables.masquerade_bit,
        masquerade_all=config.iptables.masquerade_all,
        local_traffic=_local_traffic(config, node, family),
        localhost_node_ports=config.iptables.localhost_node_ports
        and (family is Family.IPV6 or serves_loopback(networks)),
        node_ip=node_ip,
        random_fully=kernel.random_fully,
        nfacct=kernel.nfacct,
        drop_invalid=not kernel.tcp_be_liberal,
        dispatch=config.dispatch,
    )
    return RuleContext(
        node=NodeTopology(node_name, node.zone if node else ""),
        options=options,
        node_port_jumps=node_port_jumps(networks, of_family(kernel.addresses, family), options),
        allow_external_ips=config.feature_gates.allow_service_external_ips,
        max_service_pairs=config.max_service_pairs,
        max_affinity_lists=config.max_affinity_lists,
        reserved={
            **dict.fromkeys(_own_pages(config, node, family), Reserved.OWN_PAGES),
            **dict.fromkeys(api_servers_of(api_servers, family), Reserved.API_SERVER),
        },
        sctp=kernel.sctp,
    )


def _own_pages(config: Config, node: Node | None, family: Family) -> Iterator[tuple[str, int]]:
    """Yield the addresses of one family and the ports at which clients outside of the node reach the agent's pages."""
    own = {*(node.addresses if node else ()), *node_ips(config, node).values()}
    for page in (config.health_address, config.metrics_address):
        if page:
            hosts = own if page.host in _UNSPECIFIED else {page.host}
            yield from ((host, page.port) for host in hosts if family_of(host) is family)


def api_servers_of(found: ApiServers, family: Family) -> ApiServers:
    """Return the addresses of one family, in canonical form; leave out what is no IP address."""
    return frozenset(
        (address, port)
        for text, port in found
        if (address := _canonical(text)) and family_of(address) is family
    )


def node_ips(config: Config, node: Node | None) -> dict[Family, str]:
    """Return this node's address in each family: bindAddress if it is specific, else the Node's, else loopback."""
    addresses = dict(_FALLBACK)
    for address in reversed(node.addresses if node else ()):
        addresses[family_of(address)] = address
    if config.bind_address and config.bind_address not in _UNSPECIFIED:
        addresses[family_of(config.bind_address)] = config.bind_address
    return addresses


def primary_family(config: Config, node: Node | None) -> Family:
    """Return the family this node must support: that of bindAddress, else of the Node's first address, else IPv4."""
    if config.bind_address and config.bind_address not in _UNSPECIFIED:
        return family_of(config.bind_address)
    return family_of(node.addresses[0]) if node and node.addresses else Family.IPV4


def missing_network(config: Config, node: Node | None, unsupported: Mapping[Family, str]) -> str:
    """Return which setting has networks, but none of the family that this node must support; "" if none has.

    As in kube-proxy, clusterCIDR may be of the other family if the node supports both.
    """
    primary, detect = primary_family(config, node), config.detect_local
    match detect.mode:
        case DetectLocalMode.CLUSTER_CIDR if unsupported:
            setting, cidrs = "clusterCIDR", detect.cluster_cidrs
        case DetectLocalMode.NODE_CIDR:
            setting, cidrs = "podCIDRs of the Node", node.pod_cidrs if node else ()
        case _:
            return ""
    if not cidrs or of_family(cidrs, primary):
        return ""
    reasons = "".join(f"; {reason}" for reason in unsupported.values())
    return f"{setting}: {', '.join(cidrs)} has no {primary.value} network, which this node needs{reasons}"


def _local_traffic(config: Config, node: Node | None, family: Family) -> LocalTraffic | None:
    detect = config.detect_local
    match detect.mode:
        case DetectLocalMode.BRIDGE_INTERFACE:
            return LocalTraffic(interface=detect.bridge_interface)
        case DetectLocalMode.INTERFACE_NAME_PREFIX:
            return LocalTraffic(interface=f"{detect.interface_name_prefix}+")
        case DetectLocalMode.NODE_CIDR:
            cidrs = of_family(node.pod_cidrs if node else (), family)
        case DetectLocalMode.CLUSTER_CIDR:
            cidrs = of_family(detect.cluster_cidrs, family)
    return LocalTraffic(source=cidrs[0]) if cidrs else None


def node_port_networks(config: Config, node_ip: str, family: Family) -> tuple[str, ...]:
    """Return the networks whose addresses serve node ports; empty if all addresses do.

    "primary" also means all addresses in a family in which the node has no address.
    """
    known = not ipaddress.ip_address(node_ip).is_loopback
    given = (cidr for cidr in config.node_port_addresses if known or cidr != PRIMARY)
    return of_family((host(node_ip) if cidr == PRIMARY else cidr for cidr in given), family)


def _canonical(text: str) -> str:
    """Return an IP address as in `Service`, without its zone; "" for other text."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return ""
    return str(getattr(address, "ipv4_mapped", None) or address)
