"""What the log tells of endpoints at -v 4."""

from structlog.testing import capture_logs

from pykubeproxy.agent.sync.log import ENDPOINTS, SYNCS, SyncLog
from pykubeproxy.objects import Deleted, Event, Key, Kind, Updated
from tests.objects import endpoint, service, slice_of
from tests.unit.agent.test_family_tables import Followed, on_terms

WEB = (Updated(service()), Updated(slice_of("10.244.1.5")))


def told(*steps: tuple[Event, ...], verbosity: int = ENDPOINTS) -> list[dict[str, object]]:
    """What is logged of the last of several syncs."""
    followed, journal = Followed(), SyncLog(verbosity)
    lines: list[dict[str, object]] = []
    for events in steps:
        touched = {key for event in events for key in followed.cluster.apply(event)}
        report = followed.tables.sync(followed.cluster, touched, on_terms())
        with capture_logs() as logged:
            journal.synced(report)
        lines = [dict(line) for line in logged]
    return [line for line in lines if line["event"] != "synced"]


def test_an_endpoint_that_appears() -> None:
    """Its address, and that it is used, and why."""
    (line,) = told(WEB)
    assert line["event"] == "endpoint appeared"
    assert (line["service"], line["endpoint"]) == ("ns/web:http", "10.244.1.5:8080")
    assert line["state"] == "used: ready"


def test_an_endpoint_that_is_replaced() -> None:
    """The old and the new address, each in a line."""
    lines = told(WEB, (Updated(slice_of("10.244.1.6")),))
    said = [(line["event"], line["endpoint"]) for line in lines]
    assert said == [("endpoint went", "10.244.1.5:8080"), ("endpoint appeared", "10.244.1.6:8080")]


def test_an_endpoint_that_is_no_longer_ready() -> None:
    """What it was, and what it is now."""
    (line,) = told(WEB, (Updated(slice_of(endpoint("10.244.1.5", ready=False))),))
    assert (line["event"], line["was"]) == ("endpoint changed", "used: ready")
    assert line["state"] == "passed over: not ready"


def test_an_endpoint_elsewhere_under_policy_local() -> None:
    """Which policy passes it over."""
    local = (
        Updated(service(internal_local=True)),
        Updated(slice_of(endpoint("10.244.1.5", node_name="node2"))),
    )
    (line,) = told(local)
    assert line["state"] == "passed over: on another node, and the traffic policy is Local"


def test_a_service_that_goes() -> None:
    """So do its endpoints."""
    (line,) = told(WEB, (Deleted(Kind.SERVICE, Key("ns", "web")),))
    assert (line["event"], line["endpoint"]) == ("endpoint went", "10.244.1.5:8080")


def test_nothing_is_told_twice() -> None:
    """A sync that changes no endpoint says nothing of them."""
    assert told(WEB, (Updated(service(affinity_seconds=5)),)) == []


def test_less_is_told_at_less_verbosity() -> None:
    """At -v 2 endpoints are left out."""
    assert told(WEB, verbosity=SYNCS) == []
