"""What a followed connection means: the verdict, its sentence, the rules that decide, and notes."""

import enum
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec

from pykubeproxy.inspect.connection import LocationKind
from pykubeproxy.inspect.packets.iptables import EVERY_PACKET, NOT_KNOWN
from pykubeproxy.inspect.packets.walk import Step
from pykubeproxy.inspect.trace.journey import (
    EndResult,
    Journey,
    JourneyEnd,
    Location,
    NodeVisit,
    TraceAnswer,
    TraceWay,
)
from pykubeproxy.rules import names
from pykubeproxy.rules.iptables_save import parse_rule
from pykubeproxy.services.ports import FrontendKind
from pykubeproxy.wording import counted, listed, percent, period

_CERTAIN = 1 - 1e-6


class TraceVerdict(enum.Enum):
    """The answer in a word.

    - LIKELY: rules choose an endpoint, but those of its node are unknown
    - PARTLY: it depends on chance, or on the node that receives the connection
    - UNKNOWN: the rules of no first node are known
    """

    REACHED = "reached"
    LIKELY = "likely"
    PARTLY = "partly"
    NOT_REACHED = "not-reached"
    UNKNOWN = "unknown"


class _NodeFailure(NamedTuple):
    """The node that fails a connection, and what it does."""

    by: str
    what: str

    def __str__(self) -> str:
        return f"{self.by} {self.what}".strip()


def verdict(answer: TraceAnswer) -> TraceVerdict:
    """Return whether the connection gets where it should: for a Service, to an endpoint."""
    if all(journey.starts_unread for journey in answer.journeys):
        return TraceVerdict.UNKNOWN
    shares = [_share(way, answer) for way in answer.ways]
    if not any(shares):
        return TraceVerdict.NOT_REACHED
    if any(share < _CERTAIN for share in shares):
        return TraceVerdict.PARTLY
    outcomes = (outcome for journey in answer.journeys for outcome in journey.outcomes)
    return (
        TraceVerdict.LIKELY
        if any(outcome.result is EndResult.SENT for outcome in outcomes)
        else TraceVerdict.REACHED
    )


def conclusion(answer: TraceAnswer) -> str:
    """Return one sentence."""
    if len(answer.ways) > 1:
        return _through_nodes(answer)
    (journey,) = answer.journeys
    sentence = _alone(answer, journey)
    is_stale = any(is_unknown_endpoint(one, answer) for one in journey.outcomes)
    if (others := answer.ways[0].receivers.others) and not is_stale:
        sentence += f" The same should happen through {counted(len(others), 'other node')}."
    return sentence


def is_good(outcome: JourneyEnd, journey: Journey, answer: TraceAnswer) -> bool:
    """Return whether a connection works: it ends where it should and the reply comes back, as far as rules are known."""
    if is_unknown_endpoint(outcome, answer) or bypassed_node(outcome, journey, answer):
        return False
    if outcome.result is EndResult.SENT and outcome.location.kind is not None:
        return True
    chosen = outcome.translated or not (answer.destination.service or answer.destination.unserved)
    return chosen and outcome.result in (EndResult.REACHED, EndResult.LEFT, EndResult.SENT)


def _sender(source: Location) -> str:
    match source.kind:
        case LocationKind.POD:
            return f"pod {source.pod or source.address}"
        case LocationKind.NODE:
            return f"pod {source.pod} (on the network of {source.node})" if source.pod else source.node
        case _:
            return source.address


def _through_nodes(answer: TraceAnswer) -> str:
    """Conclude for a connection that any of several nodes may receive."""
    sender, title = _sender(answer.source), answer.destination.title
    good = [way for way in answer.ways if _share(way, answer) > _CERTAIN]
    names = [name for way in good for name in way.receivers.names]
    bad = [way for way in answer.ways if way not in good]
    if not bad:
        return f"{sender} reaches {title} through any of {counted(len(names), 'node')}."
    groups: dict[_NodeFailure, list[str]] = {}
    for way in bad:
        groups.setdefault(_failure_through(way, answer), []).extend(way.receivers.names)
    failures = listed(_done_by(some, failure) for failure, some in groups.items())
    if not good:
        if any(_share(way, answer) for way in bad):
            return f"{sender} reaches {title} with some of its connections only: {failures}."
        return f"{sender} does not reach {title}: {failures}."
    return f"{sender} reaches {title} only through {listed(names, _LISTED)}: {failures}."


def _done_by(receivers: Sequence[str], failure: _NodeFailure) -> str:
    if failure.by:
        return str(failure)
    return f"{receivers[0]} {failure}" if len(receivers) == 1 else f"each of {len(receivers)} nodes {failure}"


def _failure_through(way: TraceWay, answer: TraceAnswer) -> _NodeFailure:
    """Return the most probable failure; it names no node if that is the one that receives the packet."""
    if way.journey is None:
        return _NodeFailure("", "should drop it")
    if way.journey.starts_unread:
        return _NodeFailure("", "cannot be read")
    journey = way.journey
    worst = max(journey.outcomes, key=lambda end: (not is_good(end, journey, answer), end.probability))
    failure = _failure(worst, journey, answer, "it")
    return failure._replace(by="") if failure.by == journey.entry.node else failure


def _alone(answer: TraceAnswer, journey: Journey) -> str:
    sender, title = _sender(answer.source), answer.destination.title
    if journey.starts_unread:
        where = "which receives it" if answer.source.kind is LocationKind.OUTSIDE else "where it starts"
        return f"Unknown: {sender} to {title} depends on {journey.entry.node}, {where}: {journey.visits[0].unread}."
    good = [one for one in journey.outcomes if is_good(one, journey, answer)]
    bad = [one for one in journey.outcomes if one not in good]
    unread = _unread(journey)
    as_known = f"; {unread}" if unread else ""
    if not bad:
        verb = "goes to" if any(one.result is EndResult.SENT for one in good) else "reaches"
        return f"{sender} {verb} {_goal(answer, good)}{as_known}."
    if not good:
        failures = listed(dict.fromkeys(str(_failure(one, journey, answer, "its packets")) for one in bad))
        return f"{sender} does not reach {title}: {failures}."
    failures = listed(dict.fromkeys(str(_failure(one, journey, answer, "the others")) for one in bad))
    share = percent(sum(one.probability for one in good))
    return f"{sender} reaches {title} with {share} of its connections; {failures}{as_known}."


def _unread(journey: Journey) -> str:
    """Return which nodes on the way are unread, and why; "" if there is none."""
    nodes: dict[str, list[str]] = {}
    for node, reason in journey.unread.items():
        nodes.setdefault(reason, []).append(node)
    return listed(
        f"the rules of {listed(some, _LISTED)} are unknown ({reason})" for reason, some in nodes.items()
    )


def _goal(answer: TraceAnswer, outcomes: Sequence[JourneyEnd]) -> str:
    title = answer.destination.title
    first = outcomes[0]
    if not first.translated:
        if first.result is EndResult.SENT and first.location.node:
            return f"{answer.destination}, on {first.location.node}"
        if first.result is EndResult.SENT:
            return f"{title} itself, not through a Service"
        if first.result is EndResult.LEFT:
            return f"{title}, outside the cluster"
        return f"{first.location} directly, not through a Service"
    places = dict.fromkeys((one.location.address, one.port) for one in outcomes)
    nodes = listed(dict.fromkeys(one.location.node for one in outcomes if one.location.node), _LISTED)
    where = f", on {nodes}" if nodes else ""
    return f"{f'one of {len(places)} endpoints' if len(places) > 1 else 'one endpoint'} of {title}{where}"


def _failure(outcome: JourneyEnd, journey: Journey, answer: TraceAnswer, what: str) -> _NodeFailure:
    node = outcome.route[-1]
    match outcome.result:
        case EndResult.DROPPED:
            return _NodeFailure(node, f"drops {what}{_rule(outcome.step)}")
        case EndResult.REJECTED:
            return _NodeFailure(node, f"rejects {what}{_rule(outcome.step)}")
        case EndResult.LOST:
            return _NodeFailure(node, f"forwards {what} in a loop")
        case _ if is_unknown_endpoint(outcome, answer):
            stale = translating_node(outcome, journey)
            return _NodeFailure(
                stale, f"sends {what} to endpoints that have gone, or that belong to another Service"
            )
        case _ if translating := bypassed_node(outcome, journey, answer):
            return _NodeFailure(translating, f"translates {what}, but replies bypass this node")
        case _ if answer.destination.unserved:
            return _NodeFailure("", answer.destination.unserved)
        case _:
            return _NodeFailure(node, f"has no rule for {answer.destination}")


def _rule(step: Step | None) -> str:
    """Return the comment of a rule, else its chain, in parentheses."""
    if step is None:
        return ""
    return f" ({parse_rule(step.rule).comment or f'{step.table} {step.chain}'})"


def _share(way: TraceWay, answer: TraceAnswer) -> float:
    """Return the probability that a connection ends where it should; of a group that is not read, as expected."""
    if way.journey is None:
        return float(way.receivers.serve)
    if way.journey.starts_unread:
        return 0.0
    journey = way.journey
    return sum(one.probability for one in journey.outcomes if is_good(one, journey, answer))


def is_unknown_endpoint(outcome: JourneyEnd, answer: TraceAnswer) -> bool:
    """Return whether rules of a proxy have chosen an address that no EndpointSlice of the Service names."""
    known = answer.endpoints
    return outcome.by_proxy and known is not None and outcome.location.address not in known


def bypassed_node(outcome: JourneyEnd, journey: Journey, answer: TraceAnswer) -> str:
    """Return the node that replaced the destination and kept the source, if replies do not pass it; else ""."""
    if not outcome.translated or outcome.masqueraded_on or outcome.result is not EndResult.REACHED:
        return ""
    node = translating_node(outcome, journey)
    return "" if node in (outcome.route[-1], answer.source.node) else node


def translating_node(outcome: JourneyEnd, journey: Journey) -> str:
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


_FINAL = {"DROP": "dropped", "REJECT": "rejected"}
_MASQUERADING = ("MASQUERADE", "SNAT")
# kube-proxy before 1.26 marks what filter KUBE-FIREWALL drops.
_MARKS = {names.MARK_MASQ: "marked for masquerading", "KUBE-MARK-DROP": "marked to be dropped"}


class RuleDecision(msgspec.Struct, frozen=True):
    """A rule that decides, by its chain.

    - `what`: what it does to the packet
    - `endpoint`: the target of a DNAT rule, or null
    """

    table: str
    chain: str
    what: str
    endpoint: str | None = None


def decisions(visit: NodeVisit) -> tuple[RuleDecision, ...]:
    """Return what the rules of a node do to a packet, alternatives one after the other."""
    steps = visit.trace.steps if visit.trace else ()
    return tuple(
        dict.fromkeys(decision for step in steps if step.matched for decision in _decided(step, visit.node))
    )


def _decided(step: Step, node: str) -> Iterator[RuleDecision]:
    rule = parse_rule(step.rule)
    comment = rule.comment.partition(";")[0]
    target = rule.target
    if step.rule.startswith("policy "):
        yield RuleDecision(
            step.table, step.chain, f"{_FINAL.get(step.rule.split()[-1], '')} by the chain's policy"
        )
    elif target in _FINAL:
        yield RuleDecision(step.table, step.chain, f"{_FINAL[target]}: {comment or step.rule}")
    elif target == "DNAT":
        endpoint = rule.options.get("--to-destination", "")
        yield RuleDecision(step.table, step.chain, f"to endpoint {endpoint}", endpoint)
    elif target in _MASQUERADING:
        to, colon, _ = step.reason.partition(": ")
        part = f" of packets {to}" if colon and to.startswith("to ") else ""
        yield RuleDecision(step.table, step.chain, f"masqueraded: {node} replaces the source{part}")
    elif target in _MARKS:
        reason = comment if step.reason == EVERY_PACKET else step.reason
        yield RuleDecision(step.table, step.chain, f"{_MARKS[target]}: {reason}")
    elif rule.title and names.is_owned(target) and not names.is_owned(step.chain):
        yield RuleDecision(step.table, step.chain, f"matches {comment}")


_EXTERNAL = (FrontendKind.LOAD_BALANCER_IP, FrontendKind.EXTERNAL_IP)
_LISTED = 3
_ASSUMED = "No object names a pod {}; its node {} follows from podCIDRs."


def notes(answer: TraceAnswer) -> tuple[str, ...]:
    """Return sentences about assumptions, and about what no rules show; the weightiest first."""
    return tuple(dict.fromkeys((*_assumptions(answer), *_unknowns(answer))))


def _assumptions(answer: TraceAnswer) -> Iterator[str]:
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
        interface = journey.visits[0].packet.received_by
        if interface and not journey.entry.packet.received_by:
            yield f"Packets of pods are assumed to come in by {interface}, which the rules of {journey.entry.node} name."
    for visit in _visits(answer):
        yield from _affinity(visit)


def _lost_replies(answer: TraceAnswer) -> Iterator[str]:
    """Name nodes that replace the destination, but are not on the way back."""
    for journey in answer.journeys:
        for outcome in journey.outcomes:
            if node := bypassed_node(outcome, journey, answer):
                yield (
                    f"Connections to endpoints on {outcome.route[-1]} fail: their replies to {outcome.client} do not pass"
                    f" {node}, which replaced the destination and kept the source."
                )


def _unknown_endpoints(answer: TraceAnswer) -> Iterator[str]:
    """Name nodes that still send packets to pods that have gone, or belong to another Service."""
    for journey in answer.journeys:
        for outcome in journey.outcomes:
            if is_unknown_endpoint(outcome, answer):
                node = translating_node(outcome, journey)
                address, service = outcome.location.address, answer.destination.service.partition(":")[0]
                yield f"No EndpointSlice of {service} names {address}; the rules of {node} may be out of date."


def _unknowns(answer: TraceAnswer) -> Iterator[str]:
    if answer.source.kind is LocationKind.OUTSIDE:
        if answer.destination.kind in _EXTERNAL:
            yield "Not known: which nodes the load balancer uses, and whether it keeps the client's address."
        if answer.destination.kind is FrontendKind.CLUSTER_IP:
            yield "Most networks route no cluster IP from outside; this is what a node would do."
    for outcome in (end for journey in answer.journeys for end in journey.outcomes if end.client_assumed):
        yield f"{outcome.client} is assumed; {outcome.masqueraded_on} may masquerade with another address."
    if any(
        outcome.location.kind is not LocationKind.OUTSIDE
        for one in answer.journeys
        for outcome in one.outcomes
    ):
        yield "Policies outside iptables (such as eBPF), tunnels and routes are not seen."


def next_step(answer: TraceAnswer) -> str:
    """Return the command that shows why a Service is not reached, or not by its endpoints; "" if all is well."""
    service = answer.destination.service.partition(":")[0]
    for journey in answer.journeys:
        for outcome in journey.outcomes if service else ():
            node = outcome.route[-1]
            if is_unknown_endpoint(outcome, answer):
                return _command("diff", translating_node(outcome, journey), answer)
            if outcome.step and outcome.step.chain.startswith("KUBE-") and not outcome.translated:
                return _command(f"explain {service}", node, answer)
            if not outcome.translated and outcome.result in (EndResult.LEFT, EndResult.REACHED):
                return _command("diff", node, answer)
    return ""


def _command(command: str, node: str, answer: TraceAnswer) -> str:
    return f"pykubeproxy {command}" if answer.alone else f"kubectl pykubeproxy {command} --node {node}"


def _visits(answer: TraceAnswer) -> Iterator[NodeVisit]:
    for journey in answer.journeys:
        yield from journey.visits


def _unknown_matches(visit: NodeVisit) -> Iterator[str]:
    steps = visit.trace.steps if visit.trace else ()
    chains = dict.fromkeys(f"{step.table} {step.chain}" for step in steps if NOT_KNOWN in step.reason)
    if chains:
        yield f"Assumed not to match: rules that trace cannot evaluate on {visit.node}, in {listed(chains, _LISTED)}."


def _affinity(visit: NodeVisit) -> Iterator[str]:
    for step in visit.trace.steps if visit.trace else ():
        options = parse_rule(step.rule).options
        if "--rcheck" in options and options.get("--seconds", "").isdecimal():
            kept = period(int(options["--seconds"]))
            yield f"A client that used {visit.node} within {kept} keeps its endpoint (session affinity)."
            return
