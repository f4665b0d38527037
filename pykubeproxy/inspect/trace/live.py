"""Compare a static trace with what probes and nodes showed: whether rules and reality agree, and where they part."""

import enum
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from pykubeproxy.inspect.connection import Directory, LocationKind
from pykubeproxy.inspect.targets import TargetKind
from pykubeproxy.inspect.trace.causes import (
    AGREE,
    ARRIVED,
    LATE,
    MOST_CAUSES,
    STOPPED,
    Cause,
    Evidence,
    LiveCause,
    gather,
    name_causes,
)
from pykubeproxy.inspect.trace.conclusion import TraceVerdict
from pykubeproxy.inspect.trace.decisions import RuleDecision
from pykubeproxy.inspect.trace.journey import TracedEnd, shown_node
from pykubeproxy.inspect.trace.observed import NodeView, Observations
from pykubeproxy.inspect.trace.report import TraceReport
from pykubeproxy.inspect.trace.shares import unlikely_share
from pykubeproxy.kernel.probes import Probe, ProbeOutcome
from pykubeproxy.objects import address_and_port
from pykubeproxy.report.document import Report
from pykubeproxy.report.text import GAP, Block, Heading, Row, Section, Sentence, Table, Tone
from pykubeproxy.rules.names import NFT_TABLES, is_owned
from pykubeproxy.wording import counted, duration, listed, percent, tied

_STEPS, _ENDS = 6, 5
_NO_ENTRY = "unknown: conntrack has no entry"
_RULE = "a rule that stops them"
_DIFFERS, _PREDICTED, _NOT_SEEN = "differs here", "as predicted", "not seen"
_UNSURE = (Cause.UNKNOWN, Cause.UNANSWERED, Cause.NOT_SENT)


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


def _times(probes: Sequence[Probe]) -> str:
    """Return text such as "10 of 10 probes connected within 0.4 ms"."""
    took = [probe.seconds for probe in probes if probe.outcome in ARRIVED]
    if not took:
        found = Counter(probe.outcome.value.replace("-", " ") for probe in probes)
        return (
            f"{counted(len(probes), 'probe')}: {listed(f'{number} {what}' for what, number in found.items())}"
        )
    late = sum(one > LATE for one in took)
    lost = f"; {late} only after a retransmission" if late else ""
    replied = any(probe.outcome is ProbeOutcome.REPLIED for probe in probes)
    verb = "were answered" if replied else "connected"
    return f"{len(took)} of {counted(len(probes), 'probe')} {verb} within {duration(max(took))}{lost}"


def compare(trace: TraceReport, observed: Observations) -> LiveTraceReport:
    """Compare a trace of one way with what was observed."""
    evidence = gather(trace, observed)
    causes = name_causes(evidence)
    shares = _shares(evidence, causes)
    judged = all(one.cause in (*AGREE, Cause.UNANSWERED) for one in causes)
    odd = _odd_share(evidence, shares) if judged else ""
    if odd:
        causes.insert(0, _odd(evidence, odd, shares[odd]))
    verdict = _verdict(evidence, causes)
    return LiveTraceReport(
        verdict=verdict,
        message=_message(evidence, verdict, causes, shares),
        causes=tuple(causes),
        ends=tuple(_live_ends(evidence, shares, odd)),
        steps=tuple(_steps(evidence, shares, causes)),
        observed=observed,
        trace=trace,
    )


def _shares(evidence: Evidence, causes: Iterable[LiveCause]) -> Counter[str]:
    """Return how many probes came first to each end: an endpoint, _RULE, or _NO_ENTRY."""
    # The only end that the rules allow needs no conntrack.
    alone = len(evidence.ends) == 1 and not evidence.translates
    unknown = next(iter(evidence.ends)) if alone else _NO_ENTRY
    shares: Counter[str] = Counter()
    for cause in causes:
        for number in cause.probes:
            ends = evidence.ends_of(number) or evidence.way.ends
            again = evidence.observed.probes[number].outcome in ARRIVED
            stopped = again or any(end.result in STOPPED for end in ends)
            is_rule = cause.cause is Cause.AS_PREDICTED and stopped
            shares[_RULE if is_rule else evidence.targets[number] or unknown] += 1
    return shares


def _name(end: TracedEnd) -> str:
    return _RULE if end.result in STOPPED else address_and_port(end.address, end.port)


def _expected(evidence: Evidence) -> dict[str, float]:
    expected: dict[str, float] = {}
    for end in evidence.way.ends:
        expected[_name(end)] = expected.get(_name(end), 0.0) + end.probability
    return expected


def _odd_share(evidence: Evidence, shares: Counter[str]) -> str:
    """Return the end whose share chance does not explain; "" if some probes may have gone to any end."""
    sticky = any(step.affinity for visit in evidence.way.visits for step in visit.steps)
    return "" if sticky or shares[_NO_ENTRY] else unlikely_share(_expected(evidence), shares)


def _odd(evidence: Evidence, name: str, number: int) -> LiveCause:
    share, total = percent(_expected(evidence)[name]), len(evidence.targets)
    text = f"{number} of {total} probes went to {tied(name)}, for which the rules say {share}: chance does not explain that"
    return LiveCause(Cause.SHARES, evidence.first or None, text)


def _verdict(evidence: Evidence, causes: Sequence[LiveCause]) -> LiveVerdict:
    if evidence.trace.verdict is TraceVerdict.UNKNOWN:
        return LiveVerdict.UNKNOWN
    if any(_differs(one) for one in causes):
        changed = any(view.changed for view in evidence.observed.nodes)
        return LiveVerdict.UNKNOWN if changed else LiveVerdict.DIFFERS
    if any(one.cause in _UNSURE for one in causes):
        return LiveVerdict.UNKNOWN
    return LiveVerdict.FAILS if any(one.cause is Cause.AS_PREDICTED for one in causes) else LiveVerdict.WORKS


def _message(
    evidence: Evidence, verdict: LiveVerdict, causes: Sequence[LiveCause], shares: Counter[str]
) -> str:
    probes = evidence.observed.probes
    number = len(probes)
    arrived = sum(len(one.probes) for one in causes if one.cause is Cause.ARRIVED)
    data = " with their data" if any(probe.lost_size is not None for probe in probes) else ""
    came = f"{arrived} of {counted(number, 'connection')} arrived{data}"
    if verdict is LiveVerdict.WORKS:
        endpoints = sorted(name for name in shares if name not in (_RULE, _NO_ENTRY))
        each = "/".join(str(shares[name]) for name in endpoints)
        over = f", {each} over {counted(len(endpoints), 'endpoint')}"
        return f"Rules and reality agree: {came}{over if evidence.translates and endpoints else ''}."
    if verdict is LiveVerdict.FAILS:
        return f"Rules and reality agree: {came}. {evidence.trace.message}"
    parts = [
        one.text if one.cause is Cause.SHARES else f"{len(one.probes)} of {number} probes {one.text}"
        for one in causes
        if one.cause not in AGREE
    ]
    start = "Rules and reality differ" if verdict is LiveVerdict.DIFFERS else "Unknown"
    if changed := [shown_node(view.node) for view in evidence.observed.nodes if view.changed]:
        start = f"Unknown, as rules of {listed(changed)} changed during the probes"
    return f"{start}: {listed(parts, MOST_CAUSES)}{f' ({came})' if arrived else ''}."


def _live_ends(evidence: Evidence, shares: Counter[str], odd: str) -> Iterator[LiveEnd]:
    known = evidence.observed.view(evidence.first) is not None
    for end in evidence.way.ends:
        fits = _name(end) != odd if known else None
        yield LiveEnd(end.text, end.probability, shares[_name(end)], fits)
    for name in shares.keys() - _expected(evidence).keys():
        text = name if name == _NO_ENTRY else f"{tied(name)}, which the rules do not choose"
        yield LiveEnd(text, 0.0, shares[name], None if name == _NO_ENTRY else False)


def _steps(evidence: Evidence, shares: Counter[str], causes: Sequence[LiveCause]) -> Iterator[LiveStep]:
    visits = evidence.way.visits
    for node in dict.fromkeys(visit.node for visit in visits):
        view = evidence.observed.view(node)
        decided = (decision for visit in visits if visit.node == node for decision in visit.decisions)
        for decision in dict.fromkeys(decided):
            text = f"{decision.table} {decision.chain}: {decision.what}"
            yield LiveStep(node, text, _PREDICTED if view and _is_seen(decision, view, shares) else _NOT_SEEN)
        for cause in causes:
            if cause.node == (node or None) and _differs(cause):
                yield LiveStep(node, cause.text, _DIFFERS)


def _is_seen(decision: RuleDecision, view: NodeView, shares: Counter[str]) -> bool:
    """Return whether probes show a decision."""
    flows = [flow for flow in view.flows if flow]
    if decision.endpoint:
        return shares[decision.endpoint] > 0
    if decision.what.startswith(("dropped", "rejected")):
        return shares[_RULE] > 0
    if decision.what.startswith("masqueraded:"):
        return any(flow.reply.destination != flow.original.source for flow in flows)
    return bool(flows) or any(rise.packets for rise in view.rises)


def _differs(cause: LiveCause) -> bool:
    """Return whether a cause is a difference between rules and reality."""
    return cause.cause not in (*AGREE, *_UNSURE)


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
        advice = directory.advice.get(TargetKind.POD, "")
        unknown = f"{to} is no Service, pod or node {directory.place}, so no probe is sent there"
        return f"{unknown}; {advice}" if advice else unknown
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
