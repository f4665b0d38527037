"""Delete stale UDP flows: coalescing, failures, and syncs during a scan."""

import errno
import ipaddress
import os
import threading
from collections.abc import Callable, Iterator

import pytest
from structlog.testing import capture_logs

from pykubeproxy.agent import flow_cleaner as flows
from pykubeproxy.agent.flow_cleaner import FlowCleaner
from pykubeproxy.agent.notices import SyncReport
from pykubeproxy.kernel.conntrack import TrackedFlow
from pykubeproxy.objects import Deleted, EndpointPort, Event, Family, Kind, Port, Protocol, Updated
from pykubeproxy.rules.context import RuleContext
from pykubeproxy.services.flows import AddressAndPort
from tests.fakes.synced import SyncedFamily
from tests.objects import service, slice_of

DNS = service("dns", cluster_ip="10.96.0.53", ports=(Port("dns", Protocol.UDP, 53),))


class Syncs(SyncedFamily):
    """Syncs over tables in memory, reported to a cleaner."""

    def __init__(self, cleaner: FlowCleaner) -> None:
        super().__init__()
        self._cleaner = cleaner

    def sync(self, *events: Event, context: RuleContext | None = None) -> SyncReport:
        report = super().sync(*events, context=context)
        self._cleaner.notice(report)
        return report

    def pods(self, *addresses: str) -> SyncReport:
        """The service dns has these pods now."""
        ports = (EndpointPort("dns", Protocol.UDP, 53),)
        return self.sync(Updated(DNS), Updated(slice_of(*addresses, service="dns", ports=ports)))


class Table:
    """A pretended conntrack table: what is listed may do something, or fail, on the way."""

    def __init__(self) -> None:
        self.flows: list[TrackedFlow | OSError | Callable[[], object]] = []
        self.deleted: list[TrackedFlow] = []
        self.listings = 0

    def udp_flows(self, family: Family) -> Iterator[TrackedFlow]:
        self.listings += 1
        for entry in self.flows:
            if isinstance(entry, OSError):
                raise entry
            if isinstance(entry, TrackedFlow):
                yield entry
            else:
                entry()

    def delete(self, flow: TrackedFlow) -> bool:
        self.deleted.append(flow)
        return True


def end(address: str, port: int) -> AddressAndPort:
    return ipaddress.ip_address(address).packed, port


def flow(answered_by: str, port: int = 4000) -> TrackedFlow:
    """A flow to the service dns."""
    return TrackedFlow(end("10.1.0.1", port), end("10.96.0.53", 53), end(answered_by, 53), b"")


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    made = Table()
    monkeypatch.setattr(flows.conntrack, "udp_flows", made.udp_flows)
    monkeypatch.setattr(flows.conntrack, "delete", made.delete)
    return made


def test_deletes_stale_flows_and_reports(table: Table) -> None:
    """Only stale flows are deleted; the callback gets family, seconds and number."""
    reports: list[tuple[Family, float, int]] = []
    cleaner = FlowCleaner(0, lambda *args: reports.append(args))
    table.flows = [flow("10.244.0.5"), flow("10.244.0.6"), flow("10.244.0.7")]
    Syncs(cleaner).pods("10.244.0.6")
    cleaner.clean()
    assert table.deleted == [table.flows[0], table.flows[2]]
    ((family, seconds, deleted),) = reports
    assert (family, deleted) == (Family.IPV4, 2)
    assert seconds > 0


def test_a_quarantined_service_redirects_no_packets(table: Table) -> None:
    """Flows to the endpoints of another Service with the same address stay; that one's rules are in force."""
    cleaner = FlowCleaner(0)
    syncs = Syncs(cleaner)
    syncs.live.rejects = lambda rule: "ns/a:dns ->" in rule
    made = [
        service(name, cluster_ip=f"10.96.0.{host}", ports=DNS.ports, external_ips=("10.96.0.53",))
        for name, host in (("a", 1), ("b", 2))
    ]
    ports = (EndpointPort("dns", Protocol.UDP, 53),)
    slices = [slice_of(f"10.244.0.{it.cluster_ips[0][-1]}", service=it.name, ports=ports) for it in made]
    report = syncs.sync_and_retry(*map(Updated, made), *map(Updated, slices))
    assert [it.name for it in report.quarantined] == ["a"]
    table.flows = [flow("10.244.0.1"), flow("10.244.0.2")]
    cleaner.clean()
    assert table.deleted == table.flows[:1]


def test_requests_coalesce(table: Table) -> None:
    """Several syncs cause one scan, for the latest state; a sync without change causes none."""
    cleaner = FlowCleaner(0)
    syncs = Syncs(cleaner)
    for pod in ("10.244.0.5", "10.244.0.6", "10.244.0.7"):
        syncs.pods(pod)
    table.flows = [flow(f"10.244.0.{number}") for number in (5, 6, 7)]
    cleaner.clean()
    assert table.listings == 1
    assert table.deleted == table.flows[:2]
    syncs.pods("10.244.0.7")
    cleaner.clean()
    assert table.listings == 1


def test_endpoint_added_during_a_scan(table: Table) -> None:
    """Flows to an endpoint that a sync adds during the scan are not stale."""
    cleaner = FlowCleaner(0)
    syncs = Syncs(cleaner)
    syncs.pods("10.244.0.5")
    table.flows = [lambda: syncs.pods("10.244.0.6"), flow("10.244.0.6"), flow("10.244.0.5")]
    cleaner.clean()
    assert table.deleted == [table.flows[2]]


def test_sync_during_a_scan_keeps_the_request(table: Table) -> None:
    """Flows of a removed service are still deleted if a sync comes during the scan."""
    cleaner = FlowCleaner(0)
    syncs = Syncs(cleaner)
    syncs.pods("10.244.0.5")
    syncs.sync(Deleted(Kind.SERVICE, DNS.key))
    other = service("other", cluster_ip="10.96.0.99", ports=DNS.ports)
    table.flows = [lambda: syncs.sync(Updated(other)), flow("10.244.0.5"), flow("10.244.0.5", 4001)]
    cleaner.clean()
    assert table.deleted == table.flows[1:]


def test_missing_permission_is_logged_once(table: Table) -> None:
    """There is one warning, and no retry."""
    table.flows = [OSError(errno.EPERM, os.strerror(errno.EPERM))]
    cleaner = FlowCleaner(0)
    syncs = Syncs(cleaner)
    with capture_logs() as logs:
        for pod in ("10.244.0.5", "10.244.0.6"):
            syncs.pods(pod)
            cleaner.clean()
        cleaner.clean()
    (line,) = logs
    assert line["log_level"] == "warning"
    assert line["error"] == "cannot read or change the conntrack table: Operation not permitted"
    assert "CAP_NET_ADMIN" in line["advice"]
    assert table.listings == 2


def test_temporary_failure_is_retried(table: Table) -> None:
    """The request stays with all it looks for, and there is one warning."""
    cleaner = FlowCleaner(0)
    syncs = Syncs(cleaner)
    syncs.pods("10.244.0.5")
    syncs.sync(Deleted(Kind.SERVICE, DNS.key))
    table.flows = [OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))]
    with capture_logs() as logs:
        cleaner.clean()
        cleaner.clean()
        syncs.sync(Updated(service("other", cluster_ip="10.96.0.99", ports=DNS.ports)))
        cleaner.clean()
    assert len(logs) == 1
    table.flows = [flow("10.244.0.5")]
    cleaner.clean()
    assert table.deleted == table.flows


def test_a_hung_or_failing_scan_shows_how_long_flows_wait(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until a scan succeeds; new requests do not make an older one look newer, nor a done one older."""
    now = 100.0
    monkeypatch.setattr(flows.time, "monotonic", lambda: now)
    cleaner = FlowCleaner(0)
    syncs, seen = Syncs(cleaner), list[float]()

    def hang() -> None:
        nonlocal now
        now += 60
        seen.append(cleaner.waiting_seconds())
        syncs.pods("10.244.0.6")
        now += 60
        seen.append(cleaner.waiting_seconds())

    assert cleaner.waiting_seconds() == 0
    syncs.pods("10.244.0.5")
    table.flows = [hang]
    cleaner.clean()
    assert seen == [60, 120]
    assert cleaner.waiting_seconds() == 60
    table.flows = [OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))]
    cleaner.clean()
    now += 30
    assert cleaner.waiting_seconds() == 90
    table.flows = []
    cleaner.clean()
    assert cleaner.waiting_seconds() == 0


def test_log_levels(table: Table) -> None:
    """-v 2 logs each scan, -v 4 each deleted flow."""
    table.flows = [flow("10.244.0.5")]
    for verbosity, expected in ((0, []), (2, ["UDP flows scanned"]), (4, None)):
        cleaner = FlowCleaner(verbosity)
        with capture_logs() as logs:
            Syncs(cleaner).pods("10.244.0.6")
            cleaner.clean()
        if expected is not None:
            assert [line["event"] for line in logs] == expected
    assert logs[0] == {
        "event": "stale UDP flow deleted",
        "log_level": "info",
        "source": "10.1.0.1:4000",
        "destination": "10.96.0.53:53",
        "endpoint": "10.244.0.5:53",
    }


def test_run_handles_requests_until_it_fails(table: Table) -> None:
    """An unexpected error ends the thread."""
    table.flows = [flow("10.244.0.5")]
    done = threading.Event()
    cleaner = FlowCleaner(0, lambda *_: done.set())
    died: list[BaseException] = []

    def body() -> None:
        try:
            cleaner.run()
        except RuntimeError as error:
            died.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    syncs = Syncs(cleaner)
    syncs.pods("10.244.0.6")
    assert done.wait(5)

    def fail() -> None:
        raise RuntimeError("a mistake")

    table.flows = [fail]
    syncs.pods("10.244.0.7")
    thread.join(5)
    assert [str(error) for error in died] == ["a mistake"]
