"""What an event changes."""

import msgspec
import pytest

from pykubeproxy.objects import Deleted, EndpointPort, EndpointSlice, Event, Kind, Listed, Protocol, Updated
from pykubeproxy.services.cluster import Cluster
from tests.objects import endpoint, service, slice_of

BEFORE = slice_of("10.244.1.1", endpoint("10.244.1.2", ready=False, terminating=True))
RENAMED = (EndpointPort("other", Protocol.TCP, 8080),)


def moved(slice_: EndpointSlice) -> EndpointSlice:
    return msgspec.structs.replace(slice_, service="other")


@pytest.mark.parametrize(
    ("event", "loses"),
    [
        (Updated(slice_of("10.244.1.1", "10.244.1.2", "10.244.1.3")), False),
        (Updated(msgspec.structs.replace(BEFORE, trigger_time=1.0)), False),
        (Updated(msgspec.structs.replace(BEFORE, name="second")), False),
        (Listed(Kind.ENDPOINT_SLICE, (slice_of("10.244.1.1", "10.244.1.2"),)), False),
        (Updated(slice_of("10.244.1.1")), True),
        (Updated(slice_of(endpoint("10.244.1.1", ready=False), "10.244.1.2")), True),
        (Updated(slice_of("10.244.1.1", "10.244.1.2", ports=RENAMED)), True),
        (Updated(msgspec.structs.replace(BEFORE, headless=True)), True),
        (Updated(moved(BEFORE)), True),
        (Listed(Kind.ENDPOINT_SLICE, ()), True),
        (Deleted(Kind.ENDPOINT_SLICE, BEFORE.key), True),
        (Updated(service(external_ips=("192.0.2.1",))), True),
        (Deleted(Kind.SERVICE, service().key), True),
    ],
)
def test_a_service_that_has_lost_something_is_told_from_one_that_has_gained(
    event: Event, loses: bool
) -> None:
    cluster = Cluster()
    cluster.apply(Updated(service()))
    cluster.apply(Updated(BEFORE))
    assert cluster.apply(event)[service().key].loses is loses
