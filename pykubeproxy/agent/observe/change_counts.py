"""Count object events as kube-proxy does: its proxier of each address family counts them on its own."""

from collections.abc import Collection

from pykubeproxy.objects import Deleted, EndpointSlice, Event, Family, Kind, Listed, Service, Updated
from pykubeproxy.services.cluster import ChangedServices, families_of


def count_event(event: Event, changes: ChangedServices, families: Collection[Family]) -> tuple[Kind, int]:
    """Return the kind of an event and how often it counts.

    An event about a Service counts in all served `families`, even if it changes nothing. One about an EndpointSlice
    counts in the family of its addresses, if it names a Service. Of a list, only objects that it changes count.
    """
    match event:
        case Updated(Service()) | Deleted(Kind.SERVICE):
            return Kind.SERVICE, len(families)
        case Listed(Kind.SERVICE):
            return Kind.SERVICE, len(families) * len(changes)
        case Updated(EndpointSlice() as slice_):
            return Kind.ENDPOINT_SLICE, len(families_of(slice_).intersection(families))
        case Listed(Kind.ENDPOINT_SLICE) | Deleted(Kind.ENDPOINT_SLICE):
            count = sum(changed[family] for changed in changes.values() for family in families)
            return Kind.ENDPOINT_SLICE, count
    return Kind.NODE, 0
