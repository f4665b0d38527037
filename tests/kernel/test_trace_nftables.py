"""trace predicts what the kernel does with tables of nftables: those of kube-proxy, and those of firewalls."""

import json
import random
from collections import Counter
from collections.abc import Iterator

import pytest

from pykubeproxy.inspect.connection import Directory, resolve
from pykubeproxy.inspect.node import NodeRules, NodeState, Origin
from pykubeproxy.inspect.packets.packet import NodeNetwork, Packet
from pykubeproxy.inspect.packets.rule_set import NOT_KNOWN
from pykubeproxy.inspect.routes import PacketVerdict
from pykubeproxy.inspect.targets import parse_destination, parse_source
from pykubeproxy.inspect.trace.question import trace_on_node
from pykubeproxy.kernel import Backend, Iptables, Runner, nftables
from pykubeproxy.nodes.live import live_flows
from pykubeproxy.objects import Family, Node, Protocol, address_and_port
from pykubeproxy.rules.nft_list import NftRuleset, read_nft_lists
from pykubeproxy.rules.ruleset import Ruleset
from tests.cases import FIREWALLD, NFT_FOLDER, as_restore_input, nft_list
from tests.kernel.node_network import (
    BEYOND,
    CLIENT,
    NODE,
    PODS,
    LinkedNode,
    PacketSpec,
    empty,
    send_all,
    sources,
)
from tests.kernel.test_trace_packets import World, host_of, possible_results
from tests.traces import PacketTrace, trace_packet

# Cases whose endpoints all listen on 8080, by the addresses of this network.
CASES = (
    "affinity",
    "clusterip-three",
    "dual-stack",
    "itp-local",
    "lb-local",
    "lb-source-ranges",
    "lb-source-ranges-noendpoints",
    "masquerade-all",
    "no-endpoints-lb",
    "nodeport",
    "nodeport-local",
)
# Cases that have Services with SCTP ports.
SCTP_CASES = [path.stem for path in sorted(NFT_FOLDER.glob("*.json")) if '"sctp"' in path.read_text()]
CLIENT_NETWORKS = ("203.0.113.", "2001:db8:113:")
RENAMED = {
    "10.244.2.12": "10.244.2.13",
    "10.244.3.13": "10.244.1.12",
    "fd00:10:244:2::12": "fd00:10:244:2::13",
}
# nft makes what others refer to first.
ORDER = ("table", "chain", "set", "map", "rule")
# What clients see of `reject with icmpx admin-prohibited`.
PROHIBITED = (
    "No route to host",
    "Permission denied",
    "[Errno 113] No route to host",
    "[Errno 13] Permission denied",
)
FIREWALLS, SHOTS = 8, 24


@pytest.fixture
def nft(network: LinkedNode, node_tables: Iptables) -> Iterator[Runner]:
    """Run nft on the node, whose tables are empty before and after the test."""
    yield node_tables.runner
    with network.places["node"].entered():
        for table in nftables.native_tables():
            node_tables.runner.run(("nft", "delete", "table", *table.split()))


def listed(network: LinkedNode, family: Family) -> NftRuleset:
    with network.places["node"].entered():
        return read_nft_lists(nftables.print_tables(nftables.native_tables()), "nft")[family]


def load(nft: Runner, text: str, *options: str) -> None:
    loaded = nft.run(("nft", *options, "-f", "-"), text)
    assert loaded.exit_code == 0, loaded.stderr
    nft.run(("conntrack", "-F"))


def wrong_traces(
    network: LinkedNode, family: Family, packets: list[PacketSpec], traces: dict[PacketSpec, PacketTrace]
) -> dict[str, str]:
    """Send packets; return those to which something else happens than was traced."""
    predicted = {packet: possible_results(trace, family) for packet, trace in traces.items()}
    for packet, trace in traces.items():
        # A pod of another node that reaches itself is masqueraded there only.
        if any(one.address == packet.source and not one.masquerade for one in trace.endpoints):
            predicted[packet].add("")
    sent = send_all(network, {packet: "" in predicted[packet] for packet in packets})
    results = {packet: "refused" if result in PROHIBITED else result for packet, result in sent.items()}
    return {
        f"{packet.place} {packet.source} to {address_and_port(*packet[2:4])} {packet.protocol}": (
            f"trace says {sorted(predicted[packet])}, the kernel {result!r}"
        )
        for packet, result in results.items()
        if result not in predicted[packet]
    }


def traced(packet: PacketSpec, saved: Ruleset, native: NftRuleset, host: NodeNetwork) -> PacketTrace:
    sent = Packet(packet.protocol, packet.source, packet.destination, packet.port, packet.place == "node")
    trace = trace_packet(saved, sent, host, native)
    assert not [step for step in trace.steps if NOT_KNOWN in step.reason]
    return trace


def service_packets(ruleset: NftRuleset, protocol: str, rng: random.Random) -> list[PacketSpec]:
    """Return packets to all addresses of Services, to other ports of them, and to a place beside them."""
    family = ruleset.family
    targets = [("10.96.255.250" if family is Family.IPV4 else "fd00:10:96::fffa", 80)]
    for key, one in ruleset.sets.items():
        for element in one.elements:
            match key.name, element:
                case "service-ips" | "no-endpoint-services", [
                    {"concat": [str(address), str(), int(port)]},
                    _,
                ]:
                    targets += [(address, port), (address, 9090)]
                case "service-nodeports" | "no-endpoint-nodeports", [{"concat": [str(), int(port)]}, _]:
                    targets += [(address, port) for address in NODE[family]]
    packets = [PacketSpec(*source, *target, protocol) for source in sources(family) for target in targets]
    packets = [one for one in packets if one.port != 443]
    return rng.sample(packets, min(len(packets), 2 * SHOTS))


def load_list(nft: Runner, text: str) -> None:
    """Load what `nft -j list ruleset` printed."""
    items = [item for item in json.loads(text)["nftables"] if "metainfo" not in item]
    load(nft, json.dumps({"nftables": sorted(items, key=lambda item: ORDER.index(next(iter(item))))}), "-j")


def here(text: str) -> str:
    """Return recorded rules with the addresses of this network."""
    for recorded, renamed in RENAMED.items():
        text = text.replace(recorded, renamed)
    return text


@pytest.mark.root
@pytest.mark.parametrize("backend", [Backend.NFT], ids=["nft"], indirect=True)
def test_flows_of_kube_proxy_in_nftables_mode(network: LinkedNode, nft: Runner) -> None:
    """Trace names the flow of a client of a Service with session affinity, and where the client is sent again."""
    family = Family.IPV4
    load_list(nft, here(nft_list("affinity").replace('"tcp"', '"udp"')))
    host = host_of(network, family)
    place, source = next(one for one in sources(family) if one[0] not in ("node", "outside"))
    send_all(network, {PacketSpec(place, source, "10.96.1.1", 80, "udp"): False})
    with network.places["node"].entered():
        flows = live_flows([family])
    rules = NodeRules(Ruleset(family, {}), nftables=listed(network, family))
    state = NodeState(Node(""), Origin("rules"), {family: rules}, host, flows=flows)
    ends = resolve(
        parse_source(source, ""), parse_destination("10.96.1.1:80", ""), Directory(""), protocol=Protocol.UDP
    )
    (found,) = trace_on_node(state, ends, Directory(""), with_flows=True).tracked or ()
    assert found.unread is None
    (flow,) = found.flows
    assert flow.source.startswith(f"{source}:")
    assert flow.problem is None
    (entry,) = found.affinity
    assert (entry.client, entry.endpoint) == (source, flow.endpoint)
    assert entry.seconds_left is not None
    assert 10000 < entry.seconds_left <= 10800


@pytest.mark.root
@pytest.mark.parametrize("backend", [Backend.NFT], ids=["nft"], indirect=True)
@pytest.mark.parametrize("protocol", ["tcp", "udp", "sctp"])
@pytest.mark.parametrize("case", CASES)
def test_kube_proxy_in_nftables_mode(
    network: LinkedNode, nft: Runner, family: Family, case: str, protocol: str
) -> None:
    """The recorded Services have TCP ports. With another protocol, only that differs in the rules."""
    load_list(nft, here(nft_list(case).replace('"tcp"', f'"{protocol}"')))
    native, host = listed(network, family), host_of(network, family)
    packets = service_packets(native, protocol, random.Random(case))
    traces = {packet: traced(packet, Ruleset(family, {}), native, host) for packet in packets}
    assert not wrong_traces(network, family, packets, traces)


@pytest.mark.root
@pytest.mark.parametrize("backend", [Backend.NFT], ids=["nft"], indirect=True)
@pytest.mark.parametrize("case", SCTP_CASES)
def test_sctp_in_both_modes(
    network: LinkedNode, node_tables: Iptables, nft: Runner, family: Family, case: str
) -> None:
    """Each recorded Service with an SCTP port, in nftables mode and then in iptables mode."""
    load_list(nft, nft_list(case))
    host = host_of(network, family)
    with network.places["node"].entered():
        read = read_nft_lists(nftables.print_tables(nftables.native_tables()), "nft")
    if family not in read:
        pytest.skip("the Services of this case have no address of this family")
    native = read[family]
    packets = [
        packet
        for packet in service_packets(native, "sctp", random.Random(case))
        # Nobody answers for external IPs in the network of the client.
        if packet.destination in NODE[family] or not packet.destination.startswith(CLIENT_NETWORKS)
    ]
    traces = {packet: traced(packet, Ruleset(family, {}), native, host) for packet in packets}
    assert not wrong_traces(network, family, packets, traces)
    nft.run(("nft", "flush", "ruleset"))
    node_tables.restore(as_restore_input(case, family))
    nft.run(("conntrack", "-F"))
    saved = node_tables.save()
    traces = {packet: traced(packet, saved, NftRuleset(family, {}, {}), host) for packet in packets}
    assert not wrong_traces(network, family, packets, traces)


@pytest.mark.root
@pytest.mark.parametrize("backend", [Backend.NFT], ids=["nft"], indirect=True)
def test_firewalld_lets_services_pass(
    network: LinkedNode, node_tables: Iptables, nft: Runner, family: Family
) -> None:
    """It accepts translated connections before its zones, which reject all others but SSH."""
    world = World(random.Random(7), family)
    node_tables.restore(world.restore_input())
    load(nft, FIREWALLD.read_text(), "-j")
    saved, native, host = node_tables.save(), listed(network, family), host_of(network, family)
    packets = world.packets(2 * SHOTS)
    traces = {packet: traced(packet, saved, native, host) for packet in packets}
    assert not wrong_traces(network, family, packets, traces)
    rules = {step.rule for trace in traces.values() for step in trace.steps if step.matched}
    assert {"ct status dnat accept", "reject with icmpx admin-prohibited"} <= rules


class Firewall:
    """Random tables of nftables that drop, reject and translate some packets."""

    def __init__(self, rng: random.Random, family: Family) -> None:
        self._pick = rng.choice
        self._ip = "ip6" if family is Family.IPV6 else "ip"
        self._width = "ipv6_addr" if family is Family.IPV6 else "ipv4_addr"
        self._family = family
        self._addresses = [
            CLIENT[family],
            BEYOND[family],
            *NODE[family],
            *(pod[family] for pod in PODS.values()),
        ]

    def text(self) -> str:
        ip, pick = self._ip, self._pick
        blocked = ", ".join({pick(self._addresses) for _ in range(2)})
        pairs = ", ".join({f"{pick(self._addresses)} . {pick([80, 8080, 9090])}" for _ in range(3)})
        verdicts = ", ".join(
            f"{port} : {pick(['accept', 'drop', 'jump some', 'goto some'])}" for port in (80, 8080)
        )
        to = PODS["pod2"][self._family]
        target = f"[{to}]:8080" if self._family is Family.IPV6 else f"{to}:8080"
        return f"""
            table inet fw {{
              set blocked {{ type {self._width}; elements = {{ {blocked} }}; }}
              set pairs {{ type {self._width} . inet_service; elements = {{ {pairs} }}; }}
              map verdicts {{ type inet_service : verdict; }}
              chain some {{
                {self._rule()}
                {self._rule()}
              }}
              chain early {{
                type filter hook prerouting priority {pick(["mangle", "dstnat - 5", "dstnat + 5"])};
                ct state new {self._rule("drop")}
                {ip} saddr @blocked meta mark set meta mark | 0x10
              }}
              chain forward {{
                type filter hook forward priority {pick(["filter - 1", "filter + 1"])}; policy {pick(["accept", "drop"])};
                ct state vmap {{ established : accept, related : accept, invalid : drop }}
                ct status dnat {pick(["accept", "jump some"])}
                {self._rule()}
                {self._rule()}
                ct state new accept
              }}
              chain input {{
                type filter hook input priority filter - 1; policy {pick(["accept", "drop"])};
                iifname "lo" accept
                ct state established,related accept
                icmpv6 type {{ nd-neighbor-solicit, nd-neighbor-advert, nd-router-advert }} accept
                tcp dport vmap {{ {verdicts} }}
                {self._rule()}
                meta l4proto {{ tcp, udp }} accept
              }}
              chain output {{
                type filter hook output priority filter + 1;
                ct state new {self._rule("reject")}
              }}
              chain nat {{
                type nat hook prerouting priority {pick(["dstnat - 3", "dstnat + 3"])};
                {ip} saddr @blocked tcp dport 9090 dnat {ip} to {target}
                {ip} daddr {NODE[self._family][0]} tcp dport 8080 redirect to :9090
              }}
              chain post {{
                type nat hook postrouting priority srcnat - 5;
                {pick(["oifname", "iifname"])} "pod*" meta mark & 0x10 == 0x10 masquerade
              }}
            }}
            """

    def _rule(self, end: str = "") -> str:
        ip, pick = self._ip, self._pick
        condition = pick(
            [
                f"{ip} saddr @blocked",
                f"{ip} saddr . tcp dport @pairs",
                f"{ip} daddr . tcp dport @pairs",
                f"{ip} saddr != @blocked udp dport 53",
                'iifname { "pod*", "ext0" } th dport { 80, 9000-9999 }',
                'oifname "pod1"',
                "meta mark & 0x10 != 0",
                f"fib daddr type local {ip} daddr != {NODE[self._family][0]}",
                "tcp flags & (syn | ack) == syn tcp dport > 8080",
                "ct state new tcp dport 8080",
            ]
        )
        return f"{condition} counter {end or pick(['drop', 'reject', 'accept', 'return', 'reject with icmpx port-unreachable'])}"


@pytest.mark.root
@pytest.mark.parametrize("seed", range(2))
def test_firewalls_beside_iptables(
    network: LinkedNode, node_tables: Iptables, nft: Runner, family: Family, seed: int
) -> None:
    """A verdict of either counts, and the first translation at a hook."""
    host, verdicts = host_of(network, family), Counter[PacketVerdict]()
    for number in range(FIREWALLS):
        rng = random.Random(f"{seed} {number}")
        world = World(rng, family)
        empty(node_tables)
        node_tables.restore(world.restore_input())
        load(nft, f"table inet fw\ndelete table inet fw\n{Firewall(rng, family).text()}")
        saved, native = node_tables.save(), listed(network, family)
        packets = world.packets(SHOTS)
        traces = {packet: traced(packet, saved, native, host) for packet in packets}
        assert not wrong_traces(network, family, packets, traces), number
        verdicts.update(trace.verdict for trace in traces.values())
    assert verdicts.keys() == set(PacketVerdict), verdicts
