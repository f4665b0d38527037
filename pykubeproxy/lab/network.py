"""The lab's network: a fabric connects two nodes and an outside client; each pod connects to its node.

    outside 203.0.113.10 ── fabric ─┬─ node1 10.0.0.11 ─── pods 10.244.1.0/24
                                    └─ node2 10.0.0.12 ─── pods 10.244.2.0/24

All links carry IPv4 and IPv6. The fabric is a router for the outside client and a bridge for the nodes, and runs
the API server. Each host is a network namespace named `pkplab-LAB-ROLE`, so cleanup needs only the lab's name.
Both ends of a link are created inside their namespaces; the machine's own network stays untouched.
"""

import os
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from ipaddress import ip_network
from pathlib import Path
from typing import IO, NamedTuple

from pyroute2 import IPRoute, netns
from pyroute2.netlink.rtnl import rt_scope
from pyroute2.netlink.rtnl.ifaddrmsg import IFA_F_NODAD

from pykubeproxy.kernel.system import enter_new_namespace

CLUSTER_CIDRS = ("10.244.0.0/16", "fd00:10:244::/48")
FABRIC = ("10.0.0.1", "fd00:10::1")
OUTSIDE_GATEWAY = ("203.0.113.1", "2001:db8:113::1")
OUTSIDE = ("203.0.113.10", "2001:db8:113::10")
#: Additional addresses of the outside client, for scenarios with many clients.
OUTSIDE_CROWD = tuple(f"203.0.113.{last}" for last in range(101, 121))
# The node's end of every pod link has these addresses. Link scope keeps them from becoming a source address,
# so masquerading towards a pod uses the node's own address.
POD_GATEWAY = ("169.254.1.1", "fe80::1")

_SYSCTLS = {
    # Use IPv6 addresses at once, without duplicate address detection.
    "net/ipv6/conf/default/accept_dad": "0",
    "net/ipv6/conf/default/accept_ra": "0",
    # Accept packets whose reply would leave by another interface.
    "net/ipv4/conf/all/rp_filter": "0",
    "net/ipv4/conf/default/rp_filter": "0",
    # Send every ICMP error; the default limits them to a few a second.
    "net/ipv4/icmp_ratelimit": "0",
    "net/ipv6/icmp/ratelimit": "0",
}
_ROUTER_SYSCTLS = {
    "net/ipv4/ip_forward": "1",
    "net/ipv4/conf/all/send_redirects": "0",
    "net/ipv4/conf/default/send_redirects": "0",
    "net/ipv6/conf/all/forwarding": "1",
}


def namespace_prefix(lab: str) -> str:
    """Return the prefix of the names of a lab's namespaces."""
    return f"pkplab-{lab}-"


def lab_namespaces(lab: str) -> list[str]:
    return sorted(name for name in netns.listnetns() if name.startswith(namespace_prefix(lab)))


@contextmanager
def entered(name: str) -> Iterator[None]:
    """Move the calling thread into a namespace. Raises OSError if it does not exist."""
    with _namespace_restored():
        netns.setns(name, flags=0)
        yield


@contextmanager
def _namespace_restored() -> Iterator[None]:
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        yield
    finally:
        netns.setns(home)
        os.close(home)


class Namespace:
    """A network namespace, created on construction; `role` is its host's name in the lab."""

    def __init__(self, lab: str, role: str) -> None:
        self.role = role
        self.name = f"{namespace_prefix(lab)}{role}"
        # netns.create() forks, and the child would hold the janitor's pipe open.
        with _namespace_restored():
            enter_new_namespace()
            netns.attach(self.name, f"{os.getpid()}/task/{threading.get_native_id()}")
            self._ip = IPRoute()
        for name, value in _SYSCTLS.items():
            self.sysctl(name, value)
        self._set_up("lo")

    def forward(self) -> None:
        for name, value in _ROUTER_SYSCTLS.items():
            self.sysctl(name, value)

    def entered(self) -> AbstractContextManager[None]:
        """Move the calling thread, and the processes it starts, into this namespace."""
        return entered(self.name)

    def sysctl(self, name: str, value: str) -> None:
        """Write /proc/sys/NAME in this namespace."""
        with self.entered():
            Path("/proc/sys", name).write_text(value)

    def index(self, interface: str) -> int:
        """Return the index of an interface; raises LookupError if there is none."""
        for index in self._ip.link_lookup(ifname=interface):
            return int(index)
        raise LookupError(f"no interface {interface} in {self.name}")

    def _set_up(self, interface: str, **options: int) -> None:
        self._ip.link("set", index=self.index(interface), state="up", **options)

    def bridge(self, interface: str) -> None:
        self._ip.link("add", ifname=interface, kind="bridge")
        self._set_up(interface)

    def veth(self, interface: str, other: "Namespace", other_interface: str, bridge: str = "") -> None:
        """Create a veth pair to another namespace, there as a port of `bridge` if given."""
        with Path("/run/netns", other.name).open() as namespace:
            peer = {"ifname": other_interface, "net_ns_fd": namespace.fileno()}
            self._ip.link("add", ifname=interface, kind="veth", peer=peer)
        self._set_up(interface)
        other._set_up(other_interface, master=other.index(bridge) if bridge else 0)

    def set_down(self, interface: str) -> None:
        """Set an interface down, which removes its routes."""
        self._ip.link("set", index=self.index(interface), state="down")

    def delete_link(self, interface: str) -> None:
        """Delete an interface and its veth peer."""
        self._ip.link("del", index=self.index(interface))

    def address(self, interface: str, address: str, length: int, *, link_scope: bool = False) -> None:
        """Add an address with a prefix length to an interface."""
        options = {"flags": IFA_F_NODAD} if ":" in address else {}
        index, scope = self.index(interface), rt_scope["link" if link_scope else "universe"]
        self._ip.addr("add", index=index, address=address, prefixlen=length, scope=scope, **options)

    def route(self, destination: str, *, via: str = "", interface: str = "", kind: str = "unicast") -> None:
        """Add a route to a CIDR or "default"; with `via` and `interface` the gateway may be in no local subnet."""
        family = socket.AF_INET6 if ":" in f"{destination}{via}" else socket.AF_INET
        options: dict[str, object] = {"family": family, "type": kind}
        if via:
            options["gateway"] = via
        if interface:
            options["oif"] = self.index(interface)
        if via and interface:
            options["flags"] = ["onlink"]
        self._ip.route("add", dst=destination, **options)

    def spawn(
        self,
        command: Sequence[str],
        *,
        output: IO[bytes] | int,
        errors: IO[bytes] | int = subprocess.STDOUT,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a process here, in its own session so that Ctrl-C in the terminal does not reach it."""
        with self.entered():
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                env=environment,
                start_new_session=True,
            )

    def remove(self) -> None:
        """Remove the name; the kernel deletes the namespace with its last process."""
        self.close()
        netns.remove(self.name)

    def close(self) -> None:
        """Close the netlink socket, which keeps the namespace alive."""
        self._ip.close()


class Site(NamedTuple):
    """The name and zone of a node, its IPv4 and IPv6 address, and the ranges of its pods' addresses."""

    name: str
    zone: str
    addresses: tuple[str, str]
    pod_cidrs: tuple[str, str]

    def pod_addresses(self, number: int) -> tuple[str, str]:
        """Return the addresses of a pod on this node, by number (2 to 254)."""
        ipv4, ipv6 = (str(ip_network(cidr)[number]) for cidr in self.pod_cidrs)
        return ipv4, ipv6


SITES = {
    "node1": Site("node1", "zone-a", ("10.0.0.11", "fd00:10::11"), ("10.244.1.0/24", "fd00:10:244:1::/64")),
    "node2": Site("node2", "zone-b", ("10.0.0.12", "fd00:10::12"), ("10.244.2.0/24", "fd00:10:244:2::/64")),
}


class Network:
    """The namespaces of a lab and the links between them."""

    def __init__(self, lab: str) -> None:
        self._lab = lab
        self._pods_created = 0
        self.fabric = Namespace(lab, "fabric")
        self.fabric.forward()
        self.fabric.bridge("nodes")
        for address, length in zip(FABRIC, (24, 64), strict=True):
            self.fabric.address("nodes", address, length)
        self.nodes = {name: self._node(site) for name, site in SITES.items()}
        for site in SITES.values():
            others = [node for name, node in self.nodes.items() if name != site.name]
            for cidr, address in zip(site.pod_cidrs, site.addresses, strict=True):
                for host in (self.fabric, *others):
                    host.route(cidr, via=address)
        self.outside = self._outside_client()

    def _node(self, site: Site) -> Namespace:
        node = Namespace(self._lab, site.name)
        node.forward()
        node.veth("eth0", self.fabric, site.name, bridge="nodes")
        for address, length, gateway in zip(site.addresses, (24, 64), FABRIC, strict=True):
            node.address("eth0", address, length)
            # Service addresses need a route too: a packet without one never reaches iptables.
            node.route("default", via=gateway)
        for cidr in site.pod_cidrs:
            node.route(cidr, kind="blackhole")  # else packets to removed pods loop through the fabric
        return node

    def _outside_client(self) -> Namespace:
        client = Namespace(self._lab, "outside")
        client.veth("eth0", self.fabric, "outside")
        for address, gateway, length in zip(OUTSIDE, OUTSIDE_GATEWAY, (24, 64), strict=True):
            self.fabric.address("outside", gateway, length)
            client.address("eth0", address, length)
            client.route("default", via=gateway)
        for address in OUTSIDE_CROWD:
            client.address("eth0", address, 24)
        return client

    def add_pod(self, name: str, node: str, addresses: tuple[str, str]) -> tuple[Namespace, str]:
        """Create a pod's namespace and its link; return it with the name of the node's interface."""
        self._pods_created += 1
        interface = f"pod{self._pods_created}"
        pod, host = Namespace(self._lab, name), self.nodes[node]
        host.veth(interface, pod, "eth0")
        for address, gateway in zip(addresses, POD_GATEWAY, strict=True):
            length = 128 if ":" in address else 32
            host.address(interface, gateway, 64 if ":" in gateway else 32, link_scope=True)
            host.route(f"{address}/{length}", interface=interface)
            pod.address("eth0", address, length)
            pod.route("default", via=gateway, interface="eth0")
        return pod, interface

    def remove_pod(self, pod: Namespace, node: str, interface: str) -> None:
        """Remove a pod's link and namespace after its processes have ended."""
        self.nodes[node].delete_link(interface)
        pod.remove()

    def close(self) -> None:
        """Close the namespaces; the cleanup removes them."""
        for namespace in (self.fabric, self.outside, *self.nodes.values()):
            namespace.close()
