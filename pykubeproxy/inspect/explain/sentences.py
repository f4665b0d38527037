"""The sentences of `explain`."""

from pykubeproxy.inspect.routes import PacketVerdict
from pykubeproxy.objects import Endpoint
from pykubeproxy.services.endpoints import Skipped, SkipReason
from pykubeproxy.services.selection import IgnoredHints, Reason, TopologyMode
from pykubeproxy.wording import (
    listed,
)

# How many names a sentence lists.
_LISTED = 3


def endpoint_reason(reason: Reason, endpoint: Endpoint) -> str:
    """Return why an endpoint is used or not, with the fields that decide."""
    match reason:
        case Reason.OTHER_NODE_HINTED:
            return f"{reason.value} (hinted for {listed(endpoint.node_hints, _LISTED)})"
        case Reason.OTHER_ZONE_HINTED:
            return f"{reason.value} (hinted for {listed(endpoint.zone_hints, _LISTED)})"
        case Reason.NOT_LOCAL:
            return reason.value if endpoint.node_name else f"{reason.value} (its slice names no node)"
    return str(reason.value)


def skip_message(skipped: Skipped) -> str:
    """Return why an entry of an EndpointSlice is no endpoint of a port."""
    if skipped.address:
        invalid = skipped.reason is SkipReason.INVALID_ADDRESS
        address = repr(skipped.address) if invalid else skipped.address
        return f"{address} in slice {skipped.slice_name}: {skipped.reason.value}"
    if skipped.reason is SkipReason.NO_ADDRESS:
        return f"an endpoint in slice {skipped.slice_name}: {skipped.reason.value}"
    # The reasons are worded for an endpoint; here the subject is the slice.
    return f"slice {skipped.slice_name}: {skipped.reason.value.replace('its slice', 'it', 1)}"


def ignored_hints_message(ignored: IgnoredHints) -> str:
    """Return why topology hints are ignored."""
    kind = "node" if ignored.mode is TopologyMode.SAME_NODE else "zone"
    if ignored.unhinted:
        verb = "is ready but has" if len(ignored.unhinted) == 1 else "are ready but have"
        cause = f"{listed(ignored.unhinted, _LISTED)} {verb} none"
    elif not ignored.domain:
        label = " (label topology.kubernetes.io/zone)" if kind == "zone" else ""
        cause = f"this node's {kind} is unknown{label}"
    else:
        cause = f"no ready endpoint is hinted for {ignored.domain}"
    return f"Hints for {kind}s are ignored: {cause}."


def rejection(verdict: PacketVerdict, has_endpoints: bool, *, has_slices: bool) -> str:
    """Return what happens to packets under a policy that uses none of its endpoints."""
    if verdict is PacketVerdict.DROP:
        return "dropped: all usable endpoints are on other nodes"
    if not has_slices:
        return "rejected: no EndpointSlice has the Service's name (label kubernetes.io/service-name)"
    if not has_endpoints:
        return "rejected: the Service's EndpointSlices have no endpoint for this port"
    return "rejected: no endpoint is ready, and none is terminating and still serving"


def topology_message(topology: TopologyMode | None) -> str:
    """Return which topology hints are used; "" for none."""
    if topology not in (TopologyMode.SAME_NODE, TopologyMode.SAME_ZONE):
        return ""
    kind = "node" if topology is TopologyMode.SAME_NODE else "zone"
    return f"Hints for {kind}s are used: each ready endpoint has one, and some are for this {kind}."
