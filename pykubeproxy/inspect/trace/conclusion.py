"""What a followed connection means: the verdict, its sentence, notes, and the command that tells more."""

import enum
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from pykubeproxy.inspect.connection import Location, LocationKind, TracedDestination
from pykubeproxy.inspect.packets.rule_set import NO_INTERFACE, NOT_KNOWN
from pykubeproxy.inspect.packets.walk import Step
from pykubeproxy.inspect.trace.journey import (
    EndResult,
    TracedEnd,
    TracedVisit,
    TracedWay,
    is_bypassed,
    is_of_proxy,
    shown_node,
)
from pykubeproxy.rules.ruleset import ChainKey
from pykubeproxy.services.ports import FrontendKind
from pykubeproxy.wording import counted, listed, percent, period

_LISTED = 3
_EXTERNAL = (FrontendKind.LOAD_BALANCER_IP, FrontendKind.EXTERNAL_IP)
_ASSUMED = "No object names a pod {}; its node {} follows from podCIDRs."


class TraceVerdict(enum.Enum):
    """The answer in a word.

    - LIKELY: rules choose an endpoint, but those of its node, or of a node that may receive the connection, are unknown
    - PARTLY: it depends on chance, or on the node that receives the connection
    - UNKNOWN: the rules of no first node are known
    """

    REACHED = "reached"
    LIKELY = "likely"
    PARTLY = "partly"
    NOT_REACHED = "not-reached"
    UNKNOWN = "unknown"


class _NodeFailure(NamedTuple):
    """The node that fails a connection, None for the one that receives the packet, and what it does."""

    by: str | None
    what: str

    def __str__(self) -> str:
        return self.what if self.by is None else f"{shown_node(self.by)} {self.what}"


class Answer(NamedTuple):
    """Where a connection goes. `alone`: no other node can be read than the first."""

    source: Location
    destination: TracedDestination
    ways: Sequence[TracedWay]
    alone: bool

    @property
    def ends(self) -> Iterator[TracedEnd]:
        return (end for way in self.ways for end in way.ends)

    @property
    def visits(self) -> Iterator[TracedVisit]:
        return (visit for way in self.ways for visit in way.visits)


def verdict(answer: Answer) -> TraceVerdict:
    """Return whether the connection gets where it should: for a Service, to an endpoint."""
    if all(way.unread for way in answer.ways if way.visits):
        return TraceVerdict.UNKNOWN
    unread = any(way.unread for way in answer.ways)
    if not any(map(_may_work, answer.ways)):
        return TraceVerdict.PARTLY if unread else TraceVerdict.NOT_REACHED
    if not all(way.unread or _works(way) for way in answer.ways):
        return TraceVerdict.PARTLY
    if unread or any(end.result is EndResult.SENT for end in answer.ends):
        return TraceVerdict.LIKELY
    return TraceVerdict.REACHED


def conclusion(answer: Answer) -> str:
    """Return one sentence."""
    if len(answer.ways) > 1:
        return _through_nodes(answer)
    (way,) = answer.ways
    sentence = _alone(answer, way)
    if way.others and way.follows_objects and not way.unread:
        sentence += f" The same should happen through {counted(len(way.others), 'other node')}."
    return sentence


def _works(way: TracedWay) -> bool:
    """Return whether all connections end where they should; of a group that is not read, as expected."""
    return all(end.good for end in way.ends) and not way.unread if way.visits else way.serves


def _may_work(way: TracedWay) -> bool:
    return any(end.good for end in way.ends) if way.visits else way.serves


def _sender(source: Location) -> str:
    match source.kind:
        case LocationKind.POD:
            return f"pod {source.pod or source.address}"
        case LocationKind.NODE:
            node = shown_node(source.node or "")
            return f"pod {source.pod} (on the network of {node})" if source.pod else node
        case _:
            return source.address


def _through_nodes(answer: Answer) -> str:
    """Conclude for a connection that any of several nodes may receive."""
    sender, title = _sender(answer.source), answer.destination.title
    good = [name for way in answer.ways if _works(way) for name in way.names]
    bad = [way for way in answer.ways if not way.unread and not _works(way)]
    unread = _unread(visit for way in answer.ways if way.unread for visit in way.visits)
    unknown = f"; {unread}" if unread else ""
    if not bad:
        nodes = counted(len(good), "node")
        through = listed(good, _LISTED) if unread else f"any of {nodes}"
        known = f"{sender} reaches {title} through {through}" if good else f"Unknown: {sender} to {title}"
        return f"{known}{unknown}."
    groups: dict[_NodeFailure, list[str]] = {}
    for way in bad:
        groups.setdefault(_failure_through(way, answer), []).extend(way.names)
    failures = listed(_done_by(some, failure) for failure, some in groups.items()) + unknown
    if good:
        only = "" if unread else "only "
        return f"{sender} reaches {title} {only}through {listed(good, _LISTED)}: {failures}."
    if any(map(_may_work, bad)):
        return f"{sender} reaches {title} with some of its connections only: {failures}."
    return f"{sender} does not reach {title}: {failures}."


def _done_by(receivers: Sequence[str], failure: _NodeFailure) -> str:
    if failure.by is not None:
        return str(failure)
    return f"{receivers[0]} {failure}" if len(receivers) == 1 else f"each of {len(receivers)} nodes {failure}"


def _failure_through(way: TracedWay, answer: Answer) -> _NodeFailure:
    """Return the most probable failure; it names no node if that is the one that receives the packet."""
    if not way.visits:
        return _NodeFailure(None, "should drop it")
    worst = max(way.ends, key=lambda end: (not end.good, end.probability))
    failure = _failure(worst, answer, "it")
    return failure._replace(by=None) if failure.by == way.node else failure


def _alone(answer: Answer, way: TracedWay) -> str:
    sender, title = _sender(answer.source), answer.destination.title
    if way.unread:
        where = "which receives it" if answer.source.kind is LocationKind.OUTSIDE else "where it starts"
        first = shown_node(way.node or "")
        return f"Unknown: {sender} to {title} depends on {first}, {where}: {way.unread}."
    good = [end for end in way.ends if end.good]
    bad = [end for end in way.ends if not end.good]
    unread = _unread(visit for visit in way.visits if visit.unread)
    as_known = f"; {unread}" if unread else ""
    if not bad:
        verb = "goes to" if any(end.result is EndResult.SENT for end in good) else "reaches"
        return f"{sender} {verb} {_goal(answer, good)}{as_known}."
    what = "the others" if good else "its packets"
    failures = listed(dict.fromkeys(str(_failure(end, answer, what)) for end in bad))
    if not good:
        return f"{sender} does not reach {title}: {failures}."
    share = percent(sum(end.probability for end in good))
    return f"{sender} reaches {title} with {share} of its connections; {failures}{as_known}."


def _unread(visits: Iterable[TracedVisit]) -> str:
    """Return which nodes are unread, and why; "" if there is none."""
    nodes: dict[str, dict[str, None]] = {}
    for visit in visits:
        nodes.setdefault(visit.unread or "", {})[shown_node(visit.node)] = None
    return listed(
        f"the rules of {listed(some, _LISTED)} are unknown ({reason})" for reason, some in nodes.items()
    )


def _goal(answer: Answer, ends: Sequence[TracedEnd]) -> str:
    title = answer.destination.title
    first = ends[0]
    if not first.endpoint:
        if first.result is EndResult.SENT and first.node is not None:
            return f"{answer.destination}, on {shown_node(first.node)}"
        if first.result is EndResult.SENT:
            return f"{title} itself, not through a Service"
        if first.result is EndResult.LEFT:
            return f"{title}, outside the cluster"
        return f"{_place(first)} directly, not through a Service"
    places = dict.fromkeys((end.address, end.port) for end in ends)
    nodes = listed(dict.fromkeys(shown_node(end.node) for end in ends if end.node is not None), _LISTED)
    where = f", on {nodes}" if nodes else ""
    return f"{f'one of {len(places)} endpoints' if len(places) > 1 else 'one endpoint'} of {title}{where}"


def _place(end: TracedEnd) -> str:
    """Return text such as "pod default/web on node1" or "node1"."""
    node = shown_node(end.node or "")
    if end.kind is LocationKind.NODE and not end.pod:
        return node
    return f"pod {end.pod or end.address} on {node}"


def _failure(end: TracedEnd, answer: Answer, what: str) -> _NodeFailure:
    node = end.route[-1]
    match end.result:
        case EndResult.DROPPED:
            return _NodeFailure(node, f"drops {what}{_rule(end.rule)}")
        case EndResult.REJECTED:
            return _NodeFailure(node, f"rejects {what}{_rule(end.rule)}")
        case EndResult.LOST:
            return _NodeFailure(node, f"forwards {what} in a loop")
        case _ if end.stale:
            gone = f"sends {what} to endpoints that have gone, or that belong to another Service"
            return _NodeFailure(end.translated_on, gone)
        case _ if is_bypassed(end, answer.source):
            return _NodeFailure(end.translated_on, f"translates {what}, but replies bypass this node")
        case _ if answer.destination.unserved:
            return _NodeFailure(None, answer.destination.unserved)
        case _:
            return _NodeFailure(node, f"has no rule for {answer.destination}")


def _rule(step: Step | None) -> str:
    """Return the comment of a rule, else its chain, in parentheses."""
    if step is None:
        return ""
    return f" ({step.comment or f'{step.table} {step.chain}'})"


def notes(answer: Answer) -> tuple[str, ...]:
    """Return sentences about assumptions, and about what no rules show; the weightiest first."""
    return tuple(dict.fromkeys((*_assumptions(answer), *_unknowns(answer))))


def _assumptions(answer: Answer) -> Iterator[str]:
    for end in answer.ends:
        if is_bypassed(end, answer.source):
            node = shown_node(end.translated_on or "")
            yield (
                f"Connections to endpoints on {shown_node(end.route[-1])} fail: their replies to {end.client} do not"
                f" pass {node}, which replaced the destination and kept the source."
            )
    for end in answer.ends:
        if end.stale:
            node = shown_node(end.translated_on or "")
            service = answer.destination.service_key
            yield f"No EndpointSlice of {service} names {end.address}; the rules of {node} may be out of date."
    for visit in answer.visits:
        yield from _unknown_matches(visit)
    if answer.source.assumed:
        yield _ASSUMED.format(answer.source.address, answer.source.node)
    for end in answer.ends:
        if end.node_assumed:
            yield _ASSUMED.format(end.address, end.node)
    for visit in answer.visits:
        if visit.interface_assumed:
            yield f"Packets of pods are assumed to come in by {visit.interface}, which the rules of {visit.node} name."
    for visit in answer.visits:
        yield from _affinity(visit)


def _unknown_matches(visit: TracedVisit) -> Iterator[str]:
    node = shown_node(visit.node)
    # A service proxy asks for interfaces of pods only, by which packets from elsewhere do not come in.
    unknown = [
        step
        for step in visit.steps
        if NOT_KNOWN in step.reason and not is_of_proxy(ChainKey(step.table, step.chain))
    ]
    chains = dict.fromkeys(f"{one.table} {one.chain}" for one in unknown if NO_INTERFACE not in one.reason)
    if chains:
        yield f"Assumed not to match: rules that trace cannot evaluate on {node}, in {listed(chains, _LISTED)}."
    chains = dict.fromkeys(f"{one.table} {one.chain}" for one in unknown if NO_INTERFACE in one.reason)
    if chains:
        yield f"Assumed not to match: rules for interfaces of {node}, which are not known, in {listed(chains, _LISTED)}."


def _affinity(visit: TracedVisit) -> Iterator[str]:
    for step in visit.steps:
        if step.affinity:
            node, kept = shown_node(visit.node), period(step.affinity)
            yield f"A client that used {node} within {kept} keeps its endpoint (session affinity)."
            return


def _unknowns(answer: Answer) -> Iterator[str]:
    if answer.source.kind is LocationKind.OUTSIDE:
        if answer.destination.kind in _EXTERNAL:
            yield "Not known: which nodes the load balancer uses, and whether it keeps the client's address."
        if answer.destination.kind is FrontendKind.CLUSTER_IP:
            yield "Most networks route no cluster IP from outside; this is what a node would do."
    for end in answer.ends:
        if end.client_assumed:
            on = shown_node(end.masqueraded_on or "")
            yield f"{end.client} is assumed; {on} may masquerade with another address."
    if any(end.kind is not LocationKind.OUTSIDE for end in answer.ends):
        yield "Policies outside iptables (such as eBPF), tunnels and routes are not seen."


def next_step(answer: Answer) -> str | None:
    """Return the command that shows why a Service is not reached, or not by its endpoints; None if all is well."""
    service = answer.destination.service_key
    for end in answer.ends if service else ():
        node = end.route[-1]
        if end.stale:
            return _command("diff", end.translated_on or "", answer)
        if end.rule and end.rule.chain.startswith("KUBE-") and not end.endpoint:
            return _command(f"explain {service}", node, answer)
        if not end.endpoint and end.result in (EndResult.LEFT, EndResult.REACHED):
            return _command("diff", node, answer)
    return None


def _command(command: str, node: str, answer: Answer) -> str:
    return f"pykubeproxy {command}" if answer.alone else f"kubectl pykubeproxy {command} --node {node}"
