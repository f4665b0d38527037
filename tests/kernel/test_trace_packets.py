"""trace predicts what the kernel does: random packets through random rules are sent and traced."""

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from pykubeproxy.config import load
from pykubeproxy.inspect.packets.packet import NodeNetwork, NodeRoute, Packet
from pykubeproxy.inspect.routes import PacketVerdict
from pykubeproxy.kernel import Iptables, local_addresses
from pykubeproxy.kernel.network import routes
from pykubeproxy.objects import (
    Endpoint,
    EndpointPort,
    EndpointSlice,
    Family,
    Kind,
    Listed,
    Node,
    Port,
    Protocol,
    Service,
    address_and_port,
)
from pykubeproxy.rules.context import KernelFacts, RuleContext, rule_context
from pykubeproxy.rules.render import full_input, render
from pykubeproxy.rules.ruleset import Ruleset
from pykubeproxy.services.cluster import Cluster
from tests.kernel.node_network import (
    BEYOND,
    CLIENT,
    NODE,
    PODS,
    LinkedNode,
    PacketSpec,
    empty,
    owner,
    send_all,
    sources,
)
from tests.traces import PacketTrace, trace_packet

RULESETS = 7
SHOTS = 16
HERE = "node1"
# Node ports: the second one is also the port of a server.
NODE_PORTS = (30053, 30080, 30081, 30443)


def service_address(family: Family, kind: str, number: int) -> str:
    """Return a service's cluster IP, external IP or load balancer IP."""
    v4, v6 = {
        "cluster": ("10.96.0.{}", "fd00:10:96::{}"),
        "external": ("192.0.2.{}", "2001:db8:2::{}"),
        "balancer": ("198.51.100.{}", "2001:db8:51::{}"),
    }[kind]
    return (v6 if family is Family.IPV6 else v4).format(number)


class World:
    """Random objects and settings, and foreign rules."""

    def __init__(self, rng: random.Random, family: Family) -> None:
        self.family = family
        self._chance = rng
        numbers = range(1, 5)
        self.services = tuple(self._service(number) for number in numbers)
        self.slices = tuple(self._slice(number) for number in numbers)
        self.terms = self._context()

    def _service(self, number: int) -> Service:
        pick, some = self._chance.choice, self._chance.random
        kind = pick(["ClusterIP", "NodePort", "LoadBalancer", "LoadBalancer"])
        node_port = NODE_PORTS[number - 1] if kind != "ClusterIP" else 0
        return Service(
            "ns",
            f"web{number}",
            kind,
            (service_address(self.family, "cluster", number),),
            (Port("tcp", Protocol.TCP, 80, node_port), Port("udp", Protocol.UDP, 53, node_port)),
            external_ips=(service_address(self.family, "external", number),) if some() < 0.4 else (),
            load_balancer_ips=(service_address(self.family, "balancer", number),)
            if kind == "LoadBalancer"
            else (),
            source_ranges=self._source_ranges() if some() < 0.5 else (),
            internal_local=some() < 0.25,
            external_local=some() < 0.5,
            affinity_seconds=60 if some() < 0.25 else None,
        )

    def _source_ranges(self) -> tuple[str, ...]:
        """Return source ranges that contain the client, the node or one pod."""
        length = 64 if self.family is Family.IPV6 else 24
        whole = 128 if self.family is Family.IPV6 else 32
        return self._chance.choice(
            [
                (str_network(CLIENT[self.family], length),),
                (str_network(BEYOND[self.family], length),),
                (f"{PODS['pod1'][self.family]}/{whole}",),
            ]
        )

    def _slice(self, number: int) -> EndpointSlice:
        some = self._chance.random
        addresses = [
            *(
                (addresses[self.family], "node2" if name == "far" else HERE)
                for name, addresses in PODS.items()
            ),
            (NODE[self.family][0], HERE),
        ]
        chosen = self._chance.sample(addresses, self._chance.choice([0, 1, 1, 2, 3, 3, 4]))
        made = []
        for address, node in chosen:
            ready = some() < 0.8
            terminating = not ready and some() < 0.5
            made.append(Endpoint(address, ready, ready or some() < 0.5, terminating, node))
        ports = (EndpointPort("tcp", Protocol.TCP, 8080), EndpointPort("udp", Protocol.UDP, 9090))
        return EndpointSlice("ns", f"web{number}-x", f"web{number}", self.family, tuple(made), ports)

    def _context(self) -> RuleContext:
        pick = self._chance.choice
        detection: dict[str, Any] = pick(
            [
                {"clusterCIDR": "10.244.0.0/16,fd00:10:244::/48"},
                {"clusterCIDR": "10.244.0.0/16,fd00:10:244::/48"},
                {"detectLocalMode": "NodeCIDR"},
                {"detectLocalMode": "InterfaceNamePrefix", "detectLocal": {"interfaceNamePrefix": "pod"}},
                {"detectLocalMode": "BridgeInterface", "detectLocal": {"bridgeInterface": "pod2"}},
                {},
            ]
        )
        document: dict[str, Any] = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "iptables": {"masqueradeAll": self._chance.random() < 0.2},
            "nodePortAddresses": pick(
                [[], [], ["primary"], ["127.0.0.0/8", "203.0.113.0/24", "2001:db8:113::/64"]]
            ),
            **detection,
        }
        both = tuple(NODE[family][0] for family in Family)
        node = Node(HERE, both, ("10.244.1.0/24", "fd00:10:244:1::/64"))
        known = KernelFacts(addresses=("127.0.0.1", *NODE[self.family]), nfacct=False)
        return rule_context(load(document, {}).config, HERE, node, known, self.family)

    def restore_input(self) -> str:
        """Return the rules, sometimes with foreign ones."""
        cluster = Cluster()
        cluster.apply(Listed(Kind.SERVICE, self.services))
        cluster.apply(Listed(Kind.ENDPOINT_SLICE, self.slices))
        return full_input(render(cluster, self.terms), self.terms.options) + "".join(self._foreign_rules())

    def _foreign_rules(self) -> Iterator[str]:
        some, pod = self._chance.random, PODS["pod2"][self.family]
        if some() < 0.4:
            yield f"*filter\n-A FORWARD -d {pod} -m conntrack --ctstate NEW -j DROP\nCOMMIT\n"
        if some() < 0.4:
            reply = "-A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT"
            yield f"*filter\n:FORWARD DROP [0:0]\n{reply}\n-A FORWARD -i ext0 -j ACCEPT\nCOMMIT\n"
        if some() < 0.4:
            yield f"*filter\n-A INPUT ! -i lo -p tcp -m multiport --dports 8000:8999,9090 -s {pod} -j REJECT\nCOMMIT\n"
        if some() < 0.4:
            source = "fd00:10:244::/48" if self.family is Family.IPV6 else "10.244.0.0/16"
            yield f"*nat\n-A POSTROUTING -s {source} ! -o pod+ -m addrtype ! --dst-type LOCAL -j MASQUERADE\nCOMMIT\n"
        if some() < 0.4:
            port = "-p tcp -m tcp --dport 80"
            yield "*mangle\n:MINE - [0:0]\n-A PREROUTING -i far -g MINE\n"
            yield "-A PREROUTING -i far -j MARK --set-xmark 0x0/0x4000\n"
            yield f"-A MINE {port} -j MARK --or-mark 0x4000\nCOMMIT\n"

    def packets(self, number: int) -> list[PacketSpec]:
        """Return random packets to service addresses and others."""
        targets = [(service_address(self.family, "cluster", n), p) for n in range(1, 6) for p in (80, 53)]
        targets += [
            (address, port)
            for service in self.services
            for address in service.external_ips
            for port in (80, 53)
        ]
        targets += [
            (address, port)
            for service in self.services
            for address in service.load_balancer_ips * 2
            for port in (80, 53)
        ]
        ports = [service.ports[0].node_port for service in self.services if service.ports[0].node_port]
        targets += [(address, port) for port in ports for address in NODE[self.family]]
        targets += [(PODS["pod1"][self.family], 8080), (NODE[self.family][0], 9090)]
        found = {self._packet(*self._chance.choice(targets)) for _ in range(number)}
        if self.family is Family.IPV4:
            found |= {
                PacketSpec("node", "127.0.0.1", f"127.0.0.{n}", port, "tcp")
                for n, port in enumerate(ports, 1)
            }
        # Packets from a pod to itself never reach the node.
        return sorted(
            packet for packet in found if packet.place == "node" or packet.source != packet.destination
        )

    def _packet(self, destination: str, port: int) -> PacketSpec:
        place, source = self._chance.choice(list(sources(self.family)))
        protocol = {80: "tcp", 53: "udp"}.get(port) or self._chance.choice(["tcp", "udp"])
        return PacketSpec(place, source, destination, port, protocol)


def str_network(address: str, length: int) -> str:
    return (
        f"{address.rpartition('::')[0]}::/{length}"
        if ":" in address
        else f"{address.rpartition('.')[0]}.0/{length}"
    )


def host_of(network: LinkedNode, family: Family) -> NodeNetwork:
    with network.places["node"].entered():
        ways = tuple(NodeRoute(route.network, route.interface) for route in routes(family))
        return NodeNetwork(frozenset(local.address for local in local_addresses(family)), ways)


def traced(packet: PacketSpec, ruleset: Ruleset, host: NodeNetwork) -> PacketTrace:
    sent = Packet(packet.protocol, packet.source, packet.destination, packet.port, packet.place == "node")
    return trace_packet(ruleset, sent, host)


def possible_results(trace: PacketTrace, family: Family) -> set[str]:
    """Return all results the trace allows: server and client address, "refused", or "" for no answer."""
    outcomes = {
        "" if rejection.verdict is PacketVerdict.DROP else "refused" for rejection in trace.rejections
    }
    source = trace.packet.source
    for endpoint in trace.endpoints:
        who = owner(family, endpoint.address)
        seen = NODE[family] if endpoint.masquerade else (source,)
        outcomes |= {f"{who} {address}" for address in seen}
    if trace.verdict is PacketVerdict.PASS:
        who = owner(family, trace.packet.destination)
        seen = NODE[family] if trace.masquerade else (source,)
        # No server listens on a port that is no node port.
        at_node_port = who == "node" and trace.packet.port >= 30000
        outcomes |= {"refused"} if at_node_port else {f"{who} {address}" for address in seen}
    return outcomes


@pytest.mark.root
@pytest.mark.parametrize("seed", range(2))
def test_trace_predicts_the_kernel(
    network: LinkedNode, node_tables: Iptables, family: Family, seed: int
) -> None:
    """Endpoints, masquerading, rejections and drops; also with foreign rules."""
    host = host_of(network, family)
    verdicts: Counter[PacketVerdict] = Counter()
    for number in range(RULESETS):
        world = World(random.Random(f"{seed} {number}"), family)
        empty(node_tables)
        node_tables.restore(world.restore_input())
        ruleset = node_tables.save()
        traces = {packet: traced(packet, ruleset, host) for packet in world.packets(SHOTS)}
        predicted = {packet: possible_results(trace, family) for packet, trace in traces.items()}
        results = send_all(network, {packet: "" in outcomes for packet, outcomes in predicted.items()})
        wrong = {
            f"{packet.place} {packet.source} to {address_and_port(*packet[2:4])} {packet.protocol}": (
                f"trace says {sorted(predicted[packet])}, the kernel {result!r}"
            )
            for packet, result in results.items()
            if result not in predicted[packet]
        }
        assert not wrong, number
        verdicts.update(trace.verdict for trace in traces.values())
    assert verdicts.keys() == set(PacketVerdict), verdicts
    assert verdicts.total() > RULESETS * SHOTS * 0.7
