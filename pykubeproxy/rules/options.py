"""Inputs of rendering besides services: configuration, node and kernel features."""

import msgspec

from pykubeproxy.config import Dispatch
from pykubeproxy.objects import Family

# Above this many endpoints, omit comments in the chains of services, as kube-proxy does.
LARGE_CLUSTER_ENDPOINTS = 1000


class LocalTraffic(msgspec.Struct, frozen=True):
    """How to match packets of pods on this node: by source network or by interface, exactly one of them.

    `interface` is an iptables interface name; a trailing "+" matches any suffix.
    """

    source: str = ""
    interface: str = ""


class RuleOptions(msgspec.Struct, frozen=True):
    """Options for the rules of one family.

    - `masquerade_bit`: the bit of the packet mark that requests masquerading, 0 to 31
    - `local_traffic`: None if traffic of local pods cannot be detected; then no traffic is masqueraded by source
    - `localhost_node_ports`: serve node ports on 127.0.0.0/8; without effect on IPv6
    - `node_ip`: the address of this node in the family
    - `random_fully`: MASQUERADE supports --random-fully
    - `nfacct`: the nfacct objects of `skeleton.NFACCT_NAMES` exist
    - `drop_invalid`: drop packets in conntrack state INVALID; off with nf_conntrack_tcp_be_liberal
    - `dispatch`: whether to dispatch by tree and balance many endpoints in groups
    - `large_cluster`: omit comments in the chains of services
    """

    family: Family
    masquerade_bit: int = 14
    masquerade_all: bool = False
    local_traffic: LocalTraffic | None = None
    localhost_node_ports: bool = True
    node_ip: str = ""
    random_fully: bool = True
    nfacct: bool = True
    drop_invalid: bool = True
    dispatch: Dispatch = Dispatch.AUTO
    large_cluster: bool = False

    @property
    def ipv6(self) -> bool:
        return self.family is Family.IPV6

    @property
    def mark(self) -> str:
        """Return the masquerade mark as iptables-save prints it, such as 0x4000/0x4000."""
        return f"{1 << self.masquerade_bit:#x}/{1 << self.masquerade_bit:#x}"
