"""The log lines about endpoints at -v 4."""

from structlog.testing import capture_logs

from pykubeproxy.agent.observe.sync_log import ENDPOINTS, SYNCS, SyncLog
from pykubeproxy.objects import Deleted, Event, Key, Kind, Updated
from tests.objects import endpoint, service, slice_of
from tests.unit.agent.test_family_tables import SyncedTables, context

WEB = (Updated(service()), Updated(slice_of("10.244.1.5")))


def log_lines(*steps: tuple[Event, ...], verbosity: int = ENDPOINTS) -> list[dict[str, object]]:
    """Return the lines logged for the last of several syncs."""
    synced, sync_log = SyncedTables(), SyncLog(verbosity)
    lines: list[dict[str, object]] = []
    for events in steps:
        touched = {key for event in events for key in synced.cluster.apply(event)}
        report = synced.tables.sync(synced.cluster, touched, context())
        with capture_logs() as logged:
            sync_log.synced(report)
        lines = [dict(line) for line in logged]
    return [line for line in lines if line["event"] != "synced"]


def test_a_new_endpoint() -> None:
    """Its address, whether it is used, and why."""
    (line,) = log_lines(WEB)
    assert line["event"] == "endpoint added"
    assert (line["service"], line["endpoint"]) == ("ns/web:http", "10.244.1.5:8080")
    assert line["state"] == "used: ready"


def test_a_replaced_endpoint() -> None:
    """One line each for the old and the new address."""
    lines = log_lines(WEB, (Updated(slice_of("10.244.1.6")),))
    logged = [(line["event"], line["endpoint"]) for line in lines]
    assert logged == [("endpoint removed", "10.244.1.5:8080"), ("endpoint added", "10.244.1.6:8080")]


def test_an_endpoint_that_becomes_unready() -> None:
    """The old and the new state."""
    (line,) = log_lines(WEB, (Updated(slice_of(endpoint("10.244.1.5", ready=False))),))
    assert (line["event"], line["was"]) == ("endpoint changed", "used: ready")
    assert line["state"] == "not used: not ready"


def test_a_remote_endpoint_under_policy_local() -> None:
    """The state names the policy."""
    local = (
        Updated(service(internal_local=True)),
        Updated(slice_of(endpoint("10.244.1.5", node_name="node2"))),
    )
    (line,) = log_lines(local)
    assert line["state"] == "not used: on another node, and the traffic policy is Local"


def test_a_deleted_service() -> None:
    """Its endpoints are removed."""
    (line,) = log_lines(WEB, (Deleted(Kind.SERVICE, Key("ns", "web")),))
    assert (line["event"], line["endpoint"]) == ("endpoint removed", "10.244.1.5:8080")


def test_unchanged_endpoints_are_not_logged() -> None:
    """Also if another property of the Service changes."""
    assert log_lines(WEB, (Updated(service(affinity_seconds=5)),)) == []


def test_verbosity_2_logs_no_endpoints() -> None:
    """Only syncs."""
    assert log_lines(WEB, verbosity=SYNCS) == []
