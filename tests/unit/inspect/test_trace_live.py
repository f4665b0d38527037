"""A live trace names the cause of what probes and nodes showed, or says that they do not tell."""

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubeproxy.inspect.connection import Directory, Location, LocationKind, TracedDestination
from pykubeproxy.inspect.flows import Flow, FlowSide
from pykubeproxy.inspect.packets.walk import Step
from pykubeproxy.inspect.trace.causes import Cause
from pykubeproxy.inspect.trace.decisions import RuleDecision
from pykubeproxy.inspect.trace.journey import EndResult, TracedEnd, TracedVisit, TracedWay
from pykubeproxy.inspect.trace.live import LiveTraceReport, LiveVerdict, compare, exit_code, refusal
from pykubeproxy.inspect.trace.observed import Listening, NodeView, Observations, RuleRise
from pykubeproxy.inspect.trace.report import TraceReport, report
from pykubeproxy.inspect.trace.shares import unlikely_share
from pykubeproxy.kernel.hits import RuleHit
from pykubeproxy.kernel.probes import IcmpError, Probe, ProbeOutcome
from pykubeproxy.objects import Family, Protocol
from pykubeproxy.report.document import document, json_text
from pykubeproxy.report.text import text
from pykubeproxy.services.ports import FrontendKind

FORWARD = Step("filter", "FORWARD", "-p tcp -j DROP", True, "every packet matches", does="drop")
CLIENT, VIP = "10.244.1.9", "10.96.0.1"
HERE, THERE = "10.244.1.2", "10.244.2.2"
SERVICE = TracedDestination("TCP", VIP, 80, "default/web:http", FrontendKind.CLUSTER_IP)
JUMP = Step("nat", "PREROUTING", "-j KUBE-SERVICES", True, "every packet matches", does="jump")


def end(address: str, node: str, share: float, result: EndResult = EndResult.REACHED) -> TracedEnd:
    route = ("node1",) if node == "node1" else ("node1", node)
    return TracedEnd(
        text=f"{address}:8080",
        result=result,
        good=result in (EndResult.REACHED, EndResult.SENT),
        probability=share,
        address=address,
        port=8080,
        kind=LocationKind.POD,
        node=node,
        pod=f"default/web-{address[-1]}",
        node_assumed=False,
        endpoint=True,
        translated_on="node1",
        stale=False,
        client=CLIENT,
        client_assumed=False,
        masqueraded_on=None,
        route=route,
        rule=None,
    )


def visit(node: str, *, steps: tuple[Step, ...] = (JUMP,), unread: str | None = None) -> TracedVisit:
    before = () if node == "node1" else ("node1",)
    decided = (RuleDecision("nat", "KUBE-SERVICES", "matches default/web"),) if node == "node1" else ()
    return TracedVisit(node, "", before, None, False, 1.0, unread, decided, steps)


def trace(
    *ends: TracedEnd,
    visits: tuple[TracedVisit, ...] = (visit("node1"), visit("node2")),
    to: TracedDestination = SERVICE,
) -> TraceReport:
    way = TracedWay("node1", ends=ends, visits=visits)
    source = Location(LocationKind.POD, CLIENT, "node1", "default/client")
    return report(source, to, (way,), alone=False)


BOTH = trace(end(HERE, "node1", 0.5), end(THERE, "node2", 0.5))
ONE = trace(end(THERE, "node2", 1.0))
UNKNOWN = "trace does not know meta length"
FIREWALL = tuple(
    Step("inet hostfw", chain, rule, False, UNKNOWN)
    for chain in ("forward", "input")
    for rule in ("counter drop", "reject")
)
# Rules that trace cannot evaluate may drop the probes.
UNSURE = trace(end(THERE, "node2", 1.0), visits=(visit("node1"), visit("node2", steps=(JUMP, *FIREWALL))))


def probe(
    number: int, outcome: ProbeOutcome, *, seconds: float = 0.001, icmp: IcmpError | None = None
) -> Probe:
    return Probe(CLIENT, 20000 + number, outcome, 0.0, seconds, icmp)


def flow(number: int, to: str = THERE, *, after: bool = False, state: str = "ESTABLISHED") -> Flow:
    """Return the entry of a probe on node1, or on the node after it."""
    port = 20000 + number
    first = FlowSide(CLIENT, port, to, 8080) if after else FlowSide(CLIENT, port, VIP, 80)
    unreplied = state == "SYN_SENT"
    return Flow(Family.IPV4, Protocol.TCP, first, FlowSide(to, 8080, CLIENT, port), state, unreplied)


def live(
    static: TraceReport,
    outcome: ProbeOutcome,
    *views: NodeView,
    listening: tuple[Listening, ...] = (),
    **more: object,
) -> LiveTraceReport:
    """Compare four probes that end alike."""
    probes = tuple(probe(number, outcome, **more) for number in range(4))  # type: ignore[arg-type]
    return compare(static, Observations(probes, views, listening))


def tracked(state: str = "ESTABLISHED", to: str = THERE) -> tuple[Flow, ...]:
    return tuple(flow(number, to, state=state) for number in range(4))


def tracked_after(state: str) -> tuple[Flow, ...]:
    return tuple(flow(number, after=True, state=state) for number in range(4))


def listens(outcome: ProbeOutcome) -> tuple[Listening, ...]:
    return (Listening(THERE, 8080, "node2", probe(9, outcome)),)


NONE = (None,) * 4
SENT = NodeView("node1", tracked("SYN_SENT"))
DROP = RuleRise("inet hostfw", "forward", "counter drop", 12, True)


def cause(found: LiveTraceReport) -> Cause:
    return found.causes[0].cause


def test_probes_that_arrive_as_the_rules_say_agree() -> None:
    flows = tuple(flow(number, to) for number, to in enumerate((HERE, THERE, HERE, THERE)))
    found = live(BOTH, ProbeOutcome.CONNECTED, NodeView("node1", flows))
    assert found.message == "Rules and reality agree: 4 of 4 connections arrived, 2/2 over 2 endpoints."
    assert exit_code(found.verdict) == 0


def test_a_share_that_chance_does_not_explain_differs() -> None:
    probes = tuple(probe(number, ProbeOutcome.CONNECTED) for number in range(20))
    flows = tuple(flow(number, HERE) for number in range(20))
    found = compare(BOTH, Observations(probes, (NodeView("node1", flows),)))
    assert (found.verdict, cause(found)) == (LiveVerdict.DIFFERS, Cause.SHARES)
    assert "chance does not explain" in found.message


def test_a_rule_that_stops_more_than_its_share_differs() -> None:
    """The rule of a half, whose counter rose, but all probes fail."""
    dropped = msgspec.structs.replace(end(THERE, "node1", 0.5, EndResult.DROPPED), rule=FORWARD)
    probes = tuple(probe(number, ProbeOutcome.TIMED_OUT) for number in range(20))
    view = NodeView("node1", (None,) * 20, rises=(RuleRise("filter", "FORWARD", FORWARD.rule, 60, True),))
    found = compare(trace(end(HERE, "node1", 0.5), dropped), Observations(probes, (view,)))
    assert (found.verdict, cause(found)) == (LiveVerdict.DIFFERS, Cause.SHARES)


def test_session_affinity_excuses_any_share() -> None:
    sticky = msgspec.structs.replace(JUMP, affinity=10800)
    static = trace(
        end(HERE, "node1", 0.5), end(THERE, "node2", 0.5), visits=(visit("node1", steps=(sticky,)),)
    )
    probes = tuple(probe(number, ProbeOutcome.CONNECTED) for number in range(20))
    flows = tuple(flow(number, HERE) for number in range(20))
    assert compare(static, Observations(probes, (NodeView("node1", flows),))).verdict is LiveVerdict.WORKS


def test_an_endpoint_that_no_rule_chooses_differs() -> None:
    found = live(ONE, ProbeOutcome.CONNECTED, NodeView("node1", tracked(to="10.244.7.7")))
    assert (cause(found), exit_code(found.verdict)) == (Cause.OTHER_ENDPOINT, 3)


def test_a_connection_without_an_entry_is_forwarded_by_something_else() -> None:
    assert cause(live(ONE, ProbeOutcome.CONNECTED, NodeView("node1", NONE))) is Cause.NOT_TRACKED


def test_unread_conntrack_is_no_difference_if_probes_arrive() -> None:
    assert (
        live(ONE, ProbeOutcome.CONNECTED, NodeView("node1", unread="no rights")).verdict is LiveVerdict.WORKS
    )


def test_dropped_probes_agree_with_rules_that_drop() -> None:
    dropped = trace(end(THERE, "node1", 1.0, EndResult.DROPPED))
    found = live(dropped, ProbeOutcome.TIMED_OUT, NodeView("node1", NONE))
    assert (found.verdict, exit_code(found.verdict)) == (LiveVerdict.FAILS, 1)


# The rules of node2 drop what they lead there.
STOPS = msgspec.structs.replace(end(THERE, "node2", 1.0, EndResult.DROPPED), rule=FORWARD)


@pytest.mark.parametrize(
    ("packets", "met", "expected", "words"),
    [
        (4, 9, Cause.AS_PREDICTED, ""),
        (3, 9, Cause.LOST, "; a rule of node2 in filter FORWARD would stop them too"),
        (0, 0, Cause.NEVER_ARRIVED, "never saw the packets"),
        (None, 9, Cause.AS_PREDICTED, ""),
        (None, 0, Cause.NEVER_ARRIVED, "would stop them too"),
        (None, None, Cause.UNKNOWN, "no counter of node2 tells"),
    ],
)
def test_a_rule_explains_lost_probes_only_if_it_counted_them(
    packets: int | None, met: int | None, expected: Cause, words: str
) -> None:
    """A second fault before the rule must not hide behind it."""
    rises = () if packets is None else (RuleRise("filter", "FORWARD", FORWARD.rule, packets, True),)
    found = live(trace(STOPS), ProbeOutcome.TIMED_OUT, SENT, NodeView("node2", NONE, rises=rises, met=met))
    assert cause(found) is expected
    assert words in found.message or expected is Cause.AS_PREDICTED


def test_a_rule_of_the_first_node_that_did_not_count_probes_has_not_dropped_them() -> None:
    here = msgspec.structs.replace(end(THERE, "node1", 1.0, EndResult.DROPPED), rule=FORWARD)
    unmoved = NodeView("node1", NONE, rises=(RuleRise("filter", "FORWARD", FORWARD.rule, 0, True),))
    assert live(trace(here), ProbeOutcome.TIMED_OUT, unmoved).verdict is LiveVerdict.DIFFERS
    hits = tuple(RuleHit(20000 + number, "filter", "FORWARD", "xt", "drop") for number in range(4))
    seen = msgspec.structs.replace(unmoved, hits=hits)
    assert live(trace(here), ProbeOutcome.TIMED_OUT, seen).verdict is LiveVerdict.FAILS


def test_a_stale_endpoint_that_fails_agrees() -> None:
    gone = msgspec.structs.replace(end(THERE, "node2", 1.0), stale=True, good=False)
    found = live(trace(gone), ProbeOutcome.REFUSED, SENT, listening=listens(ProbeOutcome.REFUSED))
    assert (found.verdict, found.ends[0].probes) == (LiveVerdict.FAILS, 4)
    assert "out of date" in text(found.trace.blocks(wide=False))


@pytest.mark.parametrize(("refused", "expected"), [(8, LiveVerdict.FAILS), (20, LiveVerdict.DIFFERS)])
def test_refusals_without_entries_agree_with_stale_endpoints_of_their_share(
    refused: int, expected: LiveVerdict
) -> None:
    """A refusal ends the entry, which nodes that do not send the probes read too late."""
    gone = msgspec.structs.replace(end(THERE, "node2", 0.5), stale=True, good=False)
    outcomes = [ProbeOutcome.REFUSED] * refused + [ProbeOutcome.CONNECTED] * (20 - refused)
    probes = tuple(probe(number, outcome) for number, outcome in enumerate(outcomes))
    flows = (*[None] * refused, *(flow(number, HERE) for number in range(refused, 20)))
    found = compare(trace(end(HERE, "node1", 0.5), gone), Observations(probes, (NodeView("node1", flows),)))
    assert found.verdict is expected


def test_connections_that_rules_drop_differ() -> None:
    dropped = trace(end(THERE, "node1", 1.0, EndResult.DROPPED))
    assert cause(live(dropped, ProbeOutcome.CONNECTED, NodeView("node1", tracked()))) is Cause.PASSED


def test_an_icmp_error_agrees_with_rules_that_reject_even_if_later_probes_get_none() -> None:
    rejected = trace(end(THERE, "node1", 1.0, EndResult.REJECTED))
    icmp = IcmpError(3, 3, "10.0.0.11")
    probes = (probe(0, ProbeOutcome.UNREACHABLE, icmp=icmp), probe(1, ProbeOutcome.TIMED_OUT))
    view = NodeView("node1", (None, None))
    assert compare(rejected, Observations(probes, (view,))).verdict is LiveVerdict.FAILS
    found = compare(rejected, Observations(probes[1:], (view,)))
    assert "no ICMP error came back" in found.message


def test_a_refusal_with_nobody_listening_names_the_pod() -> None:
    found = live(ONE, ProbeOutcome.REFUSED, SENT, listening=listens(ProbeOutcome.REFUSED))
    assert cause(found) is Cause.NOT_LISTENING
    assert "reached node2, but nothing listens at 10.244.2.2:8080 (pod default/web-2)" in text(
        found.blocks(wide=False), 200
    )


def test_a_refusal_by_a_listening_endpoint_comes_from_the_way() -> None:
    found = live(ONE, ProbeOutcome.REFUSED, SENT, listening=listens(ProbeOutcome.CONNECTED))
    assert cause(found) is Cause.REFUSED
    assert "something on the way resets" in found.message


def test_a_rule_that_rejects_on_the_endpoints_node_is_named_by_its_counter() -> None:
    node2 = NodeView("node2", NONE, rises=(msgspec.structs.replace(DROP, rule="reject", packets=4),))
    found = live(UNSURE, ProbeOutcome.REFUSED, SENT, node2, listening=listens(ProbeOutcome.CONNECTED))
    assert cause(found) is Cause.REJECTED
    assert "were rejected on node2 in inet hostfw forward: `reject`" in found.message


def test_an_icmp_error_that_no_rule_sends_names_its_sender() -> None:
    found = live(ONE, ProbeOutcome.UNREACHABLE, SENT, icmp=IcmpError(3, 1, "10.0.0.12"))
    assert cause(found) is Cause.REJECTED
    assert "10.0.0.12: host unreachable" in found.message


def test_a_node_that_gets_no_answer_from_the_next_one_names_the_network_between() -> None:
    """After DNAT, an ICMP error of any node on the way has the address of the Service as its sender."""
    icmp = IcmpError(3, 1, "10.96.1.1")
    found = live(ONE, ProbeOutcome.UNREACHABLE, SENT, NodeView("node2", NONE), icmp=icmp)
    assert (cause(found), found.causes[0].node) == (Cause.NEVER_ARRIVED, "node2")
    assert "host unreachable, and node2 tracks none of them: look at the network between" in found.message
    seen = live(ONE, ProbeOutcome.UNREACHABLE, SENT, msgspec.structs.replace(SENT, node="node2"), icmp=icmp)
    assert cause(seen) is Cause.REJECTED


def test_a_node_whose_first_rule_met_nothing_never_saw_the_packets() -> None:
    found = live(ONE, ProbeOutcome.TIMED_OUT, SENT, NodeView("node2", NONE, met=0))
    assert cause(found) is Cause.NEVER_ARRIVED
    assert "node2 never saw the packets: look at the network between node1 and node2" in found.message


@pytest.mark.parametrize("met", [None, 4])
def test_a_node_without_entries_is_not_blamed_alone_if_packets_may_have_come(met: int | None) -> None:
    found = live(ONE, ProbeOutcome.TIMED_OUT, SENT, NodeView("node2", NONE, met=met))
    assert cause(found) is Cause.LOST
    assert "node2 drops them, or the network between node1 and node2" in found.message


def test_lost_refusals_do_not_hide_that_nothing_listens() -> None:
    """An entry that a refusal ends is gone, as if packets had never come."""
    node2 = NodeView("node2", NONE, met=4)
    found = live(ONE, ProbeOutcome.TIMED_OUT, SENT, node2, listening=listens(ProbeOutcome.REFUSED))
    assert "loses them or refusals of the endpoint; nothing listens at 10.244.2.2:8080" in found.message
    found = live(ONE, ProbeOutcome.TIMED_OUT, SENT, node2, listening=listens(ProbeOutcome.CONNECTED))
    assert found.message.endswith("loses them.")


def test_a_rule_whose_counter_rose_is_named() -> None:
    found = live(UNSURE, ProbeOutcome.TIMED_OUT, SENT, NodeView("node2", NONE, rises=(DROP,), met=12))
    assert cause(found) is Cause.DROPPED
    assert "died on node2 in inet hostfw forward: `counter drop`" in found.message


def test_a_rule_that_does_not_match_the_probes_is_not_the_cause() -> None:
    other = Step("inet hostfw", "forward", "counter drop", False, "its state is not INVALID")
    static = trace(end(THERE, "node2", 1.0), visits=(visit("node1"), visit("node2", steps=(JUMP, other))))
    assert (
        cause(live(static, ProbeOutcome.TIMED_OUT, SENT, NodeView("node2", NONE, rises=(DROP,))))
        is Cause.LOST
    )


def test_a_counter_that_rose_by_fewer_packets_is_not_the_cause() -> None:
    drop = msgspec.structs.replace(DROP, packets=3)
    assert (
        cause(live(UNSURE, ProbeOutcome.TIMED_OUT, SENT, NodeView("node2", NONE, rises=(drop,))))
        is Cause.LOST
    )


def test_one_of_several_counters_that_rose_is_the_cause() -> None:
    other = msgspec.structs.replace(DROP, chain="input")
    found = live(UNSURE, ProbeOutcome.TIMED_OUT, SENT, NodeView("node2", NONE, rises=(DROP, other)))
    assert "in one of inet hostfw forward" in found.message


def test_a_rule_that_trace_cannot_evaluate_is_only_suspected() -> None:
    unknown = Step("inet hostfw", "forward", "meta length 60 drop", False, "trace does not know meta length")
    static = trace(end(THERE, "node2", 1.0), visits=(visit("node1"), visit("node2", steps=(JUMP, unknown))))
    found = live(static, ProbeOutcome.TIMED_OUT, SENT, NodeView("node2", NONE))
    assert "perhaps in inet hostfw forward: `meta length 60 drop`" in found.message


def test_packets_that_never_reach_the_first_node_are_told_apart_from_those_lost_there() -> None:
    assert cause(live(ONE, ProbeOutcome.TIMED_OUT, NodeView("node1", NONE, met=0))) is Cause.NEVER_ARRIVED
    assert cause(live(ONE, ProbeOutcome.TIMED_OUT, NodeView("node1", NONE, met=4))) is Cause.LOST


@pytest.mark.parametrize(
    ("state", "invalid", "expected", "words"),
    [
        ("SYN_RECV", 3, Cause.REPLY_LOST, "no reply came back to node1"),
        ("SYN_RECV", 4, Cause.UNMATCHED, "come back to node1 unmatched"),
        ("CLOSE", 0, Cause.UNMATCHED, "the client reset them (asymmetric routing)"),
    ],
)
def test_a_reply_that_only_the_endpoints_node_saw_is_lost(
    state: str, invalid: int, expected: Cause, words: str
) -> None:
    first = msgspec.structs.replace(SENT, failures={"invalid": invalid})
    found = live(ONE, ProbeOutcome.TIMED_OUT, first, NodeView("node2", tracked_after(state)))
    assert cause(found) is expected
    assert words in found.message


@pytest.mark.parametrize(("dropped", "expected"), [(4, Cause.TABLE_FULL), (3, Cause.LOST)])
def test_a_full_conntrack_table_explains_missing_entries(dropped: int, expected: Cause) -> None:
    view = NodeView("node1", NONE, failures={"drop": dropped})
    assert cause(live(ONE, ProbeOutcome.TIMED_OUT, view)) is expected


def test_a_full_conntrack_table_behind_the_network_hides_what_the_network_loses() -> None:
    full = NodeView("node2", NONE, met=0, failures={"drop": 4})
    found = live(ONE, ProbeOutcome.TIMED_OUT, SENT, full)
    assert cause(found) is Cause.TABLE_FULL
    assert "which hides whether the network before it loses packets too" in found.message
    some = msgspec.structs.replace(full, failures={"drop": 1})
    found = live(ONE, ProbeOutcome.TIMED_OUT, SENT, some)
    assert cause(found) is Cause.LOST
    assert "whose full conntrack table made it drop 1 packet" in found.message


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (ProbeOutcome.CONNECTED, "it answers its own node"),
        (ProbeOutcome.TIMED_OUT, "its own node gets no answer"),
    ],
)
def test_an_endpoint_that_does_not_answer_is_asked_from_its_node(outcome: ProbeOutcome, words: str) -> None:
    node2 = NodeView("node2", tracked_after("SYN_SENT"))
    found = live(ONE, ProbeOutcome.TIMED_OUT, SENT, node2, listening=listens(outcome))
    assert cause(found) is Cause.NO_REPLY
    assert words in found.message


@pytest.mark.parametrize(
    ("size", "expected", "words"),
    [
        (
            1500,
            Cause.MTU,
            "packets of 1500 bytes do not arrive, though small ones do: the MTU between node1 and",
        ),
        (53, Cause.DATA_LOST, "which acknowledges no data"),
        (0, Cause.ARRIVED, "4 of 4 connections arrived with their data"),
    ],
)
def test_only_large_packets_that_are_lost_blame_the_mtu(size: int, expected: Cause, words: str) -> None:
    probes = tuple(
        msgspec.structs.replace(probe(number, ProbeOutcome.CONNECTED), lost_size=size) for number in range(4)
    )
    found = compare(ONE, Observations(probes, (NodeView("node1", tracked()),)))
    assert cause(found) is expected
    assert words in found.message


def test_a_node_alone_does_not_say_that_packets_reached_an_endpoint_behind_it() -> None:
    behind = end(THERE, "node1", 1.0, EndResult.SENT)
    found = live(trace(behind, visits=(visit("node1"),)), ProbeOutcome.TIMED_OUT, SENT)
    assert cause(found) is Cause.NO_REPLY
    assert "left node1 for 10.244.2.2:8080 (pod default/web-2), and no reply came back" in found.message


def test_a_node_whose_rules_are_unread_makes_the_answer_unknown() -> None:
    static = trace(
        end(THERE, "node2", 1.0, EndResult.SENT), visits=(visit("node1"), visit("node2", unread="no pod"))
    )
    found = live(static, ProbeOutcome.TIMED_OUT, SENT)
    assert (found.verdict, exit_code(found.verdict)) == (LiveVerdict.UNKNOWN, 2)


def test_udp_without_an_answer_is_unknown() -> None:
    found = live(ONE, ProbeOutcome.UNANSWERED, NodeView("node1", tracked()))
    assert found.verdict is LiveVerdict.UNKNOWN
    assert "UDP does not promise" in found.message


@pytest.mark.parametrize(
    ("delay", "dropped", "expected"),
    [(0.0, False, Cause.LATE), (1.0, False, Cause.LOST), (1.0, True, Cause.AS_PREDICTED)],
)
def test_a_late_connection_lost_its_first_packet(delay: float, dropped: bool, expected: Cause) -> None:
    """Until an entry exists, a packet that is sent again may choose another endpoint."""
    ends = (
        end(HERE, "node1", 0.5),
        end(THERE, "node1", 0.5, EndResult.DROPPED if dropped else EndResult.REACHED),
    )
    view = NodeView("node1", tracked(to=HERE), delays=(delay,) * 4)
    assert cause(live(trace(*ends), ProbeOutcome.CONNECTED, view, seconds=1.01)) is expected


def test_rules_that_change_meanwhile_make_a_difference_unknown() -> None:
    found = live(ONE, ProbeOutcome.TIMED_OUT, SENT, NodeView("node2", NONE, changed=True))
    assert found.verdict is LiveVerdict.UNKNOWN
    assert "rules of node2 changed" in found.message


def test_a_node_port_is_followed_to_the_endpoint_that_another_node_chooses() -> None:
    to = TracedDestination("TCP", VIP, 80, "default/web:http", FrontendKind.NODE_PORT)
    chosen = msgspec.structs.replace(end(THERE, "node2", 1.0), translated_on="node2")
    untranslated = tuple(
        msgspec.structs.replace(one, reply=FlowSide(VIP, 80, CLIENT, 20000 + number))
        for number, one in enumerate(tracked("SYN_SENT"))
    )
    static, first = trace(chosen, to=to), NodeView("node1", untranslated)
    assert (
        live(static, ProbeOutcome.CONNECTED, first, NodeView("node2", tracked())).verdict is LiveVerdict.WORKS
    )
    assert (
        cause(live(static, ProbeOutcome.TIMED_OUT, first, NodeView("node2", NONE, met=0)))
        is Cause.NEVER_ARRIVED
    )


@pytest.mark.parametrize(
    ("what", "seen"),
    [("matches default/web", True), ("dropped: x", False), ("masqueraded: node1 replaces the source", False)],
)
def test_a_decision_is_as_predicted_only_if_probes_show_it(what: str, seen: bool) -> None:
    first = msgspec.structs.replace(visit("node1"), decisions=(RuleDecision("nat", "C", what),))
    static = trace(end(THERE, "node2", 1.0), visits=(first,))
    (step,) = live(static, ProbeOutcome.CONNECTED, NodeView("node1", tracked())).steps
    assert step.mark == ("as predicted" if seen else "not seen")


def test_short_text_fits_a_screen_and_json_has_every_observation() -> None:
    found = live(ONE, ProbeOutcome.TIMED_OUT, SENT, NodeView("node2", NONE, rises=(DROP,)))
    assert len(text(found.blocks(wide=False)).splitlines()) < 24
    assert '"sourcePort": 20003' in json_text(document(found))


@pytest.mark.parametrize(
    ("static", "words"),
    [
        (trace(end(THERE, "node2", 1.0), visits=(), to=TracedDestination("TCP", "1.1.1.1", 80)), "is no Service"),
        (trace(end(THERE, "node2", 1.0), visits=(visit("node1", steps=(msgspec.structs.replace(JUMP, affinity=9),)),)), "--allow-affinity"),
        (msgspec.structs.replace(ONE, source=Location(LocationKind.OUTSIDE, "203.0.113.1")), "nothing can be sent"),
        (ONE, ""),
    ],
)  # fmt: skip
def test_probes_that_must_not_be_sent_are_refused(static: TraceReport, words: str) -> None:
    reason = refusal(static, Directory("here"), allow_affinity=False)
    assert words in reason
    assert bool(words) == bool(reason)


def test_shares_are_judged_exactly() -> None:
    thirds = dict.fromkeys("abc", 1 / 3)
    assert unlikely_share(thirds, {"a": 10}) == "a"
    assert unlikely_share(thirds, {"a": 6, "b": 4}) == ""
    assert unlikely_share({"a": 1.0}, {"a": 3}) == ""
    assert unlikely_share({"a": 0.5, "b": 0.5}, {"a": 99, "b": 1}) != ""


_VIEWS = st.tuples(
    st.sampled_from(["none", "SYN_SENT", "SYN_RECV", "ESTABLISHED", "CLOSE"]),
    st.sampled_from([None, 0, 4, 40]),
    st.sampled_from([(), (DROP,)]),
)


@given(
    st.sampled_from(list(ProbeOutcome)), _VIEWS, _VIEWS, st.sampled_from([(), *map(listens, ProbeOutcome)])
)
def test_only_sufficient_observations_name_a_cause(
    outcome: ProbeOutcome,
    first: tuple[str, int | None, tuple[RuleRise, ...]],
    second: tuple[str, int | None, tuple[RuleRise, ...]],
    listening: tuple[Listening, ...],
) -> None:
    """Whatever was observed: each sentence about a place has the evidence that it needs."""
    flows1 = NONE if first[0] == "none" else tracked(first[0])
    flows2 = NONE if second[0] == "none" else tracked_after(second[0])
    node1 = NodeView("node1", flows1, rises=first[2], met=first[1])
    node2 = NodeView("node2", flows2, rises=second[2], met=second[1])
    found = live(UNSURE, outcome, node1, node2, listening=listening)
    for one in found.causes:
        view = {"node1": node1, "node2": node2}.get(one.node or "")
        if one.cause is Cause.NEVER_ARRIVED:
            assert view
            assert (view.met, any(view.flows)) == (0, False)
            assert not (view is node2 and view.rises)
        if one.cause is Cause.DROPPED:
            assert view
            assert view.rises
            assert not any(view.flows)
        if one.cause is Cause.NOT_LISTENING:
            assert listening[0].probe.outcome in (ProbeOutcome.REFUSED, ProbeOutcome.UNREACHABLE)
            assert outcome not in (ProbeOutcome.TIMED_OUT, ProbeOutcome.CONNECTED)
        if one.cause is Cause.REPLY_LOST:
            assert second[0] not in ("none", "SYN_SENT") or first[0] not in ("none", "SYN_SENT")
    if outcome is ProbeOutcome.UNANSWERED:
        assert found.verdict is LiveVerdict.UNKNOWN
    if found.verdict is LiveVerdict.WORKS:
        assert outcome in (ProbeOutcome.CONNECTED, ProbeOutcome.REPLIED)
    assert sorted(itertools.chain.from_iterable(one.probes for one in found.causes)) == [0, 1, 2, 3]
