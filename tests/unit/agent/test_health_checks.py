"""The health check ports of Services, and the share of each namespace in them."""

import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from pykubeproxy.agent.observe.health_checks import (
    DesiredChecks,
    HealthCheck,
    HealthChecks,
    fair_share,
    listening_hosts,
)
from pykubeproxy.config import Config, load
from pykubeproxy.objects import EndpointPort, Family, Key, Node, Port, Protocol, Service
from pykubeproxy.pages.servicez import Quarantined
from tests.fakes.http_client import TRANSPORT, fetch, free_port, recorded_response
from tests.fakes.recorder import FakeRecorder
from tests.objects import endpoint, service, slice_of
from tests.reports import ELSEWHERE, HERE, port_names, report

WEB = Key("default", "web")
LOCAL: dict[str, Any] = {"type": "LoadBalancer", "external_local": True, "health_check_node_port": 32000}


class Proxy:
    """Health checks of a proxy whose health is a variable."""

    def __init__(self, open_files: int = 1024) -> None:
        self.notes = FakeRecorder()
        self.healthy = True
        self.checks = HealthChecks(load(None, {}).config, Family, self.notes, lambda: self.healthy)
        self.checks.serve(open_files)


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
def test_responses_equal_kube_proxys(proxy: Proxy, port: int, title: str, count: int) -> None:
    """Status, headers and body equal the recorded ones, on any path."""
    proxy.checks.apply({WEB: HealthCheck(port, count)}, ["127.0.0.1"])
    expected = recorded_response(title)
    for path in ("/", "/healthz", "/some/path?query"):
        got = fetch(port, path)
        assert (got.status, got.body) == (expected.status, expected.body)
        assert {k: v for k, v in got.headers.items() if k not in TRANSPORT} == expected.headers


def test_an_unhealthy_proxy_fails_the_checks(proxy: Proxy, port: int) -> None:
    """The weight is still reported."""
    proxy.checks.apply({WEB: HealthCheck(port, 3)}, ["127.0.0.1"])
    proxy.healthy = False
    got = fetch(port)
    assert (got.status, got.headers["X-Load-Balancing-Endpoint-Weight"]) == (503, "3")
    assert '"serviceProxyHealthy": false' in got.body


def test_ports_open_and_close_with_services(proxy: Proxy, port: int) -> None:
    """Counts change in place; a closed port may serve another Service at once."""
    proxy.checks.apply({WEB: HealthCheck(port, 0)}, ["127.0.0.1"])
    assert fetch(port).status == 503
    proxy.checks.apply({WEB: HealthCheck(port, 2)}, ["127.0.0.1"])
    assert fetch(port).status == 200
    proxy.checks.apply({Key("default", "other"): HealthCheck(port, 1)}, ["127.0.0.1"])
    assert '"name": "other"' in fetch(port).body
    proxy.checks.apply({}, ["127.0.0.1"])
    with pytest.raises(ConnectionRefusedError):
        fetch(port)
    assert proxy.notes.events == []


def test_only_the_given_hosts_are_bound(proxy: Proxy, port: int) -> None:
    """One listener per host; hosts may change."""
    checks = {WEB: HealthCheck(port, 1)}
    proxy.checks.apply(checks, ["127.0.0.2", "127.0.0.3"])
    assert fetch(port, host="127.0.0.2").status == fetch(port, host="127.0.0.3").status == 200
    with pytest.raises(ConnectionRefusedError):
        fetch(port, host="127.0.0.1")
    proxy.checks.apply(checks, [""])
    assert fetch(port, host="127.0.0.1").status == fetch(port, host="::1").status == 200
    proxy.checks.apply(checks, ["127.0.0.3"])
    with pytest.raises(ConnectionRefusedError):
        fetch(port, host="127.0.0.2")


def test_a_port_in_use_is_reported_once_and_retried(proxy: Proxy) -> None:
    """The Service gets one event; other ports are served."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port: int = other.getsockname()[1]
        second = free_port()
        checks = {WEB: HealthCheck(port, 1), Key("default", "zz"): HealthCheck(second, 1)}
        for _ in range(3):
            proxy.checks.apply(checks, ["127.0.0.1"])
            proxy.checks.retry()
        assert fetch(second).status == 200
    (event,) = proxy.notes.events
    assert (event.kind, event.regarding, event.type, event.reason) == (
        "Service",
        WEB,
        "Warning",
        "FailedToStartServiceHealthcheck",
    )
    assert str(port) in event.note
    assert HERE in event.note
    assert "in use" in event.note
    proxy.checks.retry()
    assert fetch(port).status == 200


def test_ports_are_limited_by_open_files() -> None:
    """One log line; an event for each Service without a port, some per period; the next one in turn gets a free port."""
    proxy = Proxy(open_files=36)
    ports: set[int] = set()
    while len(ports) < 61:
        ports.add(free_port())
    keys = (Key("victim", "web"), *(Key("crowd", f"s{number:02}") for number in range(60)))
    served = [*zip(keys, ports, strict=True)]
    checks = {key: HealthCheck(port, 1) for key, port in served}

    def answering() -> list[Key]:
        return [key for key, port in served if key in checks and is_open(port)]

    try:
        with capture_logs() as lines:
            for _ in range(3):
                proxy.checks.apply(checks, ["127.0.0.1"])
            before = answering()
            assert before[0] == Key("victim", "web")
            assert len(before) == 17
            proxy.checks.retry()
        assert [event.regarding for event in proxy.notes.events] == [
            key for key, _ in served if key not in before
        ]
        assert "raise its limit of open files" in proxy.notes.events[0].note
        (line,) = lines
        assert (line["event"], line["served"], line["unserved"]) == ("health check ports limited", 17, 44)
        del checks[before[-1]]
        proxy.checks.apply(checks, ["127.0.0.1"])
        assert len(answering()) == 17
        assert set(before[:-1]) < set(answering())
        with capture_logs() as lines:
            proxy.checks.apply({WEB: HealthCheck(free_port(), 1)}, ["127.0.0.1"])
            proxy.checks.retry()
        assert [line["event"] for line in lines] == ["health check ports no longer limited"]
    finally:
        proxy.checks.close()


def is_open(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return False
    return True


def test_local_ready_addresses_are_counted() -> None:
    """An address counts once over all ports; unready, terminating and remote endpoints do not."""
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
    desired = DesiredChecks()
    desired.sync_succeeded(report(web, slices))
    assert desired.checks() == {Key("ns", "web"): HealthCheck(32000, 2)}


def test_a_dual_stack_pod_counts_once() -> None:
    """The families of a dual-stack Service have the same pods."""
    web = service(cluster_ip="10.96.0.10", **LOCAL)
    dual = Service(
        **{f: getattr(web, f) for f in web.__struct_fields__} | {"cluster_ips": ("10.96.0.10", "fd00::1")}
    )
    desired = DesiredChecks()
    desired.sync_succeeded(report(dual, slice_of(endpoint("10.1.0.1", node_name=HERE))))
    desired.sync_succeeded(report(dual, slice_of(endpoint("fd01::1", node_name=HERE)), family=Family.IPV6))
    assert desired.checks() == {Key("ns", "web"): HealthCheck(32000, 1)}


def test_checks_follow_syncs() -> None:
    """A partial sync changes only its own Services; a removed Service or port is dropped."""
    desired = DesiredChecks()
    a, b = service("a", **LOCAL), service("b", **{**LOCAL, "health_check_node_port": 32001})
    desired.sync_succeeded(report(a, b, full=True))
    assert desired.checks() == {a.key: HealthCheck(32000, 0), b.key: HealthCheck(32001, 0)}
    desired.sync_succeeded(report(a, slice_of(endpoint("10.1.0.1", node_name=HERE), service="a")))
    assert desired.checks() == {a.key: HealthCheck(32000, 1), b.key: HealthCheck(32001, 0)}
    desired.sync_succeeded(report(service("a")))
    desired.sync_succeeded(report(gone=port_names(b)))
    assert desired.checks() == {}


def test_a_quarantined_service_has_no_endpoints() -> None:
    """Load balancers then prefer other nodes."""
    desired = DesiredChecks()
    done = report(service(**LOCAL), slice_of(endpoint("10.1.0.1", node_name=HERE)))
    desired.sync_succeeded(done)
    assert desired.checks() == {Key("ns", "web"): HealthCheck(32000, 1)}
    (item,) = done.resolved
    quarantined = Quarantined.from_port(Family.IPV4, item.port.name, "Invalid argument", 1.0)
    desired.sync_succeeded(msgspec.structs.replace(done, quarantined=(quarantined,)))
    assert desired.checks() == {Key("ns", "web"): HealthCheck(32000, 0)}


def config(*networks: str) -> Config:
    """Return a configuration with these nodePortAddresses."""
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
        (("primary", "localhost"), ("127.0.0.1", "192.168.99.10", "::1", "fd00:99::10")),
        (("all",), ("",)),
    ],
)
def test_hosts_follow_node_port_addresses(networks: tuple[str, ...], hosts: tuple[str, ...]) -> None:
    """All addresses of a family, or those of this node that nodePortAddresses contains."""
    assert listening_hosts(config(*networks), NODE, ADDRESSES) == hosts


@pytest.mark.parametrize(
    ("addresses", "hosts"),
    [
        (("192.168.99.10",), ("192.168.99.10", "::")),
        (("fd00:99::10",), ("0.0.0.0", "fd00:99::10")),
        ((), ("",)),
    ],
)
def test_primary_means_all_addresses_in_a_family_in_which_the_node_has_none(
    addresses: tuple[str, ...], hosts: tuple[str, ...]
) -> None:
    """As for node ports, and as in kube-proxy: a load balancer must reach the port where the Service is served."""
    assert listening_hosts(config("primary"), Node(HERE, addresses), ADDRESSES) == hosts


def test_an_unavailable_family_is_not_bound() -> None:
    """Only addresses of served families are bound."""
    assert listening_hosts(config(), NODE, {Family.IPV4: ()}) == ("0.0.0.0",)


def services_of(namespace: str, number: int) -> set[Key]:
    return {Key(namespace, f"s{position:04}") for position in range(number)}


def test_all_get_a_place_if_there_are_enough() -> None:
    everything = services_of("a", 80) | services_of("b", 2)
    assert fair_share(everything, set(), 92) == everything


def test_holders_keep_their_places() -> None:
    """A tenant with many Services takes none of them away, nor can one push out its own."""
    held = services_of("victim", 60)
    now = fair_share(held | services_of("attacker", 1100), held, 100)
    assert held < now
    assert fair_share(services_of("attacker", 2000) | held, now, 100) >= now


def test_a_namespace_leaves_places_for_others() -> None:
    """One that comes later finds a place, and so do many of them."""
    held = fair_share(services_of("attacker", 1100), set(), 90)
    assert len(held) == 80
    late = {Key(f"late{number}", "web") for number in range(10)}
    assert fair_share(held | services_of("attacker", 1100) | late, held, 90) == held | late


def test_places_are_given_in_turn() -> None:
    """All at once, as after a restart, the namespace with fewest comes first."""
    chosen = fair_share(services_of("attacker", 1100) | services_of("b", 20) | services_of("c", 5), set(), 60)
    assert services_of("b", 20) | services_of("c", 5) <= chosen
    assert len(chosen) <= 60


def test_fewer_places_are_shared_anew() -> None:
    """When the node gets more addresses, each Service needs more places."""
    held = services_of("attacker", 70) | services_of("victim", 3)
    assert services_of("victim", 3) <= fair_share(held, held, 20)


keys = st.builds(Key, st.sampled_from("abcd"), st.integers(0, 40).map(str))


@given(st.sets(keys), st.sets(keys), st.integers(0, 60))
def test_places_are_never_exceeded_and_choices_are_stable(
    candidates: set[Key], holders: set[Key], places: int
) -> None:
    chosen = fair_share(candidates, holders, places)
    assert chosen <= candidates
    assert len(chosen) <= places
    assert fair_share(candidates, chosen, places) == chosen
    if places:
        assert bool(chosen) is bool(candidates)
