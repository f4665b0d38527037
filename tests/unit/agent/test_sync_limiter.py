"""The sync limiter: kube-proxy's bounded frequency runner."""

import math

from hypothesis import given
from hypothesis import strategies as st

from pykubeproxy.agent.sync.limiter import MAX_PERIOD, SyncLimiter, TimeShare


def test_nothing_is_due_before_the_first_request() -> None:
    """The first request is due at once."""
    limiter = SyncLimiter(1.0, 30.0)
    assert limiter.due() == math.inf
    limiter.request(5.0)
    assert limiter.due() == 5.0


def test_the_minimum_period_counts_from_the_end_of_a_run() -> None:
    """Requests during a run are coalesced into the next one."""
    limiter = SyncLimiter(10.0, 30.0)
    limiter.request(0.0)
    limiter.started()
    limiter.request(1.0)
    limiter.request(2.0)
    limiter.finished(4.0, True)
    assert limiter.due() == 14.0
    limiter.started()
    limiter.finished(15.0, True)
    assert limiter.due() == 15.0 + MAX_PERIOD


def test_a_request_after_the_minimum_period_is_due_at_once() -> None:
    """An idle period does not delay the next run."""
    limiter = SyncLimiter(10.0, 30.0)
    limiter.finished(0.0, True)
    limiter.request(50.0)
    assert limiter.due() == 50.0


def test_failed_runs_are_retried_with_backoff() -> None:
    """Delays are 1, 2, 4 ... seconds up to the retry period; a success resets them."""
    limiter = SyncLimiter(0.0, 30.0)
    delays = []
    for _ in range(2000):
        limiter.finished(0.0, False)
        delays.append(limiter.due())
    assert delays[:7] == [1, 2, 4, 8, 16, 30, 30]
    assert set(delays[6:]) == {30.0}
    limiter.finished(0.0, True)
    limiter.finished(0.0, False)
    assert limiter.due() == 1.0


def test_a_change_brings_a_retry_forward_to_the_minimum_period() -> None:
    """The change may be the one that makes the next run succeed."""
    limiter = SyncLimiter(2.0, 30.0)
    for _ in range(5):
        limiter.finished(0.0, False)
    limiter.request(0.5)
    assert limiter.due() == 2.0


@given(
    minimum=st.floats(0, 60),
    gaps=st.lists(st.tuples(st.floats(0, 100), st.floats(0, 5), st.booleans()), max_size=30),
)
def test_runs_keep_the_minimum_period(minimum: float, gaps: list[tuple[float, float, bool]]) -> None:
    """Holds for any requests and results; no request waits longer than the minimum period."""
    limiter, now, ended = SyncLimiter(minimum, 60.0), 0.0, -math.inf
    for gap, duration, succeeded in gaps:
        now += gap
        limiter.request(now)
        due = limiter.due()
        assert ended + minimum <= due <= max(now, ended + minimum)
        now = max(now, due)
        limiter.started()
        now += duration
        limiter.finished(now, succeeded)
        ended = now


def test_short_pieces_of_work_use_saved_time() -> None:
    """Then they take no more than their share; a longer piece saves nothing for itself."""
    share = TimeShare(0.25, short=1.0, saved=8.0)
    now = 100.0
    for _ in range(4):
        assert share.due() <= now
        share.worked(now, now + 0.5)
        now += 0.5
    while share.due() <= now:
        share.worked(now, now + 0.5)
        now += 0.5
    # 4 n - 8 seconds are used after n seconds of work.
    assert now - 100.0 == 3.0
    assert share.due() == 100.0 - 8.0 + 4 * 3.0
    share.worked(200.0, 202.0)
    assert share.due() == 208.0
