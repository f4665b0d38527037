"""Names of pods, Services and nodes in place of addresses."""

from typing import Any

import msgspec
import pytest

from pykubeproxy.inspect.connection import (
    Directory,
    LocationKind,
    ResolvedConnection,
    Unresolved,
    resolve,
)
from pykubeproxy.inspect.targets import (
    InvalidTarget,
    Target,
    TargetKind,
    parse_destination,
    parse_service,
    parse_source,
)
from pykubeproxy.objects import EndpointPort, Family, Key, Node, Port, Protocol
from pykubeproxy.objects.pods import Pod
from tests.objects import endpoint, service, slice_of

WEB = service(
    cluster_ips=("10.96.0.10", "fd00:96::10"),
    ports=(Port("http", Protocol.TCP, 80, 30080), Port("metrics", Protocol.TCP, 9090)),
)
DNS = service("dns", ports=(Port("dns", Protocol.UDP, 53), Port("dns-tcp", Protocol.TCP, 53)))
OBJECTS = Directory(
    "in objects.yaml",
    services=(
        WEB,
        DNS,
        service("lb", external_ips=("192.0.2.9",), load_balancer_ips=("192.0.2.1", "2001:db8::1")),
        service("inner"),
        service("db", cluster_ips=(), headless=True),
        service("elsewhere", cluster_ips=(), type="ExternalName"),
        service("other", proxy_name="cilium"),
    ),
    slices=(
        slice_of(
            endpoint("10.244.1.5", pod="web-1", node_name="n1"),
            endpoint("10.244.2.6", pod="web-2", node_name="n2", ready=False),
            endpoint("192.168.0.1", pod="on-host", node_name="n1"),
        ),
        slice_of(endpoint("fd00:244::5", pod="web-1", node_name="n1")),
        slice_of(endpoint("10.244.1.8", pod="db-0", node_name="n1"), service="db"),
    ),
    nodes=(
        Node("n1", ("192.168.0.1", "fd00::1"), ("10.244.1.0/24",)),
        Node("n2", ("192.168.0.2",), ("10.244.2.0/24",)),
        Node("bare"),
    ),
    listed_pods=(
        Pod("ns", "client", ("10.244.2.9",), "n2", ports=(EndpointPort("", Protocol.UDP, 5353),)),
        Pod("ns", "done", ("10.244.2.10",), "n2", phase="Succeeded"),
        Pod("ns", "pending", phase="Pending"),
    ),
    pod_networks=("10.244.0.0/16",),
)


def resolved(
    source: str, destination: str, directory: Directory = OBJECTS, **options: object
) -> ResolvedConnection:
    start, end = parse_source(source, "ns"), parse_destination(destination, "ns")
    return resolve(start, end, directory, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("pod/a/web-1", Target(TargetKind.POD, "web-1", "a")),
        ("pods/web.1", Target(TargetKind.POD, "web.1", "ns")),
        ("node/n1.example", Target(TargetKind.NODE, "n1.example")),
        ("10.1.2.3", Target(TargetKind.ADDRESS, "10.1.2.3")),
        ("[FD00:0::1]", Target(TargetKind.ADDRESS, "fd00::1")),
    ],
)
def test_sources(text: str, target: Target) -> None:
    assert parse_source(text, "ns") == target


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("svc/web", Target(TargetKind.SERVICE, "web", "ns")),
        ("Service/a/web:http", Target(TargetKind.SERVICE, "web", "a", "http")),
        ("a/web:80", Target(TargetKind.SERVICE, "web", "a", "80")),
        ("web:80", Target(TargetKind.SERVICE, "web", "ns", "80")),
        ("web.a", Target(TargetKind.SERVICE, "web", "a")),
        ("web.a.svc:80", Target(TargetKind.SERVICE, "web", "a", "80")),
        ("web.a.svc.cluster.local.:http", Target(TargetKind.SERVICE, "web", "a", "http")),
        ("pod/a/web-1:8080", Target(TargetKind.POD, "web-1", "a", "8080")),
        ("node/n1:30080", Target(TargetKind.NODE, "n1", "", "30080")),
        ("10.1.2.3:080", Target(TargetKind.ADDRESS, "10.1.2.3", "", "80")),
        ("[fd00::1]:80", Target(TargetKind.ADDRESS, "fd00::1", "", "80")),
    ],
)
def test_destinations(text: str, target: Target) -> None:
    assert parse_destination(text, "ns") == target


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("svc/web", "use pod/NAME"),
        ("pod/web-1:80", "use pod/default/web-1"),
        ("web-1", "use pod/NAME"),
        ("pod/a/b/c", "is not of the form pod/[NAMESPACE/]NAME"),
        ("node/", "is not of the form node/NAME"),
        ("fe80::1%eth0", "is not an IP address"),
    ],
)
def test_invalid_sources(text: str, advice: str) -> None:
    """The error has the form that is right."""
    with pytest.raises(InvalidTarget) as caught:
        parse_source(text)
    assert str(caught.value).startswith(f'"{text}" ')
    assert advice in str(caught.value)


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("10.1.2.3", "use 10.1.2.3:PORT"),
        ("fd00::1", "use [fd00::1]:PORT"),
        ("1:2:3:4:5:6:7:8:80", "use [1:2:3:4:5:6:7:8]:80"),
        ("10.1.2.3:x", "use 10.1.2.3:PORT"),
        ("10.1.2.3:0", "has no port from 1 to 65535; use 10.1.2.3:PORT"),
        ("10.1.2.3:65536", "has no port from 1 to 65535"),
        ("10.1.2.3:٣", "has no port from 1 to 65535"),
        ("[fe80::2%eth0]:80", "use svc/NAME"),
        ("10.1.2.300:80", "use svc/NAME"),
        ("svc/web:", "is not of the form svc/[NAMESPACE/]NAME[:PORT]"),
        ("svc/web:0", "is not of the form svc/[NAMESPACE/]NAME[:PORT]"),
        ("svc/$(reboot)", "is not of the form svc/[NAMESPACE/]NAME[:PORT]"),
        ("node/n1", "use node/n1:PORT"),
        ("node/n1:http", "use node/n1:NUMBER"),
        ("web-0.web.a.svc:80", "use pod/a/web-0"),
        ("www.example.com:80", "use svc/NAME"),
        ("", "use svc/NAME"),
    ],
)
def test_invalid_destinations(text: str, advice: str) -> None:
    with pytest.raises(InvalidTarget) as caught:
        parse_destination(text)
    assert str(caught.value).startswith(f'"{text}" ')
    assert advice in str(caught.value)


@pytest.mark.parametrize(
    ("source", "destination", "wanted"),
    [
        ("pod/web-1", "svc/web:http", ("10.244.1.5", "10.96.0.10", 80)),
        ("pod/client", "svc/web:9090", ("10.244.2.9", "10.96.0.10", 9090)),
        ("fd00:244::5", "svc/web:http", ("fd00:244::5", "fd00:96::10", 80)),
        ("node/n2", "web.ns:80", ("192.168.0.2", "10.96.0.10", 80)),
        ("node/n1", "pod/web-1", ("192.168.0.1", "10.244.1.5", 8080)),
        ("10.244.9.9", "svc/lb", ("10.244.9.9", "10.96.0.10", 80)),
        ("203.0.113.7", "svc/lb", ("203.0.113.7", "192.0.2.1", 80)),
        ("2001:db8::7", "svc/lb", ("2001:db8::7", "2001:db8::1", 80)),
        ("203.0.113.7", "node/n2:30080", ("203.0.113.7", "192.168.0.2", 30080)),
        ("pod/on-host", "10.0.0.1:443", ("192.168.0.1", "10.0.0.1", 443)),
    ],
)
def test_addresses(source: str, destination: str, wanted: tuple[str, str, int]) -> None:
    """The source gives the family, else the Service's first address; clients outside use a load balancer."""
    found = resolved(source, destination)
    assert (found.client.address, found.destination.address, found.destination.port) == wanted


def test_family_is_selected() -> None:
    found = resolved("pod/web-1", "svc/web:http", family=Family.IPV6)
    assert (found.client.address, found.destination.address) == ("fd00:244::5", "fd00:96::10")


@pytest.mark.parametrize(
    ("source", "kind", "node"),
    [
        ("pod/web-1", LocationKind.POD, "n1"),
        ("pod/on-host", LocationKind.NODE, "n1"),
        ("10.244.1.5", LocationKind.POD, "n1"),
        ("10.244.2.99", LocationKind.POD, "n2"),
        ("10.244.9.9", LocationKind.POD, None),
        ("fd00::1", LocationKind.NODE, "n1"),
        ("node/n2", LocationKind.NODE, "n2"),
        ("203.0.113.7", LocationKind.OUTSIDE, None),
    ],
)
def test_node_where_a_packet_starts(source: str, kind: LocationKind, node: str | None) -> None:
    """A pod with the network of its node counts as the node."""
    found = resolved(source, "[2001:db8::1]:80" if ":" in source else "8.8.8.8:80")
    assert (found.client.kind, found.client.node) == (kind, node)


def test_node_port_of_a_given_node() -> None:
    """A Service without an address for clients outside is reached at the node port of the entry node."""
    found = resolved("203.0.113.7", "svc/web:http", entry="n1")
    assert (found.destination.address, found.destination.port, found.destination.service) == (
        "192.168.0.1",
        30080,
        "ns/web:http",
    )
    with pytest.raises(Unresolved, match="use node/NAME:30080"):
        resolved("203.0.113.7", "svc/web:http")
    cluster = msgspec.structs.replace(OBJECTS, complete=True)
    assert resolved("2001:db8::7", "svc/web:http", cluster).destination.address == "fd00::1"


def test_cluster_ip_for_a_client_outside() -> None:
    """Nothing else is there: say so."""
    found = resolved("203.0.113.7", "svc/inner")
    assert found.destination.address == "10.96.0.10"
    assert "no address for clients outside" in found.notes[0]


@pytest.mark.parametrize(
    ("destination", "protocol", "wanted"),
    [
        ("svc/dns:dns", None, Protocol.UDP),
        ("svc/dns", Protocol.TCP, Protocol.TCP),
        ("svc/dns:53", Protocol.UDP, Protocol.UDP),
        ("pod/client", None, Protocol.UDP),
        ("pod/client:80", None, Protocol.TCP),
        ("pod/client:5353", Protocol.TCP, Protocol.TCP),
        ("10.96.0.10:53", None, Protocol.TCP),
        ("10.96.0.10:53", Protocol.UDP, Protocol.UDP),
        ("8.8.8.8:53", None, Protocol.TCP),
    ],
)
def test_protocols(destination: str, protocol: Protocol | None, wanted: Protocol) -> None:
    """A named port has one; plain addresses and undeclared ports of pods have TCP by default."""
    assert resolved("pod/web-1", destination, protocol=protocol).destination.protocol == wanted.value


@pytest.mark.parametrize(
    ("source", "destination", "options", "said"),
    [
        ("pod/clinet", "svc/web:http", {}, "did you mean pod/ns/client?"),
        ("pod/other/client", "svc/web:http", {}, "did you mean pod/ns/client?"),
        ("pod/web-1", "svc/wbe", {}, "did you mean svc/ns/web?"),
        ("node/n3", "svc/web:http", {}, "there is no node/n3 in objects.yaml"),
        ("node/bare", "svc/web:http", {}, "node/bare has no address in objects.yaml; give an address"),
        ("pod/done", "svc/web:http", {}, "has ended (phase Succeeded)"),
        ("pod/pending", "svc/web:http", {}, "has no address yet (phase Pending)"),
        (
            "pod/web-1",
            "svc/web",
            {},
            "http (80/TCP) and metrics (9090/TCP); name one, such as svc/ns/web:http",
        ),
        ("pod/web-1", "svc/web:https", {}, "has no port https; it has http (80/TCP)"),
        ("pod/web-1", "svc/web:30080", {}, "use node/NAME:30080, or svc/ns/web:http"),
        (
            "pod/web-1",
            "svc/web:http",
            {"protocol": Protocol.UDP},
            "has protocol TCP, not UDP; remove --proto",
        ),
        (
            "pod/web-1",
            "svc/dns:53",
            {},
            "dns (53/UDP) and dns-tcp (53/TCP); name one, such as svc/ns/dns:dns",
        ),
        ("pod/web-1", "pod/done:80", {}, "has ended"),
        (
            "pod/web-1",
            "svc/db",
            {},
            "is headless: clients connect to its pods, without a proxy; trace to one of pod/ns/db-0",
        ),
        ("pod/web-1", "svc/elsewhere", {}, "is an ExternalName Service"),
        (
            "pod/client",
            "svc/web:http",
            {"family": Family.IPV6},
            "pod/ns/client has no IPv6 address; remove --family",
        ),
        ("fd00::7", "10.96.0.10:80", {}, "are of different address families"),
        ("fd00::7", "pod/client", {}, "fd00::7 (IPv6) and pod/ns/client (IPv4) are of different"),
    ],
)
def test_errors_say_what_to_type_next(
    source: str, destination: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(Unresolved) as caught:
        resolved(source, destination, **options)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_facts_about_the_ends() -> None:
    """They are no errors."""
    assert "is not ready" in resolved("pod/web-1", "pod/web-2").notes[0]
    assert "another proxy serves it" in resolved("pod/web-1", "svc/other").notes[0]
    assert resolved("pod/web-2", "svc/web:http").notes == ()


@pytest.mark.parametrize("text", ["deploy/web", "Deployment/shop/web", "sts/web", "ingress/web", "jobs/web"])
def test_a_workload_is_no_end_of_a_connection(text: str) -> None:
    for parse in (parse_source, parse_destination, parse_service):
        with pytest.raises(InvalidTarget, match=r"^no connection ends at an? .*, such as svc/web$"):
            parse(text)
    assert parse_destination("svc/deploy/web").key == Key("deploy", "web")
