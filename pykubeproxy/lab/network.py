"""The lab's network: a fabric that connects two nodes and an outside client, and pods behind the nodes.

    client 203.0.113.10 ── fabric ─┬─ node1 10.0.0.11 ─── pods 10.244.1.0/24
                                   └─ node2 10.0.0.12 ─── pods 10.244.2.0/24

All of it has IPv4 and IPv6. The fabric is a router for the client and a bridge for the nodes; the API
server lives there as well. A pod hangs on its node by a cable of its own, without a bridge in between.
"""

from dataclasses import dataclass

from pykubeproxy.lab.namespaces import Namespace

SERVICE_CIDRS = ("10.96.0.0/16", "fd00:10:96::/112")
CLUSTER_CIDRS = ("10.244.0.0/16", "fd00:10:244::/48")
FABRIC = ("10.0.0.1", "fd00:10::1")
CLIENT_GATEWAY = ("203.0.113.1", "2001:db8:113::1")
CLIENT = ("203.0.113.10", "2001:db8:113::10")
#: Further addresses of the client, for when it has to look like many.
CLIENT_CROWD = tuple(f"203.0.113.{last}" for last in range(101, 121))

# The node's end of each pod cable has these, alike on all cables: a pod's way out. Both are of link scope,
# so that a packet masqueraded towards a pod bears the node's own address.
POD_GATEWAY = ("169.254.1.1", "fe80::1")


@dataclass(frozen=True)
class Site:
    """What a node is given: its name, zone, addresses and the addresses of its pods."""

    name: str
    number: int
    zone: str

    @property
    def addresses(self) -> tuple[str, str]:
        """The node's own addresses, IPv4 and IPv6."""
        return f"10.0.0.1{self.number}", f"fd00:10::1{self.number}"

    @property
    def pod_cidrs(self) -> tuple[str, str]:
        """What the node's pods' addresses are taken from."""
        return f"10.244.{self.number}.0/24", f"fd00:10:244:{self.number}::/64"

    def pod_addresses(self, number: int) -> tuple[str, str]:
        """The addresses of the node's pod of this number (2 to 254)."""
        return f"10.244.{self.number}.{number}", f"fd00:10:244:{self.number}::{number:x}"


SITES = (Site("node1", 1, "zone-a"), Site("node2", 2, "zone-b"))


class Network:
    """Builds the namespaces and everything between them; `pods` come and go."""

    def __init__(self, lab: str) -> None:
        self._lab = lab
        self._pods_made = 0
        self.fabric = Namespace(lab, "fabric")
        self.fabric.forward()
        self.fabric.bridge("nodes")
        for address, length in zip(FABRIC, (24, 64), strict=True):
            self.fabric.address("nodes", address, length)
        self.nodes = {site.name: self._node(site) for site in SITES}
        self._connect_pods()
        self.client = self._client()

    def _node(self, site: Site) -> Namespace:
        node = Namespace(self._lab, site.name)
        node.forward()
        node.cable("eth0", self.fabric, site.name)
        self.fabric.plug(site.name, "nodes")
        for address, length, fabric in zip(site.addresses, (24, 64), FABRIC, strict=True):
            node.address("eth0", address, length)
            # Not least this covers the service addresses: a packet without a route never meets iptables.
            node.route("::/0" if ":" in fabric else "0.0.0.0/0", via=fabric)
        for cidr in site.pod_cidrs:
            node.route(cidr, kind="blackhole")  # else a packet for a pod long gone would go round in circles
        return node

    def _connect_pods(self) -> None:
        """Everybody on the nodes' net knows which node a pod is behind."""
        for site in SITES:
            others = [node for name, node in self.nodes.items() if name != site.name]
            for cidr, address in zip(site.pod_cidrs, site.addresses, strict=True):
                for neighbour in (self.fabric, *others):
                    neighbour.route(cidr, via=address)

    def _client(self) -> Namespace:
        client = Namespace(self._lab, "client")
        client.cable("eth0", self.fabric, "client")
        for own, gateway, length in zip(CLIENT, CLIENT_GATEWAY, (24, 64), strict=True):
            self.fabric.address("client", gateway, length)
            client.address("eth0", own, length)
            client.route("::/0" if ":" in gateway else "0.0.0.0/0", via=gateway)
        for address in CLIENT_CROWD:
            client.address("eth0", address, 24)
        return client

    def add_pod(self, name: str, node: str, addresses: tuple[str, str]) -> tuple[Namespace, str]:
        """A namespace for a pod, connected to its node; returns it and the node's interface to it."""
        self._pods_made += 1
        interface = f"pod{self._pods_made}"
        pod, host = Namespace(self._lab, name), self.nodes[node]
        host.cable(interface, pod, "eth0")
        for address, gateway in zip(addresses, POD_GATEWAY, strict=True):
            whole = 128 if ":" in address else 32
            host.address(interface, gateway, 64 if ":" in gateway else 32, link_scope=True)
            host.route(f"{address}/{whole}", interface=interface)
            pod.address("eth0", address, whole)
            pod.route("::/0" if ":" in gateway else "0.0.0.0/0", via=gateway, interface="eth0")
        return pod, interface

    def remove_pod(self, pod: Namespace, node: str, interface: str) -> None:
        """Pull the cable and give up the namespace; the pod's processes have to be gone."""
        self.nodes[node].unplug(interface)
        pod.remove()

    def close(self) -> None:
        """Let go of the namespaces; removing them is the sweep's business."""
        for namespace in (self.fabric, self.client, *self.nodes.values()):
            namespace.close()
