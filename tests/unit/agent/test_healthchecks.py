"""The health check ports of Services."""

import socket
from collections.abc import Iterator

import pytest

from pykubeproxy.agent.observe.healthchecks import Check, HealthChecks, Wanted, listening_hosts
from pykubeproxy.config import Config, load
from pykubeproxy.objects import EndpointPort, Family, Key, Node, Port, Protocol, Service
from tests.fakes.asking import TRANSPORT, ask, free_port, recorded
from tests.fakes.notes import Notes
from tests.objects import endpoint, service, slice_of
from tests.reports import ELSEWHERE, HERE, port_names, report

WEB = Key("default", "web")
LOCAL = {"type": "LoadBalancer", "external_local": True, "health_check_node_port": 32000}


class Proxy:
    """Health checks of a proxy whose own health is a switch."""

    def __init__(self) -> None:
        self.notes = Notes()
        self.healthy = True
        self.checks = HealthChecks(HERE, self.notes, lambda: self.healthy)


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    made = Proxy()
    yield made
    made.checks.close()


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.mark.parametrize(
    ("title", "count"), [("GET :32000/ (healthCheckNodePort)", 1), ("the same without a local endpoint", 0)]
)
def test_the_answer_is_kube_proxys(proxy: Proxy, port: int, title: str, count: int) -> None:
    """Status, headers and body are those recorded, on any path."""
    proxy.checks.apply({WEB: Check(port, count)}, ["127.0.0.1"])
    wanted = recorded(title)
    for path in ("/", "/healthz", "/some/path?query"):
        got = ask(port, path)
        assert (got.status, got.body) == (wanted.status, wanted.body)
        assert {k: v for k, v in got.headers.items() if k not in TRANSPORT} == wanted.headers


def test_an_ill_proxy_takes_no_traffic(proxy: Proxy, port: int) -> None:
    """Endpoints are of no use where rules are not kept up to date; the weight is told all the same."""
    proxy.checks.apply({WEB: Check(port, 3)}, ["127.0.0.1"])
    proxy.healthy = False
    got = ask(port)
    assert (got.status, got.headers["X-Load-Balancing-Endpoint-Weight"]) == (503, "3")
    assert '"serviceProxyHealthy": false' in got.body


def test_ports_come_and_go_with_services(proxy: Proxy, port: int) -> None:
    """A count changes in place; a port is closed with its Service and may be another's at once."""
    proxy.checks.apply({WEB: Check(port, 0)}, ["127.0.0.1"])
    assert ask(port).status == 503
    proxy.checks.apply({WEB: Check(port, 2)}, ["127.0.0.1"])
    assert ask(port).status == 200
    proxy.checks.apply({Key("default", "other"): Check(port, 1)}, ["127.0.0.1"])
    assert '"name": "other"' in ask(port).body
    proxy.checks.apply({}, ["127.0.0.1"])
    with pytest.raises(ConnectionRefusedError):
        ask(port)
    assert proxy.notes.events == []


def test_it_listens_only_where_it_is_told(proxy: Proxy, port: int) -> None:
    """One listener for each host; hosts may change."""
    checks = {WEB: Check(port, 1)}
    proxy.checks.apply(checks, ["127.0.0.2", "127.0.0.3"])
    assert ask(port, host="127.0.0.2").status == ask(port, host="127.0.0.3").status == 200
    with pytest.raises(ConnectionRefusedError):
        ask(port, host="127.0.0.1")
    proxy.checks.apply(checks, [""])
    assert ask(port, host="127.0.0.1").status == ask(port, host="::1").status == 200
    proxy.checks.apply(checks, ["127.0.0.3"])
    with pytest.raises(ConnectionRefusedError):
        ask(port, host="127.0.0.2")


def test_a_taken_port_is_told_once_and_tried_again(proxy: Proxy) -> None:
    """The Service gets an event, others are served, and the port is, once it is free."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port: int = other.getsockname()[1]
        second = free_port()
        checks = {WEB: Check(port, 1), Key("default", "zz"): Check(second, 1)}
        for _ in range(3):
            proxy.checks.apply(checks, ["127.0.0.1"])
            proxy.checks.retry()
        assert ask(second).status == 200
    (event,) = proxy.notes.events
    assert (event.kind, event.about, event.type, event.reason) == (
        "Service",
        WEB,
        "Warning",
        "FailedToStartServiceHealthcheck",
    )
    assert str(port) in event.note
    assert HERE in event.note
    assert "in use" in event.note
    proxy.checks.retry()
    assert ask(port).status == 200


def test_local_ready_addresses_are_counted() -> None:
    """An address counts once over all ports; unready, terminating and other nodes' endpoints do not."""
    ports = (Port("http", Protocol.TCP, 80), Port("https", Protocol.TCP, 443))
    web = service(ports=ports, **LOCAL)
    slices = slice_of(
        endpoint("10.1.0.1", node_name=HERE),
        endpoint("10.1.0.2", node_name=HERE),
        endpoint("10.1.0.3", node_name=HERE, ready=False),
        endpoint("10.1.0.4", node_name=HERE, terminating=True),
        endpoint("10.1.0.5", node_name=ELSEWHERE),
        ports=(EndpointPort("http", Protocol.TCP, 8080), EndpointPort("https", Protocol.TCP, 8443)),
    )
    wanted = Wanted()
    wanted.follow(report(web, slices))
    assert wanted.checks() == {Key("ns", "web"): Check(32000, 2)}


def test_a_pod_of_two_families_counts_once() -> None:
    """The families of a dual-stack Service have the same pods."""
    web = service(cluster_ip="10.96.0.10", **LOCAL)
    dual = Service(
        **{f: getattr(web, f) for f in web.__struct_fields__} | {"cluster_ips": ("10.96.0.10", "fd00::1")}
    )
    wanted = Wanted()
    wanted.follow(report(dual, slice_of(endpoint("10.1.0.1", node_name=HERE))))
    wanted.follow(report(dual, slice_of(endpoint("fd01::1", node_name=HERE)), family=Family.IPV6))
    assert wanted.checks() == {Key("ns", "web"): Check(32000, 1)}


def test_wanted_ports_follow_the_syncs() -> None:
    """A partial sync changes what it looked at; a Service that went or has the port no longer is dropped."""
    wanted = Wanted()
    a, b = service("a", **LOCAL), service("b", **{**LOCAL, "health_check_node_port": 32001})
    wanted.follow(report(a, b, full=True))
    assert wanted.checks() == {a.key: Check(32000, 0), b.key: Check(32001, 0)}
    wanted.follow(report(a, slice_of(endpoint("10.1.0.1", node_name=HERE), service="a")))
    assert wanted.checks() == {a.key: Check(32000, 1), b.key: Check(32001, 0)}
    wanted.follow(report(service("a")))
    wanted.follow(report(gone=port_names(b)))
    assert wanted.checks() == {}


def config(*networks: str) -> Config:
    """A configuration with these nodePortAddresses."""
    return load(None, {"nodeport-addresses": ",".join(networks)} if networks else {}).config


ADDRESSES = {
    Family.IPV4: ("127.0.0.1", "192.168.99.10", "10.0.0.7"),
    Family.IPV6: ("::1", "fd00:99::10"),
}
NODE = Node(HERE, ("192.168.99.10", "fd00:99::10"))


@pytest.mark.parametrize(
    ("networks", "hosts"),
    [
        ((), ("",)),
        (("0.0.0.0/0", "::/0"), ("",)),
        (("0.0.0.0/0",), ("",)),
        (("192.168.99.0/24",), ("192.168.99.10", "::")),
        (("192.168.99.0/24", "10.0.0.0/8"), ("10.0.0.7", "192.168.99.10", "::")),
        (("fd00:99::/64",), ("0.0.0.0", "fd00:99::10")),
        (("127.0.0.0/8", "fd00:98::/64"), ("127.0.0.1",)),
        (("primary",), ("192.168.99.10", "fd00:99::10")),
    ],
)
def test_hosts_are_where_node_ports_are_served(networks: tuple[str, ...], hosts: tuple[str, ...]) -> None:
    """All addresses of a family unless nodePortAddresses names some of it; then those this node has."""
    assert listening_hosts(config(*networks), NODE, ADDRESSES) == hosts


def test_a_family_that_is_not_served_is_not_listened_on() -> None:
    """Where the kernel lacks a family only the other one's addresses are meant."""
    assert listening_hosts(config(), NODE, {Family.IPV4: ()}) == ("0.0.0.0",)
