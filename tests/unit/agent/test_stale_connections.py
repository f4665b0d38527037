"""Count stale connections of each family, and go on where one cannot be read."""

import errno
import ipaddress
from collections.abc import Callable, Iterator

import pytest
from structlog.testing import capture_logs

from pykubeproxy.agent import stale_connections
from pykubeproxy.agent.stale_connections import StaleConnections
from pykubeproxy.kernel.conntrack import TrackedFlow
from pykubeproxy.objects import Family
from pykubeproxy.services.cluster import Cluster
from tests.objects import cluster_of, service, slice_of

CLUSTER = cluster_of(service(cluster_ip="10.96.0.1"), slice_of("10.244.0.5"))


def flow(endpoint: str) -> TrackedFlow:
    def end(address: str, port: int) -> tuple[bytes, int]:
        return ipaddress.ip_address(address).packed, port

    return TrackedFlow(end("10.1.0.1", 4000), end("10.96.0.1", 80), end(endpoint, 8080), b"")


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> list[TrackedFlow]:
    """The connections of IPv4; those of IPv6 cannot be read."""
    made: list[TrackedFlow] = []

    def read(family: Family) -> Iterator[TrackedFlow]:
        if family is Family.IPV6:
            raise OSError(errno.EPERM, "Operation not permitted")
        return iter(made)

    monkeypatch.setattr(stale_connections.conntrack, "translated_connections", read)
    return made


def counter(answers: bool = True) -> tuple[StaleConnections, list[tuple[Family, int]]]:
    reports: list[tuple[Family, int]] = []

    def ask(question: Callable[[Cluster], int]) -> int | None:
        return question(CLUSTER) if answers else None

    return StaleConnections(Family, ask, lambda *found: reports.append(found)), reports


def test_counts_connections_to_endpoints_that_do_not_serve(table: list[TrackedFlow]) -> None:
    """A family that cannot be read has no number, and one log line."""
    table += [flow("10.244.0.5"), flow("10.244.0.6"), flow("10.244.0.6")]
    made, reports = counter()
    with capture_logs() as logs:
        made.count()
        table.clear()
        made.count()
    assert reports == [(Family.IPV4, 2), (Family.IPV4, 0)]
    assert [(line["event"], line["family"]) for line in logs] == [("stale connections not counted", "IPv6")]


def test_keeps_the_last_number_while_a_sync_runs(table: list[TrackedFlow]) -> None:
    """The loop answers questions between syncs only."""
    table.append(flow("10.244.0.6"))
    made, reports = counter(answers=False)
    made.count()
    assert not reports
