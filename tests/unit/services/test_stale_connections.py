"""TCP connections that stay on endpoints which no longer serve."""

import pytest

from pykubeproxy.objects import Family, Port, Protocol
from pykubeproxy.services.flows import TranslatedFlow, count_stale_connections
from tests.objects import cluster_of, endpoint, service, slice_of

WEB = service(
    cluster_ip="10.96.0.1", ports=(Port("http", Protocol.TCP, 80, 30080),), external_ips=("198.51.100.7",)
)
ENDING = endpoint("10.244.0.6", terminating=True, serving=True)
CLUSTER = cluster_of(
    WEB,
    slice_of("10.244.0.5", ENDING, endpoint("10.244.0.7", ready=False, serving=False)),
    service("other", cluster_ip="10.96.0.2"),
    slice_of("10.244.0.9", service="other"),
)


def stale(destination: str, port: int, endpoint: str, endpoint_port: int = 8080) -> int:
    """Count three connections of one kind."""
    flow = TranslatedFlow((destination, port), (endpoint, endpoint_port))
    return count_stale_connections({flow: 3}, Family.IPV4, CLUSTER)


@pytest.mark.parametrize(
    ("destination", "port"),
    [("10.96.0.1", 80), ("198.51.100.7", 80), ("192.0.2.1", 30080)],
    ids=["cluster IP", "external IP", "node port"],
)
def test_connections_to_a_removed_endpoint_count(destination: str, port: int) -> None:
    """An endpoint of another Service, one that is not ready and another port are as good as none."""
    assert stale(destination, port, "10.244.0.8") == 3
    assert stale(destination, port, "10.244.0.9") == 3
    assert stale(destination, port, "10.244.0.7") == 3
    assert stale(destination, port, "10.244.0.5", 9090) == 3


def test_connections_to_endpoints_that_serve_do_not_count() -> None:
    """A terminating endpoint keeps its connections while it serves."""
    assert stale("10.96.0.1", 80, "10.244.0.5") == 0
    assert stale("10.96.0.1", 80, "10.244.0.6") == 0
    assert stale("192.0.2.1", 30080, "10.244.0.5") == 0


def test_connections_to_other_addresses_do_not_count() -> None:
    """Other programs use DNAT, too, such as for ports of the host."""
    assert stale("192.0.2.1", 8443, "10.244.0.8") == 0
    assert stale("10.96.0.1", 81, "10.244.0.8") == 0
