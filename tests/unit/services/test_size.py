"""The size of a Service, in pairs of a port and an endpoint or address."""

from typing import Any

import pytest

from pykubeproxy.objects import EndpointPort, EndpointSlice, Family, Key, Port, Protocol, Service
from pykubeproxy.services.size import AFFINITY_COST, count_pairs, oversized
from tests.objects import cluster_of, service, slice_of

WEB = Key("ns", "web")
PORTS = tuple(Port(f"p{n}", Protocol.TCP, n) for n in range(1, 4))


def pairs(*objects: Service | EndpointSlice, family: Family = Family.IPV4) -> int:
    return count_pairs(cluster_of(*objects), WEB, family)


def test_each_endpoint_counts_once_for_each_port() -> None:
    ports = tuple(EndpointPort(port.name, Protocol.TCP, 8080) for port in PORTS)
    slices = (slice_of("10.0.0.1", "10.0.0.2", name=name, ports=ports) for name in "ab")
    assert pairs(service(ports=PORTS), *slices) == 3 * 4


def test_a_port_without_endpoints_counts_as_one_pair() -> None:
    """Endpoints of other names, protocols and families do not count."""
    other = slice_of("10.0.0.1", ports=(EndpointPort("p1", Protocol.UDP, 53),))
    assert pairs(service(ports=PORTS), other, slice_of("fd00::1")) == 3
    assert count_pairs(cluster_of(), WEB, Family.IPV4) == 0


def test_a_slice_without_endpoints_for_a_port_counts_as_one() -> None:
    """Every port goes through all slices: thousands of both would take gigabytes."""
    slices = [slice_of(name=f"s{n}", ports=(EndpointPort("other", Protocol.TCP, 1),)) for n in range(4)]
    assert pairs(service(ports=PORTS), *slices) == 3 * 4
    full = slice_of("10.0.0.1", "10.0.0.2", name="full", ports=(EndpointPort("p1", Protocol.TCP, 1),))
    assert pairs(service(ports=PORTS), *slices, full) == 3 * (4 + 2)


def test_ports_that_only_slices_have_count() -> None:
    """A sync reads a hundred of them in each slice, too."""
    ports = tuple(EndpointPort(f"other{n}", Protocol.TCP, n) for n in range(1, 101))
    slices = [slice_of("10.0.0.1", name=f"s{n}", ports=ports) for n in range(4)]
    assert pairs(service(ports=PORTS), *slices) == 3 * 4 + 97 * 4


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("external_ips", ("192.0.2.1", "192.0.2.2", "2001:db8::1")),
        ("load_balancer_ips", ("192.0.2.1", "192.0.2.2", "2001:db8::1")),
        ("source_ranges", ("192.0.2.0/24", "198.51.100.0/24", "2001:db8::/32")),
    ],
)
def test_each_address_of_the_family_counts_once_for_each_port(field: str, values: tuple[str, ...]) -> None:
    fields: dict[str, Any] = {field: values}
    made, endpoints = service(ports=PORTS, **fields), (slice_of("10.0.0.1"), slice_of("2001:db8::9"))
    assert pairs(made, *endpoints) == 3 * (2 + 1)
    assert pairs(made, *endpoints, family=Family.IPV6) == 3 * (1 + 1)


def test_a_port_without_endpoints_counts_once_for_each_address() -> None:
    """It has a rule that rejects at each of them, the cluster IP included."""
    made = service(ports=PORTS, external_ips=("192.0.2.1", "192.0.2.2"))
    assert pairs(made) == 3 * (1 + 2)


def test_a_service_is_oversized_above_the_limit() -> None:
    """The value has both numbers; 0 allows any number."""
    made = cluster_of(service(), slice_of("10.0.0.1", "10.0.0.2", "10.0.0.3"))
    found = oversized(made, WEB, Family.IPV4, 2)
    assert found
    assert (found.service, found.cluster_ip, found.pairs, found.limit) == (WEB, "10.96.0.10", 3, 2)
    assert [oversized(made, WEB, Family.IPV4, limit) for limit in (3, 0)] == [None, None]


def test_a_service_that_is_not_served_is_not_oversized() -> None:
    headless = Service("ns", "web", headless=True, ports=PORTS)
    assert oversized(cluster_of(headless), WEB, Family.IPV4, 1) is None


def test_a_service_without_ports_is_not_oversized() -> None:
    """A manifest may have one."""
    made = cluster_of(service(ports=()), slice_of("10.0.0.1", "10.0.0.2"))
    assert oversized(made, WEB, Family.IPV4, 1) is None


def test_an_endpoint_with_session_affinity_costs_more() -> None:
    """That makes a Service large earlier, but never too large to be served."""
    made = service(ports=PORTS, affinity_seconds=60, external_ips=("192.0.2.1",)), slice_of("10.0.0.1")
    assert pairs(*made) == 3 * (AFFINITY_COST + 1)
    assert oversized(cluster_of(*made), WEB, Family.IPV4, 3 * (1 + 1)) is None
