"""Services that are served without the session affinity that they ask for: log lines, events, explain, other nodes."""

from collections.abc import Iterator, MutableMapping
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from pykubeproxy.agent.observe.query import list_objects
from pykubeproxy.agent.observe.status import Filter
from pykubeproxy.agent.observe.unkept_affinity import UnkeptAffinityReporter
from pykubeproxy.objects import Family, Key, Service, Updated
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.selection import NodeTopology, ResolvedPort, resolve_ports
from tests.fakes.recorder import FakeRecorder
from tests.objects import service, slice_of
from tests.reports import HERE, report

Lines = list[MutableMapping[str, Any]]


@pytest.fixture
def logged() -> Iterator[Lines]:
    with capture_logs() as lines:
        yield lines


def ports(lists: int, *names: str) -> tuple[ResolvedPort, ...]:
    """Return the ports of Services whose affinity needs so many lists and is not kept; 0: it is kept."""
    made = Cluster()
    for name in names:
        made.apply(Updated(service(name, affinity_seconds=60)))
    return tuple(
        port
        for name in names
        for port in resolve_ports(made, Key("ns", name), Family.IPV4, NodeTopology(HERE), unkept_lists=lists)
    )


class Reporter:
    def __init__(self) -> None:
        self.recorder = FakeRecorder()
        self._reporter = UnkeptAffinityReporter(HERE, self.recorder, 500)

    def sync(self, *resolved: ResolvedPort, gone: tuple[ResolvedPort, ...] = ()) -> None:
        names = tuple(it.port.name for it in gone)
        self._reporter.sync_succeeded(msgspec.structs.replace(report(gone=names), resolved=resolved))


def test_affinity_that_is_not_kept_is_reported_once(logged: Lines) -> None:
    """Also if the number of endpoints crosses the bound again and again."""
    reporter = Reporter()
    for lists in (0, 600, 600, 0, 601, 600):
        reporter.sync(*ports(lists, "web"))
    (event,) = reporter.recorder.events
    assert (event.regarding, event.type, event.reason) == (Key("ns", "web"), "Warning", "AffinityNotKept")
    assert event.note == (
        "node node1 serves ns/web without session affinity, which needs 600 lists of clients: the Services of a namespace"
        " may have 500, the oldest Service first (maxAffinityLists)"
    )
    (line,) = logged
    assert (line["event"], line["log_level"]) == ("session affinity not kept", "warning")
    assert (line["service"], line["lists"], line["limit"]) == ("ns/web", 600, 500)


def test_a_service_that_is_created_again_is_reported_again(logged: Lines) -> None:
    reporter, web = Reporter(), ports(600, "web")
    reporter.sync(*web)
    reporter.sync(gone=web)
    reporter.sync(*web)
    assert len(reporter.recorder.events) == len(logged) == 2


def test_many_services_hide_no_other(logged: Lines) -> None:
    """The log and the recorder limit the reports about each namespace, so each report names its Service."""
    reporter = Reporter()
    reporter.sync(*ports(600, *(f"s{number:02}" for number in range(100)), "victim"))
    assert [it["about"].name for it in logged] == [*(f"s{number:02}" for number in range(100)), "victim"]
    assert [it.regarding for it in reporter.recorder.events] == [it["about"] for it in logged]


@pytest.mark.parametrize(
    ("wanted", "expected"), [("new", {"new", "old"}), ("plain", {"plain"}), ("", {"new", "old", "plain"})]
)
def test_the_agent_hands_out_what_decides_about_affinity(wanted: str, expected: set[str]) -> None:
    """`explain` asks for one Service: an older one of the namespace may take its affinity."""
    made, elsewhere = Cluster(), service("elsewhere", affinity_seconds=60)
    some: list[Service] = [
        service("old", affinity_seconds=60, created=1.0),
        service("new", affinity_seconds=60, created=2.0),
        service("plain"),
    ]
    for it in some:
        made.apply(Updated(it))
        made.apply(Updated(slice_of("10.0.0.1", service=it.name)))
    made.apply(Updated(msgspec.structs.replace(elsewhere, namespace="other")))
    found = list_objects(made, (), "node1", Filter("ns", wanted))
    assert {it.name for it in found.services} == expected
    assert {it.service for it in found.slices} == (expected if wanted else set())
