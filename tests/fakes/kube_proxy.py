"""What kube-proxy leaves on a node, in its modes iptables and IPVS."""

import re
from collections.abc import Iterable

from pyroute2 import IPRoute, IPSet
from pyroute2.ipset import PortEntry

from pykubeproxy.rules.ruleset import ChainKey

_PER_SERVICE = re.compile("KUBE-(SVC|SVL|FW|EXT|SEP)-")


def without_unknown(nat: Iterable[str], live: Iterable[ChainKey]) -> list[str]:
    """Return lines for table nat that also delete the live chains of Services that the lines do not declare."""
    lines = [*nat]
    known = {line[1:].partition(" ")[0] for line in lines if line.startswith(":")}
    stale = [key.chain for key in live if _PER_SERVICE.match(key.chain) and key.chain not in known]
    return [*(f":{chain} - [0:0]" for chain in stale), *lines, *(f"-X {chain}" for chain in stale)]


SERVICE_ADDRESSES = ("10.96.0.1", "10.96.0.10", "fd00:96::1")
NODE_PORT = 30080
SETS = {
    "KUBE-CLUSTER-IP": "hash:ip,port",
    "KUBE-NODE-PORT-TCP": "bitmap:port",
    "KUBE-6-NODE-PORT-TCP": "bitmap:port",
    # The kernel limits names to 31 characters.
    "KUBE-6-LOAD-BALANCER-SOURCE-CID": "hash:ip,port,net",
}
RULES = """\
*nat
:KUBE-SERVICES - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-NODE-PORT - [0:0]
:KUBE-LOAD-BALANCER - [0:0]
:KUBE-MARK-MASQ - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODE-PORT
-A KUBE-SERVICES -m set --match-set KUBE-CLUSTER-IP dst,dst -j ACCEPT
-A KUBE-LOAD-BALANCER -j KUBE-MARK-MASQ
-A KUBE-NODE-PORT -p tcp -m set --match-set KUBE-NODE-PORT-TCP dst -j KUBE-MARK-MASQ
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
COMMIT
*filter
:KUBE-FORWARD - [0:0]
:KUBE-NODE-PORT - [0:0]
:KUBE-PROXY-FIREWALL - [0:0]
:KUBE-SOURCE-RANGES-FIREWALL - [0:0]
:KUBE-IPVS-FILTER - [0:0]
:KUBE-IPVS-OUT-FILTER - [0:0]
-A INPUT -m comment --comment "kubernetes ipvs access filter" -j KUBE-IPVS-FILTER
-A INPUT -m comment --comment "kube-proxy firewall rules" -j KUBE-PROXY-FIREWALL
-A INPUT -m comment --comment "kubernetes health check rules" -j KUBE-NODE-PORT
-A FORWARD -m comment --comment "kube-proxy firewall rules" -j KUBE-PROXY-FIREWALL
-A FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD
-A OUTPUT -m comment --comment "kubernetes ipvs access filter" -j KUBE-IPVS-OUT-FILTER
-A KUBE-IPVS-FILTER -m set --match-set KUBE-CLUSTER-IP dst,dst -j RETURN
-A KUBE-SOURCE-RANGES-FIREWALL -j DROP
COMMIT
"""


def create_ipsets(*others: str) -> None:
    """Create the sets with a node port in each that holds ports, and `others` of type hash:ip."""
    with IPSet() as sets:
        for name, kind in SETS.items():
            ports = {"bitmap_ports_range": (0, 65535)} if kind == "bitmap:port" else {}
            sets.create(name, stype=kind, **ports)
            if ports:
                sets.add(name, PortEntry(NODE_PORT), etype="port")
        for name in others:
            sets.create(name)


def create_interface() -> None:
    """Create kube-ipvs0: a bridge, because not every kernel has kube-proxy's dummy interfaces."""
    with IPRoute() as route:
        route.link("add", ifname="kube-ipvs0", kind="bridge")
        (index,) = route.link_lookup(ifname="kube-ipvs0")
        for address in SERVICE_ADDRESSES:
            route.addr("add", index=index, address=address, prefixlen=128 if ":" in address else 32)
