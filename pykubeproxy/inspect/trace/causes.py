"""Name the causes of what happened to probes, by a static trace and what was observed."""

import enum
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from pykubeproxy.inspect.connection import LocationKind
from pykubeproxy.inspect.flows import Flow
from pykubeproxy.inspect.packets.rule_set import NOT_KNOWN
from pykubeproxy.inspect.packets.walk import Step
from pykubeproxy.inspect.trace.journey import EndResult, TracedEnd, TracedWay, shown_node
from pykubeproxy.inspect.trace.observed import Observations, RuleRise
from pykubeproxy.inspect.trace.report import TraceReport
from pykubeproxy.inspect.trace.shares import unlikely_share
from pykubeproxy.kernel.probes import SMALL, Probe, ProbeOutcome
from pykubeproxy.objects import address_and_port, family_of
from pykubeproxy.wording import counted, listed, tied

ARRIVED = (ProbeOutcome.CONNECTED, ProbeOutcome.REPLIED)
STOPPED = (EndResult.DROPPED, EndResult.REJECTED)
# A SYN that comes this late is at least the second one.
LATE = 0.9
MOST_CAUSES = 3
_SILENT = (ProbeOutcome.TIMED_OUT, ProbeOutcome.UNANSWERED)
_STOPS = re.compile(r"\b(drop|reject)\b", re.IGNORECASE)
# A node or router has no route to the next one, or gets no answer from it.
_NO_WAY = ("network unreachable", "host unreachable", "no route", "address unreachable")
_PREDICTED = "failed, as the rules say"
_FULL = "its conntrack table is full (nf_conntrack_max)"
_OWN_NODE: Mapping[ProbeOutcome | None, str] = {
    ProbeOutcome.CONNECTED: ", though it answers its own node: a policy in front of the pod may drop them",
    ProbeOutcome.TIMED_OUT: ", and its own node gets no answer either",
}


class Cause(enum.Enum):
    """What happened to a probe, beside "arrived" and "as-predicted"."""

    ARRIVED = "arrived"
    AS_PREDICTED = "as-predicted"
    OTHER_ENDPOINT = "other-endpoint"
    PASSED = "passed"
    NOT_TRACKED = "not-tracked"
    NOT_LISTENING = "not-listening"
    REFUSED = "refused"
    REJECTED = "rejected"
    DROPPED = "dropped"
    NEVER_ARRIVED = "never-arrived"
    REPLY_LOST = "reply-lost"
    UNMATCHED = "reply-unmatched"
    NO_REPLY = "no-reply"
    NOT_SENT = "not-sent"
    LATE = "late"
    LOST = "lost"
    TABLE_FULL = "table-full"
    UNANSWERED = "unanswered"
    MTU = "mtu"
    DATA_LOST = "data-lost"
    SHARES = "shares"
    UNKNOWN = "unknown"


AGREE = (Cause.ARRIVED, Cause.AS_PREDICTED)


class LiveCause(msgspec.Struct, frozen=True):
    """What happened to some of the probes.

    - `cause`: a word for it
    - `node`: where it shows, or null
    - `text`: as a sentence without its subject
    - `probes`: their positions, from 0
    """

    cause: Cause
    node: str | None
    text: str
    probes: tuple[int, ...] = ()


class Evidence(NamedTuple):
    """A trace of one way, and what was observed.

    - `ends`: those of the trace, by address and port
    - `targets`: where each probe went at last, by the last node that tracks it; "" if none does
    - `listening`: how a connection to an endpoint from its own node ended
    """

    trace: TraceReport
    observed: Observations
    ends: Mapping[str, Sequence[TracedEnd]]
    targets: Sequence[str]
    listening: Mapping[str, ProbeOutcome]

    @property
    def way(self) -> TracedWay:
        return self.trace.ways[0]

    @property
    def first(self) -> str:
        """The node that the probes meet first."""
        return self.way.node or ""

    @property
    def translates(self) -> bool:
        return any(end.endpoint for end in self.way.ends)

    def steps(self, node: str) -> Iterator[Step]:
        """Yield the rules that the trace met on a node."""
        return (step for visit in self.way.visits if visit.node == node for step in visit.steps)

    def ends_of(self, number: int) -> Sequence[TracedEnd]:
        """Return the ends to which a probe went: of its target, or those for which another node replaces that."""
        to, target = self.trace.destination, self.targets[number]
        if target in self.ends or target != address_and_port(to.address, to.port):
            return self.ends.get(target, ())
        ahead = (end for end in self.way.ends if end.translated_on)
        return [end for end in ahead if not self.observed.flow(end.translated_on or "", number)]

    def lost_at_first(self, number: int) -> bool:
        """Return whether the first packet of a probe got no entry on the first node, but a later one did."""
        view = self.observed.view(self.first)
        delay = view.delays[number] if view and number < len(view.delays) else None
        return delay is not None and delay >= LATE


def gather(trace: TraceReport, observed: Observations) -> Evidence:
    """Return the evidence for a trace of one way."""
    ends: dict[str, list[TracedEnd]] = {}
    for end in trace.ways[0].ends:
        ends.setdefault(address_and_port(end.address, end.port), []).append(end)
    targets = []
    for number in range(len(observed.probes)):
        flows = [observed.flow(view.node, number) for view in observed.nodes]
        last = next((flow for flow in reversed(flows) if flow), None)
        targets.append(address_and_port(last.reply.source, last.reply.source_port) if last else "")
    listening = {address_and_port(one.address, one.port): one.probe.outcome for one in observed.listening}
    return Evidence(trace, observed, ends, targets, listening)


class _Alike(NamedTuple):
    """Probes that ended alike: `probe` is one of them, `stops` are ends of the trace with a rule that fits."""

    evidence: Evidence
    numbers: tuple[int, ...]
    probe: Probe
    target: str
    ends: Sequence[TracedEnd]
    stops: tuple[TracedEnd, ...]

    @property
    def late(self) -> bool:
        return self.probe.outcome in ARRIVED and self.probe.seconds > LATE

    @property
    def where(self) -> str:
        """The node of the end to which they went."""
        return next((end.route[-1] for end in self.evidence.ends.get(self.target, ())), self.evidence.first)

    @property
    def place(self) -> str:
        """Text such as "10.244.2.7:8080 (pod default/web-2)"."""
        pod = next((end.pod for end in self.evidence.ends.get(self.target, ()) if end.pod), "")
        return tied(self.target) + (f" (pod {pod})" if pod else "")

    def cause(self, cause: Cause, text: str, node: str = "") -> LiveCause:
        return LiveCause(cause, node or None, text, self.numbers)


def name_causes(evidence: Evidence) -> list[LiveCause]:
    """Return what happened to the probes, the most frequent first, but what agrees with the rules last."""
    alike: dict[object, list[int]] = {}
    for number, probe in enumerate(evidence.observed.probes):
        flows = [evidence.observed.flow(view.node, number) for view in evidence.observed.nodes]
        shown = tuple((flow.unreplied, flow.state == "CLOSE") if flow else None for flow in flows)
        late = float(probe.seconds > LATE)
        same = msgspec.structs.replace(probe, source_port=0, started=0.0, seconds=late)
        key = (same, evidence.targets[number], shown, evidence.lost_at_first(number))
        alike.setdefault(key, []).append(number)
    groups = [_alike(evidence, numbers) for numbers in alike.values()]
    stopped: dict[tuple[TracedEnd, ...], list[int]] = {}
    for group in groups:
        stopped.setdefault(group.stops, []).extend(group.numbers)
    found: dict[tuple[Cause, str | None, str], tuple[int, ...]] = {}
    for group in groups:
        one = _named(group, _have_stopped(evidence, group.stops, stopped[group.stops]))
        named = (one.cause, one.node, one.text)
        found[named] = (*found.get(named, ()), *one.probes)
    causes = [LiveCause(*named, tuple(sorted(numbers))) for named, numbers in found.items()]
    return sorted(causes, key=lambda one: (one.cause in AGREE, -len(one.probes)))


def _alike(evidence: Evidence, numbers: Sequence[int]) -> _Alike:
    first = numbers[0]
    probe, target, ends = evidence.observed.probes[first], evidence.targets[first], evidence.ends_of(first)
    group = _Alike(evidence, tuple(numbers), probe, target, ends, ())
    return group._replace(stops=tuple(_fitting_stops(group)))


def _fitting_stops(group: _Alike) -> Iterable[TracedEnd]:
    """Return the ends with a rule that may have stopped these probes, as far as probes and conntrack show."""
    evidence, number = group.evidence, group.numbers[0]
    dropped = [end for end in evidence.way.ends if end.result is EndResult.DROPPED]
    if group.probe.outcome in ARRIVED:
        # Without an entry, a packet that is sent again meets the rules like a new one, and may go another way.
        again = group.late and evidence.lost_at_first(number)
        return (end for end in dropped if again and end.route[-1] == evidence.first)
    if group.target and not group.ends:
        return ()
    if group.probe.outcome is ProbeOutcome.NOT_SENT:
        return dropped
    stops = (end for end in group.ends or evidence.way.ends if end.result in STOPPED)
    return (end for end in stops if _fits(group, end))


def _fits(group: _Alike, end: TracedEnd) -> bool:
    """Return whether a rule that stops packets fits to the result of probes and to their entries."""
    evidence, node = group.evidence, end.route[-1]
    # Packets that a rule stops have no entry on that node, but on those before. From a node to itself, they get one.
    passed = bool(group.target) != (node != evidence.first)
    passed |= evidence.observed.flow(node, group.numbers[0]) is not None
    if passed and evidence.observed.view(evidence.first) and not _stays(evidence, end.route):
        return False
    silent = group.probe.outcome in _SILENT
    if end.result is EndResult.DROPPED:
        return silent
    # Kernels limit the rate of ICMP errors, so some rejected probes get none.
    rejected = any(one.icmp or one.outcome is ProbeOutcome.REFUSED for one in evidence.observed.probes)
    said_no = (ProbeOutcome.REFUSED, ProbeOutcome.RESET)
    return bool((silent and rejected) or group.probe.icmp or group.probe.outcome in said_no)


def _stays(evidence: Evidence, route: Sequence[str]) -> bool:
    """Return whether packets start on the node where they end."""
    return evidence.trace.source.kind is LocationKind.NODE and tuple(route) == (evidence.first,)


def _have_stopped(evidence: Evidence, stops: Iterable[TracedEnd], numbers: Sequence[int]) -> bool | None:
    """Return whether the rules of ends stopped these probes: by their counters, or by the kernel's trace.

    None if no counter tells, and the packets may have been lost before.
    """
    probes = [evidence.observed.probes[number] for number in numbers]
    silent = any(probe.outcome in _SILENT for probe in probes)
    packets, unknown = 0, False
    traced: set[int] = set()
    for node, rule in {(end.route[-1], end.rule) for end in stops}:
        view, at = evidence.observed.view(node), (rule.table, rule.chain) if rule else ()
        hits = (hit for hit in (view.hits if view else ()) if (hit.table, hit.chain) == at)
        traced |= {hit.source_port for hit in hits if hit.verdict == "drop"}
        rises = (one for one in (view.rises if view else ()) if (one.table, one.chain) == at)
        if counted := [one.packets for one in rises if rule and one.rule == rule.rule]:
            packets += sum(counted)
        elif silent and view and view.met is not None:
            packets += view.met  # without a counter of its own, as many as came to the node
        elif silent and node != evidence.first:
            unknown = True
        else:
            packets += len(numbers)
    if packets >= len(numbers) or traced >= {probe.source_port for probe in probes}:
        return True
    return None if unknown else False


def _named(group: _Alike, stopped: bool | None) -> LiveCause:
    """Name the cause of what happened to probes, if rules of `group.stops` stopped them, did not, or None."""
    evidence, first, here = group.evidence, group.evidence.first, shown_node(group.evidence.first)
    target, at, outcome = group.target, tied(group.target), group.probe.outcome
    if stopped:
        return group.cause(Cause.AS_PREDICTED, _PREDICTED)
    if stopped is None:
        node = group.stops[0].route[-1]
        text = (
            f"failed: a rule of {node} stops them, as the rules say, or {_network(here, node)} loses them before; no"
            f" counter of {node} tells"
        )
        return group.cause(Cause.UNKNOWN, text, node)
    if group.late and evidence.lost_at_first(group.numbers[0]):
        return _lost(group, first)
    if group.late:
        text = f"arrived at {at} only when sent again: packets are lost on the way there or back"
        return group.cause(Cause.LATE, text, group.where)
    if outcome in ARRIVED:
        return _arrived(group)
    if target and not group.ends:
        text = f"went to {at}, which the rules of {here} do not choose"
        return group.cause(Cause.OTHER_ENDPOINT, text, first)
    if outcome is ProbeOutcome.NOT_SENT:
        return group.cause(Cause.NOT_SENT, f"could not be sent ({group.probe.error})", first)
    if _fails(group):
        return group.cause(Cause.AS_PREDICTED, _PREDICTED)
    if outcome is ProbeOutcome.UNANSWERED:
        went = f"went to {at} and " if target else ""
        return group.cause(Cause.UNANSWERED, f"{went}got no answer, which UDP does not promise", first)
    if outcome in _SILENT:
        return _silent(group)
    return _refused(group)


def _fails(group: _Alike) -> bool:
    """Return whether the rules lead probes to an endpoint that has gone, or whose replies bypass the first node."""
    bad = [end for end in group.ends or group.evidence.way.ends if not (end.good or end.result in STOPPED)]
    if group.ends:
        return len(bad) == len(group.ends)
    # A refusal may have ended the entries that say where the probes went; then their number must fit.
    share, number = sum(end.probability for end in bad), len(group.numbers)
    others = len(group.evidence.targets) - number
    refused = group.probe.outcome not in _SILENT and not group.target and bool(bad)
    return refused and not unlikely_share({"bad": share, "good": 1 - share}, {"bad": number, "good": others})


def _arrived(group: _Alike) -> LiveCause:
    evidence, first = group.evidence, group.evidence.first
    target, at, here, size = group.target, tied(group.target), shown_node(first), group.probe.lost_size
    if all(end.result in STOPPED for end in group.ends):
        if target and not group.ends:
            text = f"were answered by {at}, which the rules of {here} do not choose"
            return group.cause(Cause.OTHER_ENDPOINT, text, first)
        if target or all(end.result in STOPPED for end in evidence.way.ends):
            to = f" to {at}" if target else ""
            return group.cause(Cause.PASSED, f"connected{to}, which the rules forbid", first)
        if evidence.translates and evidence.observed.view(first):
            text = (
                f"connected, but conntrack of {here} has no entry for them: something else than these rules forwards them,"
                " such as eBPF"
            )
            return group.cause(Cause.NOT_TRACKED, text, first)
    if not size:
        return group.cause(Cause.ARRIVED, "arrived")
    node = group.where
    if size <= SMALL:
        text = f"connected to {group.place}, which acknowledges no data after that"
        return group.cause(Cause.DATA_LOST, text, node)
    way = "on the way" if node == first else f"between {here} and {shown_node(node)}"
    text = (
        f"connected to {group.place}, but packets of {size} bytes do not arrive, though small ones do: the MTU {way} is"
        " smaller, and no ICMP error says so"
    )
    return group.cause(Cause.MTU, text, node)


def _silent(group: _Alike) -> LiveCause:
    """Name the place where the trail of probes without an answer ends."""
    evidence, observed = group.evidence, group.evidence.observed
    flows: list[tuple[str, Flow]] = []
    for node in group.ends[0].route if group.ends else (evidence.first,):
        if observed.view(node) is None:
            left = (
                f"left {shown_node(evidence.first)} for {tied(group.target)}" if group.target else "were sent"
            )
            reason = next((one.unread for one in evidence.way.visits if one.node == node and one.unread), "")
            unread = f" ({reason})" if reason else ""
            text = f"{left}, and no reply came back; what happened on {shown_node(node)} is not known{unread}"
            return group.cause(Cause.UNKNOWN if reason else Cause.LOST, text, node)
        flow = observed.flow(node, group.numbers[0])
        if flow is None:
            return _lost(group, node)
        flows.append((node, flow))
    unreplied = [node for node, flow in flows if flow.unreplied]
    if not unreplied:
        why = f"the replies passed {shown_node(evidence.first)} and did not reach the client"
        return group.cause(Cause.REPLY_LOST, f"reached {group.place}, which answered, but {why}")
    node, (last, _) = unreplied[-1], flows[-1]
    if node == last:
        return _unanswered(group, node)
    here, invalid, cause = shown_node(node), observed.failures(node, "invalid"), Cause.UNMATCHED
    if invalid >= len(group.numbers):
        why = (
            f"the replies seem to come back to {here} unmatched (asymmetric routing): conntrack there counted {invalid}"
            " invalid packets"
        )
    elif any(flow.state == "CLOSE" for _, flow in flows):
        why = f"the replies bypassed {here}, and the client reset them (asymmetric routing)"
    else:
        cause = Cause.REPLY_LOST
        why = f"no reply came back to {here}: replies are lost, or take another way (asymmetric routing)"
    return group.cause(cause, f"reached {group.place}, which answered, but {why}", node)


def _unanswered(group: _Alike, node: str) -> LiveCause:
    """Describe probes that the last node sent on, without a reply."""
    evidence, here = group.evidence, shown_node(node)
    rises = _rises_of_stops(group, node)
    if rises and _stays(evidence, group.ends[0].route):
        return _stopped(group, Cause.DROPPED, node, rises)
    if any(end.result is EndResult.SENT for end in group.ends):
        text = (
            f"left {here} for {group.place}, and no reply came back: packets or replies are lost behind this node, or the"
            " endpoint does not answer"
        )
        return group.cause(Cause.NO_REPLY, text, node)
    own = _OWN_NODE.get(evidence.listening.get(group.target), "")
    return group.cause(Cause.NO_REPLY, f"reached {here}, but {group.place} did not answer{own}", node)


def _refused(group: _Alike) -> LiveCause:
    """Name who said no to probes."""
    evidence, icmp, first = group.evidence, group.probe.icmp, group.evidence.first
    target, node, by, who = group.target, group.where, Cause.REFUSED, group.probe.error
    if icmp:
        who = icmp.describe(family_of(evidence.trace.source.address))
        # Of an endpoint, the ICMP error comes from its address, or from the one that conntrack puts in its place.
        senders = (target.rpartition(":")[0].strip("[]"), evidence.trace.destination.address)
        if not (target and icmp.sender in senders and icmp.from_closed_port):
            by, who = Cause.REJECTED, f"{icmp.sender or 'an unknown host'}: {who}"
    if by is Cause.REJECTED or not target:
        if rises := _rises_of_stops(group, first):
            return _stopped(group, Cause.REJECTED, first, rises)
        untracked = evidence.observed.view(node) and not evidence.observed.flow(node, group.numbers[0])
        if who.endswith(_NO_WAY) and node != first and untracked:
            between = _network(shown_node(first), node)
            text = f"went to {tied(target)} and got {who}, and {node} tracks none of them: look at {between}"
            return group.cause(Cause.NEVER_ARRIVED, text, node)
        why = ": nothing listens there, or a firewall resets them" if by is Cause.REFUSED else ""
        text = f"were refused {f'({who})' if who else 'by a reset'}, which no rule says{why}"
        return group.cause(by, text, first)
    listening = evidence.listening.get(target)
    if listening in (ProbeOutcome.REFUSED, ProbeOutcome.UNREACHABLE):
        text = f"reached {shown_node(node)}, but nothing listens at {group.place}"
        return group.cause(Cause.NOT_LISTENING, text, node)
    if rises := _rises_of_stops(group, node):
        return _stopped(group, Cause.REJECTED, node, rises)
    if listening is ProbeOutcome.CONNECTED:
        why = "though it accepts connections from its own node: something on the way resets them"
    else:
        why = "so nothing listens there, or a firewall resets them"
    return group.cause(Cause.REFUSED, f"were refused by {group.place}, {why}", node)


def _lost(group: _Alike, node: str) -> LiveCause:
    """Describe probes of which a node has no entry: they did not get there, or something there dropped them."""
    evidence, here, at = group.evidence, shown_node(node), tied(group.target)
    ends = (end for end in group.ends or evidence.way.ends if end.result is EndResult.REJECTED)
    if _have_stopped(evidence, [end for end in ends if end.route[-1] == node], group.numbers):
        text = f"met a rule of {here} that rejects them, but no ICMP error came back"
        return group.cause(Cause.LOST, text, node)
    if rises := _seen_dropping(group, node) or _rises_of_stops(group, node):
        return _stopped(group, Cause.DROPPED, node, rises)
    view, full = evidence.observed.view(node), evidence.observed.failures(node, "drop")
    tracked = sum(evidence.observed.flow(node, one) is not None for one in range(len(evidence.targets)))
    # Whatever a full table drops, the first rules do not see.
    never = view is not None and view.met is not None and view.met <= tracked and not full
    cause = Cause.NEVER_ARRIVED if never else Cause.LOST
    dropped = f", whose full conntrack table made it drop {counted(full, 'packet')}" if full else ""
    maybe = dropped or _suspect(evidence, node)
    if full >= len(group.numbers):
        cause = Cause.TABLE_FULL
    listening = evidence.listening.get(group.target)
    closed = listening in (ProbeOutcome.REFUSED, ProbeOutcome.UNREACHABLE)
    if node == evidence.first:
        texts = {
            Cause.TABLE_FULL: f"were dropped on {here}: {_FULL}",
            Cause.NEVER_ARRIVED: f"never reached the rules of {here}: look at the client's network and policies (such as"
            " eBPF)",
            Cause.LOST: f"were lost on {here}{maybe}: look at its routes and policies (such as eBPF)",
        }
    else:
        route = group.ends[0].route
        between = _network(shown_node(route[route.index(node) - 1]), here)
        none = f"went to {at}, but {here} tracks none of them"
        texts = {
            Cause.TABLE_FULL: f"{none}: {_FULL}, which hides whether the network before it loses packets too",
            Cause.NEVER_ARRIVED: f"went to {at}, but {here} never saw the packets: look at {between}",
            Cause.LOST: f"{none}: {here} drops them{maybe}, or {between} loses them",
        }
        # A refusal ends the entry of a connection at once.
        if cause is Cause.LOST and listening is not ProbeOutcome.CONNECTED:
            texts[cause] += " or refusals of the endpoint"
    also = f"; nothing listens at {group.place}" if closed else ""
    return group.cause(cause, texts[cause] + also + _behind(group.stops), node)


def _behind(stops: Iterable[TracedEnd]) -> str:
    """Return which rules would stop probes that get lost before them."""
    rules = {f"{shown_node(end.route[-1])} in {end.rule.table} {end.rule.chain}" for end in stops if end.rule}
    return f"; a rule of {listed(sorted(rules), MOST_CAUSES)} would stop them too" if rules else ""


def _network(before: str, here: str) -> str:
    return f"the network between {before} and {here} (routes, VXLAN, security groups)"


def _suspect(evidence: Evidence, node: str) -> str:
    """Return which rule of a node may drop packets, as far as the trace knows."""
    for step in evidence.steps(node):
        if NOT_KNOWN in step.reason and _STOPS.search(step.rule):
            return f", perhaps in {step.table} {step.chain}: `{step.rule}`, which trace cannot evaluate"
    return ""


def _seen_dropping(group: _Alike, node: str) -> Sequence[RuleRise]:
    """Return the rules that the kernel saw dropping probes, each with their number."""
    observed = group.evidence.observed
    view, ports = observed.view(node), {observed.probes[number].source_port for number in group.numbers}
    hits = (hit for hit in (view.hits if view else ()) if hit.source_port in ports and hit.verdict == "drop")
    rules = Counter((hit.table, hit.chain, hit.rule) for hit in hits)
    return [RuleRise(*rule, packets, True) for rule, packets in rules.items()]


def _rises_of_stops(group: _Alike, node: str) -> Sequence[RuleRise]:
    """Return the rules of a node that may stop these probes, and counted at least so many packets.

    A rule that does not match the probes counts packets of others.
    """
    steps = (step for step in group.evidence.steps(node) if step.matched or NOT_KNOWN in step.reason)
    may = {(step.table, step.chain, step.rule) for step in steps}
    view = group.evidence.observed.view(node)
    rises = (rise for rise in (view.rises if view else ()) if (rise.table, rise.chain, rise.rule) in may)
    return [rise for rise in rises if rise.stops and rise.packets >= len(group.numbers)]


def _stopped(group: _Alike, cause: Cause, node: str, rises: Sequence[RuleRise]) -> LiveCause:
    rules = listed((f"{rise.table} {rise.chain}: `{rise.rule}`" for rise in rises), MOST_CAUSES)
    verb, one_of = "died" if cause is Cause.DROPPED else "were rejected", "one of " if len(rises) > 1 else ""
    text = f"{verb} on {shown_node(node)} in {one_of}{rules}, which should let them pass"
    return group.cause(cause, text, node)
