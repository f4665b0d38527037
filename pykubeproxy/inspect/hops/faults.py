"""Connections that fail although rules have chosen an endpoint."""

from itertools import pairwise

from pykubeproxy.inspect.hops.answer import Answer
from pykubeproxy.inspect.hops.journey import Journey, Outcome, Result


def is_unknown_endpoint(outcome: Outcome, answer: Answer) -> bool:
    """Return whether rules of a proxy have chosen an address that no EndpointSlice of the Service names."""
    known = answer.endpoints
    return outcome.by_proxy and known is not None and outcome.location.address not in known


def bypassed_node(outcome: Outcome, journey: Journey, answer: Answer) -> str:
    """Return the node that replaced the destination and kept the source, if replies do not pass it; else ""."""
    if not outcome.translated or outcome.masqueraded_on or outcome.result is not Result.REACHED:
        return ""
    node = translating_node(outcome, journey)
    return "" if node in (outcome.route[-1], answer.source.node) else node


def translating_node(outcome: Outcome, journey: Journey) -> str:
    """Return the node on the route after which the packet has its last destination."""
    for number, (before, node) in enumerate(pairwise(outcome.route), 1):
        if any(
            visit.node == node
            and visit.route == outcome.route[:number]
            and visit.packet.destination == outcome.location.address
            for visit in journey.visits
        ):
            return before
    return outcome.route[-1]
