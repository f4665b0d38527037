"""What the agent reports about Services: log lines and events for quarantine, skipped addresses and lost affinity."""

from collections.abc import Iterator, MutableMapping
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from pykubeproxy.agent.notices import SyncReport
from pykubeproxy.agent.observe.service_reports import ENDPOINTS, SYNCS, ServiceReporter, SyncLog
from pykubeproxy.agent.observe.status import list_objects
from pykubeproxy.objects import Deleted, Event, Family, Key, Kind, Port, Protocol, Service, Updated
from pykubeproxy.pages.servicez import Quarantined
from pykubeproxy.pages.statusz import PageFilter
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.ports import PortName, Reserved
from pykubeproxy.services.selection import NodeTopology, ResolvedPort, resolve_ports
from tests.fakes.recorder import FakeRecorder
from tests.fakes.synced import SyncedFamily
from tests.objects import endpoint, service, slice_of
from tests.reports import HERE, port_names, report

SERVERS = dict.fromkeys(
    (("203.0.113.7", 6443), ("203.0.113.8", 6443), ("fd00::7", 6443)), Reserved.API_SERVER
) | {("203.0.113.1", 6443): Reserved.OWN_PAGES}
WEB_KEY = Key("ns", "web")
WEB = (Updated(service()), Updated(slice_of("10.244.1.5")))


class Reports:
    """A reporter with what it logs and records."""

    def __init__(self, lines: list[MutableMapping[str, Any]]) -> None:
        self.lines = lines
        self.recorder = FakeRecorder()
        self.sync = ServiceReporter(self.recorder, 500).notice

    @property
    def regarding(self) -> list[Key]:
        return [event.regarding for event in self.recorder.events]

    def logged(self, *fields: str) -> list[tuple[object, ...]]:
        return [tuple(line[field] for field in fields) for line in self.lines]


@pytest.fixture
def reports() -> Iterator[Reports]:
    with capture_logs() as lines:
        yield Reports(lines)


def with_quarantined(*services: str, family: Family = Family.IPV4) -> SyncReport:
    quarantined = tuple(
        Quarantined.from_port(family, PortName("ns", name, "http", "TCP"), "Invalid argument", 1.0)
        for name in services
    )
    done = report(*(service(name) for name in ("one", "two")), family=family)
    return msgspec.structs.replace(done, quarantined=quarantined)


def test_each_quarantined_port_is_reported_once(reports: Reports) -> None:
    """One log line per family, one event per Service, and one log line on release."""
    reports.sync(with_quarantined("one"))
    reports.sync(with_quarantined("one"))
    reports.sync(with_quarantined("one", family=Family.IPV6))
    reports.sync(with_quarantined("one", "two"))
    assert reports.recorder.reasons == ["ServiceQuarantined"] * 2
    assert reports.regarding == [Key("ns", "one"), Key("ns", "two")]
    assert "Invalid argument" in reports.recorder.events[0].note
    assert reports.logged("service", "family", "reason") == [
        ("ns/one:http", "IPv4", "Invalid argument"),
        ("ns/one:http", "IPv6", "Invalid argument"),
        ("ns/two:http", "IPv4", "Invalid argument"),
    ]
    reports.sync(with_quarantined("two"))
    assert reports.logged("event", "service")[-1] == ("service released from quarantine", "ns/one:http")


def test_suspect_ports_are_reported_as_a_number(reports: Reports) -> None:
    """When there are more than before. Each one that turns out to be rejected is reported like any other."""
    for held in (2, 2, 1):
        reports.sync(msgspec.structs.replace(with_quarantined(), held=held))
    assert reports.logged("event", "service_ports") == [("rules rejected, looking for the service", 2)]
    reports.sync(with_quarantined("two"))
    assert reports.regarding == [Key("ns", "two")]
    assert reports.logged("event")[1:] == [("service quarantined",)]


def claiming(*addresses: str, name: str = "web", family: Family = Family.IPV4) -> SyncReport:
    """A sync of a Service with these external IPs and port 6443."""
    return report(claimant(name, *addresses, family=family), family=family, reserved=SERVERS)


def claimant(name: str, *addresses: str, family: Family = Family.IPV4) -> Service:
    cluster_ip = "10.96.0.10" if family is Family.IPV4 else "fd96::10"
    ports = (Port("http", Protocol.TCP, 6443),)
    return service(name, cluster_ip=cluster_ip, ports=ports, external_ips=addresses)


def test_a_skipped_address_is_reported_once_while_it_lasts(reports: Reports) -> None:
    """Syncs of the same or of other Services repeat nothing; the event names address and port."""
    for done in (*[claiming("203.0.113.7", "203.0.113.99")] * 2, report(service("other"), reserved=SERVERS)):
        reports.sync(done)
    (event,) = reports.recorder.events
    assert (event.regarding, event.type, event.reason) == (WEB_KEY, "Warning", "AddressSkipped")
    assert "does not serve ns/web at 203.0.113.7:6443: " in event.note
    assert reports.logged("event", "log_level", "service", "addresses") == [
        ("external address skipped", "warning", "ns/web:http", ["203.0.113.7:6443"])
    ]


def test_each_service_gets_one_event_for_all_its_addresses(reports: Reports) -> None:
    """Further addresses and the other family are logged only."""
    reports.sync(claiming("203.0.113.7"))
    reports.sync(claiming("203.0.113.7", "203.0.113.8"))
    reports.sync(claiming("fd00::7", family=Family.IPV6))
    reports.sync(claiming("203.0.113.7", name="api"))
    assert reports.regarding == [WEB_KEY, Key("ns", "api")]
    addresses = ["203.0.113.7:6443", "203.0.113.8:6443", "[fd00::7]:6443", "203.0.113.7:6443"]
    assert reports.logged("addresses") == [([address],) for address in addresses]


@pytest.mark.parametrize("deleted", [True, False], ids=["deleted", "changed"])
def test_a_service_that_claims_the_address_again_is_reported_again(reports: Reports, deleted: bool) -> None:
    reports.sync(claiming("203.0.113.7"))
    gone = report(gone=port_names(claimant("web"), family=Family.IPV4), reserved=SERVERS)
    reports.sync(gone if deleted else claiming("203.0.113.99"))
    assert len(reports.lines) == 1
    reports.sync(claiming("203.0.113.7"))
    assert (len(reports.lines), len(reports.recorder.events)) == (2, 2)


def test_each_reason_is_named(reports: Reports) -> None:
    """In a log line each, and in the event the first one."""
    reports.sync(claiming("203.0.113.1", "203.0.113.7"))
    assert reports.logged("addresses", "reason") == [
        (["203.0.113.1:6443"], "the agent serves its health or metrics there"),
        (["203.0.113.7:6443"], "this node reaches the API server there"),
    ]
    (event,) = reports.recorder.events
    assert event.note.endswith("at 203.0.113.1:6443: the agent serves its health or metrics there")


def with_lists(lists: int, *names: str) -> SyncReport:
    """A sync of Services whose affinity needs so many lists and is not kept; 0: it is kept."""
    made, resolved = Cluster(), list[ResolvedPort]()
    for name in names:
        made.apply(Updated(service(name, affinity_seconds=60)))
        resolved += resolve_ports(made, Key("ns", name), Family.IPV4, NodeTopology(HERE), unkept_lists=lists)
    return msgspec.structs.replace(report(), resolved=tuple(resolved))


def test_affinity_that_is_not_kept_is_reported_once(reports: Reports) -> None:
    """Also if the number of endpoints crosses the bound again and again."""
    for lists in (0, 600, 600, 0, 601, 600):
        reports.sync(with_lists(lists, "web"))
    (event,) = reports.recorder.events
    assert (event.regarding, event.type, event.reason) == (WEB_KEY, "Warning", "AffinityNotKept")
    assert event.note == (
        "node node1 serves ns/web without session affinity, which needs 600 lists of clients: the Services of a namespace"
        " may have 500, the oldest Service first (maxAffinityLists)"
    )
    assert reports.logged("event", "log_level", "service", "lists", "limit") == [
        ("session affinity not kept", "warning", "ns/web", 600, 500)
    ]


def test_a_service_that_is_created_again_is_reported_again(reports: Reports) -> None:
    unkept = with_lists(600, "web")
    gone = report(gone=tuple(item.port.name for item in unkept.resolved))
    for done in (unkept, gone, unkept):
        reports.sync(done)
    assert len(reports.recorder.events) == len(reports.lines) == 2


def test_many_services_hide_no_other(reports: Reports) -> None:
    """The log and the recorder limit the reports about each namespace, so each report names its Service."""
    names = [*(f"s{number:02}" for number in range(100)), "victim"]
    reports.sync(with_lists(600, *names))
    assert reports.logged("about") == [(Key("ns", name),) for name in names]
    assert reports.regarding == [Key("ns", name) for name in names]


@pytest.mark.parametrize(
    ("wanted", "expected"), [("new", {"new", "old"}), ("plain", {"plain"}), ("", {"new", "old", "plain"})]
)
def test_the_agent_hands_out_what_decides_about_affinity(wanted: str, expected: set[str]) -> None:
    """`explain` asks for one Service: an older one of the namespace may take its affinity."""
    made, elsewhere = Cluster(), service("elsewhere", affinity_seconds=60)
    for found in (
        service("old", affinity_seconds=60, created=1.0),
        service("new", affinity_seconds=60, created=2.0),
        service("plain"),
    ):
        made.apply(Updated(found))
        made.apply(Updated(slice_of("10.0.0.1", service=found.name)))
    made.apply(Updated(msgspec.structs.replace(elsewhere, namespace="other")))
    objects = list_objects(made, (), "node1", PageFilter("ns", wanted))
    assert {it.name for it in objects.services} == expected
    assert {it.service for it in objects.slices} == (expected if wanted else set())


UNREADY = Updated(slice_of(endpoint("10.244.1.5", ready=False)))
REMOTE = (Updated(service(internal_local=True)), Updated(slice_of(endpoint("10.244.1.5", node_name="node2"))))
NOT_LOCAL = "not used: on another node, and the traffic policy is Local"
ABOUT = {"about": WEB_KEY, "detail": True, "service": "ns/web:http"}
OLD, NEW = (ABOUT | {"endpoint": f"10.244.1.{last}:8080"} for last in (5, 6))
ADDED, CHANGED, REMOVED = ({"event": f"endpoint {what}"} for what in ("added", "changed", "removed"))


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        pytest.param([WEB], [ADDED | OLD | {"state": "used: ready"}], id="new"),
        pytest.param([REMOTE], [ADDED | OLD | {"state": NOT_LOCAL}], id="remote"),
        pytest.param(
            [WEB, [Updated(slice_of("10.244.1.6"))]],
            [REMOVED | OLD, ADDED | NEW | {"state": "used: ready"}],
            id="replaced",
        ),
        pytest.param(
            [WEB, [UNREADY]],
            [CHANGED | OLD | {"state": "not used: not ready", "was": "used: ready"}],
            id="unready",
        ),
        pytest.param([WEB, [Deleted(Kind.SERVICE, WEB_KEY)]], [REMOVED | OLD], id="deleted"),
        pytest.param([WEB, [Updated(service(affinity_seconds=5))]], [], id="another property"),
    ],
)
def test_verbosity_4_logs_endpoints(steps: list[list[Event]], expected: list[dict[str, object]]) -> None:
    """Their address, whether they are used, and why, in the last sync."""
    assert endpoint_lines(steps) == [line | {"log_level": "info"} for line in expected]


def test_all_lines_about_endpoints_are_limited() -> None:
    """They name their Service as the object that others may change."""
    twice = [Updated(service()), Updated(slice_of("10.244.1.5", "10.244.1.5"))]
    steps = [twice, [UNREADY], [Deleted(Kind.SERVICE, WEB_KEY)]]
    lines = [line for number in (1, 2, 3) for line in endpoint_lines(steps[:number])]
    assert [line["event"].removeprefix("endpoint ") for line in lines] == [
        *("added", "skipped", "changed", "removed"),
    ]
    assert all(line["about"] == WEB_KEY for line in lines)


def test_verbosity_2_logs_no_endpoints() -> None:
    assert endpoint_lines([WEB], SYNCS) == []


def endpoint_lines(steps: list[Any], verbosity: int = ENDPOINTS) -> list[MutableMapping[str, Any]]:
    """Return the lines logged about endpoints for the last of several syncs."""
    synced, sync_log = SyncedFamily(), SyncLog(verbosity)
    for events in steps:
        done = synced.sync(*events)
        with capture_logs() as lines:
            sync_log.notice(done)
    return [line for line in lines if line["event"] != "synced"]
