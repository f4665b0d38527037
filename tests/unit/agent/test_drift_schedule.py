"""The schedule of drift checks and repairs, on a test clock."""

import math

import pytest

from pykubeproxy.agent.drift import DriftSchedule, DriftScope
from pykubeproxy.kernel import TABLES, ExternalWrite
from pykubeproxy.objects import Family
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.ruleset import ChainKey

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
