"""Why topology hints are not heeded, and which EndpointSlices are not looked at."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubeproxy.objects import Endpoint, Family
from pykubeproxy.services.endpoints import ResolvedEndpoint, SkipReason, belongs, unnoticed
from pykubeproxy.services.selection import IgnoredHints, NodeTopology, Topology, ignored_hints, topology_of
from tests.objects import endpoint, slice_of

HERE = NodeTopology("node1", "zone-a")


def backends(*endpoints: Endpoint) -> tuple[ResolvedEndpoint, ...]:
    return tuple(ResolvedEndpoint(f"{it.address}:80", it, 80, it.node_name == "node1") for it in endpoints)


def zoned(address: str, *zones: str, **fields: object) -> Endpoint:
    return endpoint(address, zone_hints=zones, **fields)


def noded(address: str, *nodes: str, **fields: object) -> Endpoint:
    return endpoint(address, node_hints=nodes, **fields)


def test_no_hints_need_no_excuse() -> None:
    """Where no ready endpoint has a hint there is nothing to say."""
    found = backends(endpoint("10.0.0.1"), zoned("10.0.0.2", "zone-a", ready=False))
    assert ignored_hints(found, HERE) == ()


def test_lacking() -> None:
    """Ready endpoints without a hint are named; those that are not ready do not count."""
    found = backends(zoned("10.0.0.1", "zone-a"), endpoint("10.0.0.2"), endpoint("10.0.0.3", ready=False))
    assert ignored_hints(found, HERE) == (IgnoredHints(Topology.SAME_ZONE, "zone-a", ("10.0.0.2:80",)),)


def test_none_for_this_zone() -> None:
    """With a hint for each but none for here, nobody is lacking one, and the zone is named."""
    found = backends(zoned("10.0.0.1", "zone-b"), zoned("10.0.0.2", "zone-c"))
    assert ignored_hints(found, HERE) == (IgnoredHints(Topology.SAME_ZONE, "zone-a", ()),)


def test_zone_not_known() -> None:
    """A node without a zone label is told by an empty zone."""
    found = backends(zoned("10.0.0.1", "zone-b"))
    assert ignored_hints(found, NodeTopology("node1")) == (IgnoredHints(Topology.SAME_ZONE, "", ()),)


def test_heeded() -> None:
    """Hints that are heeded need no excuse, and neither do those that are not looked at any more."""
    both = endpoint("10.0.0.1", node_hints=("node1",), zone_hints=("zone-b",))
    assert ignored_hints(backends(both), HERE) == ()
    assert topology_of(backends(both), HERE) is Topology.SAME_NODE


def test_node_hints_fall_back_to_zones() -> None:
    """Node hints that do not count are excused though zone hints count."""
    found = backends(endpoint("10.0.0.1", node_hints=("node2",), zone_hints=("zone-a",)))
    assert ignored_hints(found, HERE) == (IgnoredHints(Topology.SAME_NODE, "node1", ()),)
    assert topology_of(found, HERE) is Topology.SAME_ZONE


@given(
    st.lists(
        st.builds(
            Endpoint,
            address=st.sampled_from(["10.0.0.1", "10.0.0.2", "10.0.0.3"]),
            ready=st.booleans(),
            node_hints=st.sampled_from([(), ("node1",), ("node2",)]),
            zone_hints=st.sampled_from([(), ("zone-a",), ("zone-b",), ("zone-a", "zone-b")]),
        ),
        max_size=4,
    ),
    st.sampled_from([HERE, NodeTopology("node3", "zone-c"), NodeTopology("node1", "")]),
)
def test_heeded_or_excused(endpoints: list[Endpoint], place: NodeTopology) -> None:
    """Hints that a ready endpoint has are heeded or excused, never both, unless better ones are heeded."""
    found = backends(*endpoints)
    topology = topology_of(found, place)
    excused = {it.hints for it in ignored_hints(found, place)}
    ready = [it for it in endpoints if it.ready]
    assert topology not in excused
    if any(it.node_hints for it in ready):
        assert topology is Topology.SAME_NODE or Topology.SAME_NODE in excused
    if any(it.zone_hints for it in ready) and topology is not Topology.SAME_NODE:
        assert topology is Topology.SAME_ZONE or Topology.SAME_ZONE in excused
    assert len(excused) <= any(it.node_hints for it in ready) + any(it.zone_hints for it in ready)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"headless": True}, SkipReason.HEADLESS),
    ],
)
def test_slices(fields: dict[str, bool], reason: SkipReason | None) -> None:
    """A slice is looked at unless it is labelled headless or of another family, and belongs only then."""
    slice_ = slice_of("10.0.0.1", **fields)
    assert unnoticed(slice_, Family.IPV4) is reason
    assert belongs(slice_, Family.IPV4) == (reason is None)
    assert not belongs(slice_, Family.IPV6)


def test_slices_of_others() -> None:
    """A slice of the other family, or of names, says so."""
    assert unnoticed(slice_of("10.0.0.1"), Family.IPV6) is SkipReason.OTHER_FAMILY
    names = slice_of("10.0.0.1")
    fqdn = type(names)("ns", "names", "web", None)
    assert unnoticed(fqdn, Family.IPV4) is SkipReason.FQDN
