"""What rules depend on besides the services: the configuration, this node, and what the kernel can do."""

import msgspec

from pykubeproxy.config import Dispatch
from pykubeproxy.objects import Family

# Above this many endpoints comments are left out where there are most of them, as kube-proxy does.
LARGE_CLUSTER_ENDPOINTS = 1000


class LocalTraffic(msgspec.Struct, frozen=True):
    """How packets of this node's pods are told from others: by source network or by interface, one of the two.

    `interface` is in iptables' form: a trailing "+" stands for any continuation.
    """

    source: str = ""
    interface: str = ""


class RuleOptions(msgspec.Struct, frozen=True):
    """The terms on which the rules of one family are written.

    - `masquerade_bit`: the bit of the packet mark that asks for masquerading, 0 to 31
    - `local_traffic`: None if traffic of local pods cannot be told; then nothing is masqueraded by its source
    - `localhost_node_ports`: node ports answer on 127.0.0.0/8 too; meaningless for IPv6, where the kernel cannot
    - `node_ip`: this node's address in the family
    - `random_fully`: MASQUERADE can pick source ports fully at random
    - `nfacct`: the counters of `skeleton.NFACCT_NAMES` exist
    - `drop_invalid`: drop packets that conntrack calls INVALID; off when nf_conntrack_tcp_be_liberal is set
    - `dispatch`: whether services are found by a tree of chains, and many backends balanced in groups
    - `large_cluster`: leave out the comments of which there are most
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
        """The masquerade mark as iptables-save prints it, such as 0x4000/0x4000."""
        return f"{1 << self.masquerade_bit:#x}/{1 << self.masquerade_bit:#x}"
