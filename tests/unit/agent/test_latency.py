"""The programming latency: from a change of endpoints to its rules."""

import pickle

import pytest

from pykubeproxy.agent.observe.latency import Latencies
from pykubeproxy.objects import Deleted, EndpointSlice, Family, Key, Kind, Listed, Updated
from tests.objects import service, slice_of

V4, V6 = Family.IPV4, Family.IPV6
STARTED = 1000.0


def changed(
    at: float | None, name: str = "web-1", address: str = "10.1.0.1", **fields: object
) -> EndpointSlice:
    """Return a slice with this trigger time."""
    return slice_of(address, name=name, trigger_time=at, **fields)  # type: ignore[arg-type]


@pytest.fixture
def latencies() -> Latencies:
    return Latencies(STARTED, Family)


def test_each_change_counts_once(latencies: Latencies) -> None:
    """Several changes of a slice before a sync are several samples."""
    for trigger in (1001.0, 1002.5, 1002.5):
        latencies.event_applied(Updated(changed(trigger)))
    assert latencies.sync_succeeded(V4, 1003.0) == [2.0, 0.5]
    assert latencies.sync_succeeded(V4, 1004.0) == []
    # The same time again, as after a relist or a change of something else.
    latencies.event_applied(Updated(changed(1002.5)))
    latencies.event_applied(Listed(Kind.ENDPOINT_SLICE, (changed(1002.5),)))
    assert latencies.sync_succeeded(V4, 1005.0) == []


def test_the_oldest_of_replaced_events_counts(latencies: Latencies) -> None:
    """If it is new; the last one counts as seen."""
    latencies.event_applied(Updated(changed(1003.0), replaced=1001.0))
    latencies.event_applied(Updated(changed(1003.0), replaced=1003.0))
    assert latencies.sync_succeeded(V4, 1005.0) == [4.0]
    latencies.event_applied(Updated(changed(1004.0), replaced=1003.0))
    latencies.event_applied(Updated(changed(None), replaced=1004.5))
    latencies.event_applied(Updated(changed(1004.75), replaced=STARTED - 1))
    assert latencies.sync_succeeded(V4, 1005.0) == [1.0, 0.5, 0.25]


def test_changes_before_the_start_do_not_count(latencies: Latencies) -> None:
    """The first list contains changes that another process may have applied."""
    slices = (changed(999.0), changed(1000.0, "web-2"), changed(None, "web-3"), changed(1001.0, "web-4"))
    latencies.event_applied(Listed(Kind.ENDPOINT_SLICE, slices))
    assert latencies.sync_succeeded(V4, 1002.0) == [1.0]


def test_families_are_measured_separately(latencies: Latencies) -> None:
    """A change counts when the family of its slice is synced."""
    latencies.event_applied(Updated(changed(1001.0)))
    latencies.event_applied(Updated(changed(1002.0, "web-6", "fd00::1")))
    assert latencies.sync_succeeded(V4, 1005.0) == [4.0]
    assert latencies.sync_succeeded(V6, 1006.0) == [4.0]


def test_unserved_families_use_no_memory() -> None:
    """On a node without IPv6 in a dual-stack cluster, they would add up."""
    latencies = Latencies(STARTED, [V4])
    kept = pickle.dumps(latencies)
    for second in range(10):
        latencies.event_applied(Updated(changed(1001.0 + second, "web-6", "fd00::1")))
    assert pickle.dumps(latencies) == kept
    latencies.event_applied(Updated(changed(1001.0)))
    assert latencies.sync_succeeded(V4, 1005.0) == [4.0]


def test_deleted_slices_do_not_count(latencies: Latencies) -> None:
    """Their trigger time is that of the last change; a slice missing from a list counts as deleted."""
    gone = changed(1001.0)
    latencies.event_applied(Updated(gone))
    latencies.event_applied(Deleted(Kind.ENDPOINT_SLICE, gone.key))
    assert latencies.sync_succeeded(V4, 1005.0) == []
    latencies.event_applied(Updated(gone))
    latencies.event_applied(Listed(Kind.ENDPOINT_SLICE, ()))
    assert latencies.sync_succeeded(V4, 1005.0) == []


def test_only_slices_that_lead_to_rules_count(latencies: Latencies) -> None:
    """A clock set back gives no negative latency."""
    latencies.event_applied(Updated(service()))
    latencies.event_applied(Listed(Kind.SERVICE, (service(),)))
    latencies.event_applied(Deleted(Kind.SERVICE, Key("ns", "web")))
    latencies.event_applied(Updated(changed(1001.0, headless=True)))
    assert latencies.sync_succeeded(V4, 1005.0) == []
    latencies.event_applied(Updated(changed(1010.0)))
    assert latencies.sync_succeeded(V4, 1005.0) == [0.0]


@pytest.mark.parametrize("fields", [{"service": ""}, {"headless": True}])
def test_slices_that_cause_no_sync_do_not_count(latencies: Latencies, fields: dict[str, object]) -> None:
    """Otherwise a later sync would report how long nothing had to be done."""
    latencies.event_applied(Updated(changed(1001.0, **fields)))  # type: ignore[arg-type]
    assert latencies.sync_succeeded(V4, 5000.0) == []


def test_changes_of_a_deferred_service_count_once_they_are_applied(latencies: Latencies) -> None:
    """Those of others count at once; further changes until then are samples of their own."""
    web, other = Key("ns", "web"), changed(1001.0, "other-1", service="other")
    latencies.event_applied(Updated(changed(1001.0)))
    latencies.event_applied(Updated(other))
    assert latencies.sync_succeeded(V4, 1002.0, {web}) == [1.0]
    latencies.event_applied(Updated(changed(1003.0)))
    assert latencies.sync_succeeded(V4, 1004.0, {web}) == []
    assert latencies.sync_succeeded(V4, 1006.0) == [5.0, 3.0]
