"""The sync limiter: kube-proxy's bounded frequency runner."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubeproxy.agent.limiter import MAX_PERIOD, SyncLimiter, TimeShare

OK, FAILED = True, False


@pytest.mark.parametrize(
    ("minimum", "ends", "requested", "due"),
    [
        pytest.param(1.0, [], math.inf, math.inf, id="nothing is due before the first request"),
        pytest.param(1.0, [], 5.0, 5.0, id="the first request is due at once"),
        pytest.param(10.0, [(4.0, OK)], 1.0, 14.0, id="the minimum period counts from the end of a sync"),
        pytest.param(
            10.0, [(4.0, OK), (15.0, OK)], math.inf, 15.0 + MAX_PERIOD, id="a sync is due each hour"
        ),
        pytest.param(10.0, [(0.0, OK)], 50.0, 50.0, id="an idle period delays no sync"),
        pytest.param(0.0, [(0.0, FAILED)], math.inf, 1.0, id="a failed sync is retried"),
        pytest.param(0.0, [(0.0, FAILED)] * 5, math.inf, 16.0, id="each further retry waits twice as long"),
        pytest.param(
            0.0, [(0.0, FAILED)] * 2000, math.inf, 30.0, id="no retry waits longer than a sync period"
        ),
        pytest.param(
            0.0, [(0.0, FAILED)] * 9 + [(0.0, OK), (0.0, FAILED)], math.inf, 1.0, id="success resets it"
        ),
        pytest.param(2.0, [(0.0, FAILED)] * 5, 0.5, 2.0, id="a change brings a retry forward"),
    ],
)
def test_when_the_next_sync_is_due(
    minimum: float, ends: list[tuple[float, bool]], requested: float, due: float
) -> None:
    """As in kube-proxy's bounded frequency runner."""
    limiter = SyncLimiter(minimum, 30.0)
    for now, succeeded in ends:
        limiter.finished(now, succeeded)
    assert limiter.due(requested) == due


@given(
    minimum=st.floats(0, 60),
    gaps=st.lists(st.tuples(st.floats(0, 100), st.floats(0, 5), st.booleans()), max_size=30),
)
def test_runs_keep_the_minimum_period(minimum: float, gaps: list[tuple[float, float, bool]]) -> None:
    """Holds for any requests and results; no request waits longer than the minimum period."""
    limiter, now, ended = SyncLimiter(minimum, 60.0), 0.0, -math.inf
    for gap, duration, succeeded in gaps:
        now += gap
        due = limiter.due(now)
        assert ended + minimum <= due <= max(now, ended + minimum)
        now = max(now, due)
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
