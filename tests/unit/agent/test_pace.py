"""When runs are due: kube-proxy's bounded frequency."""

import math

from hypothesis import given
from hypothesis import strategies as st

from pykubeproxy.agent.sync.limiter import MAX_PERIOD, SyncLimiter


def test_nothing_is_due_before_it_is_asked_for() -> None:
    """The first request is due at once."""
    pace = SyncLimiter(1.0, 30.0)
    assert pace.due() == math.inf
    pace.request(5.0)
    assert pace.due() == 5.0


def test_the_minimum_counts_from_the_end_of_a_run() -> None:
    """A slow run does not lead to the next one right away; requests meanwhile are one run."""
    pace = SyncLimiter(10.0, 30.0)
    pace.request(0.0)
    pace.started()
    pace.request(1.0)
    pace.request(2.0)
    pace.finished(4.0, True)
    assert pace.due() == 14.0
    pace.started()
    pace.finished(15.0, True)
    assert pace.due() == 15.0 + MAX_PERIOD


def test_a_request_after_the_minimum_is_due_at_once() -> None:
    """A quiet time is not made up for by waiting."""
    pace = SyncLimiter(10.0, 30.0)
    pace.finished(0.0, True)
    pace.request(50.0)
    assert pace.due() == 50.0


def test_failures_are_tried_again_ever_later() -> None:
    """1, 2, 4 ... seconds, never more than the retry period; one success and it begins anew."""
    pace = SyncLimiter(0.0, 30.0)
    delays = []
    for _ in range(2000):
        pace.finished(0.0, False)
        delays.append(pace.due())
    assert delays[:7] == [1, 2, 4, 8, 16, 30, 30]
    assert set(delays[6:]) == {30.0}
    pace.finished(0.0, True)
    pace.finished(0.0, False)
    assert pace.due() == 1.0


def test_a_change_hurries_a_retry_but_not_beyond_the_minimum() -> None:
    """It may be the very change that makes the next run succeed."""
    pace = SyncLimiter(2.0, 30.0)
    for _ in range(5):
        pace.finished(0.0, False)
    pace.request(0.5)
    assert pace.due() == 2.0


@given(
    minimum=st.floats(0, 60),
    gaps=st.lists(st.tuples(st.floats(0, 100), st.floats(0, 5), st.booleans()), max_size=30),
)
def test_runs_are_never_closer_than_the_minimum(
    minimum: float, gaps: list[tuple[float, float, bool]]
) -> None:
    """Whatever is asked for and however runs end; and no request waits longer than that once a run is over."""
    pace, now, ended = SyncLimiter(minimum, 60.0), 0.0, -math.inf
    for gap, duration, succeeded in gaps:
        now += gap
        pace.request(now)
        due = pace.due()
        assert ended + minimum <= due <= max(now, ended + minimum)
        now = max(now, due)
        pace.started()
        now += duration
        pace.finished(now, succeeded)
        ended = now
