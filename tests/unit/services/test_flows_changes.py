"""Which syncs require a flush, and what a flush contains."""

from collections.abc import Iterable

from pykubeproxy.objects import (
    EndpointPort,
    EndpointSlice,
    Family,
    Kind,
    Listed,
    Port,
    Protocol,
    Service,
)
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.flows import Flush, NodePortAddresses, UdpPorts
from pykubeproxy.services.ports import PortName
from pykubeproxy.services.selection import NodeTopology, ResolvedPort, resolve_ports
from tests.objects import service, slice_of

# Node ports have an empty address.
NODE_PORT = (b"", 30053)
EVERYWHERE = NodePortAddresses()
UDP = (Port("dns", Protocol.UDP, 53, 30053), Port("http", Protocol.TCP, 80, 30080))
PODS = (EndpointPort("dns", Protocol.UDP, 53), EndpointPort("http", Protocol.TCP, 80))


def resolved(*services: Service, slices: Iterable[EndpointSlice] = ()) -> list[ResolvedPort]:
    """Return the resolved ports of these objects."""
    cluster = Cluster()
    cluster.apply(Listed(Kind.SERVICE, services))
    cluster.apply(Listed(Kind.ENDPOINT_SLICE, tuple(slices)))
    return [
        item for it in services for item in resolve_ports(cluster, it.key, Family.IPV4, NodeTopology("n1"))
    ]


def names(items: list[ResolvedPort]) -> list[PortName]:
    return [item.port.name for item in items]


def test_no_flush_without_udp_changes() -> None:
    """Without UDP services, and if only TCP ports change, no flush is required."""
    ports = UdpPorts(Family.IPV4)
    web = resolved(service(), slices=[slice_of("10.244.0.5")])
    assert ports.update(web, (), EVERYWHERE, repaired=True) is None
    assert ports.update((), names(web), EVERYWHERE) is None

    both = service("both", ports=UDP)
    slices = slice_of("10.244.0.5", service="both", ports=PODS)
    assert ports.update(resolved(both, slices=[slices]), (), EVERYWHERE)
    other = slice_of("10.244.0.5", service="both", ports=(PODS[0], EndpointPort("http", Protocol.TCP, 81)))
    assert ports.update(resolved(both, slices=[other]), (), EVERYWHERE) is None


def test_unchanged_ports_require_a_flush_only_after_repairs_and_moves() -> None:
    """A sync of unchanged UDP ports requires no flush, unless it repaired rules or nodePortAddresses changed."""
    ports = UdpPorts(Family.IPV4)
    items = resolved(service(ports=UDP), slices=[slice_of("10.244.0.5", ports=PODS)])
    assert ports.update(items, (), EVERYWHERE)
    assert ports.update(items, (), EVERYWHERE) is None
    assert ports.update((), (), EVERYWHERE) is None
    assert ports.update(items, (), EVERYWHERE, repaired=True)
    assert ports.update((), (), NodePortAddresses(("10.0.0.0/8",)))
    assert ports.update((), (), NodePortAddresses(("10.0.0.0/8",))) is None


def test_flush_contains_all_udp_ports() -> None:
    """A change of one service flushes with the ports of all services, to keep their flows."""
    ports = UdpPorts(Family.IPV4)
    first = resolved(service("a", ports=UDP[:1]))
    second = resolved(service("b", cluster_ip="10.96.0.11", ports=(Port("dns", Protocol.UDP, 53),)))
    assert ports.update(first, (), EVERYWHERE)
    flush = ports.update(second, (), EVERYWHERE)
    assert flush
    assert sorted(flush.ports) == sorted([*names(first), *names(second)])
    assert not flush.gone


def test_removed_frontends_are_in_one_flush() -> None:
    """The frontends of a deleted service are in the next flush and in no later one."""
    ports = UdpPorts(Family.IPV4)
    items = resolved(service("a", ports=UDP, external_ips=("1.2.3.4",)))
    ports.update(items, (), EVERYWHERE)
    flush = ports.update((), names(items), EVERYWHERE)
    assert flush
    assert not flush.ports
    assert flush.gone == {(bytes((10, 96, 0, 10)), 53), (bytes((1, 2, 3, 4)), 53), NODE_PORT}
    again = ports.update(resolved(service("b", cluster_ip="10.96.0.11", ports=UDP)), (), EVERYWHERE)
    assert again
    assert not again.gone


def test_merged_flushes_keep_removed_frontends() -> None:
    """A merged flush has the removed frontends of both."""
    ports = UdpPorts(Family.IPV4)
    a, b = resolved(service("a", ports=UDP)), resolved(service("b", cluster_ip="10.96.0.11", ports=UDP[:1]))
    ports.update([*a, *b], (), EVERYWHERE)
    requests = [ports.update((), names(gone), EVERYWHERE) for gone in (a, b)]
    merged: Flush | None = None
    for request in requests:
        assert request
        merged = request.merged_with(merged)
    assert merged
    assert not merged.ports
    assert merged.gone == {(bytes((10, 96, 0, 10)), 53), (bytes((10, 96, 0, 11)), 53), NODE_PORT}


def test_later_syncs_do_not_change_a_flush() -> None:
    """A flush is a value: later syncs leave it alone."""
    ports = UdpPorts(Family.IPV4)
    items = resolved(service("a", ports=UDP))
    flush = ports.update(items, (), EVERYWHERE)
    ports.update((), names(items), EVERYWHERE)
    assert flush
    assert len(flush.ports) == 1


def test_installed_frontends_without_service_are_removed() -> None:
    """Frontends in the tables at start count as removed if no service has them."""
    ports = UdpPorts(Family.IPV4)
    items = resolved(service("a", ports=UDP))
    here = (("10.96.0.10", 53), ("", 30053))
    assert ports.update((), (), EVERYWHERE, installed=()) is None
    flush = ports.update(items, (), EVERYWHERE, installed=(*here, ("10.96.0.11", 53), ("", 30054)))
    assert flush
    assert flush.gone == {(bytes((10, 96, 0, 11)), 53), (b"", 30054)}
    assert ports.update(items, (), EVERYWHERE, installed=here) is None
    last = UdpPorts(Family.IPV4).update((), (), EVERYWHERE, installed=here)
    assert last
    assert last.gone == {(bytes((10, 96, 0, 10)), 53), NODE_PORT}
