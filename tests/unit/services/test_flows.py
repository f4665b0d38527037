"""Stale UDP flows."""

import ipaddress
import tracemalloc
from typing import Any

import pytest

from pykubeproxy.objects import Endpoint, EndpointPort, Family, Kind, Listed, Port, Protocol, Service
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.flows import (
    AddressAndPort,
    Flush,
    NodePortAddresses,
    StaleFlowFilter,
    UdpPort,
    UdpPorts,
)
from pykubeproxy.services.ports import PortName
from pykubeproxy.services.selection import NodeTopology, resolve_ports
from tests.objects import endpoint, service, slice_of

EVERYWHERE = NodePortAddresses()
NODE = ("192.168.0.1", "127.0.0.1")
DNS = (Port("dns", Protocol.UDP, 53, 30053),)


def dns(name: str = "dns", cluster_ip: str = "10.96.0.53", **fields: object) -> Service:
    """A Service with the UDP port 53 and the node port 30053."""
    return service(name, cluster_ip=cluster_ip, **{"type": "NodePort", "ports": DNS, **fields})


def flush_for(
    *before: Service,
    now: tuple[Service, ...] | None = None,
    pods: tuple[str | Endpoint, ...] = ("10.244.0.5",),
    port: int = 5353,
    at: NodePortAddresses = EVERYWHERE,
) -> Flush:
    """Return the flush after the Services `before` are replaced by `now`, by default the same; all have the same pods."""
    ports = UdpPorts(Family.IPV4)
    flush = None
    for services in (before, before if now is None else now):
        cluster = Cluster()
        slices = tuple(
            slice_of(*pods, service=it.name, ports=(EndpointPort("dns", Protocol.UDP, port),))
            for it in services
        )
        cluster.apply(Listed(Kind.SERVICE, services))
        cluster.apply(Listed(Kind.ENDPOINT_SLICE, slices))
        names = {it.key for it in (*before, *services)}
        resolved = [
            it for key in names for it in resolve_ports(cluster, key, Family.IPV4, NodeTopology("n1"))
        ]
        gone: list[PortName] = (
            [it for it in flush.ports if it not in {s.port.name for s in resolved}] if flush else []
        )
        flush = ports.update(resolved, gone, at) or flush
    assert flush
    return flush


def end(text: str) -> AddressAndPort:
    address, _, port = text.rpartition(":")
    return ipaddress.ip_address(address.strip("[]")).packed, int(port)


def stale(flush: Flush, destination: str, answered_by: str = "") -> bool:
    """Return whether a flow to `destination` is stale; without `answered_by` it has no DNAT."""
    local = {ipaddress.ip_address(address).packed for address in NODE}
    return StaleFlowFilter(flush, local.__contains__).is_stale(
        end(destination), end(answered_by or destination)
    )


# What happened to a Service; the pod that answers a flow, "" without DNAT; whether the flow is stale.
CHANGES: list[tuple[dict[str, Any], str, bool]] = [
    ({}, "10.244.0.5:5353", False),
    ({}, "10.244.0.9:5353", True),
    # A flow that started before the first endpoint has no DNAT.
    ({}, "", True),
    ({"port": 5354}, "10.244.0.5:5353", True),
    ({"pods": ()}, "10.244.0.5:5353", True),
    # No rule redirects its packets. Of a Service that is deleted, the endpoints go first.
    ({"pods": ()}, "", False),
    ({"now": ()}, "10.244.0.5:5353", True),
    # Another program may use the address then.
    ({"now": ()}, "", False),
]


@pytest.mark.parametrize(("change", "pod", "expected"), CHANGES)
@pytest.mark.parametrize("destination", ["10.96.0.53:53", "1.2.3.4:53", "5.6.7.8:53", "192.168.0.1:30053"])
def test_flows_to_other_pods_than_endpoints_are_stale(
    destination: str, change: dict[str, Any], pod: str, expected: bool
) -> None:
    """Through any frontend."""
    made = dns(external_ips=("1.2.3.4",), load_balancer_ips=("5.6.7.8",))
    assert stale(flush_for(made, **change), destination, pod) is expected


def test_removed_external_ip() -> None:
    """Flows to a removed external IP are stale; flows to other addresses stay."""
    flush = flush_for(dns(external_ips=("1.2.3.4", "1.2.3.5")), now=(dns(external_ips=("1.2.3.5",)),))
    assert stale(flush, "1.2.3.4:53", "10.244.0.5:5353")
    assert not stale(flush, "1.2.3.5:53", "10.244.0.5:5353")
    assert not stale(flush, "10.96.0.53:53", "10.244.0.5:5353")


def test_node_port_changed_or_gone() -> None:
    """Flows to a former node port are stale; flows to the new one stay."""
    for ports in ((Port("dns", Protocol.UDP, 53, 30054),), (Port("dns", Protocol.UDP, 53),)):
        flush = flush_for(dns(), now=(dns(ports=ports),))
        assert stale(flush, "192.168.0.1:30053", "10.244.0.5:5353")
        assert not stale(flush, "192.168.0.1:30054", "10.244.0.5:5353")


def test_frontend_moves_to_another_service() -> None:
    """Flows to the endpoints of the new service stay; flows to those of the old one are stale."""
    flush = flush_for(dns("old"), now=(dns("new"),), pods=("10.244.0.6",))
    assert not stale(flush, "10.96.0.53:53", "10.244.0.6:5353")
    assert stale(flush, "10.96.0.53:53", "10.244.0.5:5353")


def test_node_port_replaces_external_ip_of_the_node() -> None:
    """A removed external IP that is an address of the node is served by the node port with the same number."""
    there = dns("web", "10.96.0.80")
    was = dns("was", external_ips=("192.168.0.1",), ports=(Port("dns", Protocol.UDP, 30053),))
    flush = flush_for(there, was, now=(there,))
    assert not stale(flush, "192.168.0.1:30053", "10.244.0.5:5353")
    assert stale(flush, "192.168.0.1:30053", "10.244.0.9:5353")


def claimed_by(
    *services: Service, pods: dict[str, tuple[str | Endpoint, ...]], rejected: tuple[PortName, ...] = ()
) -> Flush:
    """Return the flush after a sync of these Services; `pods` are those of each, by name, others have none."""
    cluster = Cluster()
    udp = (EndpointPort("dns", Protocol.UDP, 5353),)
    slices = tuple(slice_of(*addresses, service=name, ports=udp) for name, addresses in pods.items())
    cluster.apply(Listed(Kind.SERVICE, services))
    cluster.apply(Listed(Kind.ENDPOINT_SLICE, slices))
    resolved = [it for s in services for it in resolve_ports(cluster, s.key, Family.IPV4, NodeTopology("n1"))]
    flush = UdpPorts(Family.IPV4).update(resolved, (), EVERYWHERE, rejected=rejected)
    assert flush
    return flush


FIRST, SECOND, DEAD = "10.244.0.5:5353", "10.244.0.6:5353", "10.244.0.7:5353"
ONE_EACH: dict[str, tuple[str | Endpoint, ...]] = {"a": ("10.244.0.5",), "b": ("10.244.0.6",)}
UDP_53 = (Port("dns", Protocol.UDP, 53),)


def claimant(name: str, cluster_ip: str, **fields: object) -> Service:
    return dns(name, cluster_ip, ports=UDP_53, **fields)


def test_an_external_ip_keeps_no_flows_to_the_cluster_ip_of_another_service() -> None:
    """A tenant claims the address of cluster DNS, with endpoints at the addresses of pods that may be deleted."""
    tenant = claimant("a", "10.96.0.9", external_ips=("10.96.0.53",))
    every_pod = tuple(f"10.244.0.{number}" for number in range(1, 50))
    flush = claimed_by(tenant, claimant("b", "10.96.0.53"), pods={"a": every_pod, "b": ("10.244.0.6",)})
    assert stale(flush, "10.96.0.53:53", DEAD)
    assert not stale(flush, "10.96.0.53:53", SECOND)
    assert not stale(flush, "10.96.0.9:53", DEAD)
    local = claimant("b", "10.96.0.53", internal_local=True)
    flush = claimed_by(tenant, local, pods={"b": ("10.244.0.6",)})
    assert not stale(flush, "10.96.0.53:53", SECOND)


def test_of_two_services_with_one_external_address_the_first_by_name_counts() -> None:
    """Its rule comes first, unless it has no endpoint or is quarantined."""
    both = [
        claimant(name, f"10.96.0.{host}", external_ips=("1.2.3.4",)) for name, host in (("b", 2), ("a", 1))
    ]
    flush = claimed_by(*both, pods=ONE_EACH)
    assert [stale(flush, "1.2.3.4:53", pod) for pod in (FIRST, SECOND, DEAD)] == [False, True, True]
    assert stale(flush, "10.96.0.1:53", SECOND)
    flush = claimed_by(*both, pods={"b": ("10.244.0.6",)})
    assert [stale(flush, "1.2.3.4:53", pod) for pod in (FIRST, SECOND, DEAD)] == [True, False, True]
    flush = claimed_by(*both, pods=ONE_EACH, rejected=(PortName("ns", "a", "dns", "UDP"),))
    assert [stale(flush, "1.2.3.4:53", pod) for pod in (FIRST, SECOND, DEAD)] == [True, False, True]


def test_the_next_service_counts_where_the_first_one_redirects_only_some_clients() -> None:
    """Source ranges exclude clients, and so does policy Local without an endpoint on this node."""
    ip, type_ = ("1.2.3.4",), "LoadBalancer"
    second = claimant("b", "10.96.0.2", external_ips=ip)
    for fields in (
        {"load_balancer_ips": ip, "source_ranges": ("10.0.0.0/8",)},
        {"load_balancer_ips": ip, "external_local": True},
    ):
        flush = claimed_by(claimant("a", "10.96.0.1", type=type_, **fields), second, pods=ONE_EACH)
        assert [stale(flush, "1.2.3.4:53", pod) for pod in (FIRST, SECOND, DEAD)] == [False, False, True]


def test_many_services_with_the_same_addresses_take_little_memory() -> None:
    """Each lets packets pass to the next one: its policy is Local, and it has no endpoint on this node."""
    addresses = frozenset((bytes((1, 2, 3, host)), 53) for host in range(20))
    ports = {}
    for number in range(300):
        pods = frozenset((bytes((10, 244, number % 256, host)), number) for host in range(30))
        ports[PortName("ns", f"s{number}", "", "UDP")] = UdpPort(
            addresses, pods, end("10.96.0.1:53"), addresses, addresses
        )
    stale_flows = StaleFlowFilter(Flush(Family.IPV4, ports, frozenset(), EVERYWHERE), lambda _: False)
    tracemalloc.start()
    assert all(stale_flows.is_stale(there, end(DEAD)) for there in addresses)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 1_000_000


def test_node_port_counts_where_an_external_address_of_the_node_redirects_only_some_clients() -> None:
    """And where the Service with that external IP has no endpoint; an address that serves no node ports has none behind."""
    ports = (Port("dns", Protocol.UDP, 30053),)
    for fields, expected in (
        ({"external_local": True}, [False, False, True]),
        ({}, [False, True, True]),
    ):
        node_port = dns("b", "10.96.0.2")
        claims = dns("a", "10.96.0.1", external_ips=("192.168.0.1", "1.2.3.4"), ports=ports, **fields)
        flush = claimed_by(claims, node_port, pods=ONE_EACH)
        assert [stale(flush, "192.168.0.1:30053", pod) for pod in (FIRST, SECOND, DEAD)] == expected
        assert [stale(flush, "1.2.3.4:30053", pod) for pod in (FIRST, SECOND, DEAD)] == [False, True, True]
        flush = claimed_by(claims, node_port, pods={"b": ONE_EACH["b"]})
        assert [stale(flush, "192.168.0.1:30053", pod) for pod in (FIRST, SECOND)] == [True, False]


def test_unrelated_flows_stay() -> None:
    """Flows to pods, to other ports of a cluster IP and to other destinations stay."""
    flush = flush_for(dns(), pods=())
    assert not stale(flush, "10.244.0.5:5353")
    assert not stale(flush, "10.244.0.5:53")
    assert not stale(flush, "10.96.0.53:54", "10.244.0.5:5353")
    assert not stale(flush, "8.8.8.8:53")


def test_node_port_applies_to_local_addresses_only() -> None:
    """Flows to the same port of a foreign address stay, also after the node port is removed."""
    for flush in (flush_for(dns()), flush_for(dns(), now=())):
        assert not stale(flush, "8.8.8.8:30053")
        assert not stale(flush, "8.8.8.8:30053", "10.244.0.9:5353")


def test_flows_to_the_number_of_a_node_port_at_many_addresses_take_no_memory() -> None:
    """Any pod can send such packets."""
    stale_flows = StaleFlowFilter(flush_for(dns()), lambda _: False)
    tracemalloc.start()
    for number in range(100_000):
        there = (number.to_bytes(4, "big"), 30053)
        assert not stale_flows.is_stale(there, there)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 4_000_000


def test_node_port_applies_to_node_port_addresses_only() -> None:
    """Flows stay at addresses outside nodePortAddresses and at loopback without localhostNodePorts."""
    assert not stale(flush_for(dns(), at=NodePortAddresses(("10.0.0.0/8",))), "192.168.0.1:30053")
    assert stale(flush_for(dns(), at=NodePortAddresses(("192.168.0.0/16",))), "192.168.0.1:30053")
    assert not stale(flush_for(dns()), "127.0.0.1:30053")
    assert stale(flush_for(dns(), at=NodePortAddresses((), loopback=True)), "127.0.0.1:30053")


def test_terminating_endpoint_keeps_flows_while_serving() -> None:
    """A terminating pod keeps its flows while it serves, although new flows use other pods."""
    ending = endpoint("10.244.0.5", terminating=True, serving=True)
    stopped = endpoint("10.244.0.6", terminating=True, serving=False)
    flush = flush_for(dns(), pods=(ending, stopped, "10.244.0.7"))
    assert not stale(flush, "10.96.0.53:53", "10.244.0.5:5353")
    assert stale(flush, "10.96.0.53:53", "10.244.0.6:5353")
    assert not stale(flush, "10.96.0.53:53", "10.244.0.7:5353")


def test_ready_endpoint_that_does_not_serve_keeps_flows() -> None:
    """With publishNotReadyAddresses a pod gets traffic without serving."""
    flush = flush_for(dns(), pods=(endpoint("10.244.0.5", ready=True, serving=False),))
    assert not stale(flush, "10.96.0.53:53", "10.244.0.5:5353")


def test_flow_to_an_unready_endpoint_is_stale() -> None:
    """A pod that is neither ready nor serving loses its flows."""
    flush = flush_for(dns(), pods=(endpoint("10.244.0.5", ready=False, serving=False), "10.244.0.7"))
    assert stale(flush, "10.96.0.53:53", "10.244.0.5:5353")
