"""No external address of a Service takes over the API server's address or the agent's pages."""

from typing import Any

import pytest

from pykubeproxy.config import load
from pykubeproxy.objects import EndpointPort, EndpointSlice, Family, Node, Port, Protocol, Service
from pykubeproxy.rules.context import KernelFacts, RuleContext, rule_context
from pykubeproxy.rules.ownership import release_input
from pykubeproxy.rules.render import full_input, render
from pykubeproxy.services.ports import ApiServers, Reserved, ServicePort, SkippedIP, service_ports
from tests.fakes.iptables import FakeIptables
from tests.objects import cluster_of, endpoint, service, slice_of
from tests.strategies import NODE

SERVER = ("203.0.113.7", 6443)
CONFIG = load(None, {"cluster-cidr": "10.244.0.0/16"}).config
TCP, UDP = Protocol.TCP, Protocol.UDP


def context(*servers: tuple[str, int], family: Family = Family.IPV4) -> RuleContext:
    return rule_context(CONFIG, NODE, None, KernelFacts(), family, frozenset(servers))


def ports(it: Service, servers: ApiServers, family: Family = Family.IPV4) -> tuple[ServicePort, ...]:
    found = service_ports(it, family, reserved=dict.fromkeys(servers, Reserved.API_SERVER))
    assert isinstance(found, tuple)
    return found


def rules_to(address: str, port: int, on: RuleContext, *objects: Service | EndpointSlice) -> list[str]:
    """Return the rules of all chains that match this address and port."""
    rules = (rule for chain in render(cluster_of(*objects), on).chains.values() for rule in chain)
    return [rule for rule in rules if f"-d {address}/" in rule and f"--dport {port}" in rule]


@pytest.mark.parametrize("field", ["external_ips", "load_balancer_ips"])
def test_only_the_address_and_tcp_port_of_the_server_are_skipped(field: str) -> None:
    """Other protocols, other ports, and other addresses stay."""
    numbers = (Port("a", TCP, 6443), Port("b", UDP, 6443), Port("c", TCP, 443))
    addresses: dict[str, Any] = {field: ("203.0.113.7", "203.0.113.8")}
    it = service(ports=numbers, **addresses)
    first, *others = ports(it, frozenset({SERVER}))
    assert (getattr(first, field), first.skipped_ips) == (
        ("203.0.113.8",),
        (SkippedIP("203.0.113.7", Reserved.API_SERVER),),
    )
    assert [(getattr(port, field), port.skipped_ips) for port in others] == [
        (("203.0.113.7", "203.0.113.8"), ())
    ] * 2


@pytest.mark.parametrize("endpoints", [("10.244.0.5",), ()], ids=["endpoints", "none"])
@pytest.mark.parametrize("ranges", [(), ("10.0.0.0/8",)], ids=["open", "source-ranges"])
@pytest.mark.parametrize("local", [False, True], ids=["cluster", "local"])
def test_no_rule_of_any_kind_matches_the_server(
    endpoints: tuple[str, ...], ranges: tuple[str, ...], local: bool
) -> None:
    """Neither one that redirects, nor one that rejects or drops; without the server's address, each kind exists."""
    it = service(
        type="LoadBalancer",
        ports=(Port("http", TCP, 6443),),
        external_ips=("203.0.113.7",),
        load_balancer_ips=("203.0.113.7",),
        source_ranges=ranges,
        external_local=local,
    )
    slices = [slice_of(*(endpoint(address, node_name="elsewhere") for address in endpoints))]
    assert rules_to(*SERVER, context(), it, *slices)
    assert not rules_to(*SERVER, context(SERVER), it, *slices)
    assert rules_to("10.96.0.10", 6443, context(SERVER), it, *slices)


def test_a_cluster_ip_is_never_skipped() -> None:
    """A pod's client reaches the API server at the cluster IP of default/kubernetes, whose rules it needs."""
    it = Service("default", "kubernetes", cluster_ips=("10.96.0.1",), ports=(Port("https", TCP, 443),))
    slices = EndpointSlice(
        "default",
        "kubernetes",
        "kubernetes",
        Family.IPV4,
        slice_of("192.168.99.10").endpoints,
        slice_of("192.168.99.10", ports=()).ports,
    )
    at_cluster_ip = context(("10.96.0.1", 443))
    assert rules_to("10.96.0.1", 443, at_cluster_ip, it, slices)
    assert rules_to("10.96.0.1", 443, at_cluster_ip, it, slices) == rules_to(
        "10.96.0.1", 443, context(), it, slices
    )


def test_an_external_ip_cannot_take_over_a_cluster_ip_that_the_client_uses() -> None:
    """Not even while default/kubernetes has no endpoints."""
    it = service(ports=(Port("http", TCP, 443),), external_ips=("10.96.0.1",))
    assert not rules_to("10.96.0.1", 443, context(("10.96.0.1", 443)), it, slice_of("10.244.0.5"))


@pytest.mark.parametrize("spelling", ["fd00::7", "FD00:0:0::7", "fd00::7%eth0"])
def test_ipv6_addresses_are_compared_by_value(spelling: str) -> None:
    it = service(cluster_ip="fd96::10", ports=(Port("http", TCP, 6443),), external_ips=("fd00::7",))
    slices = slice_of("fd00:244::5")
    ipv6 = Family.IPV6
    assert rules_to("fd00::7", 6443, context(family=ipv6), it, slices)
    assert not rules_to("fd00::7", 6443, context((spelling, 6443), family=ipv6), it, slices)


def test_the_context_of_a_family_has_its_addresses_only() -> None:
    """Both families of a host name with several addresses; an IPv4-mapped address is one of IPv4."""
    found = (SERVER, ("203.0.113.8", 6443), ("fd00::7", 6443), ("::ffff:203.0.113.9", 443), ("name", 1))
    assert servers_of(context(*found)) == {SERVER, ("203.0.113.8", 6443), ("203.0.113.9", 443)}
    assert servers_of(context(*found, family=Family.IPV6)) == {("fd00::7", 6443)}


def servers_of(it: RuleContext) -> ApiServers:
    return frozenset(place for place, reason in it.reserved.items() if reason is Reserved.API_SERVER)


@pytest.mark.usefixtures("small_trees")
@pytest.mark.parametrize("endpoints", [("10.244.0.5",), ()], ids=["endpoints", "none"])
@pytest.mark.parametrize("dispatch", ["flat", "tree"])
def test_rules_of_an_earlier_proxy_are_released(endpoints: tuple[str, ...], dispatch: str) -> None:
    """All those of external addresses at the server's port, and no others; a second time there are none."""
    config = load(None, {"dispatch": dispatch}).config
    numbers = (Port("http", TCP, 6443), Port("other", TCP, 80), Port("udp", UDP, 6443))
    addresses = ("203.0.113.7", "203.0.113.8")
    it = service(
        type="LoadBalancer",
        ports=numbers,
        external_ips=addresses,
        load_balancer_ips=addresses,
        source_ranges=("10.0.0.0/8",),
    )
    at_cluster_ip = service("kubernetes", cluster_ip="10.96.0.1", ports=(Port("http", TCP, 443),))
    cluster = cluster_of(it, at_cluster_ip, slice_of(*endpoints), slice_of(*endpoints, service="kubernetes"))
    tables, on = FakeIptables(), rule_context(config, NODE, None, KernelFacts(nfacct=False), Family.IPV4)
    tables.restore(full_input(render(cluster, on), on.options))
    before = list_rules(tables)
    servers = frozenset({SERVER, ("10.96.0.1", 443)})
    tables.restore(release_input(tables.save(), servers))
    deleted = [rule for rule in before if rule not in list_rules(tables)]
    assert deleted
    assert deleted == [
        rule for rule in before if "-d 203.0.113.7/" in rule and "-p tcp" in rule and "--dport 6443" in rule
    ]
    assert release_input(tables.save(), servers) == ""


def list_rules(tables: FakeIptables) -> list[str]:
    return [f"{key} {rule}" for key, rules in tables.save().chains.items() for rule in rules]


ADDRESSES = ("192.0.2.1", "203.0.113.1", "fd00::1", "fd00::2")


def served(
    family: Family, ports: dict[int, Protocol], node: bool = True, **flags: str
) -> set[tuple[str, int]]:
    """Return where rules serve a Service with these ports that claims all addresses of the node, and one more."""
    four = family is Family.IPV4
    claimed = tuple(it for it in (*ADDRESSES, "203.0.113.99", "fd00::99") if (":" in it) is not four)
    numbers = tuple(Port(f"p{number}", protocol, number) for number, protocol in ports.items())
    it = service(cluster_ip="10.96.0.10" if four else "fd96::10", ports=numbers, external_ips=claimed)
    targets = tuple(EndpointPort(f"p{number}", protocol, 8080) for number, protocol in ports.items())
    cluster = cluster_of(it, slice_of("10.244.0.5" if four else "fd00:244::5", ports=targets))
    here = Node(NODE, addresses=ADDRESSES) if node else None
    context = rule_context(load(None, flags).config, NODE, here, KernelFacts(), family)
    rules = [rule for chain in render(cluster, context).chains.values() for rule in chain]
    length = 32 if four else 128
    return {
        (address, number)
        for address in claimed
        for number in ports
        if any(f"-d {address}/{length}" in rule and f"--dport {number} " in rule for rule in rules)
    }


@pytest.mark.parametrize("family", Family)
def test_the_health_port_at_addresses_of_the_node_is_skipped(family: Family) -> None:
    """Other ports, and other addresses, are served. So is the metrics port: by default it is only on loopback."""
    own = [it for it in ADDRESSES if (":" in it) is (family is Family.IPV6)]
    other = "203.0.113.99" if family is Family.IPV4 else "fd00::99"
    ports = (10249, 10256, 10257)
    expected = {(address, port) for address in (*own, other) for port in ports} - {(it, 10256) for it in own}
    assert served(family, dict.fromkeys(ports, TCP)) == expected


def test_other_protocols_are_served() -> None:
    assert ("192.0.2.1", 10256) in served(Family.IPV4, {10256: UDP})


@pytest.mark.parametrize(
    ("flags", "skipped"),
    [
        ({"metrics-bind-address": "0.0.0.0:10249"}, {("192.0.2.1", 10249), ("203.0.113.1", 10249)}),
        ({"metrics-bind-address": "203.0.113.1:9000"}, {("203.0.113.1", 9000)}),
        ({"healthz-bind-address": "[::]:9001"}, {("192.0.2.1", 9001), ("203.0.113.1", 9001)}),
        ({"healthz-bind-address": "203.0.113.99:9001"}, {("203.0.113.99", 9001)}),
        ({"healthz-bind-address": "127.0.0.1:9001"}, set()),
        ({"healthz-bind-address": ""}, None),
    ],
)
def test_the_configured_addresses_and_ports_are_skipped(
    flags: dict[str, Any], skipped: set[tuple[str, int]] | None
) -> None:
    """An unspecified address means those of the node, of both families."""
    ports = dict.fromkeys((9000, 9001, 10249), TCP)
    everything = {(it, port) for it in (*ADDRESSES[:2], "203.0.113.99") for port in ports}
    assert everything - served(Family.IPV4, ports, **flags) == (skipped or set())


def test_a_bind_address_is_an_address_of_the_node() -> None:
    """While the Node is not known."""
    flags = {"bind-address": "203.0.113.1"}
    found = served(Family.IPV4, {10256: TCP}, node=False, **flags)
    assert found == {("192.0.2.1", 10256), ("203.0.113.99", 10256)}
