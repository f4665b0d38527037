"""No external address of a Service takes over the address at which the agent reaches its API server."""

import pytest

from pykubeproxy.config import load
from pykubeproxy.objects import EndpointSlice, Family, Port, Protocol, Service, Updated
from pykubeproxy.rules.context import KernelFacts, RuleContext, rule_context
from pykubeproxy.rules.release import release_input
from pykubeproxy.rules.render import full_input, render
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.ports import ApiServers, Reserved, ServicePort, SkippedIP, service_ports
from tests.fakes.iptables import FakeIptables
from tests.objects import endpoint, service, slice_of
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
    cluster = Cluster()
    for object_ in objects:
        cluster.apply(Updated(object_))
    rules = (rule for chain in render(cluster, on).chains.values() for rule in chain)
    return [rule for rule in rules if f"-d {address}/" in rule and f"--dport {port}" in rule]


@pytest.mark.parametrize("field", ["external_ips", "load_balancer_ips"])
def test_only_the_address_and_tcp_port_of_the_server_are_skipped(field: str) -> None:
    """Other protocols, other ports, and other addresses stay."""
    numbers = (Port("a", TCP, 6443), Port("b", UDP, 6443), Port("c", TCP, 443))
    it = service(ports=numbers, **{field: ("203.0.113.7", "203.0.113.8")})
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
    cluster = Cluster()
    for object_ in (it, at_cluster_ip, slice_of(*endpoints), slice_of(*endpoints, service="kubernetes")):
        cluster.apply(Updated(object_))
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
