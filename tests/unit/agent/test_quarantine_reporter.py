"""The log lines and events for quarantined services."""

from collections.abc import Iterator, MutableMapping
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from pykubeproxy.agent.quarantine.quarantined import Quarantined
from pykubeproxy.agent.quarantine.reporter import QuarantineReporter
from pykubeproxy.agent.sync.report import SyncReport
from pykubeproxy.objects import Family, Key
from pykubeproxy.services.ports import PortName
from tests.fakes.recorder import FakeRecorder
from tests.objects import service
from tests.reports import HERE, report

Lines = list[MutableMapping[str, Any]]


@pytest.fixture
def logged() -> Iterator[Lines]:
    with capture_logs() as lines:
        yield lines


def with_quarantined(*services: str, family: Family = Family.IPV4) -> SyncReport:
    quarantined = tuple(
        Quarantined.from_port(family, PortName("ns", name, "http", "TCP"), "Invalid argument", 1.0)
        for name in services
    )
    done = report(*(service(name) for name in ("one", "two")), family=family)
    return msgspec.structs.replace(done, quarantined=quarantined)


def test_each_quarantined_port_is_reported_once(logged: Lines) -> None:
    """One log line per family, one event per Service, and one log line on release."""
    notes = FakeRecorder()
    reporter = QuarantineReporter(HERE, notes)
    assert reporter.sync_succeeded(with_quarantined("one"))
    assert not reporter.sync_succeeded(with_quarantined("one"))
    assert reporter.sync_succeeded(with_quarantined("one", family=Family.IPV6))
    assert reporter.sync_succeeded(with_quarantined("one", "two"))
    assert [(it.regarding, it.reason) for it in notes.events] == [
        (Key("ns", "one"), "ServiceQuarantined"),
        (Key("ns", "two"), "ServiceQuarantined"),
    ]
    assert "Invalid argument" in notes.events[0].note
    assert [(it["service"], it["family"], it["reason"]) for it in logged] == [
        ("ns/one:http", "IPv4", "Invalid argument"),
        ("ns/one:http", "IPv6", "Invalid argument"),
        ("ns/two:http", "IPv4", "Invalid argument"),
    ]
    assert not reporter.sync_succeeded(with_quarantined("two"))
    assert logged[-1]["event"] == "service released from quarantine"
    assert logged[-1]["service"] == "ns/one:http"


def test_undecided_ports_are_reported_as_a_number(logged: Lines) -> None:
    """Each one that turns out to be rejected is reported like any other."""
    notes = FakeRecorder()
    reporter = QuarantineReporter(HERE, notes)
    done = with_quarantined("one", "two")
    undecided = tuple(msgspec.structs.replace(it, tried=False) for it in done.quarantined)
    for _ in range(2):
        assert not reporter.sync_succeeded(msgspec.structs.replace(done, quarantined=undecided))
    assert [(it["event"], it["service_ports"]) for it in logged] == [
        ("service ports rejected until tried", 2)
    ]
    assert notes.events == []
    assert reporter.sync_succeeded(with_quarantined("two"))
    assert [it.regarding for it in notes.events] == [Key("ns", "two")]
    assert [it["event"] for it in logged[1:]] == ["service quarantined"]
