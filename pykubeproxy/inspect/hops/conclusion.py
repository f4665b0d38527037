"""The first line of an answer: where the connection goes."""

import enum
from collections.abc import Sequence
from typing import NamedTuple

from pykubeproxy.inspect.hops.answer import Answer, Way
from pykubeproxy.inspect.hops.faults import bypassed_node, is_unknown_endpoint, translating_node
from pykubeproxy.inspect.hops.journey import Journey, Outcome, Result
from pykubeproxy.inspect.hops.locations import Location
from pykubeproxy.inspect.targets import LocationKind
from pykubeproxy.inspect.trace.walk import Step
from pykubeproxy.rules.parse import parse_rule
from pykubeproxy.wording import counted, listed, percent

_CERTAIN = 1 - 1e-6
_LISTED = 3


class Verdict(enum.Enum):
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


class _Failure(NamedTuple):
    """The node that fails a connection, and what it does."""

    by: str
    what: str

    def __str__(self) -> str:
        return f"{self.by} {self.what}".strip()


def verdict(answer: Answer) -> Verdict:
    """Return whether the connection gets where it should: for a Service, to an endpoint."""
    if all(journey.starts_unread for journey in answer.journeys):
        return Verdict.UNKNOWN
    shares = [_share(way, answer) for way in answer.ways]
    if not any(shares):
        return Verdict.NOT_REACHED
    if any(share < _CERTAIN for share in shares):
        return Verdict.PARTLY
    outcomes = (outcome for journey in answer.journeys for outcome in journey.outcomes)
    return Verdict.LIKELY if any(it.result is Result.SENT for it in outcomes) else Verdict.REACHED


def conclusion(answer: Answer) -> str:
    """Return one sentence."""
    if len(answer.ways) > 1:
        return _through_nodes(answer)
    (journey,) = answer.journeys
    sentence = _alone(answer, journey)
    is_stale = any(is_unknown_endpoint(one, answer) for one in journey.outcomes)
    if (others := answer.ways[0].receivers.others) and not is_stale:
        sentence += f" The same should happen through {counted(len(others), 'other node')}."
    return sentence


def is_good(outcome: Outcome, journey: Journey, answer: Answer) -> bool:
    """Return whether a connection works: it ends where it should and the reply comes back, as far as rules are known."""
    if is_unknown_endpoint(outcome, answer) or bypassed_node(outcome, journey, answer):
        return False
    if outcome.result is Result.SENT:
        return True
    chosen = outcome.translated or not (answer.destination.service or answer.destination.unserved)
    return chosen and outcome.result in (Result.REACHED, Result.LEFT)


def _sender(source: Location) -> str:
    match source.kind:
        case LocationKind.POD:
            return f"pod {source.pod or source.address}"
        case LocationKind.NODE:
            return f"pod {source.pod} (on the network of {source.node})" if source.pod else source.node
        case LocationKind.OUTSIDE:
            return source.address


def _through_nodes(answer: Answer) -> str:
    """Conclude for a connection that any of several nodes may receive."""
    sender, title = _sender(answer.source), answer.destination.title
    good = [way for way in answer.ways if _share(way, answer) > _CERTAIN]
    names = [name for way in good for name in way.receivers.names]
    bad = [way for way in answer.ways if way not in good]
    if not bad:
        return f"{sender} reaches {title} through any of {counted(len(names), 'node')}."
    groups: dict[_Failure, list[str]] = {}
    for way in bad:
        groups.setdefault(_failure_through(way, answer), []).extend(way.receivers.names)
    failures = listed(_done_by(some, failure) for failure, some in groups.items())
    if not good:
        if any(_share(way, answer) for way in bad):
            return f"{sender} reaches {title} with some of its connections only: {failures}."
        return f"{sender} does not reach {title}: {failures}."
    return f"{sender} reaches {title} only through {listed(names, _LISTED)}: {failures}."


def _done_by(receivers: Sequence[str], failure: _Failure) -> str:
    if failure.by:
        return str(failure)
    return f"{receivers[0]} {failure}" if len(receivers) == 1 else f"each of {len(receivers)} nodes {failure}"


def _failure_through(way: Way, answer: Answer) -> _Failure:
    """Return the most probable failure; it names no node if that is the one that receives the packet."""
    if way.journey is None:
        return _Failure("", "should drop it")
    if way.journey.starts_unread:
        return _Failure("", "cannot be read")
    journey = way.journey
    worst = max(journey.outcomes, key=lambda it: (not is_good(it, journey, answer), it.probability))
    failure = _failure(worst, journey, answer, "it")
    return failure._replace(by="") if failure.by == journey.entry.node else failure


def _alone(answer: Answer, journey: Journey) -> str:
    sender, title = _sender(answer.source), answer.destination.title
    if journey.starts_unread:
        where = "which receives it" if answer.source.kind is LocationKind.OUTSIDE else "where it starts"
        return f"Unknown: {sender} to {title} depends on {journey.entry.node}, {where}: {journey.visits[0].unread}."
    good = [one for one in journey.outcomes if is_good(one, journey, answer)]
    bad = [one for one in journey.outcomes if one not in good]
    unread = _unread(journey)
    as_known = f"; {unread}" if unread else ""
    if not bad:
        verb = "goes to" if unread else "reaches"
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


def _goal(answer: Answer, outcomes: Sequence[Outcome]) -> str:
    title = answer.destination.title
    first = outcomes[0]
    if not first.translated:
        if first.result is Result.SENT:
            return f"{answer.destination}, on {first.location.node}"
        if first.result is Result.LEFT:
            return f"{title}, outside the cluster"
        return f"{first.location} directly, not through a Service"
    places = dict.fromkeys((one.location.address, one.port) for one in outcomes)
    nodes = listed(dict.fromkeys(one.location.node for one in outcomes if one.location.node), _LISTED)
    where = f", on {nodes}" if nodes else ""
    return f"{f'one of {len(places)} endpoints' if len(places) > 1 else 'one endpoint'} of {title}{where}"


def _failure(outcome: Outcome, journey: Journey, answer: Answer, what: str) -> _Failure:
    node = outcome.route[-1]
    match outcome.result:
        case Result.DROPPED:
            return _Failure(node, f"drops {what}{_rule(outcome.step)}")
        case Result.REJECTED:
            return _Failure(node, f"rejects {what}{_rule(outcome.step)}")
        case Result.LOST:
            return _Failure(node, f"sends {what} on and on")
        case _ if is_unknown_endpoint(outcome, answer):
            stale = translating_node(outcome, journey)
            return _Failure(
                stale, f"sends {what} to endpoints that have gone, or that belong to another Service"
            )
        case _ if translating := bypassed_node(outcome, journey, answer):
            return _Failure(translating, f"translates {what}, but replies bypass this node")
        case _ if answer.destination.unserved:
            return _Failure("", answer.destination.unserved)
        case _:
            return _Failure(node, f"has no rule for {answer.destination}")


def _rule(step: Step | None) -> str:
    """Return the comment of a rule, else its chain, in parentheses."""
    if step is None:
        return ""
    return f" ({parse_rule(step.rule).comment or f'{step.table} {step.chain}'})"


def _share(way: Way, answer: Answer) -> float:
    """Return the probability that a connection ends where it should; of a group that is not read, as expected."""
    if way.journey is None:
        return float(way.receivers.serve)
    if way.journey.starts_unread:
        return 0.0
    journey = way.journey
    return sum(one.probability for one in journey.outcomes if is_good(one, journey, answer))
