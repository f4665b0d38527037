"""Which UDP flows are stale."""

import ipaddress

from pykubeproxy.objects import Endpoint, EndpointPort, Family, Kind, Listed, Port, Protocol, Service
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.flows import End, Flush, Frontends, NodePortAddresses, UdpPorts
from pykubeproxy.services.resolve import resolve_ports
from pykubeproxy.services.selection import NodeTopology
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
    """The request after there were some Services and then others, or the same; all have the same pods."""
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
        served = [it for key in names for it in resolve_ports(cluster, key, Family.IPV4, NodeTopology("n1"))]
        gone = [it for it in flush.ports if it not in {s.port.name for s in served}] if flush else []
        flush = ports.follow(served, gone, at) or flush
    assert flush
    return flush


def end(text: str) -> End:
    address, _, port = text.rpartition(":")
    return ipaddress.ip_address(address.strip("[]")).packed, int(port)


def stale(flush: Flush, destination: str, answered_by: str = "") -> bool:
    """Whether a flow to `destination` goes; without `answered_by` it was not DNATed."""
    local = {ipaddress.ip_address(address).packed for address in NODE}
    return Frontends(flush, local.__contains__).is_stale(end(destination), end(answered_by or destination))


def test_flow_to_an_endpoint_stays() -> None:
    """A flow that is answered by an endpoint stays, whichever way it came."""
    flush = flush_for(dns(external_ips=("1.2.3.4",), load_balancer_ips=("5.6.7.8",)))
    for destination in ("10.96.0.53:53", "1.2.3.4:53", "5.6.7.8:53", "192.168.0.1:30053"):
        assert not stale(flush, destination, "10.244.0.5:5353")


def test_endpoint_gone() -> None:
    """A flow to a pod that is no endpoint goes, whichever way it came."""
    flush = flush_for(dns(external_ips=("1.2.3.4",), load_balancer_ips=("5.6.7.8",)))
    for destination in ("10.96.0.53:53", "1.2.3.4:53", "5.6.7.8:53", "192.168.0.1:30053"):
        assert stale(flush, destination, "10.244.0.9:5353")


def test_endpoint_port_changed() -> None:
    """A flow to the pod's former port goes, though the pod is still there."""
    assert stale(flush_for(dns(), port=5354), "10.96.0.53:53", "10.244.0.5:5353")


def test_no_endpoints_left() -> None:
    """With no endpoint left all flows of the service go."""
    assert stale(flush_for(dns(), pods=()), "10.96.0.53:53", "10.244.0.5:5353")


def test_first_endpoint_after_none() -> None:
    """A flow from before there was an endpoint, not DNATed, goes."""
    flush = flush_for(dns(external_ips=("1.2.3.4",)))
    for destination in ("10.96.0.53:53", "1.2.3.4:53", "192.168.0.1:30053"):
        assert stale(flush, destination)


def test_service_deleted() -> None:
    """After a service was deleted its flows go, by cluster IP, external IP and node port."""
    flush = flush_for(dns(external_ips=("1.2.3.4",)), now=())
    for destination in ("10.96.0.53:53", "1.2.3.4:53", "192.168.0.1:30053"):
        assert stale(flush, destination, "10.244.0.5:5353")


def test_undirected_flow_to_what_was_a_frontend_stays() -> None:
    """Once a service is gone, its addresses and ports may be anybody's: what was not DNATed is not ours."""
    flush = flush_for(dns(external_ips=("1.2.3.4",)), now=())
    for destination in ("1.2.3.4:53", "192.168.0.1:30053"):
        assert not stale(flush, destination)


def test_address_taken_away() -> None:
    """Flows to an external IP that the service no longer has go; those to its others stay."""
    flush = flush_for(dns(external_ips=("1.2.3.4", "1.2.3.5")), now=(dns(external_ips=("1.2.3.5",)),))
    assert stale(flush, "1.2.3.4:53", "10.244.0.5:5353")
    assert not stale(flush, "1.2.3.5:53", "10.244.0.5:5353")
    assert not stale(flush, "10.96.0.53:53", "10.244.0.5:5353")


def test_node_port_changed_or_gone() -> None:
    """Flows to a node port that the service no longer has go; those to its new one stay."""
    for ports in ((Port("dns", Protocol.UDP, 53, 30054),), (Port("dns", Protocol.UDP, 53),)):
        flush = flush_for(dns(), now=(dns(ports=ports),))
        assert stale(flush, "192.168.0.1:30053", "10.244.0.5:5353")
        assert not stale(flush, "192.168.0.1:30054", "10.244.0.5:5353")


def test_frontend_of_another_service_now() -> None:
    """What a deleted service left to a new one is the new one's: its flows stay, the old one's go."""
    flush = flush_for(dns("old"), now=(dns("new"),), pods=("10.244.0.6",))
    assert not stale(flush, "10.96.0.53:53", "10.244.0.6:5353")
    assert stale(flush, "10.96.0.53:53", "10.244.0.5:5353")


def test_node_port_at_what_was_an_external_address() -> None:
    """A node's address that was an external IP too is served by the node port of the same number now."""
    there = dns("web", "10.96.0.80")
    was = dns("was", external_ips=("192.168.0.1",), ports=(Port("dns", Protocol.UDP, 30053),))
    flush = flush_for(there, was, now=(there,))
    assert not stale(flush, "192.168.0.1:30053", "10.244.0.5:5353")
    assert stale(flush, "192.168.0.1:30053", "10.244.0.9:5353")


def test_two_services_with_one_external_address() -> None:
    """A flow to an address that two services claim stays as long as it is answered by an endpoint of either."""
    ports = UdpPorts(Family.IPV4)
    cluster = Cluster()
    both = [
        dns(name, ip, external_ips=("1.2.3.4",), ports=(Port("dns", Protocol.UDP, 53),))
        for name, ip in (("a", "10.96.0.1"), ("b", "10.96.0.2"))
    ]
    cluster.apply(Listed(Kind.SERVICE, tuple(both)))
    udp = (EndpointPort("dns", Protocol.UDP, 5353),)
    cluster.apply(
        Listed(
            Kind.ENDPOINT_SLICE,
            (slice_of("10.244.0.5", service="a", ports=udp), slice_of("10.244.0.6", service="b", ports=udp)),
        )
    )
    served = [it for s in both for it in resolve_ports(cluster, s.key, Family.IPV4, NodeTopology("n1"))]
    flush = ports.follow(served, (), NodePortAddresses())
    assert flush
    for pod, goes in (("10.244.0.5", False), ("10.244.0.6", False), ("10.244.0.7", True)):
        assert stale(flush, "1.2.3.4:53", f"{pod}:5353") is goes
    assert stale(flush, "10.96.0.1:53", "10.244.0.6:5353")


def test_others_stay() -> None:
    """Flows to pods directly, to other ports of a cluster IP and to elsewhere stay."""
    flush = flush_for(dns(), pods=())
    assert not stale(flush, "10.244.0.5:5353")
    assert not stale(flush, "10.244.0.5:53")
    assert not stale(flush, "10.96.0.53:54", "10.244.0.5:5353")
    assert not stale(flush, "8.8.8.8:53")


def test_node_port_number_elsewhere_stays() -> None:
    """The number of a node port means nothing at an address that is not the node's, now or after it is gone."""
    for flush in (flush_for(dns()), flush_for(dns(), now=())):
        assert not stale(flush, "8.8.8.8:30053")
        assert not stale(flush, "8.8.8.8:30053", "10.244.0.9:5353")


def test_node_port_where_it_is_not_served_stays() -> None:
    """Nor does it at addresses of the node that nodePortAddresses leaves out, nor at loopback unless that is in."""
    assert not stale(flush_for(dns(), at=NodePortAddresses(("10.0.0.0/8",))), "192.168.0.1:30053")
    assert stale(flush_for(dns(), at=NodePortAddresses(("192.168.0.0/16",))), "192.168.0.1:30053")
    assert not stale(flush_for(dns()), "127.0.0.1:30053")
    assert stale(flush_for(dns(), at=NodePortAddresses((), loopback=True)), "127.0.0.1:30053")


def test_terminating_endpoint_keeps_its_flows_while_it_serves() -> None:
    """A pod that ends keeps its flows as long as it serves, though new ones go to others."""
    ending = endpoint("10.244.0.5", terminating=True, serving=True)
    stopped = endpoint("10.244.0.6", terminating=True, serving=False)
    flush = flush_for(dns(), pods=(ending, stopped, "10.244.0.7"))
    assert not stale(flush, "10.96.0.53:53", "10.244.0.5:5353")
    assert stale(flush, "10.96.0.53:53", "10.244.0.6:5353")
    assert not stale(flush, "10.96.0.53:53", "10.244.0.7:5353")


def test_ready_though_not_serving() -> None:
    """A pod that is ready only by publishNotReadyAddresses gets traffic, so it keeps it too."""
    flush = flush_for(dns(), pods=(endpoint("10.244.0.5", ready=True, serving=False),))
    assert not stale(flush, "10.96.0.53:53", "10.244.0.5:5353")


def test_unready_endpoint() -> None:
    """A pod that is neither ready nor serving loses its flows."""
    flush = flush_for(dns(), pods=(endpoint("10.244.0.5", ready=False, serving=False), "10.244.0.7"))
    assert stale(flush, "10.96.0.53:53", "10.244.0.5:5353")
