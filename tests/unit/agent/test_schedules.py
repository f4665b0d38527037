"""When syncs, turns, drift checks, retries of quarantined ports and checks for leftovers are due, on a test clock."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubeproxy.agent.drift import DriftSchedule, DriftScope
from pykubeproxy.agent.limiter import MAX_PERIOD, SyncLimiter, TimeShare
from pykubeproxy.agent.node_rules import LeftoverSchedule
from pykubeproxy.agent.quarantine import RetrySchedule
from pykubeproxy.kernel import TABLES, ExternalWrite
from pykubeproxy.objects import Family
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.ruleset import ChainKey
from pykubeproxy.services.ports import PortName

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


PERIOD = 30.0
IPV4 = Family.IPV4
OURS = ChainKey("nat", "KUBE-SERVICES")


def new_schedule() -> DriftSchedule:
    return DriftSchedule(PERIOD, 0.0)


def write(*chains: ChainKey, writer: str = "x") -> ExternalWrite:
    return ExternalWrite(IPV4, chains=frozenset(chains), writer=writer)


def test_external_writes_are_debounced() -> None:
    """One check covers all writes within a moment, and counts from the first."""
    schedule = new_schedule()
    schedule.external_write(write(OURS, writer="a"), 10.0)
    schedule.external_write(write(ChainKey("nat", "PREROUTING"), writer="b"), 10.05)
    schedule.external_write(ExternalWrite(IPV4, frozenset({"filter"})), 10.06)
    assert schedule.due() == pytest.approx(10.1)
    chains = frozenset({OURS, ChainKey("nat", "PREROUTING")})
    assert schedule.take(10.1) == DriftScope(10.0, frozenset({"filter"}), chains, ("a", "b"))
    assert schedule.due() == PERIOD


def test_a_write_to_unknown_tables_is_checked_at_once() -> None:
    """Such as a flush of thousands of rules."""
    schedule = new_schedule()
    schedule.external_write(write(OURS), 10.0)
    schedule.external_write(ExternalWrite.anywhere(IPV4), 10.02)
    assert schedule.next_missing_check() == schedule.due() == 10.0
    scope = schedule.take(10.02)
    schedule.checked(scope, 0.2, 10.22)
    schedule.external_write(ExternalWrite.anywhere(IPV4), 10.23)
    assert schedule.due() == pytest.approx(11.22)


@pytest.mark.parametrize("chain", [ChainKey("nat", "KUBE-MARK-DROP"), ChainKey("nat", "KUBE-KUBELET-CANARY")])
def test_the_kubelets_chains_are_ignored(chain: ChainKey) -> None:
    """Their names start like ours."""
    schedule = new_schedule()
    schedule.external_write(write(chain), 10.0)
    assert schedule.due() == PERIOD


def test_all_tables_are_checked_periodically() -> None:
    """Every period, or less often so that it takes a thousandth of the time."""
    schedule = new_schedule()
    everything = schedule.take(PERIOD)
    assert everything.tables == set(TABLES)
    schedule.checked(everything, 0.02, PERIOD + 0.02)
    assert schedule.due() == pytest.approx(2 * PERIOD + 0.02)
    schedule.checked(schedule.take(schedule.due()), 2.0, 100.0)
    assert schedule.due() == 2100.0


def test_a_full_sync_counts_as_a_check() -> None:
    """A start that took longer than the period is not followed by a full check."""
    schedule = new_schedule()
    schedule.resync_starts()
    schedule.resynced(40.0)
    assert schedule.due() == 40.0 + PERIOD


def test_slow_checks_take_a_fifth_of_the_time_at_most() -> None:
    """Even while others keep writing."""
    schedule = new_schedule()
    schedule.external_write(write(OURS), 1.0)
    schedule.checked(schedule.take(1.1), 0.8, 1.9)
    schedule.external_write(write(OURS), 2.0)
    assert schedule.due() == pytest.approx(1.9 + 4.0)


def test_contested_repairs_back_off() -> None:
    """Three happen at once; then after 0.5 s, 1 s, 2 s and so on up to a minute."""
    schedule = DriftSchedule(1e6, 0.0)
    now, waits = 100.0, []
    for _ in range(14):
        schedule.external_write(write(OURS), now)
        waits.append(round(schedule.due() - now, 3))
        now = schedule.due()
        schedule.take(now)
        schedule.repaired(now)
    assert waits == [0.1, 0.1, 0.1, 0.5, 1, 2, 4, 8, 16, 32, 60, 60, 60, 60]


def test_a_delayed_repair_still_checks_for_missing_rules() -> None:
    """One check for each write while no rules are missing, at most a fifth of the time; none until missing ones return."""
    schedule = new_schedule()
    for _ in range(8):
        schedule.repaired(10.0)
    assert schedule.next_missing_check() == math.inf
    schedule.external_write(write(OURS), 11.0)
    assert schedule.next_missing_check() == pytest.approx(11.1)
    assert schedule.due() == 26.0
    schedule.missing_checked(0.2, 11.3, missing=False)
    assert schedule.next_missing_check() == math.inf
    schedule.external_write(write(OURS), 11.4)
    assert schedule.next_missing_check() == pytest.approx(12.3)
    schedule.missing_checked(0.2, 12.5, missing=True)
    schedule.external_write(write(OURS), 13.0)
    assert schedule.next_missing_check() == math.inf
    schedule.checked(schedule.take(26.0), 0.2, 26.2)
    schedule.external_write(write(OURS), 26.3)
    assert schedule.next_missing_check() == pytest.approx(27.2)


def test_contention_ends_when_the_tables_stay_calm() -> None:
    """Some seconds and twice the backoff after the last repair; the next one happens at once again.

    Three repairs are no contention: other programs may need a few commands for one task.
    """
    schedule, contested = new_schedule(), []
    for _ in range(4):
        schedule.repaired(10.0)
        contested.append(schedule.contested)
    assert contested == [False, False, False, True]
    assert schedule.calm_at == 10.0 + 5.0 + 2.0
    schedule.calmed()
    assert not schedule.contested
    assert schedule.calm_at == math.inf
    schedule.external_write(write(OURS), 20.0)
    assert schedule.due() == pytest.approx(20.1)


def test_failed_checks_are_retried_with_backoff() -> None:
    """At the latest after a period."""
    schedule = new_schedule()
    now, waits = 0.0, []
    schedule.external_write(write(skeleton.NAT_SERVICES), 0.0)
    for _ in range(9):
        schedule.check_failed(schedule.take(schedule.due()), now)
        waits.append(schedule.due() - now)
        now = schedule.due()
    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert schedule.take(now).chains == {OURS}


A, B = (PortName("ns", name, "", "TCP") for name in "ab")


def test_an_unchanged_port_is_tried_every_hour() -> None:
    """While it is in quarantine."""
    schedule = RetrySchedule()
    assert (schedule.due(), schedule.take(10.0)) == (math.inf, ())
    schedule.follow([A], 100.0)
    assert schedule.due() == 3700.0
    schedule.tried([A], 3700.0, 3700.5)
    assert schedule.due() == 7300.5
    schedule.follow([], 3800.0)
    assert schedule.due() == math.inf


def test_a_changed_port_is_tried_after_its_backoff() -> None:
    """Each failed retry doubles it, up to five minutes; other ports keep theirs."""
    schedule, now, delays = RetrySchedule(), 0.0, []
    schedule.follow([A, B], now)
    for _ in range(11):
        schedule.changed([A.service_key], now)
        delays.append(schedule.due() - now)
        now = schedule.due()
        assert schedule.take(now) == (A,)
        schedule.tried([A], now, now)
    assert delays == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 300.0, 300.0]
    schedule.changed([B.service_key], now)
    assert schedule.take(now) == (B,)


def test_repeated_changes_do_not_postpone_a_retry() -> None:
    schedule = RetrySchedule()
    schedule.follow([A], 0.0)
    for tenths in range(10):
        schedule.changed([A.service_key], tenths / 10)
    assert schedule.due() == 1.0


def test_retries_take_a_tenth_of_the_time() -> None:
    """What was not tried in time stays due, the one that waits longest first."""
    schedule = RetrySchedule()
    schedule.follow([A, B], 0.0)
    schedule.changed([B.service_key], 2.0)
    schedule.changed([A.service_key], 3.0)
    assert schedule.take(10.0) == (B, A)
    schedule.tried([B], 10.0, 11.0)
    assert schedule.due() == 20.0
    assert schedule.take(20.0) == (A,)


def test_suspect_ports_are_tried_one_after_the_other() -> None:
    """Until none is left; meanwhile, no rejected port is due."""
    schedule = RetrySchedule()
    schedule.follow([A], 0.0)
    schedule.follow([A], 10.0, searching=True)
    schedule.changed([A.service_key], 10.0)
    assert (schedule.due(), schedule.take(10.0)) == (-math.inf, ())
    schedule.tried([], 10.0, 11.0)
    assert schedule.due() <= 11.0
    schedule.follow([A, B], 13.0)
    assert (schedule.due(), schedule.take(13.0)) == (10.0, (A,))


def test_rejected_ports_that_are_tried_take_a_tenth_of_the_time() -> None:
    schedule = RetrySchedule()
    schedule.follow([A, B], 0.0, has_tries=True)
    schedule.tried([], 1.0, 2.0)
    assert (schedule.due(), schedule.take(11.0)) == (11.0, ())


@pytest.mark.parametrize("searching", [True, False])
def test_failing_tries_wait_longer_each_time(searching: bool) -> None:
    """The ports stay due."""
    schedule, now, delays = RetrySchedule(), 0.0, []
    schedule.follow([A], now, has_tries=True, searching=searching)
    for _ in range(4):
        schedule.tried([], now, now, succeeded=False)
        delays.append(schedule.due() - now)
        now = schedule.due()
    assert delays == [1.0, 2.0, 4.0, 8.0]


def pauses(found: list[bool], period: float = 30.0) -> list[float]:
    """Return the pauses after checks with these results."""
    schedule = LeftoverSchedule(period, 0.0)
    waited = []
    for it in found:
        now = schedule.due
        schedule.checked(it, now)
        waited.append(schedule.due - now)
    return waited


def test_the_first_checks_follow_one_another_quickly() -> None:
    """A proxy that ends now may have written its rules again."""
    assert pauses([True, True, False, False, False, False, False]) == [1, 2, 4, 8, 16, 30, 30]


def test_a_proxy_that_keeps_running_is_left_alone_ever_longer() -> None:
    assert pauses([True] * 14)[-8:] == [64, 128, 256, 512, 1024, 2048, 3600, 3600]
    assert pauses([True] * 14 + [False])[-1] == 30
