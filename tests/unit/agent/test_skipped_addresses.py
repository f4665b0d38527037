"""The log lines and events for addresses that the agent needs itself."""

from collections.abc import Iterator, MutableMapping
from typing import Any

import pytest
from structlog.testing import capture_logs

from pykubeproxy.agent.observe.skipped_addresses import SkippedAddressReporter
from pykubeproxy.objects import Family, Key, Port, Protocol, Service
from pykubeproxy.services.ports import Reserved
from tests.fakes.recorder import FakeRecorder
from tests.objects import service
from tests.reports import HERE, port_names, report

SERVERS = dict.fromkeys(
    (("203.0.113.7", 6443), ("203.0.113.8", 6443), ("fd00::7", 6443)), Reserved.API_SERVER
) | {("203.0.113.1", 6443): Reserved.OWN_PAGES}
Lines = list[MutableMapping[str, Any]]


@pytest.fixture
def logged() -> Iterator[Lines]:
    with capture_logs() as lines:
        yield lines


def claiming(name: str, *addresses: str, family: Family = Family.IPV4) -> Service:
    """A Service with these external IPs and port 6443."""
    cluster_ip = "10.96.0.10" if family is Family.IPV4 else "fd96::10"
    ports = (Port("http", Protocol.TCP, 6443),)
    return service(name, cluster_ip=cluster_ip, ports=ports, external_ips=addresses)


class Reporter:
    def __init__(self) -> None:
        self.recorder = FakeRecorder()
        self._reporter = SkippedAddressReporter(HERE, self.recorder)

    def sync(self, *services: Service, family: Family = Family.IPV4, gone: Service | None = None) -> None:
        names = port_names(gone, family=family) if gone else ()
        self._reporter.sync_succeeded(report(*services, family=family, gone=names, reserved=SERVERS))

    @property
    def regarding(self) -> list[Key]:
        return [event.regarding for event in self.recorder.events]


def test_a_skipped_address_is_reported_once_while_it_lasts(logged: Lines) -> None:
    """Syncs of the same or of other Services repeat nothing; the event names address and port."""
    reporter, web = Reporter(), claiming("web", "203.0.113.7", "203.0.113.99")
    reporter.sync(web)
    reporter.sync(web)
    reporter.sync(service("other"))
    (event,) = reporter.recorder.events
    assert (event.regarding, event.type, event.reason) == (Key("ns", "web"), "Warning", "AddressSkipped")
    assert "does not serve ns/web at 203.0.113.7:6443: " in event.note
    (line,) = logged
    assert (line["event"], line["log_level"]) == ("external address skipped", "warning")
    assert (line["service"], line["addresses"]) == ("ns/web:http", ["203.0.113.7:6443"])


def test_each_service_gets_one_event_for_all_its_addresses(logged: Lines) -> None:
    """Further addresses and the other family are logged only."""
    reporter, six = Reporter(), Family.IPV6
    reporter.sync(claiming("web", "203.0.113.7"))
    reporter.sync(claiming("web", "203.0.113.7", "203.0.113.8"))
    reporter.sync(claiming("web", "fd00::7", family=six), family=six)
    reporter.sync(claiming("api", "203.0.113.7"))
    assert reporter.regarding == [Key("ns", "web"), Key("ns", "api")]
    assert [line["addresses"] for line in logged] == [
        ["203.0.113.7:6443"],
        ["203.0.113.8:6443"],
        ["[fd00::7]:6443"],
        ["203.0.113.7:6443"],
    ]


@pytest.mark.parametrize("deleted", [True, False], ids=["deleted", "changed"])
def test_a_service_that_claims_the_address_again_is_reported_again(logged: Lines, deleted: bool) -> None:
    reporter, web = Reporter(), claiming("web", "203.0.113.7")
    reporter.sync(web)
    if deleted:
        reporter.sync(gone=web)
    else:
        reporter.sync(claiming("web", "203.0.113.99"))
    assert len(logged) == 1
    reporter.sync(web)
    assert (len(logged), len(reporter.recorder.events)) == (2, 2)


def test_each_reason_is_named(logged: Lines) -> None:
    """In a log line each, and in the event the first one."""
    reporter = Reporter()
    reporter.sync(claiming("web", "203.0.113.1", "203.0.113.7"))
    assert [(line["addresses"], line["reason"]) for line in logged] == [
        (["203.0.113.1:6443"], "the agent serves its health or metrics there"),
        (["203.0.113.7:6443"], "this node reaches the API server there"),
    ]
    (event,) = reporter.recorder.events
    assert event.note.endswith("at 203.0.113.1:6443: the agent serves its health or metrics there")
