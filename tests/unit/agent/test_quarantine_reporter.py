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
