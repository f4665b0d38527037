"""Why topology hints are ignored, and which EndpointSlices are skipped."""

from hypothesis import given
from hypothesis import strategies as st

from pykubeproxy.objects import Endpoint, EndpointSlice, Family
from pykubeproxy.services.endpoints import ResolvedEndpoint, SkipReason, slice_skip_reason
from pykubeproxy.services.selection import (
    IgnoredHints,
    NodeTopology,
    TopologyMode,
    ignored_hints,
    topology_mode,
)
from tests.objects import endpoint, slice_of

HERE = NodeTopology("node1", "zone-a")


def resolved(*endpoints: Endpoint) -> tuple[ResolvedEndpoint, ...]:
    return tuple(ResolvedEndpoint(f"{it.address}:80", it, 80, it.node_name == "node1") for it in endpoints)


def zoned(address: str, *zones: str, **fields: object) -> Endpoint:
    return endpoint(address, zone_hints=zones, **fields)


def test_missing_hints_are_not_ignored_hints() -> None:
    """Without hints on ready endpoints, no hints are ignored."""
    found = resolved(endpoint("10.0.0.1"), zoned("10.0.0.2", "zone-a", ready=False))
    assert ignored_hints(found, HERE) == ()


def test_unhinted_endpoints() -> None:
    """Ready endpoints without a hint are listed; unready ones do not count."""
    found = resolved(zoned("10.0.0.1", "zone-a"), endpoint("10.0.0.2"), endpoint("10.0.0.3", ready=False))
    assert ignored_hints(found, HERE) == (IgnoredHints(TopologyMode.SAME_ZONE, "zone-a", ("10.0.0.2:80",)),)


def test_none_for_this_zone() -> None:
    """If every endpoint has a hint but none is for this zone, the zone is named."""
    found = resolved(zoned("10.0.0.1", "zone-b"), zoned("10.0.0.2", "zone-c"))
    assert ignored_hints(found, HERE) == (IgnoredHints(TopologyMode.SAME_ZONE, "zone-a", ()),)


def test_unknown_zone() -> None:
    """A node without a zone label has an empty zone."""
    found = resolved(zoned("10.0.0.1", "zone-b"))
    assert ignored_hints(found, NodeTopology("node1")) == (IgnoredHints(TopologyMode.SAME_ZONE, "", ()),)


def test_followed_hints_are_not_ignored() -> None:
    """Node hints in use hide zone hints."""
    both = endpoint("10.0.0.1", node_hints=("node1",), zone_hints=("zone-b",))
    assert ignored_hints(resolved(both), HERE) == ()
    assert topology_mode(resolved(both), HERE) is TopologyMode.SAME_NODE


def test_node_hints_fall_back_to_zones() -> None:
    """Node hints for other nodes are ignored while zone hints are followed."""
    found = resolved(endpoint("10.0.0.1", node_hints=("node2",), zone_hints=("zone-a",)))
    assert ignored_hints(found, HERE) == (IgnoredHints(TopologyMode.SAME_NODE, "node1", ()),)
    assert topology_mode(found, HERE) is TopologyMode.SAME_ZONE


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
def test_hints_are_followed_or_ignored(endpoints: list[Endpoint], node: NodeTopology) -> None:
    """Hints of ready endpoints are either followed or ignored, unless better ones are followed."""
    found = resolved(*endpoints)
    mode = topology_mode(found, node)
    ignored = {it.mode for it in ignored_hints(found, node)}
    ready = [it for it in endpoints if it.ready]
    assert mode not in ignored
    if any(it.node_hints for it in ready):
        assert mode is TopologyMode.SAME_NODE or TopologyMode.SAME_NODE in ignored
    if any(it.zone_hints for it in ready) and mode is not TopologyMode.SAME_NODE:
        assert mode is TopologyMode.SAME_ZONE or TopologyMode.SAME_ZONE in ignored
    assert len(ignored) <= any(it.node_hints for it in ready) + any(it.zone_hints for it in ready)


def test_slice_skip_reasons() -> None:
    """A slice is usable unless it is headless or of another family, or of type FQDN."""
    usable, headless = slice_of("10.0.0.1"), slice_of("10.0.0.1", headless=True)
    fqdn = EndpointSlice("ns", "names", "web", None)
    assert [slice_skip_reason(slice_, Family.IPV4) for slice_ in (usable, headless, fqdn)] == [
        None,
        SkipReason.HEADLESS,
        SkipReason.FQDN,
    ]
    assert slice_skip_reason(usable, Family.IPV6) is SkipReason.OTHER_FAMILY
