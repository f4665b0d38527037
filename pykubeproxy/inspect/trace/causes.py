"""Name the causes of what happened to probes, by a static trace and what was observed."""

import enum
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from pykubeproxy.inspect.connection import LocationKind
from pykubeproxy.inspect.flows import Flow
from pykubeproxy.inspect.packets.rule_set import NOT_KNOWN
from pykubeproxy.inspect.trace.journey import EndResult, TracedEnd, TracedWay, shown_node
from pykubeproxy.inspect.trace.observed import Observations, RuleRise
from pykubeproxy.inspect.trace.report import TraceReport
from pykubeproxy.kernel.probes import SMALL, IcmpError, Probe, ProbeOutcome
from pykubeproxy.objects import address_and_port
from pykubeproxy.wording import listed, tied

ARRIVED = (ProbeOutcome.CONNECTED, ProbeOutcome.REPLIED)
STOPPED = (EndResult.DROPPED, EndResult.REJECTED)
# A SYN that comes this late is at least the second one.
LATE = 0.9
MOST_CAUSES = 3
_SILENT = (ProbeOutcome.TIMED_OUT, ProbeOutcome.UNANSWERED)
_ICMP = {
    4: {
        (3, 0): "network unreachable",
        (3, 1): "host unreachable",
        (3, 2): "protocol unreachable",
        (3, 3): "port unreachable",
        (3, 4): "packet too big",
        (3, 9): "network prohibited",
        (3, 10): "host prohibited",
        (3, 13): "prohibited by a filter",
        (11, 0): "time to live exceeded",
    },
    6: {
        (1, 0): "no route",
        (1, 1): "prohibited by a filter",
        (1, 3): "address unreachable",
        (1, 4): "port unreachable",
        (2, 0): "packet too big",
        (3, 0): "hop limit exceeded",
    },
}
_STOPS = re.compile(r"\b(drop|reject)\b", re.IGNORECASE)
# A node or router has no route to the next one, or gets no answer from it.
_NO_WAY = ("network unreachable", "host unreachable", "no route", "address unreachable")
_PORT_UNREACHABLE = ((3, 3), (1, 4))
_UNREAD, _UNCOUNTED = "unread", "uncounted"


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

    def ends_of(self, number: int) -> Sequence[TracedEnd]:
        """Return the ends to which a probe went: of its target, or those for which another node replaces that."""
        to, target = self.trace.destination, self.targets[number]
        if target in self.ends or target != address_and_port(to.address, to.port):
            return self.ends.get(target, ())
        return [
            end
            for end in self.way.ends
            if end.translated_on and not flow_of(self.observed, end.translated_on, number)
        ]

    def node_of(self, target: str) -> str:
        return next((end.route[-1] for end in self.ends.get(target, ())), self.first)

    def place(self, target: str) -> str:
        """Return text such as "10.244.2.7:8080 (pod default/web-2)"."""
        pod = next((end.pod for end in self.ends.get(target, ()) if end.pod), "")
        return tied(target) + (f" (pod {pod})" if pod else "")

    def failures(self, node: str, kind: str) -> int:
        """Return how many packets conntrack of a node failed on."""
        view = self.observed.view(node)
        return view.failures.get(kind, 0) if view else 0


def gather(trace: TraceReport, observed: Observations) -> Evidence:
    """Return the evidence for a trace of one way."""
    ends: dict[str, list[TracedEnd]] = {}
    for end in trace.ways[0].ends:
        ends.setdefault(address_and_port(end.address, end.port), []).append(end)
    targets = [_target(observed, number) for number in range(len(observed.probes))]
    listening = {address_and_port(one.address, one.port): one.probe.outcome for one in observed.listening}
    return Evidence(trace, observed, ends, targets, listening)


def flow_of(observed: Observations, node: str, number: int) -> Flow | None:
    """Return the entry of a probe on a node."""
    view = observed.view(node)
    return view.flows[number] if view and number < len(view.flows) else None


def _target(observed: Observations, number: int) -> str:
    flows = [flow_of(observed, view.node, number) for view in observed.nodes]
    last = next((flow for flow in reversed(flows) if flow), None)
    return address_and_port(last.reply.source, last.reply.source_port) if last else ""


class Symptom(NamedTuple):
    """What is known of one probe.

    - `node`: where the cause shows
    - `target`: where the probe went
    - `stops`: ends of the trace that would stop it, but whose rules have not done so
    """

    cause: Cause
    node: str = ""
    target: str = ""
    detail: str = ""
    stops: tuple[TracedEnd, ...] = ()


def find_symptoms(evidence: Evidence) -> list[Symptom]:
    """Return the symptom of each probe."""
    stopped: dict[tuple[TracedEnd, ...], list[int]] = {}
    for number in range(len(evidence.observed.probes)):
        stopped.setdefault(_fitting_stops(evidence, number), []).append(number)
    found: dict[int, Symptom] = {}
    for stops, numbers in stopped.items():
        proven = _have_stopped(evidence, stops, numbers)
        for number in numbers:
            if proven:
                found[number] = Symptom(Cause.AS_PREDICTED)
            elif proven is None:
                target = evidence.targets[number]
                found[number] = Symptom(Cause.UNKNOWN, stops[0].route[-1], target, _UNCOUNTED)
            else:
                found[number] = _symptom(evidence, number)._replace(stops=stops)
    return [found[number] for number in range(len(found))]


def _fitting_stops(evidence: Evidence, number: int) -> tuple[TracedEnd, ...]:
    """Return the ends with a rule that may have stopped a probe, as far as the probe and conntrack show."""
    probe, target, ends = evidence.observed.probes[number], evidence.targets[number], evidence.ends_of(number)
    stops = [end for end in (ends or evidence.way.ends) if end.result in STOPPED]
    dropped = [end for end in evidence.way.ends if end.result is EndResult.DROPPED]
    if probe.outcome in ARRIVED:
        # Without an entry, a packet that is sent again meets the rules like a new one, and may go another way.
        here = [end for end in dropped if end.route[-1] == evidence.first]
        return tuple(here) if _is_late(probe) and _lost_at_first(evidence, number) else ()
    if target and not ends:
        return ()
    if probe.outcome is ProbeOutcome.NOT_SENT:
        return tuple(dropped)
    return tuple(end for end in stops if _fits(evidence, number, end))


def _fits(evidence: Evidence, number: int, end: TracedEnd) -> bool:
    """Return whether a rule that stops packets fits to the result of a probe and to its entries."""
    probe, node = evidence.observed.probes[number], end.route[-1]
    # Packets that a rule stops have no entry on that node, but on those before. From a node to itself, they get one.
    passed = bool(evidence.targets[number]) != (node != evidence.first)
    passed |= flow_of(evidence.observed, node, number) is not None
    if passed and evidence.observed.view(evidence.first) and not _stays(evidence, end.route):
        return False
    if end.result is EndResult.DROPPED:
        return probe.outcome in _SILENT
    # Kernels limit the rate of ICMP errors, so some rejected probes get none.
    rejected = any(one.icmp or one.outcome is ProbeOutcome.REFUSED for one in evidence.observed.probes)
    silent = probe.outcome in _SILENT and rejected
    return bool(silent or probe.icmp or probe.outcome in (ProbeOutcome.REFUSED, ProbeOutcome.RESET))


def _have_stopped(evidence: Evidence, stops: Sequence[TracedEnd], numbers: Sequence[int]) -> bool | None:
    """Return whether the rules of ends stopped these probes: the kernel's trace or their counters say so.

    None if no counter tells, and the packets may have been lost before.
    """
    probes = [evidence.observed.probes[number] for number in numbers]
    rules = {(end.route[-1], end.rule) for end in stops}
    if not rules:
        return False
    counted, uncounted = 0, set()
    ports: set[int] = set()
    for node, rule in rules:
        view = evidence.observed.view(node)
        same = [
            rise.packets
            for rise in (view.rises if view else ())
            if rule and (rise.table, rise.chain, rise.rule) == (rule.table, rule.chain, rule.rule)
        ]
        counted += sum(same)
        if not same:
            uncounted.add(node)
        ports |= {
            hit.source_port
            for hit in (view.hits if view else ())
            if rule and (hit.table, hit.chain, hit.verdict) == (rule.table, rule.chain, "drop")
        }
    if counted >= len(numbers) or ports >= {probe.source_port for probe in probes}:
        return True
    if not uncounted:
        return False
    if evidence.first in uncounted or not any(probe.outcome in _SILENT for probe in probes):
        return True
    met = [view.met if (view := evidence.observed.view(node)) else None for node in uncounted]
    known = [one for one in met if one is not None]
    return None if len(known) < len(met) else sum(known) >= len(numbers)


def _stays(evidence: Evidence, route: Sequence[str]) -> bool:
    """Return whether packets start on the node where they end."""
    return evidence.trace.source.kind is LocationKind.NODE and tuple(route) == (evidence.first,)


def _is_late(probe: Probe) -> bool:
    return probe.outcome in ARRIVED and probe.seconds > LATE


def _lost_at_first(evidence: Evidence, number: int) -> bool:
    """Return whether the first packet of a probe got no entry on the first node, but a later one did."""
    view = evidence.observed.view(evidence.first)
    delay = view.delays[number] if view and number < len(view.delays) else None
    return delay is not None and delay >= LATE


def _symptom(evidence: Evidence, number: int) -> Symptom:
    """Return the symptom of a probe that no rule of the trace stopped."""
    probe, target, ends = evidence.observed.probes[number], evidence.targets[number], evidence.ends_of(number)
    if _is_late(probe):
        if _lost_at_first(evidence, number):
            return Symptom(Cause.LOST, evidence.first)
        return Symptom(Cause.LATE, evidence.node_of(target), target)
    if probe.outcome in ARRIVED:
        return _arrived(evidence, probe, target, ends)
    if target and not ends:
        return Symptom(Cause.OTHER_ENDPOINT, evidence.first, target, "went to")
    if probe.outcome is ProbeOutcome.NOT_SENT:
        return Symptom(Cause.NOT_SENT, evidence.first, "", probe.error)
    # A stale endpoint, or one whose replies bypass the node that chose it.
    if ends and not any(end.good or end.result in STOPPED for end in ends):
        return Symptom(Cause.AS_PREDICTED, target=target)
    if probe.outcome in _SILENT:
        return _silent(evidence, number, target, ends)
    if probe.icmp:
        return _unreachable(evidence, probe.icmp, target)
    return Symptom(Cause.REFUSED, evidence.node_of(target), target, probe.error)


def _arrived(evidence: Evidence, probe: Probe, target: str, ends: Sequence[TracedEnd]) -> Symptom:
    first = evidence.first
    if not any(end.result not in STOPPED for end in ends):
        if target and not ends:
            return Symptom(Cause.OTHER_ENDPOINT, first, target, "were answered by")
        if target or all(end.result in STOPPED for end in evidence.way.ends):
            return Symptom(Cause.PASSED, first, target, f" to {tied(target)}" if target else "")
        if evidence.translates and evidence.observed.view(first):
            return Symptom(Cause.NOT_TRACKED, first)
    if probe.lost_size:
        cause = Cause.MTU if probe.lost_size > SMALL else Cause.DATA_LOST
        return Symptom(cause, evidence.node_of(target), target, str(probe.lost_size))
    return Symptom(Cause.ARRIVED)


def _unreachable(evidence: Evidence, icmp: IcmpError, target: str) -> Symptom:
    family = 6 if ":" in evidence.trace.source.address else 4
    name = _ICMP[family].get((icmp.type, icmp.code), f"ICMP type {icmp.type}, code {icmp.code}")
    # Of an endpoint, the ICMP error comes from its address, or from the one that conntrack puts in its place.
    by_endpoint = icmp.sender in (target.rpartition(":")[0].strip("[]"), evidence.trace.destination.address)
    if target and by_endpoint and (icmp.type, icmp.code) in _PORT_UNREACHABLE:
        return Symptom(Cause.REFUSED, evidence.node_of(target), target, name)
    return Symptom(Cause.REJECTED, evidence.first, target, f"{icmp.sender or 'an unknown host'}: {name}")


def _silent(evidence: Evidence, number: int, target: str, ends: Sequence[TracedEnd]) -> Symptom:
    """Return where the trail of a probe without an answer ends."""
    if evidence.observed.probes[number].outcome is ProbeOutcome.UNANSWERED:
        went = f"went to {tied(target)} and " if target else ""
        return Symptom(Cause.UNANSWERED, evidence.first, target, went)
    route = ends[0].route if ends else (evidence.first,)
    flows: list[Flow] = []
    for node in route:
        if evidence.observed.view(node) is None:
            unread = any(visit.node == node and visit.unread for visit in evidence.way.visits)
            return Symptom(Cause.UNKNOWN if unread else Cause.LOST, node, target, _UNREAD)
        flow = flow_of(evidence.observed, node, number)
        if flow is None:
            return Symptom(Cause.LOST, node, target)
        flows.append(flow)
    for node, flow in reversed(list(zip(route, flows, strict=True))):
        if flow.unreplied:
            if node == route[-1]:
                return Symptom(Cause.NO_REPLY, node, target)
            refused = any(one.state == "CLOSE" for one in flows)
            return Symptom(Cause.REPLY_LOST, node, target, "refused" if refused else "")
    return Symptom(Cause.REPLY_LOST, "", target)


class _Group(NamedTuple):
    """Probes with one symptom, beside the symptoms of all probes."""

    evidence: Evidence
    symptom: Symptom
    numbers: Sequence[int]
    symptoms: Sequence[Symptom]

    def cause(self, text: str, cause: Cause | None = None, node: str | None = None) -> LiveCause:
        """Return the cause with this text; that of the symptom and its node by default."""
        where = self.symptom.node if node is None else node
        return LiveCause(cause or self.symptom.cause, where or None, text, tuple(self.numbers))


def name_causes(evidence: Evidence, symptoms: Sequence[Symptom]) -> list[LiveCause]:
    """Return what happened to the probes, one cause for all of one symptom; most of them first, agreement last."""
    groups: dict[Symptom, list[int]] = {}
    for number, symptom in enumerate(symptoms):
        groups.setdefault(symptom, []).append(number)
    causes = [_named(_Group(evidence, symptom, numbers, symptoms)) for symptom, numbers in groups.items()]
    return sorted(
        causes, key=lambda one: (one.cause in (Cause.ARRIVED, Cause.AS_PREDICTED), -len(one.probes))
    )


_TEXTS = {
    Cause.ARRIVED: "arrived",
    Cause.AS_PREDICTED: "failed, as the rules say",
    Cause.OTHER_ENDPOINT: "{detail} {at}, which the rules of {node} do not choose",
    Cause.PASSED: "connected{detail}, which the rules forbid",
    Cause.NOT_TRACKED: "connected, but conntrack of {node} has no entry for them: something else than these rules forwards"
    " them, such as eBPF",
    Cause.MTU: "connected to {place}, but packets of {detail} bytes do not arrive, though small ones do: the MTU {between}"
    " is smaller, and no ICMP error says so",
    Cause.DATA_LOST: "connected to {place}, which acknowledges no data after that",
    Cause.NOT_SENT: "could not be sent ({detail})",
    Cause.LATE: "arrived at {at} only when sent again: packets are lost on the way there or back",
    Cause.UNANSWERED: "{detail}got no answer, which UDP does not promise",
}


def _named(group: _Group) -> LiveCause:
    evidence, symptom = group.evidence, group.symptom
    if symptom.detail == _UNREAD:
        return _unread(group)
    if describe := _DESCRIBERS.get(symptom.cause):
        found = describe(group)
        return msgspec.structs.replace(found, text=found.text + _behind(symptom.stops, found.cause))
    node, first = shown_node(symptom.node), shown_node(evidence.first)
    return group.cause(
        _TEXTS[symptom.cause].format(
            node=node,
            at=tied(symptom.target),
            place=evidence.place(symptom.target),
            detail=symptom.detail,
            between="on the way" if symptom.node == evidence.first else f"between {first} and {node}",
        )
    )


def _behind(stops: Sequence[TracedEnd], cause: Cause) -> str:
    """Return which rules would stop the probes too, if what hides them were mended."""
    if cause not in (Cause.LOST, Cause.NEVER_ARRIVED, Cause.TABLE_FULL):
        return ""
    rules = dict.fromkeys(
        f"{shown_node(end.route[-1])} in {end.rule.table} {end.rule.chain}" for end in stops if end.rule
    )
    return f"; a rule of {listed(rules, MOST_CAUSES)} would stop them too" if rules else ""


def _unread(group: _Group) -> LiveCause:
    evidence, (_, node, target, *_) = group.evidence, group.symptom
    left = f"left {shown_node(evidence.first)} for {tied(target)}" if target else "were sent"
    reason = next((one.unread for one in evidence.way.visits if one.node == node and one.unread), "")
    unread = f" ({reason})" if reason else ""
    return group.cause(
        f"{left}, and no reply came back; what happened on {shown_node(node)} is not known{unread}"
    )


def _uncounted(group: _Group) -> LiveCause:
    node, first = (shown_node(name) for name in (group.symptom.node, group.evidence.first))
    return group.cause(
        f"failed: a rule of {node} stops them, as the rules say, or {_network(first, node)} loses them before; no counter"
        f" of {node} tells"
    )


def _lost_reply(group: _Group) -> LiveCause:
    """Describe replies that a node did not see as such; "" is the way from the first node."""
    evidence, (_, node, target, detail, _) = group.evidence, group.symptom
    here, invalid = shown_node(node), evidence.failures(node, "invalid")
    cause = Cause.REPLY_LOST
    if not node:
        why = f"the replies passed {shown_node(evidence.first)} and did not reach the client"
    elif invalid >= len(group.numbers):
        cause = Cause.UNMATCHED
        why = (
            f"the replies seem to come back to {here} unmatched (asymmetric routing): conntrack there counted {invalid}"
            " invalid packets"
        )
    elif detail:
        cause = Cause.UNMATCHED
        why = f"the replies bypassed {here}, and the client reset them (asymmetric routing)"
    else:
        why = f"no reply came back to {here}: replies are lost, or take another way (asymmetric routing)"
    return group.cause(f"reached {evidence.place(target)}, which answered, but {why}", cause)


def _no_reply(group: _Group) -> LiveCause:
    evidence, (_, node, target, *_) = group.evidence, group.symptom
    here, place = shown_node(node), evidence.place(target)
    rises = _may_have_stopped(evidence, node, len(group.numbers))
    if rises and _stays(evidence, evidence.ends_of(group.numbers[0])[0].route):
        return _stopped(group, Cause.DROPPED, "died", node, rises)
    if any(end.result is EndResult.SENT for end in evidence.ends.get(target, ())):
        return group.cause(
            f"left {here} for {place}, and no reply came back: packets or replies are lost behind this node, or the"
            " endpoint does not answer"
        )
    own = {
        ProbeOutcome.CONNECTED: ", though it answers its own node: a policy in front of the pod may drop them",
        ProbeOutcome.TIMED_OUT: ", and its own node gets no answer either",
    }
    asked = evidence.listening.get(target)
    return group.cause(f"reached {here}, but {place} did not answer{own.get(asked, '') if asked else ''}")


def _refusal(group: _Group) -> LiveCause:
    """Describe probes to which somebody said no."""
    evidence, (cause, node, target, detail, _) = group.evidence, group.symptom
    number = len(group.numbers)
    if cause is Cause.REJECTED or not target:
        if rises := _may_have_stopped(evidence, evidence.first, number):
            return _stopped(group, Cause.REJECTED, "were rejected", evidence.first, rises)
        to = evidence.node_of(target)
        if detail.endswith(_NO_WAY) and _tracks_none(evidence, to, group.numbers):
            between = _network(shown_node(evidence.first), to)
            text = f"went to {tied(target)} and got {detail}, and {to} tracks none of them: look at {between}"
            return group.cause(text, Cause.NEVER_ARRIVED, to)
        who = f"({detail})" if detail else "by a reset"
        why = ": nothing listens there, or a firewall resets them" if cause is Cause.REFUSED else ""
        return group.cause(f"were refused {who}, which no rule says{why}")
    place, listening = evidence.place(target), evidence.listening.get(target)
    if listening in (ProbeOutcome.REFUSED, ProbeOutcome.UNREACHABLE):
        return group.cause(f"reached {shown_node(node)}, but nothing listens at {place}", Cause.NOT_LISTENING)
    if rises := _may_have_stopped(evidence, node, number):
        return _stopped(group, Cause.REJECTED, "were rejected", node, rises)
    if listening is ProbeOutcome.CONNECTED:
        why = "though it accepts connections from its own node: something on the way resets them"
    else:
        why = "so nothing listens there, or a firewall resets them"
    return group.cause(f"were refused by {place}, {why}")


def _tracks_none(evidence: Evidence, node: str, numbers: Sequence[int]) -> bool:
    """Return whether another node than the first is known to track none of these probes."""
    known = node != evidence.first and evidence.observed.view(node) is not None
    return known and not any(flow_of(evidence.observed, node, number) for number in numbers)


def _missing(group: _Group) -> LiveCause:
    """Describe probes of which a node has no entry: they did not get there, or something there dropped them."""
    evidence, (_, node, target, *_) = group.evidence, group.symptom
    here, number = shown_node(node), len(group.numbers)
    ends = evidence.ends_of(group.numbers[0])
    rejecting = [
        end for end in ends or evidence.way.ends if end.result is EndResult.REJECTED and end.route[-1] == node
    ]
    if _have_stopped(evidence, rejecting, group.numbers):
        return group.cause(f"met a rule of {here} that rejects them, but no ICMP error came back")
    if rises := _seen_dropping(group) or _may_have_stopped(evidence, node, number):
        return _stopped(group, Cause.DROPPED, "died", node, rises)
    full = "its conntrack table is full (nf_conntrack_max)"
    dropped = evidence.failures(node, "drop")
    view = evidence.observed.view(node)
    never = view is not None and view.met is not None and view.met <= _others_that_pass(group)
    maybe = _suspect(evidence, node)
    if dropped:
        maybe = f", where conntrack dropped {dropped} packets as its table is full{maybe}"
    if node == evidence.first:
        if dropped >= number:
            return group.cause(f"were dropped on {here}: {full}", Cause.TABLE_FULL)
        if never:
            text = (
                f"never reached the rules of {here}: look at the client's network and policies (such as eBPF)"
            )
            return group.cause(text, Cause.NEVER_ARRIVED)
        return group.cause(f"were lost on {here}{maybe}: look at its routes and policies (such as eBPF)")
    route = ends[0].route
    between = _network(shown_node(route[route.index(node) - 1]), here)
    if dropped >= number:
        hides = "which hides whether the network before it loses packets too"
        text = f"went to {tied(target)}, but {here} tracks none of them: {full}, {hides}"
        return group.cause(text, Cause.TABLE_FULL)
    if never and not dropped:
        text = f"went to {tied(target)}, but {here} never saw the packets: look at {between}"
        return group.cause(text, Cause.NEVER_ARRIVED)
    return group.cause(
        f"went to {tied(target)}, but {here} tracks none of them: {here} drops them{maybe}, or {between} loses them"
    )


def _network(before: str, here: str) -> str:
    return f"the network between {before} and {here} (routes, VXLAN, security groups)"


def _others_that_pass(group: _Group) -> int:
    """Return how many probes with another symptom pass the node."""
    node, evidence = group.symptom.node, group.evidence
    return sum(
        one != group.symptom
        and any(node in end.route for end in evidence.ends.get(evidence.targets[number], ()))
        for number, one in enumerate(group.symptoms)
    )


def _suspect(evidence: Evidence, node: str) -> str:
    """Return which rule of a node may drop packets, as far as the trace knows."""
    steps = [step for visit in evidence.way.visits if visit.node == node for step in visit.steps]
    for step in steps:
        if NOT_KNOWN in step.reason and _STOPS.search(step.rule):
            return f", perhaps in {step.table} {step.chain}: `{step.rule}`, which trace cannot evaluate"
    return ""


def _seen_dropping(group: _Group) -> tuple[RuleRise, ...]:
    """Return the rules that the kernel saw dropping probes, each with their number."""
    observed = group.evidence.observed
    view = observed.view(group.symptom.node)
    ports = {observed.probes[number].source_port for number in group.numbers}
    rules = Counter(
        (hit.table, hit.chain, hit.rule)
        for hit in (view.hits if view else ())
        if hit.source_port in ports and hit.verdict == "drop"
    )
    return tuple(RuleRise(*rule, packets, True) for rule, packets in rules.items())


def _may_have_stopped(evidence: Evidence, node: str, least: int) -> tuple[RuleRise, ...]:
    """Return the rules of a node that may stop these probes, and counted at least so many packets.

    A rule that does not match the probes counts packets of others.
    """
    view = evidence.observed.view(node)
    steps = (step for visit in evidence.way.visits if visit.node == node for step in visit.steps)
    may = {(step.table, step.chain, step.rule) for step in steps if step.matched or NOT_KNOWN in step.reason}
    return tuple(
        rise
        for rise in (view.rises if view else ())
        if rise.stops and rise.packets >= least and (rise.table, rise.chain, rise.rule) in may
    )


def _stopped(group: _Group, cause: Cause, verb: str, node: str, rises: Sequence[RuleRise]) -> LiveCause:
    rules = listed((f"{rise.table} {rise.chain}: `{rise.rule}`" for rise in rises), MOST_CAUSES)
    one_of = "one of " if len(rises) > 1 else ""
    text = f"{verb} on {shown_node(node)} in {one_of}{rules}, which should let them pass"
    return group.cause(text, cause, node)


_DESCRIBERS: Mapping[Cause, Callable[[_Group], LiveCause]] = {
    Cause.REFUSED: _refusal,
    Cause.REJECTED: _refusal,
    Cause.LOST: _missing,
    Cause.REPLY_LOST: _lost_reply,
    Cause.NO_REPLY: _no_reply,
    Cause.UNKNOWN: _uncounted,
}
