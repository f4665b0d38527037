"""Pauses after failures, and the log of outages."""

import pytest

from pykubeproxy.sources import backoff, client, outage
from pykubeproxy.sources.backoff import Backoff
from pykubeproxy.sources.client import TokenBucket
from pykubeproxy.sources.contact import Contact
from pykubeproxy.sources.failures import Failure, Unreachable
from pykubeproxy.sources.outage import OutageLog
from pykubeproxy.sources.watch import Outage


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of the monotonic clock in outages and the rate limit."""
    time = [0.0]
    for module in (client, outage):
        monkeypatch.setattr(module.time, "monotonic", lambda: time[0])
    return time


@pytest.fixture
def no_jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pause is as long as its ceiling."""
    monkeypatch.setattr(backoff.random, "uniform", lambda low, high: high)


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


@pytest.fixture
def contact(now: list[float]) -> Contact:
    """A server that was heard at the start, before another request."""
    made = Contact(clock=lambda: now[0])
    made.heard()
    made.requested()
    return made


@pytest.fixture
def outages(contact: Contact) -> OutageLog:
    return OutageLog("services", contact)


OWN = Failure("forbidden")
DEAD, SILENT = Unreachable("refused"), Unreachable("no data", persistent=True)


def test_same_reason_is_logged_once_a_minute(
    logged: list[dict[str, object]], now: list[float], outages: OutageLog
) -> None:
    """The first failure is logged, the same reason again only after a minute, another reason at once."""
    for now[0] in range(0, 130, 2):
        outages.failed(OWN, 1.0)
    assert [line["reason"] for line in logged] == ["forbidden"] * 3
    outages.failed(Failure("timeout"), 1.0)
    assert logged[-1]["reason"] == "timeout"


def test_recovery_is_logged_once(
    logged: list[dict[str, object]], now: list[float], outages: OutageLog
) -> None:
    """Recovery is one line with the time it took, and without an outage there is none."""
    outages.recovered()
    outages.failed(OWN, 1.0)
    now[0] = 7.0
    assert outages.outage() == Outage("services", 7.0, "forbidden")
    outages.recovered()
    assert outages.outage() is None
    outages.recovered()
    assert [(line["log_level"], line.get("after")) for line in logged] == [
        ("warning", None),
        ("info", "7.0s"),
    ]


@pytest.mark.parametrize("failure", [DEAD, SILENT])
def test_an_outage_of_the_server_is_no_line_of_a_watch(
    logged: list[dict[str, object]], now: list[float], outages: OutageLog, failure: Failure
) -> None:
    """Neither is its end; but the outage of the watch counts."""
    for now[0] in range(0, 130, 2):
        outages.failed(failure, 1.0)
    assert outages.outage() == Outage("services", 128.0, str(failure))
    outages.recovered()
    assert {line["log_level"] for line in logged} == {"debug"}


@pytest.mark.parametrize(("failure", "second"), [(DEAD, 12), (SILENT, 10)])
def test_a_watch_that_fails_alone_is_logged(
    logged: list[dict[str, object]],
    now: list[float],
    contact: Contact,
    outages: OutageLog,
    failure: Failure,
    second: int,
) -> None:
    """Once it has failed for 10 s, or was silent for so long, while other watches hear the server."""
    for now[0] in range(2, second + 1, 2):
        assert not [line for line in logged if line["log_level"] != "debug"]
        contact.heard()
        outages.failed(failure, 1.0)
    outages.recovered()
    assert [(line["event"], line["log_level"]) for line in logged[-2:]] == [
        ("watch failed", "warning"),
        ("watch recovered", "info"),
    ]


def test_an_unavailable_server_is_an_outage_of_each_watch(
    now: list[float], contact: Contact, outages: OutageLog
) -> None:
    """Even before its requests fail."""
    now[0] = 9.9
    assert outages.outage() is None
    now[0] = 10.0
    assert outages.outage() == Outage("services", 10.0, "the API server sends nothing")
    contact.heard()
    assert outages.outage() is None


def test_rate_limit(monkeypatch: pytest.MonkeyPatch, now: list[float]) -> None:
    """Burst requests pass at once, later ones qps a second; an idle time gives the burst back."""
    slept = []

    def sleep(seconds: float) -> None:
        slept.append(round(seconds, 6))
        now[0] += seconds

    monkeypatch.setattr(client.time, "sleep", sleep)
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
    monkeypatch.setattr(client.time, "sleep", slept.append)
    bucket = TokenBucket(-1, 1)
    for _ in range(50):
        bucket.wait()
    assert not slept
