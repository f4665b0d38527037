"""From the cause of a change to its rules."""

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
    """A slice that changed for a cause at this time."""
    return slice_of(address, name=name, trigger_time=at, **fields)  # type: ignore[arg-type]


@pytest.fixture
def latencies() -> Latencies:
    return Latencies(STARTED, Family)


def test_each_change_counts_once(latencies: Latencies) -> None:
    """Several changes of a slice before a sync are several samples; after it none is left."""
    for trigger in (1001.0, 1002.5, 1002.5):
        latencies.noted(Updated(changed(trigger)))
    assert latencies.programmed(V4, 1003.0) == [2.0, 0.5]
    assert latencies.programmed(V4, 1004.0) == []
    # The same time again, as after a relist or a change of something else.
    latencies.noted(Updated(changed(1002.5)))
    latencies.noted(Listed(Kind.ENDPOINT_SLICE, (changed(1002.5),)))
    assert latencies.programmed(V4, 1005.0) == []


def test_what_was_before_the_start_does_not_count(latencies: Latencies) -> None:
    """The first list brings changes that had been programmed by a predecessor, or nobody."""
    slices = (changed(999.0), changed(1000.0, "web-2"), changed(None, "web-3"), changed(1001.0, "web-4"))
    latencies.noted(Listed(Kind.ENDPOINT_SLICE, slices))
    assert latencies.programmed(V4, 1002.0) == [1.0]


def test_families_are_programmed_apart(latencies: Latencies) -> None:
    """A change counts in the family of its slice, when that is programmed."""
    latencies.noted(Updated(changed(1001.0)))
    latencies.noted(Updated(changed(1002.0, "web-6", "fd00::1")))
    assert latencies.programmed(V4, 1005.0) == [4.0]
    assert latencies.programmed(V6, 1006.0) == [4.0]


def test_a_family_that_is_never_programmed_leaves_nothing_behind() -> None:
    """On a node without IPv6 in a cluster that has it, changes would be gathered for months."""
    latencies = Latencies(STARTED, [V4])
    kept = pickle.dumps(latencies)
    for second in range(10):
        latencies.noted(Updated(changed(1001.0 + second, "web-6", "fd00::1")))
    assert pickle.dumps(latencies) == kept
    latencies.noted(Updated(changed(1001.0)))
    assert latencies.programmed(V4, 1005.0) == [4.0]


def test_a_slice_that_went_is_no_change_to_measure(latencies: Latencies) -> None:
    """The time it bears is that of its last change, not of its going; whether it was deleted or is missing in a list."""
    gone = changed(1001.0)
    latencies.noted(Updated(gone))
    latencies.noted(Deleted(Kind.ENDPOINT_SLICE, gone.key))
    assert latencies.programmed(V4, 1005.0) == []
    latencies.noted(Updated(gone))
    latencies.noted(Listed(Kind.ENDPOINT_SLICE, ()))
    assert latencies.programmed(V4, 1005.0) == []


def test_other_objects_and_headless_slices_do_not_count(latencies: Latencies) -> None:
    """Only what leads to rules is measured, and a clock that was set back gives no negative time."""
    latencies.noted(Updated(service()))
    latencies.noted(Listed(Kind.SERVICE, (service(),)))
    latencies.noted(Deleted(Kind.SERVICE, Key("ns", "web")))
    latencies.noted(Updated(changed(1001.0, headless=True)))
    assert latencies.programmed(V4, 1005.0) == []
    latencies.noted(Updated(changed(1010.0)))
    assert latencies.programmed(V4, 1005.0) == [0.0]
