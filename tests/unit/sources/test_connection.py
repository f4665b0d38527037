"""When the watches of an agent try again, alone and together with those of thousands of agents, and the log of outages."""

import threading
import time
from collections.abc import MutableMapping
from typing import Any
from unittest.mock import create_autospec

import pytest

from pykubeproxy.sources.attempt import Attempt
from pykubeproxy.sources.client import TokenBucket
from pykubeproxy.sources.connection import Backoff, ConnectionState, OutageLog, Pause, Reconnection, Timing
from pykubeproxy.sources.contact import Contact
from pykubeproxy.sources.failures import Failure, Unreachable, from_status
from pykubeproxy.sources.watch import Outage
from tests.bench.retries import OUTAGES, renewals, simulate
from tests.fakes.waiting import PATIENCE

Lines = list[MutableMapping[str, Any]]

AGENTS = 400
BROKEN = Failure("the connection broke", server_wide=True)


def watches(timing: Timing | None = None) -> list[ConnectionState]:
    """Return the states of the three watches of an agent, open for a minute."""
    timing = timing or Timing()
    shared = Reconnection(timing.first_pause, timing.longest_pause)
    names = ("services", "endpointslices", "nodes")
    return [ConnectionState(name, shared, timing, Contact()) for name in names]


def work(states: list[ConnectionState], now: list[float]) -> None:
    for state in states:
        state.connecting()
        state.opened()
    now[0] += 60
    for state in states:
        state.outages.heard()


def acknowledged(now: list[float]) -> tuple[Contact, ConnectionState]:
    """Return the contact and a watch whose packets the server acknowledges."""
    contact = Contact(clock=lambda: now[0])
    contact.heard()
    attempt = create_autospec(Attempt, instance=True)
    attempt.unacknowledged.return_value = 0.0
    contact.opened(attempt)
    return contact, ConnectionState("services", Reconnection(1.0, 30.0), Timing(), contact)


@pytest.mark.parametrize("outage", OUTAGES.values(), ids=OUTAGES)
def test_agents_do_not_flood_a_server_after_an_outage(outage: Failure) -> None:
    """In no second more than 1.5 attempts per agent, and no agent is late."""
    attempts = simulate(AGENTS, outage, 60.0)
    assert attempts.peak() <= 1.5 * AGENTS
    assert attempts.total(10) <= 4.5 * AGENTS
    assert attempts.peak(start=60) <= 0.5 * AGENTS
    assert attempts.watched_after <= Timing().longest_pause
    assert simulate(AGENTS, outage, 60.0) == attempts


def test_the_watches_of_5000_nodes_are_renewed_evenly() -> None:
    """At most 50 requests in any second, also after all of them began at once."""
    assert max(renewals(5000, 3600)) <= 50


def test_watches_share_their_attempts(now: list[float], no_jitter: None) -> None:
    """Three watches that lose a server at once take turns, as far apart as the attempts of one watch."""
    states = watches()
    work(states, now)
    assert [state.failed(BROKEN).seconds for state in states] == [1.0, 3.0, 7.0]


def test_a_failed_check_of_an_open_watch_leaves_the_turns_of_the_others(
    now: list[float], no_jitter: None
) -> None:
    """No watch has opened since."""
    open_watch, broken, _ = states = watches()
    work(states, now)
    before = broken.failed(BROKEN)
    open_watch.opened(now[0] - 60)
    after = broken.failed(BROKEN)
    assert (before.seconds, after.seconds) == (1.0, 3.0)
    assert after.opened == before.opened


@pytest.mark.parametrize(
    ("failure", "away"), [(Unreachable("no response"), True), (Failure("the API server sent no list"), False)]
)
def test_only_a_check_without_an_answer_casts_doubt_on_the_server(
    failure: Failure, away: bool, now: list[float]
) -> None:
    """A list that cannot be read is an answer."""
    contact, state = acknowledged(now)
    state.checking()
    now[0] += 60
    state.check_failed(failure)
    assert state.outages.outage()
    assert bool(contact.outage()) is away


@pytest.mark.parametrize(
    ("refusal", "answers"),
    [
        *((from_status(code, "", 0.0, "services"), True) for code in (401, 403, 410, 429, 500)),
        *((from_status(code, "", 0.0, "services"), False) for code in (502, 503)),
        (Unreachable("connection refused", refused=True), False),
    ],
    ids=str,
)
def test_a_refused_check_ends_the_outage_of_one_without_an_answer(
    refusal: Failure, answers: bool, now: list[float]
) -> None:
    """The server answers, unless the refusal is that of a load balancer; the next outage counts from then."""
    contact, state = acknowledged(now)
    for silence in (60.0, 90.0 if answers else 180.0):
        state.checking()
        now[0] += 60
        state.check_failed(Unreachable("no response"))
        assert contact.outage()
        outage = state.outages.outage()
        assert outage
        assert outage.seconds == silence
        now[0] += 30
        state.check_failed(refusal)
        assert (not state.outages.outage(), not contact.outage()) == (answers, answers)
        now[0] += 30


def test_checks_that_expire_again_and_again_list_ever_more_rarely(now: list[float], no_jitter: None) -> None:
    """Until a watch works."""
    state, *_ = watches()
    expired = from_status(410, "too old", 0.0, "services")
    for _ in range(2):
        assert [state.check_failed(expired) for _ in range(7)] == [30, 60, 120, 240, 480, 600, 600]
        state.works()


def test_persistent_failures_hours_apart_cause_no_list(now: list[float]) -> None:
    """A watch that works between them has shown that its version is good, also without an event."""
    state, *_ = watches()
    state.listed(went_back=False)
    for _ in range(3):
        state.connecting()
        state.opened()
        now[0] += 3600
        state.works()
        state.failed(Failure("it did not end in time", persistent=True))
    assert not state.must_list


def test_a_watch_that_opens_ends_the_wait_of_the_others() -> None:
    """Even when it opened before the other began to wait."""
    shared = Reconnection(PATIENCE, PATIENCE)
    pause = shared.failed(0.0)._replace(seconds=PATIENCE)
    threading.Timer(0.1, shared.opened).start()
    started = time.monotonic()
    shared.wait(pause)
    shared.wait(pause)
    assert time.monotonic() - started < PATIENCE / 2


def test_the_time_a_server_asks_for_is_never_cut_short() -> None:
    shared = Reconnection(1.0, 30.0)
    pause = shared.failed(0.0, at_least=0.3)
    shared.opened()
    started = time.monotonic()
    shared.wait(pause)
    assert time.monotonic() - started >= 0.3


def test_a_connection_that_fails_at_once_does_not_reset_the_backoff(
    now: list[float], no_jitter: None
) -> None:
    """Only a watch that works for a while does."""
    state = watches()[0]
    work([state], now)
    pauses = []
    for _ in range(7):
        pauses.append(state.failed(BROKEN).seconds)
        now[0] += pauses[-1]
        state.connecting()
        state.opened()
        now[0] += 0.01
    # The rest of the second in which a watch opened comes on top.
    assert pauses == pytest.approx([1.0, 2.99, 4.99, 8.99, 16.99, 30.99, 30.99])
    work([state], now)
    assert state.failed(BROKEN).seconds == 1.0


def test_a_failure_of_one_resource_delays_no_other(now: list[float], no_jitter: None) -> None:
    """A missing permission may stay for ever."""
    forbidden, other, _ = watches()
    work([other], now)
    for _ in range(6):
        forbidden.connecting()
        last = forbidden.failed(from_status(403, "", 0.0, "services"))
    assert last == Pause(30.0, 30.0, 0)
    assert other.failed(BROKEN).seconds == 1.0


@pytest.mark.parametrize("status", [429, 500, 503])
def test_retry_after_is_a_minimum_with_jitter_after_it(status: int) -> None:
    """So agents that are told the same do not return at once."""
    pauses = []
    for _ in range(300):
        state = watches()[0]
        state.connecting()
        pauses.append(state.failed(from_status(status, "", 20.0, "services")).seconds)
    assert min(pauses) >= 20.0
    assert 20.0 <= min(pauses) < 22.0
    assert 38.0 < max(pauses) <= 40.0


def test_a_long_retry_after_is_spread_over_the_longest_pause(now: list[float], no_jitter: None) -> None:
    state = watches()[0]
    state.connecting()
    assert state.failed(from_status(429, "", 100.0, "services")).seconds == 130.0


def test_watches_that_a_stopping_server_ends_are_spread(now: list[float], no_jitter: None) -> None:
    """One that lasted as long as requested is followed at once by the next."""
    state, other, _ = watches()
    work([state, other], now)
    assert state.ended(300).seconds == 1.0
    assert other.ended(60).seconds == 0.0


def test_the_ceiling_is_at_least_the_spread(no_jitter: None) -> None:
    backoff = Backoff(1.0, 30.0)
    assert [backoff.next(spread=5.0) for _ in range(5)] == [5.0, 5.0, 5.0, 8.0, 16.0]
    assert backoff.next(spread=99.0) == 30.0


def test_pauses_double_up_to_the_longest_and_reset(no_jitter: None) -> None:
    """The ceiling of the pause is 0.2 s, doubles to 30 s, and a success resets it."""
    pauses = Backoff(0.2, 30.0)
    assert [pauses.next() for _ in range(10)] == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0, 30.0]
    pauses.reset()
    assert pauses.next() == 0.2


def test_pauses_are_spread_over_the_whole_range() -> None:
    """Full jitter: pauses lie anywhere between nothing and the ceiling."""
    backoff = Backoff(0.2, 0.2)
    pauses = [backoff.next() for _ in range(300)]
    assert 0 <= min(pauses) < 0.03
    assert 0.17 < max(pauses) <= 0.2


def test_pauses_survive_many_failures(no_jitter: None) -> None:
    """A server that is away for months does not overflow anything."""
    backoff = Backoff(0.2, 30.0)
    backoff.failures = 10**9
    assert backoff.next() == 30.0


class Outages:
    """The log of a watch, from second 0, when the server was heard, before another request."""

    def __init__(self, clock: list[float], logged: Lines) -> None:
        self.start, self._clock, self.lines = clock[0], clock, logged
        self.contact = Contact(clock=lambda: clock[0])
        self.contact.heard()
        self.contact.requested()
        self.log = OutageLog("services", self.contact)

    def at(self, second: float) -> None:
        self._clock[0] = self.start + second


@pytest.fixture
def outages(now: list[float], logged: Lines) -> Outages:
    return Outages(now, logged)


OWN = Failure("forbidden")
DEAD, SILENT = Unreachable("refused"), Unreachable("no data", persistent=True)


def test_same_reason_is_logged_once_a_minute(outages: Outages, logged: Lines) -> None:
    """The first failure is logged, the same reason again only after a minute, another reason at once."""
    for second in range(0, 130, 2):
        outages.at(second)
        outages.log.failed(OWN, 1.0)
    assert [line["reason"] for line in logged] == ["forbidden"] * 3
    outages.log.failed(Failure("timeout"), 1.0)
    assert logged[-1]["reason"] == "timeout"


def test_recovery_is_logged_once(outages: Outages, logged: Lines) -> None:
    """Recovery is one line with the time it took, and without an outage there is none."""
    outages.log.recovered()
    outages.log.failed(OWN, 1.0)
    outages.at(7.0)
    assert outages.log.outage() == Outage("services", 7.0, "forbidden")
    outages.log.recovered()
    assert outages.log.outage() is None
    outages.log.recovered()
    assert [(line["log_level"], line.get("after")) for line in logged] == [
        ("warning", None),
        ("info", "7.0s"),
    ]


@pytest.mark.parametrize("failure", [DEAD, SILENT])
def test_an_outage_of_the_server_is_no_line_of_a_watch(
    outages: Outages, logged: Lines, failure: Failure
) -> None:
    """Neither is its end; but the outage of the watch counts."""
    for second in range(0, 130, 2):
        outages.at(second)
        outages.log.failed(failure, 1.0)
    assert outages.log.outage() == Outage("services", 128.0, str(failure))
    outages.log.recovered()
    assert not logged


@pytest.mark.parametrize(("failure", "second"), [(DEAD, 12), (SILENT, 10)])
def test_a_watch_that_fails_alone_is_logged(outages: Outages, failure: Failure, second: int) -> None:
    """Once it has failed for 10 s, or was silent for so long, while other watches hear the server."""
    for passed in range(2, second + 1, 2):
        outages.at(passed)
        assert not outages.lines
        outages.contact.heard()
        outages.log.failed(failure, 1.0)
    outages.log.recovered()
    assert [(line["event"], line["log_level"]) for line in outages.lines] == [
        ("watch failed", "warning"),
        ("watch recovered", "info"),
    ]


def test_an_unavailable_server_is_an_outage_of_each_watch(outages: Outages) -> None:
    """Even before its requests fail."""
    outages.at(9.9)
    assert outages.log.outage() is None
    outages.at(10.0)
    assert outages.log.outage() == Outage("services", 10.0, "the API server sends nothing")
    outages.contact.heard()
    assert outages.log.outage() is None


def test_rate_limit(monkeypatch: pytest.MonkeyPatch, now: list[float]) -> None:
    """Burst requests pass at once, later ones qps a second; an idle time gives the burst back."""
    now[0] = 0.0  # without rounding
    slept = []

    def sleep(seconds: float) -> None:
        slept.append(round(seconds, 6))
        now[0] += seconds

    monkeypatch.setattr(time, "sleep", sleep)
    bucket = TokenBucket(5, 3)
    for _ in range(5):
        bucket.wait()
    assert slept == [0.2, 0.2]
    now[0] += 10
    for _ in range(4):
        bucket.wait()
    assert slept == [0.2, 0.2, 0.2]


def test_no_rate_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A qps that is not above zero means no limit."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    bucket = TokenBucket(-1, 1)
    for _ in range(50):
        bucket.wait()
    assert not slept
