"""Compare a static trace with what probes and nodes showed: whether rules and reality agree, and where they part."""

import enum
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from pykubeproxy.inspect.connection import Directory, LocationKind
from pykubeproxy.inspect.flows import Flow
from pykubeproxy.inspect.packets.rule_set import NOT_KNOWN
from pykubeproxy.inspect.trace.conclusion import TraceVerdict
from pykubeproxy.inspect.trace.decisions import RuleDecision
from pykubeproxy.inspect.trace.journey import EndResult, TracedEnd, shown_node
from pykubeproxy.inspect.trace.observed import NodeView, Observations, RuleRise
from pykubeproxy.inspect.trace.report import TraceReport
from pykubeproxy.inspect.trace.shares import unlikely_share
from pykubeproxy.kernel.probes import SMALL, IcmpError, Probe, ProbeOutcome
from pykubeproxy.objects import address_and_port
from pykubeproxy.report.document import Report
from pykubeproxy.report.text import GAP, Block, Heading, Row, Section, Sentence, Table, Tone
from pykubeproxy.rules.names import NFT_TABLES, is_owned
from pykubeproxy.wording import counted, duration, listed, percent, tied

_ARRIVED = (ProbeOutcome.CONNECTED, ProbeOutcome.REPLIED)
_SILENT = (ProbeOutcome.TIMED_OUT, ProbeOutcome.UNANSWERED)
_STOPPED = (EndResult.DROPPED, EndResult.REJECTED)
# A SYN that comes this late is at least the second one.
_LATE = 0.9
_CAUSES, _STEPS, _ENDS = 3, 6, 5
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
_BEYOND = "packets or replies are lost behind this node, or the endpoint does not answer"
_STOPS = re.compile(r"\b(drop|reject)\b", re.IGNORECASE)
# A node or router has no route to the next one, or gets no answer from it.
_NO_WAY = ("network unreachable", "host unreachable", "no route", "address unreachable")
_PORT_UNREACHABLE = ((3, 3), (1, 4))


class LiveVerdict(enum.Enum):
    """What the comparison says.

    - WORKS: rules and reality agree, and every probe arrived
    - FAILS: rules and reality agree, and some probes or all do not arrive, as the rules say
    - DIFFERS: something happens that the rules do not say
    - UNKNOWN: the observations do not tell, as for UDP without an answer
    """

    WORKS = "works"
    FAILS = "fails-as-predicted"
    DIFFERS = "differs"
    UNKNOWN = "unknown"


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


_NO_DIFFERENCE = (Cause.ARRIVED, Cause.AS_PREDICTED, Cause.NOT_SENT, Cause.UNANSWERED, Cause.UNKNOWN)


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


class LiveEnd(msgspec.Struct, frozen=True):
    """An end of the static trace, or an endpoint that only the probes reached.

    - `text`: the end as a phrase
    - `probability`: by the rules, 0 to 1
    - `probes`: how many came there
    - `as_predicted`: whether chance explains that number; null if the probes do not tell
    """

    text: str
    probability: float
    probes: int
    as_predicted: bool | None


class LiveStep(msgspec.Struct, frozen=True):
    """A rule that decides, or a difference.

    - `text`: the decision with its table and chain, or what differs on this node
    - `mark`: what the probes say of it: "as predicted", "differs here" or "not seen"
    """

    node: str
    text: str
    mark: str


class LiveTraceReport(Report, frozen=True, kw_only=True):
    """A static trace, and whether probes did the same.

    - `verdict`: "works" and "fails-as-predicted" if rules and reality agree, "differs", or "unknown"
    - `message`: the verdict as a sentence
    - `causes`: what happened to the probes, most of them first
    - `ends`: the ends of the static trace with the number of probes
    - `steps`: the rules that decide, each with what the probes say
    - `observed`: all observations
    - `trace`: the static trace
    """

    verdict: LiveVerdict
    message: str
    causes: tuple[LiveCause, ...]
    ends: tuple[LiveEnd, ...]
    steps: tuple[LiveStep, ...]
    observed: Observations
    trace: TraceReport

    def blocks(self, *, wide: bool) -> Iterator[Block]:
        """Return the sentence, the ends, and the steps with marks; `wide` adds the static trace."""
        tones: dict[LiveVerdict, Tone] = {LiveVerdict.WORKS: "good", LiveVerdict.UNKNOWN: "warning"}
        yield Section(
            Sentence(self.message, tones.get(self.verdict, "bad")),
            [Sentence(f"{self.trace.packet}; {_times(self.observed.probes)}")],
        )
        yield GAP
        number = len(self.observed.probes)
        shown = self.ends if wide else self.ends[:_ENDS]
        yield Table(
            [Row((percent(end.probability), f"{end.probes} of {number}", end.text)) for end in shown],
            right=frozenset({0, 1}),
        )
        if more := len(self.ends) - len(shown):
            yield Sentence(f"and {more} more (-o wide lists all)")
        for node in dict.fromkeys(step.node for step in self.steps):
            steps = [step for step in self.steps if step.node == node]
            # What differs is shown first if not all fit.
            some = steps if wide else sorted(steps, key=lambda step: step.mark != _DIFFERS)[:_STEPS]
            rows = [
                Row((step.mark, step.text), "bad" if step.mark == _DIFFERS else "")
                for step in steps
                if step in some
            ]
            yield GAP
            yield Section(Heading(f"On {shown_node(node)}:", "part"), [Table(rows)])
        yield GAP
        for view in self.observed.nodes:
            if view.unread:
                yield Sentence(
                    f"{shown_node(view.node)} shows nothing of the probes: {view.unread}.", start="Note: "
                )
        if wide:
            yield GAP
            yield from self.trace.blocks(wide=False)

    def names(self) -> Iterator[str]:
        """Return the names of what the probes reach."""
        return iter(self.trace.names())


_NO_ENTRY = "unknown: conntrack has no entry"
_DIFFERS, _PREDICTED, _NOT_SEEN = "differs here", "as predicted", "not seen"


def _times(probes: Sequence[Probe]) -> str:
    """Return text such as "10 probes, connected in 0.2 to 0.4 ms"."""
    took = [probe.seconds for probe in probes if probe.outcome in _ARRIVED]
    if not took:
        found = Counter(probe.outcome.value.replace("-", " ") for probe in probes)
        return (
            f"{counted(len(probes), 'probe')}: {listed(f'{number} {what}' for what, number in found.items())}"
        )
    late = sum(one > _LATE for one in took)
    lost = f"; {late} only after a retransmission" if late else ""
    return f"{len(took)} of {counted(len(probes), 'probe')} answered within {duration(max(took))}{lost}"


class _Symptom(NamedTuple):
    """What is known of one probe: the cause so far, the node where it shows, the end it went to, what else counts."""

    cause: Cause
    node: str = ""
    target: str = ""
    detail: str = ""


def compare(trace: TraceReport, observed: Observations) -> LiveTraceReport:
    """Compare a trace of one way with what was observed."""
    return _Comparison(trace, observed).report()


class _Comparison:
    """One static trace beside its observations."""

    def __init__(self, trace: TraceReport, observed: Observations) -> None:
        self._trace, self._observed = trace, observed
        (self._way,) = trace.ways
        self._first = self._way.node or ""
        self._ends: dict[str, list[TracedEnd]] = {}
        for end in self._way.ends:
            self._ends.setdefault(address_and_port(end.address, end.port), []).append(end)
        self._translates = any(end.endpoint for end in self._way.ends)
        self._results = {end.result for end in self._way.ends}
        self._rejected = any(probe.icmp or probe.outcome is ProbeOutcome.REFUSED for probe in observed.probes)
        self._listening = {
            address_and_port(one.address, one.port): one.probe.outcome for one in observed.listening
        }

    def report(self) -> LiveTraceReport:
        symptoms = [self._symptom(number) for number in range(len(self._observed.probes))]
        groups: dict[_Symptom, list[int]] = {}
        for number, symptom in enumerate(symptoms):
            groups.setdefault(symptom, []).append(number)
        causes = [self._cause(symptom, numbers, symptoms) for symptom, numbers in groups.items()]
        shares = self._shares(symptoms)
        causes.sort(key=lambda one: (one.cause in (Cause.ARRIVED, Cause.AS_PREDICTED), -len(one.probes)))
        odd = "" if any(_differs(one) for one in causes) else self._odd_share(shares)
        if odd:
            causes.insert(0, self._odd(odd, shares[odd]))
        verdict = self._verdict(causes)
        return LiveTraceReport(
            verdict=verdict,
            message=self._message(verdict, causes, shares),
            causes=tuple(causes),
            ends=tuple(self._live_ends(shares, odd)),
            steps=tuple(self._steps(shares, causes)),
            observed=self._observed,
            trace=self._trace,
        )

    def _flow(self, node: str, number: int) -> Flow | None:
        view = self._observed.view(node)
        return view.flows[number] if view and number < len(view.flows) else None

    def _target(self, number: int) -> str:
        """Return where a probe went at last, by the last node that tracks it; "" if none does."""
        flows = [self._flow(view.node, number) for view in self._observed.nodes]
        last = next((flow for flow in reversed(flows) if flow), None)
        return address_and_port(last.reply.source, last.reply.source_port) if last else ""

    def _ends_at(self, number: int, target: str) -> Sequence[TracedEnd]:
        """Return the ends to which a target belongs: its own, or those for which another node replaces it."""
        to = self._trace.destination
        if target in self._ends or target != address_and_port(to.address, to.port):
            return self._ends.get(target, ())
        ahead = (
            end for end in self._way.ends if end.translated_on and not self._flow(end.translated_on, number)
        )
        return tuple(ahead)

    def _symptom(self, number: int) -> _Symptom:
        probe, target = self._observed.probes[number], self._target(number)
        ends = self._ends_at(number, target)
        if probe.outcome in _ARRIVED and probe.seconds > _LATE:
            return self._late(number, target)
        if probe.outcome in _ARRIVED:
            found = self._arrived(target, ends)
            if found.cause is Cause.ARRIVED and probe.lost_size:
                large = probe.lost_size > SMALL
                detail = str(probe.lost_size)
                return _Symptom(
                    Cause.MTU if large else Cause.DATA_LOST, self._node_of(target), target, detail
                )
            return found
        if target and not ends:
            return _Symptom(Cause.OTHER_ENDPOINT, self._first, target, "failed")
        if probe.outcome is ProbeOutcome.NOT_SENT:
            said = EndResult.DROPPED in self._results
            return _Symptom(Cause.AS_PREDICTED if said else Cause.NOT_SENT, self._first, "", probe.error)
        stopped = [end for end in (ends or self._way.ends) if end.result in _STOPPED]
        if any(self._is_predicted(number, end, target) for end in stopped):
            return _Symptom(Cause.AS_PREDICTED)
        # A stale endpoint, or one whose replies bypass the node that chose it.
        if ends and not any(end.good or end.result in _STOPPED for end in ends):
            return _Symptom(Cause.AS_PREDICTED, target=target)
        if probe.outcome in _SILENT:
            return self._silent(number, target, ends)
        if probe.icmp:
            return self._unreachable(probe.icmp, target)
        return _Symptom(Cause.REFUSED, self._node_of(target), target, probe.error)

    def _late(self, number: int, target: str) -> _Symptom:
        """Return where the first packet of a probe was lost that arrived when it was sent again.

        Without an entry, a packet that is sent again meets the rules like a new one, and may go another way.
        """
        view = self._observed.view(self._first)
        delay = view.delays[number] if view and number < len(view.delays) else None
        if delay is None or delay < _LATE:
            return _Symptom(Cause.LATE, self._node_of(target), target)
        dropped = (end for end in self._way.ends if end.result is EndResult.DROPPED)
        if any(end.route[-1] == self._first for end in dropped):
            return _Symptom(Cause.AS_PREDICTED)
        return _Symptom(Cause.LOST, self._first)

    def _arrived(self, target: str, ends: Sequence[TracedEnd]) -> _Symptom:
        if any(end.result not in _STOPPED for end in ends):
            return _Symptom(Cause.ARRIVED)
        if target:
            return _Symptom(Cause.PASSED if ends else Cause.OTHER_ENDPOINT, self._first, target)
        if self._results <= {*_STOPPED}:
            return _Symptom(Cause.PASSED, self._first)
        if self._translates and self._observed.view(self._first):
            return _Symptom(Cause.NOT_TRACKED, self._first)
        return _Symptom(Cause.ARRIVED)

    def _is_predicted(self, number: int, end: TracedEnd, target: str) -> bool:
        """Return whether a rule that stops packets explains the result of a probe."""
        probe, node = self._observed.probes[number], end.route[-1]
        # Packets that a rule stops have no entry on that node, but on those before. From a node to itself, they get one.
        passed = bool(target) != (node != self._first) or self._flow(node, number)
        if passed and self._observed.view(self._first) and not self._stays(end.route):
            return False
        if end.result is EndResult.DROPPED:
            return probe.outcome in _SILENT
        # Kernels limit the rate of ICMP errors, so some rejected probes get none.
        silent = probe.outcome in _SILENT and self._rejected
        return bool(silent or probe.icmp or probe.outcome in (ProbeOutcome.REFUSED, ProbeOutcome.RESET))

    def _stays(self, route: Sequence[str]) -> bool:
        """Return whether packets start on the node where they end."""
        return self._trace.source.kind is LocationKind.NODE and route == (self._first,)

    def _node_of(self, target: str) -> str:
        return next((end.route[-1] for end in self._ends.get(target, ())), self._first)

    def _unreachable(self, icmp: IcmpError, target: str) -> _Symptom:
        family = 6 if ":" in self._trace.source.address else 4
        name = _ICMP[family].get((icmp.type, icmp.code), f"ICMP type {icmp.type}, code {icmp.code}")
        # Of an endpoint, the ICMP error comes from its address, or from the one that conntrack puts in its place.
        by_endpoint = icmp.sender in (target.rpartition(":")[0].strip("[]"), self._trace.destination.address)
        if target and by_endpoint and (icmp.type, icmp.code) in _PORT_UNREACHABLE:
            return _Symptom(Cause.REFUSED, self._node_of(target), target, name)
        return _Symptom(Cause.REJECTED, self._first, target, f"{icmp.sender or 'an unknown host'}: {name}")

    def _silent(self, number: int, target: str, ends: Sequence[TracedEnd]) -> _Symptom:
        """Return where the trail of a probe without an answer ends."""
        if self._observed.probes[number].outcome is ProbeOutcome.UNANSWERED:
            return _Symptom(Cause.UNANSWERED, self._first, target)
        route = ends[0].route if ends else (self._first,)
        flows: list[Flow] = []
        for node in route:
            if self._observed.view(node) is None:
                unread = any(visit.node == node and visit.unread for visit in self._way.visits)
                return _Symptom(Cause.UNKNOWN if unread else Cause.LOST, node, target, "unread")
            flow = self._flow(node, number)
            if flow is None:
                rejected = any(
                    end.result is EndResult.REJECTED and end.route[-1] == node
                    for end in ends or self._way.ends
                )
                return _Symptom(Cause.LOST, node, target, "no ICMP" if rejected else "")
            flows.append(flow)
        for node, flow in reversed(list(zip(route, flows, strict=True))):
            if flow.unreplied:
                if node == route[-1]:
                    return _Symptom(Cause.NO_REPLY, node, target)
                refused = any(one.state == "CLOSE" for one in flows)
                return _Symptom(Cause.REPLY_LOST, node, target, "refused" if refused else "")
        return _Symptom(Cause.REPLY_LOST, "", target)

    def _cause(self, symptom: _Symptom, numbers: Sequence[int], symptoms: Sequence[_Symptom]) -> LiveCause:
        """Describe what happened to probes with one symptom."""
        cause, text = symptom.cause, ""
        node, at = shown_node(symptom.node), tied(symptom.target)
        place = self._place(symptom.target)
        match symptom:
            case _Symptom(Cause.ARRIVED):
                text = "arrived"
            case _Symptom(Cause.AS_PREDICTED):
                text = "failed, as the rules say"
            case _Symptom(Cause.OTHER_ENDPOINT, detail=detail):
                verb = "went to" if detail else "were answered by"
                text = f"{verb} {at}, which the rules of {node} do not choose"
            case _Symptom(Cause.PASSED):
                text = f"connected{f' to {at}' if at else ''}, which the rules forbid"
            case _Symptom(Cause.NOT_TRACKED):
                text = (
                    f"connected, but conntrack of {node} has no entry for them: something else than these rules forwards"
                    " them, such as eBPF"
                )
            case _Symptom(Cause.MTU, detail=size):
                way = (
                    "on the way"
                    if symptom.node == self._first
                    else f"between {shown_node(self._first)} and {node}"
                )
                text = (
                    f"connected to {place}, but packets of {size} bytes do not arrive, though small ones do: the MTU {way}"
                    " is smaller, and no ICMP error says so"
                )
            case _Symptom(Cause.DATA_LOST):
                text = f"connected to {place}, which acknowledges no data after that"
            case _Symptom(Cause.NOT_SENT, detail=error):
                text = f"could not be sent ({error})"
            case _Symptom(Cause.REFUSED | Cause.REJECTED):
                return self._refusal(symptom, numbers)
            case _Symptom(Cause.LOST, detail=("" | "no ICMP")):
                return self._missing(symptom, numbers, symptoms)
            case _Symptom(Cause.REPLY_LOST, detail=detail):
                cause, why = self._lost_reply(symptom.node, detail, numbers)
                text = f"reached {place}, which answered, but {why}"
            case _Symptom(Cause.LATE):
                text = f"arrived at {at} only when sent again: packets are lost on the way there or back"
            case _Symptom(Cause.NO_REPLY):
                rises = self._stopping(symptom.node, len(numbers))
                if rises and self._stays(self._ends_at(numbers[0], symptom.target)[0].route):
                    return self._stopped(Cause.DROPPED, "died", symptom.node, rises, numbers)
                if any(end.result is EndResult.SENT for end in self._ends.get(symptom.target, ())):
                    text = f"left {node} for {place}, and no reply came back: {_BEYOND}"
                else:
                    text = f"reached {node}, but {place} did not answer{self._own_node(symptom.target)}"
            case _Symptom(Cause.UNANSWERED):
                text = f"{f'went to {at} and ' if at else ''}got no answer, which UDP does not promise"
            case _:
                left = f"left {shown_node(self._first)} for {at}" if at else "were sent"
                reason = next(
                    (one.unread for one in self._way.visits if one.node == symptom.node and one.unread), ""
                )
                unread = f" ({reason})" if reason else ""
                text = f"{left}, and no reply came back; what happened on {node} is not known{unread}"
        return LiveCause(cause, symptom.node or None, text, tuple(numbers))

    def _lost_reply(self, node: str, detail: str, numbers: Sequence[int]) -> tuple[Cause, str]:
        """Return what happened to replies that a node did not see as such; "" is the way from the first node."""
        here = shown_node(node)
        if not node:
            return (
                Cause.REPLY_LOST,
                f"the replies passed {shown_node(self._first)} and did not reach the client",
            )
        if self._failed(node, "invalid", numbers):
            invalid = f"conntrack there counted {self._failures(node)['invalid']} invalid packets"
            return (
                Cause.UNMATCHED,
                f"the replies seem to come back to {here} unmatched (asymmetric routing): {invalid}",
            )
        if detail:
            return (
                Cause.UNMATCHED,
                f"the replies bypassed {here}, and the client reset them (asymmetric routing)",
            )
        return Cause.REPLY_LOST, (
            f"no reply came back to {here}: replies are lost, or take another way (asymmetric routing)"
        )

    def _tracks_none(self, node: str, numbers: Sequence[int]) -> bool:
        """Return whether another node than the first is known to track none of these probes."""
        known = node != self._first and self._observed.view(node) is not None
        return known and not any(self._flow(node, number) for number in numbers)

    def _own_node(self, target: str) -> str:
        match self._listening.get(target):
            case ProbeOutcome.CONNECTED:
                return ", though it answers its own node: a policy in front of the pod may drop them"
            case ProbeOutcome.TIMED_OUT:
                return ", and its own node gets no answer either"
        return ""

    def _refusal(self, symptom: _Symptom, numbers: Sequence[int]) -> LiveCause:
        """Describe probes to which somebody said no."""
        node, target, place = symptom.node, symptom.target, self._place(symptom.target)
        rises = self._stopping(self._first, len(numbers))
        if symptom.cause is Cause.REJECTED or not target:
            who = f"({symptom.detail})" if symptom.detail else "by a reset"
            if rises and (not target or symptom.cause is Cause.REJECTED):
                return self._stopped(Cause.REJECTED, "were rejected", self._first, rises, numbers)
            to = self._node_of(target)
            if symptom.detail.endswith(_NO_WAY) and self._tracks_none(to, numbers):
                text = (
                    f"went to {tied(target)} and got {symptom.detail}, and {to} tracks none of them: look at the network"
                    f" between {shown_node(self._first)} and {to} (routes, VXLAN, security groups)"
                )
                return LiveCause(Cause.NEVER_ARRIVED, to, text, tuple(numbers))
            why = (
                ": nothing listens there, or a firewall resets them" if symptom.cause is Cause.REFUSED else ""
            )
            text = f"were refused {who}, which no rule says{why}"
            return LiveCause(symptom.cause, node or None, text, tuple(numbers))
        listening = self._listening.get(target)
        if listening in (ProbeOutcome.REFUSED, ProbeOutcome.UNREACHABLE):
            text = f"reached {shown_node(node)}, but nothing listens at {place}"
            return LiveCause(Cause.NOT_LISTENING, node or None, text, tuple(numbers))
        if rises := self._stopping(node, len(numbers)):
            return self._stopped(Cause.REJECTED, "were rejected", node, rises, numbers)
        if listening is ProbeOutcome.CONNECTED:
            why = "though it accepts connections from its own node: something on the way resets them"
        else:
            why = "so nothing listens there, or a firewall resets them"
        return LiveCause(Cause.REFUSED, node or None, f"were refused by {place}, {why}", tuple(numbers))

    def _missing(self, symptom: _Symptom, numbers: Sequence[int], symptoms: Sequence[_Symptom]) -> LiveCause:
        """Describe probes of which a node has no entry: they did not get there, or something there dropped them."""
        node, target = symptom.node, symptom.target
        here, to = shown_node(node), tied(target)
        if symptom.detail:
            text = f"met a rule of {here} that rejects them, but no ICMP error came back"
            return LiveCause(Cause.LOST, node or None, text, tuple(numbers))
        if rises := self._stopped_in(node, numbers) or self._stopping(node, len(numbers)):
            return self._stopped(Cause.DROPPED, "died", node, rises, numbers)
        if self._failed(node, "drop", numbers):
            text = f"were dropped on {here}, whose conntrack table is full (nf_conntrack_max)"
            return LiveCause(Cause.TABLE_FULL, node or None, text, tuple(numbers))
        view = self._observed.view(node)
        others = sum(one != symptom and self._passes(number, node) for number, one in enumerate(symptoms))
        never = view is not None and view.met is not None and view.met <= others
        maybe = self._suspect(node)
        if node == self._first and never:
            text = (
                f"never reached the rules of {here}: look at the client's network and policies (such as eBPF)"
            )
        elif node == self._first:
            text = f"were lost on {here}{maybe}: look at its routes and policies (such as eBPF)"
        else:
            ends = self._ends_at(numbers[0], target)
            route = ends[0].route
            before = shown_node(route[route.index(node) - 1])
            between = f"the network between {before} and {here} (routes, VXLAN, security groups)"
            if never:
                text = f"went to {to}, but {here} never saw the packets: look at {between}"
            else:
                text = f"went to {to}, but {here} tracks none of them: {here} drops them{maybe}, or {between} loses them"
        return LiveCause(Cause.NEVER_ARRIVED if never else Cause.LOST, node or None, text, tuple(numbers))

    def _failed(self, node: str, kind: str, numbers: Sequence[int]) -> bool:
        """Return whether conntrack of a node failed on a packet for each of these probes."""
        return self._failures(node).get(kind, 0) >= len(numbers)

    def _failures(self, node: str) -> Mapping[str, int]:
        view = self._observed.view(node)
        return view.failures if view else {}

    def _suspect(self, node: str) -> str:
        """Return which rule of a node may drop packets, as far as the trace knows."""
        steps = [step for visit in self._way.visits if visit.node == node for step in visit.steps]
        for step in steps:
            if NOT_KNOWN in step.reason and _STOPS.search(step.rule):
                return f", perhaps in {step.table} {step.chain}: `{step.rule}`, which trace cannot evaluate"
        return ""

    def _passes(self, number: int, node: str) -> bool:
        return any(node in end.route for end in self._ends.get(self._target(number), ()))

    def _stopped_in(self, node: str, numbers: Sequence[int]) -> tuple[RuleRise, ...]:
        """Return the rules that the kernel saw dropping probes, each with their number."""
        view = self._observed.view(node)
        ports = {self._observed.probes[number].source_port for number in numbers}
        dropped = [
            hit for hit in (view.hits if view else ()) if hit.source_port in ports and hit.verdict == "drop"
        ]
        rules = Counter((hit.table, hit.chain, hit.rule) for hit in dropped)
        return tuple(RuleRise(*rule, packets, True) for rule, packets in rules.items())

    def _stopping(self, node: str, least: int) -> tuple[RuleRise, ...]:
        """Return the rules of a node that may stop these probes, and counted at least so many packets.

        A rule that does not match the probes counts packets of others.
        """
        view = self._observed.view(node)
        steps = (step for visit in self._way.visits if visit.node == node for step in visit.steps)
        may = {
            (step.table, step.chain, step.rule) for step in steps if step.matched or NOT_KNOWN in step.reason
        }
        return tuple(
            rise
            for rise in (view.rises if view else ())
            if rise.stops and rise.packets >= least and (rise.table, rise.chain, rise.rule) in may
        )

    def _stopped(
        self, cause: Cause, verb: str, node: str, rises: Sequence[RuleRise], numbers: Sequence[int]
    ) -> LiveCause:
        rules = listed((f"{rise.table} {rise.chain}: `{rise.rule}`" for rise in rises), _CAUSES)
        one_of = "one of " if len(rises) > 1 else ""
        text = f"{verb} on {shown_node(node)} in {one_of}{rules}, which should let them pass"
        return LiveCause(cause, node or None, text, tuple(numbers))

    def _place(self, target: str) -> str:
        """Return text such as "10.244.2.7:8080 (pod default/web-2)"."""
        pod = next((end.pod for end in self._ends.get(target, ()) if end.pod), "")
        return tied(target) + (f" (pod {pod})" if pod else "")

    def _shares(self, symptoms: Sequence[_Symptom]) -> Counter[str]:
        """Return how many probes came to each end: an endpoint, "" for a rule that stops them, or an unknown end."""
        targets = (self._target(number) for number in range(len(symptoms)))
        return Counter(
            symptom.target if symptom.cause is Cause.AS_PREDICTED else target or self._only_end()
            for symptom, target in zip(symptoms, targets, strict=True)
        )

    def _only_end(self) -> str:
        """Return the only end that the rules allow, which needs no conntrack."""
        return next(iter(self._ends)) if len(self._ends) == 1 and not self._translates else _NO_ENTRY

    def _expected(self) -> dict[str, float]:
        expected: dict[str, float] = {}
        for end in self._way.ends:
            name = "" if end.result in _STOPPED else address_and_port(end.address, end.port)
            expected[name] = expected.get(name, 0.0) + end.probability
        return expected

    def _odd_share(self, shares: Counter[str]) -> str:
        """Return the end whose share chance does not explain."""
        sticky = any(step.affinity for visit in self._way.visits for step in visit.steps)
        known = {name: number for name, number in shares.items() if name != _NO_ENTRY}
        return unlikely_share(self._expected(), known) if known and not sticky else ""

    def _odd(self, name: str, number: int) -> LiveCause:
        share = percent(self._expected()[name])
        total = len(self._observed.probes)
        text = f"{number} of {total} probes went to {tied(name)}, for which the rules say {share}: chance does not explain that"
        return LiveCause(Cause.SHARES, self._first or None, text)

    def _verdict(self, causes: Sequence[LiveCause]) -> LiveVerdict:
        unsure = (Cause.UNKNOWN, Cause.UNANSWERED, Cause.NOT_SENT)
        if self._trace.verdict is TraceVerdict.UNKNOWN:
            return LiveVerdict.UNKNOWN
        if any(_differs(one) for one in causes):
            changed = any(view.changed for view in self._observed.nodes)
            return LiveVerdict.UNKNOWN if changed else LiveVerdict.DIFFERS
        if any(one.cause in unsure for one in causes):
            return LiveVerdict.UNKNOWN
        return (
            LiveVerdict.FAILS if any(one.cause is Cause.AS_PREDICTED for one in causes) else LiveVerdict.WORKS
        )

    def _message(self, verdict: LiveVerdict, causes: Sequence[LiveCause], shares: Counter[str]) -> str:
        number = len(self._observed.probes)
        arrived = sum(len(one.probes) for one in causes if one.cause is Cause.ARRIVED)
        came = f"{arrived} of {counted(number, 'connection')} arrived"
        if verdict is LiveVerdict.WORKS:
            endpoints = sorted(name for name in shares if name not in ("", _NO_ENTRY))
            each = "/".join(str(shares[name]) for name in endpoints)
            over = (
                f", {each} over {counted(len(endpoints), 'endpoint')}"
                if self._translates and endpoints
                else ""
            )
            return f"Rules and reality agree: {came}{over}."
        if verdict is LiveVerdict.FAILS:
            return f"Rules and reality agree: {came}. {self._trace.message}"
        parts = [
            one.text if one.cause is Cause.SHARES else f"{len(one.probes)} of {number} probes {one.text}"
            for one in causes
            if one.cause not in (Cause.ARRIVED, Cause.AS_PREDICTED)
        ]
        start = "Rules and reality differ" if verdict is LiveVerdict.DIFFERS else "Unknown"
        if changed := [shown_node(view.node) for view in self._observed.nodes if view.changed]:
            start = f"Unknown, as rules of {listed(changed)} changed during the probes"
        rest = f" ({came})" if arrived else ""
        return f"{start}: {listed(parts, _CAUSES)}{rest}."

    def _live_ends(self, shares: Counter[str], odd: str) -> Iterator[LiveEnd]:
        known = self._observed.view(self._first) is not None
        for end in self._way.ends:
            name = "" if end.result in _STOPPED else address_and_port(end.address, end.port)
            fits = name != odd if known else None
            yield LiveEnd(end.text, end.probability, shares[name], fits)
        for name in shares.keys() - {*self._expected()}:
            text = name if name == _NO_ENTRY else f"{tied(name)}, which the rules do not choose"
            yield LiveEnd(text, 0.0, shares[name], None if name == _NO_ENTRY else False)

    def _steps(self, shares: Counter[str], causes: Sequence[LiveCause]) -> Iterator[LiveStep]:
        for node in dict.fromkeys(visit.node for visit in self._way.visits):
            view = self._observed.view(node)
            decided = (
                decision for visit in self._way.visits if visit.node == node for decision in visit.decisions
            )
            for decision in dict.fromkeys(decided):
                text = f"{decision.table} {decision.chain}: {decision.what}"
                mark = _PREDICTED if view and self._is_seen(decision, view, shares) else _NOT_SEEN
                yield LiveStep(node, text, mark)
            for cause in causes:
                if cause.node == (node or None) and _differs(cause):
                    yield LiveStep(node, cause.text, _DIFFERS)

    @staticmethod
    def _is_seen(decision: RuleDecision, view: NodeView, shares: Counter[str]) -> bool:
        """Return whether probes show a decision."""
        flows = [flow for flow in view.flows if flow]
        if decision.endpoint:
            return shares[decision.endpoint] > 0
        if decision.what.startswith(("dropped", "rejected")):
            return shares[""] > 0
        if decision.what.startswith("masqueraded:"):
            return any(flow.reply.destination != flow.original.source for flow in flows)
        return bool(flows or view.rises)


def _differs(cause: LiveCause) -> bool:
    """Return whether a cause is a difference between rules and reality."""
    return cause.cause not in _NO_DIFFERENCE


def exit_code(verdict: LiveVerdict) -> int:
    """Return the exit code of a verdict: 0 works, 1 fails as the rules say, 3 differs, 2 unknown."""
    return {LiveVerdict.WORKS: 0, LiveVerdict.FAILS: 1, LiveVerdict.DIFFERS: 3, LiveVerdict.UNKNOWN: 2}[
        verdict
    ]


def refusal(trace: TraceReport, directory: Directory, *, allow_affinity: bool, here: bool = False) -> str:
    """Return why no probe may be sent along a trace, "" if probes may; `here`: this machine has the source address."""
    to = trace.destination
    kinds = (LocationKind.POD, LocationKind.NODE)
    if trace.source.kind not in kinds and not here:
        return f"{trace.source.address} is no address of a pod, a node or this machine, so nothing can be sent from there"
    if not (to.service or directory.find(to.address).kind in kinds or _is_served(trace)):
        return f"{to} is no Service, pod or node of the cluster, so no probe is sent there"
    if len(trace.ways) > 1 or trace.ways[0].others:
        return "several nodes may receive the connection; choose one with --via-node"
    sticky = any(step.affinity for visit in trace.ways[0].visits for step in visit.steps)
    if sticky and not allow_affinity:
        return f"{to.title} has session affinity, and a probe would renew the client's entry; add --allow-affinity"
    return ""


def _is_served(trace: TraceReport) -> bool:
    """Return whether a rule of a service proxy decides."""
    decided = (decision for way in trace.ways for visit in way.visits for decision in visit.decisions)
    return any(is_owned(one.chain) or one.table in NFT_TABLES for one in decided)
