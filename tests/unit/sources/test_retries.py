"""When the watches of an agent try again, alone and together with those of thousands of agents."""

import time

import pytest

from pykubeproxy.objects import Kind
from pykubeproxy.sources import Client, Timing
from pykubeproxy.sources.api import ApiWatch, Backoff, resource_of
from pykubeproxy.sources.client import TokenBucket
from pykubeproxy.sources.failures import Failure, from_status
from tests.bench.retries import OUTAGES, renewals, simulate

AGENTS = 400
BROKEN = Failure("the connection broke", server_wide=True)


def a_watch(now: list[float], open_for: float = 60.0) -> ApiWatch:
    """Return a watch that has been open for some seconds."""
    watch = ApiWatch(Client(master="http://127.0.0.1:1"), resource_of(Kind.SERVICE), Timing())
    watch._must_list = False
    watch._opened = now[0] - open_for
    if open_for >= Timing().steady:
        watch._succeeded()
    return watch


@pytest.mark.parametrize("outage", OUTAGES.values(), ids=OUTAGES)
def test_agents_do_not_flood_a_server_after_an_outage(outage: Failure) -> None:
    """In no second more than 2.5 attempts per agent, and no agent is late."""
    attempts = simulate(AGENTS, outage, 60.0)
    assert attempts.peak() <= 2.5 * AGENTS
    assert attempts.total(10) <= 10 * AGENTS
    assert attempts.peak(start=60) <= 0.5 * AGENTS
    assert attempts.watched_after <= Timing().longest_pause + 1.0
    assert simulate(AGENTS, outage, 60.0) == attempts


def test_the_watches_of_5000_nodes_are_renewed_evenly() -> None:
    """Also after all of them began at once."""
    assert max(renewals(5000, 3600)) <= 80


def test_a_failed_request_after_silence_puts_open_watches_in_doubt(now: list[float]) -> None:
    """The watch of the Node, which checks the server, may have just ended. Before, only its own path may be broken."""
    watch = a_watch(now)
    contact = watch._contact
    contact.heard()
    with contact.open_watch():
        now[0] += Timing().quiet - 1
        watch._failed(BROKEN)
        now[0] += contact.limit
        assert not contact.outage()
        watch._failed(BROKEN)
        assert contact.outage() == str(BROKEN)


def test_pauses_grow_until_a_watch_works(now: list[float], no_jitter: None) -> None:
    """The rest of the second in which a watch opened comes on top."""
    watch = a_watch(now)
    pauses = []
    for _ in range(6):
        pauses.append(watch._failed(BROKEN))
        watch._opened, watch._works = now[0] - 0.25, False
    assert pauses == [2.0, 4.75, 8.75, 16.75, 30.75, 30.75]
    watch._succeeded()
    watch._opened = now[0] - 60
    assert watch._failed(BROKEN) == 2.0


@pytest.mark.parametrize("status", [429, 500, 503])
def test_retry_after_is_a_minimum_with_jitter_after_it(status: int, now: list[float]) -> None:
    """So agents that are told the same do not return at once."""
    pauses = [a_watch(now)._failed(from_status(status, "", 20.0, "services")) for _ in range(300)]
    assert 20.0 <= min(pauses) < 22.0
    assert 38.0 < max(pauses) <= 40.0


def test_a_long_retry_after_is_spread_over_the_longest_pause(now: list[float], no_jitter: None) -> None:
    assert a_watch(now)._failed(from_status(429, "", 100.0, "services")) == 130.0


def test_watches_that_a_stopping_server_ends_are_spread(now: list[float], no_jitter: None) -> None:
    """One that lasted as long as requested is followed at once by the next."""
    watch = a_watch(now)
    assert watch._ended(300) == 2.0
    assert watch._ended(60) == 0.0


def test_a_watch_that_ends_at_once_is_a_failure(now: list[float]) -> None:
    with pytest.raises(Failure, match="ends the watch at once"):
        a_watch(now, open_for=0.1)._ended(300)


def test_expired_versions_are_listed_ever_more_rarely(now: list[float], no_jitter: None) -> None:
    """Until a watch works."""
    expired, watch = from_status(410, "too old", 0.0, "services"), a_watch(now)
    for _ in range(2):
        assert [watch._failed(expired) for _ in range(6)] == [2, 4, 8, 16, 30, 30]
        assert watch._must_list
        watch._works = False
        watch._succeeded()


def test_only_persistent_failures_in_a_row_cause_a_list(now: list[float]) -> None:
    """A watch that works between them has shown that its version is good, also without an event."""
    persistent, watch = Failure("rejected", persistent=True), a_watch(now)
    for _ in range(3):
        watch._works = False
        watch._failed(persistent)
        watch._succeeded()
    assert not watch._must_list
    watch._works = False
    watch._failed(persistent)
    watch._failed(persistent)
    assert watch._must_list


def test_the_ceiling_is_at_least_the_spread(no_jitter: None) -> None:
    backoff = Backoff(1.0, 30.0)
    assert [backoff.next(spread=5.0) for _ in range(5)] == [5.0, 5.0, 5.0, 8.0, 16.0]
    assert backoff.next(spread=99.0) == 30.0


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
