"""When quarantined service ports are tried again."""

import math

from pykubeproxy.agent.quarantine import RetrySchedule
from pykubeproxy.services.ports import PortName

A, B = (PortName("ns", name, "", "TCP") for name in "ab")


def test_an_unchanged_port_is_tried_every_hour() -> None:
    """While it is in quarantine."""
    schedule = RetrySchedule()
    assert (schedule.due(), schedule.take(10.0)) == (math.inf, ())
    schedule.follow([A], [], [], 100.0)
    assert schedule.due() == 3700.0
    schedule.tried([A], 3700.0, 3700.5)
    assert schedule.due() == 7300.5
    schedule.follow([], [], [], 3800.0)
    assert schedule.due() == math.inf


def test_a_changed_port_is_tried_after_its_backoff() -> None:
    """Each failed retry doubles it, up to five minutes; other ports keep theirs."""
    schedule, now, delays = RetrySchedule(), 0.0, []
    schedule.follow([A, B], [], [], now)
    for _ in range(11):
        schedule.follow([A, B], [], [A.service_key], now)
        delays.append(schedule.due() - now)
        now = schedule.due()
        assert schedule.take(now) == (A,)
        schedule.tried([A], now, now)
    assert delays == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 300.0, 300.0]
    schedule.follow([A, B], [], [B.service_key], now)
    assert schedule.take(now) == (B,)


def test_repeated_changes_do_not_postpone_a_retry() -> None:
    schedule = RetrySchedule()
    schedule.follow([A], [], [], 0.0)
    for tenths in range(10):
        schedule.follow([A], [], [A.service_key], tenths / 10)
    assert schedule.due() == 1.0


def test_retries_take_a_tenth_of_the_time() -> None:
    """What was not tried in time stays due, the one that waits longest first."""
    schedule = RetrySchedule()
    schedule.follow([A, B], [], [], 0.0)
    schedule.follow([A, B], [], [B.service_key], 2.0)
    schedule.follow([A, B], [], [A.service_key], 3.0)
    assert schedule.take(10.0) == (B, A)
    schedule.tried([B], 10.0, 11.0)
    assert schedule.due() == 20.0
    assert schedule.take(20.0) == (A,)


def test_a_port_that_no_search_has_decided_about_is_due_at_once() -> None:
    """Such retries take half of the time, until none is left."""
    schedule = RetrySchedule()
    schedule.follow([A, B], [B], [], 10.0)
    assert (schedule.due(), schedule.take(10.0)) == (10.0, (B,))
    schedule.tried([], 10.0, 11.0)
    assert (schedule.due(), schedule.take(12.0)) == (12.0, (B,))
    schedule.tried([B], 12.0, 13.0)
    schedule.follow([A, B], [], [], 13.0)
    assert schedule.due() == 3610.0


def test_failing_retries_wait_longer_each_time() -> None:
    """The ports stay due."""
    schedule, now, delays = RetrySchedule(), 0.0, []
    schedule.follow([A], [A], [], now)
    for _ in range(4):
        schedule.tried([], now, now, succeeded=False)
        delays.append(schedule.due() - now)
        now = schedule.due()
        assert schedule.take(now) == (A,)
    assert delays == [1.0, 2.0, 4.0, 8.0]
