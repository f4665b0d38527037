"""The pending work of one family, and which step it plans."""

import math

import pytest

from pykubeproxy.agent.drift import DriftScope
from pykubeproxy.agent.work import Changes, DriftCheck, Losses, Retry, Step, Turn, Work
from pykubeproxy.kernel import TABLES, ExternalWrite
from pykubeproxy.objects import Family, Key
from pykubeproxy.services.ports import PortName

WEB, API = Key("ns", "web"), Key("other", "api")
PORT = PortName("ns", "web", "http", "TCP")
STEPS: tuple[type[Step], ...] = (Changes, Losses, Turn, Retry, DriftCheck)


def synced() -> Work:
    work = Work()
    work.schedule(30.0, 0.0)
    work.done(False)
    return work


def planned(work: Work, now: float = 1.0) -> list[type[Step]]:
    return [kind for kind in STEPS if work.plan(kind, now)]


@pytest.mark.parametrize(
    ("happens", "steps"),
    [
        pytest.param(lambda _: None, [], id="nothing"),
        pytest.param(lambda work: work.request(1.0, 1.0, [WEB]), [Changes], id="a change"),
        pytest.param(lambda work: setattr(work, "visit_all", True), [Changes], id="other settings"),
        pytest.param(lambda work: work.dirty.add(WEB), [Changes], id="a Service that no sync has written"),
        pytest.param(lambda work: work.defer(WEB, [PORT]), [Turn], id="a Service that waits"),
        pytest.param(
            lambda work: work.lose(WEB, [PORT]), [Losses], id="a waiting Service that loses something"
        ),
        pytest.param(lambda work: setattr(work, "unused_chains", True), [Turn], id="unused chains"),
        pytest.param(
            lambda work: work.retries.follow([], (), 0.0, searching=True), [Retry], id="a suspect port"
        ),
        pytest.param(
            lambda work: work.checks.external_write(ExternalWrite(Family.IPV4, frozenset(TABLES)), 0.0),
            [DriftCheck],
            id="a write of another program",
        ),
    ],
)
def test_what_is_planned(happens: object, steps: list[type[Step]]) -> None:
    """After a sync that succeeded, nothing is left to do until something happens."""
    work = synced()
    assert callable(happens)
    happens(work)
    assert planned(work) == steps


def test_a_failed_sync_keeps_what_it_took_up() -> None:
    """Until one succeeds. Only Services that have drifted since do not wait."""
    work = synced()
    work.lose(WEB, [PORT])
    work.dirty |= {WEB, API}
    work.drifted |= {WEB}
    work.failed(turn=True)
    assert (work.has_changes, work.has_losses, work.drifted) == (True, True, set())
    assert work.alone
    work.done(turn=True)
    assert (work.has_changes, work.has_losses) == (False, True)
    assert not work.alone
    assert not work.dirty


def test_a_step_takes_all_changes_since_the_last_one() -> None:
    work = synced()
    for number, key in enumerate((WEB, API, WEB)):
        work.request(5.0 + number, 4.0 + number, [key], listed=key is API)
    assert (work.requested, work.take_arrival(), work.take_arrival()) == (5.0, 4.0, math.inf)
    assert work.plan(Changes, 6.0) == Changes(frozenset({WEB, API}), listed=True)
    assert work.requested == math.inf
    work.done(turn=False)
    assert work.plan(Changes, 6.0) is None


def test_turns_and_retries_wait_for_a_sync_that_would_begin_meanwhile() -> None:
    work = synced()
    work.defer(WEB, [PORT])
    work.retries.follow([], (), 0.0, searching=True)
    assert (work.plan(Turn, 1.0, fits=False), work.plan(Retry, 1.0, fits=False)) == (None, None)
    assert (work.due(9.0), work.due(-math.inf)) == (9.0, -math.inf)


def test_those_whose_turn_it_was_go_to_the_end_of_the_queue() -> None:
    """Behind all other namespaces, and behind other ports of their Service."""
    work, second = synced(), PortName("ns", "web", "https", "TCP")
    work.defer(WEB, [PORT, second])
    work.defer(API, [PortName("other", "api", "", "TCP")])
    work.rotate(work.deferred, {PORT})
    assert [*work.deferred] == [API, WEB]
    assert [*work.deferred[WEB]] == [second, PORT]
    work.settle({WEB}, deferred={second}, losing=())
    assert [*work.deferred[WEB]] == [second]


def test_a_write_during_the_backoff_is_checked_for_missing_rules_only() -> None:
    work = synced()
    for _ in range(4):
        work.checks.repaired(10.0)
    work.checks.external_write(ExternalWrite(Family.IPV4, frozenset(TABLES)), 10.0)
    step = work.plan(DriftCheck, 10.2)
    assert isinstance(step, DriftCheck)
    assert step.missing_only
    assert isinstance(step.scope, DriftScope)
    assert work.checks.suspected is not None
