"""What a journey cannot tell, in one line each."""

from collections.abc import Iterator

from pykubeproxy.inspect.hops.answer import Answer
from pykubeproxy.inspect.hops.faults import bypassed_node, is_unknown_endpoint, translating_node
from pykubeproxy.inspect.hops.journey import Result, Visit
from pykubeproxy.inspect.targets import LocationKind
from pykubeproxy.inspect.trace.rule import NOT_KNOWN
from pykubeproxy.rules.parse import parse_rule
from pykubeproxy.services.frontend import FrontendKind
from pykubeproxy.wording import listed, period

_EXTERNAL = (FrontendKind.LOAD_BALANCER_IP, FrontendKind.EXTERNAL_IP)
_LISTED = 3
_ASSUMED = "No object names a pod {}; its node {} follows from podCIDRs."


def notes(answer: Answer) -> tuple[str, ...]:
    """Return sentences about assumptions, and about what no rules show; the weightiest first."""
    return tuple(dict.fromkeys((*_assumptions(answer), *_unknowns(answer))))


def _assumptions(answer: Answer) -> Iterator[str]:
    yield from _lost_replies(answer)
    yield from _unknown_endpoints(answer)
    for visit in _visits(answer):
        yield from _unknown_matches(visit)
    if answer.source.assumed:
        yield _ASSUMED.format(answer.source.address, answer.source.node)
    for journey in answer.journeys:
        for outcome in journey.outcomes:
            if outcome.location.assumed:
                yield _ASSUMED.format(outcome.location.address, outcome.location.node)
    for journey in answer.journeys:
        if interface := journey.visits[0].packet.received_by:
            yield f"Packets of pods are assumed to come in by {interface}, which the rules of {journey.entry.node} name."
    for visit in _visits(answer):
        yield from _affinity(visit)


def _lost_replies(answer: Answer) -> Iterator[str]:
    """Name nodes that replace the destination, but are not on the way back."""
    for journey in answer.journeys:
        for outcome in journey.outcomes:
            if node := bypassed_node(outcome, journey, answer):
                yield (
                    f"Connections to endpoints on {outcome.route[-1]} fail: their replies to {outcome.client} do not pass"
                    f" {node}, which replaced the destination and kept the source."
                )


def _unknown_endpoints(answer: Answer) -> Iterator[str]:
    """Name nodes that still send packets to pods that have gone, or belong to another Service."""
    for journey in answer.journeys:
        for outcome in journey.outcomes:
            if is_unknown_endpoint(outcome, answer):
                node = translating_node(outcome, journey)
                address, service = outcome.location.address, answer.destination.service.partition(":")[0]
                yield f"No EndpointSlice of {service} names {address}; the rules of {node} may be out of date."


def _unknowns(answer: Answer) -> Iterator[str]:
    if answer.source.kind is LocationKind.OUTSIDE:
        if answer.destination.kind in _EXTERNAL:
            yield "Not known: which nodes the load balancer uses, and whether it keeps the client's address."
        if answer.destination.kind is FrontendKind.CLUSTER_IP:
            yield "Most networks route no cluster IP from outside; this is what a node would do."
    for outcome in (it for journey in answer.journeys for it in journey.outcomes if it.client_assumed):
        yield f"{outcome.client} is assumed; {outcome.masqueraded_on} may masquerade with another address."
    if any(
        outcome.location.kind is not LocationKind.OUTSIDE
        for one in answer.journeys
        for outcome in one.outcomes
    ):
        yield "Policies outside iptables (such as eBPF), tunnels and routes are not seen."


def next_step(answer: Answer) -> str:
    """Return the command that shows why a Service is not reached, or not by its endpoints; "" if all is well."""
    service = answer.destination.service.partition(":")[0]
    for journey in answer.journeys:
        for outcome in journey.outcomes if service else ():
            node = outcome.route[-1]
            if is_unknown_endpoint(outcome, answer):
                return f"kubectl pykubeproxy diff --node {translating_node(outcome, journey)}"
            if outcome.step and outcome.step.chain.startswith("KUBE-") and not outcome.translated:
                return f"kubectl pykubeproxy explain {service} --node {node}"
            if not outcome.translated and outcome.result in (Result.LEFT, Result.REACHED):
                return f"kubectl pykubeproxy diff --node {node}"
    return ""


def _visits(answer: Answer) -> Iterator[Visit]:
    for journey in answer.journeys:
        yield from journey.visits


def _unknown_matches(visit: Visit) -> Iterator[str]:
    steps = visit.trace.steps if visit.trace else ()
    chains = dict.fromkeys(f"{step.table} {step.chain}" for step in steps if NOT_KNOWN in step.reason)
    if chains:
        yield f"Assumed not to match: rules that trace cannot evaluate on {visit.node}, in {listed(chains, _LISTED)}."


def _affinity(visit: Visit) -> Iterator[str]:
    for step in visit.trace.steps if visit.trace else ():
        options = parse_rule(step.rule).options
        if "--rcheck" in options and options.get("--seconds", "").isdecimal():
            kept = period(int(options["--seconds"]))
            yield f"A client that used {visit.node} within {kept} keeps its endpoint (session affinity)."
            return
