"""When flows have to be looked at, and what is remembered until they were."""

from collections.abc import Iterable

from pykubeproxy.objects import EndpointPort, EndpointSlice, Family, Kind, Listed, Port, Protocol, Service
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.flows import Flush, NodePortAddresses, UdpPorts
from pykubeproxy.services.resolve import ResolvedPort, resolve_ports
from pykubeproxy.services.selection import NodeTopology
from tests.objects import service, slice_of

# A node port counts as one of an empty address.
NODE_PORT = (b"", 30053)
EVERYWHERE = NodePortAddresses()
UDP = (Port("dns", Protocol.UDP, 53, 30053), Port("http", Protocol.TCP, 80, 30080))
PODS = (EndpointPort("dns", Protocol.UDP, 53), EndpointPort("http", Protocol.TCP, 80))


def served(*services: Service, slices: Iterable[EndpointSlice] = ()) -> list[ResolvedPort]:
    """What a full sync of these objects looks at."""
    cluster = Cluster()
    cluster.apply(Listed(Kind.SERVICE, services))
    cluster.apply(Listed(Kind.ENDPOINT_SLICE, tuple(slices)))
    return [
        item for it in services for item in resolve_ports(cluster, it.key, Family.IPV4, NodeTopology("n1"))
    ]


def names(items: list[ResolvedPort]) -> list[object]:
    return [item.port.name for item in items]


def test_without_udp_nothing_is_asked_for() -> None:
    """Where there is no UDP service, and where only TCP ports changed, nothing is to be listed."""
    ports = UdpPorts(Family.IPV4)
    web = served(service(), slices=[slice_of("10.244.0.5")])
    assert ports.follow(web, (), EVERYWHERE, repaired=True) is None
    assert ports.follow((), names(web), EVERYWHERE) is None

    both = service("both", ports=UDP)
    slices = slice_of("10.244.0.5", service="both", ports=PODS)
    assert ports.follow(served(both, slices=[slices]), (), EVERYWHERE)
    other = slice_of("10.244.0.5", service="both", ports=(PODS[0], EndpointPort("http", Protocol.TCP, 81)))
    assert ports.follow(served(both, slices=[other]), (), EVERYWHERE) is None


def test_unchanged_is_not_asked_for_again() -> None:
    """A sync that looks at the same UDP ports again asks for nothing, unless rules were repaired or moved."""
    ports = UdpPorts(Family.IPV4)
    items = served(service(ports=UDP), slices=[slice_of("10.244.0.5", ports=PODS)])
    assert ports.follow(items, (), EVERYWHERE)
    assert ports.follow(items, (), EVERYWHERE) is None
    assert ports.follow((), (), EVERYWHERE) is None
    assert ports.follow(items, (), EVERYWHERE, repaired=True)
    assert ports.follow((), (), NodePortAddresses(("10.0.0.0/8",)))
    assert ports.follow((), (), NodePortAddresses(("10.0.0.0/8",))) is None


def test_all_ports_are_held() -> None:
    """A request made by one service's change holds all UDP ports, so that all others' flows can be kept."""
    ports = UdpPorts(Family.IPV4)
    first = served(service("a", ports=UDP[:1]))
    second = served(service("b", cluster_ip="10.96.0.11", ports=(Port("dns", Protocol.UDP, 53),)))
    assert ports.follow(first, (), EVERYWHERE)
    flush = ports.follow(second, (), EVERYWHERE)
    assert flush
    assert sorted(flush.ports) == sorted([*names(first), *names(second)])
    assert not flush.gone


def test_what_is_gone_is_told_once() -> None:
    """The addresses and node port of a deleted service are in the request that follows, and in no later one."""
    ports = UdpPorts(Family.IPV4)
    items = served(service("a", ports=UDP, external_ips=("1.2.3.4",)))
    ports.follow(items, (), EVERYWHERE)
    flush = ports.follow((), names(items), EVERYWHERE)
    assert flush
    assert not flush.ports
    assert flush.gone == {(bytes((10, 96, 0, 10)), 53), (bytes((1, 2, 3, 4)), 53), NODE_PORT}
    again = ports.follow(served(service("b", cluster_ip="10.96.0.11", ports=UDP)), (), EVERYWHERE)
    assert again
    assert not again.gone


def test_requests_add_up() -> None:
    """A request that comes before an earlier one was met takes over what that one would have looked for."""
    ports = UdpPorts(Family.IPV4)
    a, b = served(service("a", ports=UDP)), served(service("b", cluster_ip="10.96.0.11", ports=UDP[:1]))
    ports.follow([*a, *b], (), EVERYWHERE)
    requests = [ports.follow((), names(gone), EVERYWHERE) for gone in (a, b)]
    merged: Flush | None = None
    for request in requests:
        assert request
        merged = request.after(merged)
    assert merged
    assert not merged.ports
    assert merged.gone == {(bytes((10, 96, 0, 10)), 53), (bytes((10, 96, 0, 11)), 53), NODE_PORT}


def test_request_is_not_changed_by_later_syncs() -> None:
    """A request stays as it was while later syncs go on."""
    ports = UdpPorts(Family.IPV4)
    items = served(service("a", ports=UDP))
    flush = ports.follow(items, (), EVERYWHERE)
    ports.follow((), names(items), EVERYWHERE)
    assert flush
    assert len(flush.ports) == 1


def test_left_by_rules_that_were_there() -> None:
    """Of what rules were found to lead to at the start, what is served no more counts as gone."""
    ports = UdpPorts(Family.IPV4)
    items = served(service("a", ports=UDP))
    here = (("10.96.0.10", 53), ("", 30053))
    assert ports.follow((), (), EVERYWHERE, installed=()) is None
    flush = ports.follow(items, (), EVERYWHERE, installed=(*here, ("10.96.0.11", 53), ("", 30054)))
    assert flush
    assert flush.gone == {(bytes((10, 96, 0, 11)), 53), (b"", 30054)}
    assert ports.follow(items, (), EVERYWHERE, installed=here) is None
    last = UdpPorts(Family.IPV4).follow((), (), EVERYWHERE, installed=here)
    assert last
    assert last.gone == {(bytes((10, 96, 0, 10)), 53), NODE_PORT}
