"""When others' changes are looked at and put right, on a clock of the test's own."""

import math

import pytest

from pykubeproxy.agent.drift.schedule import DriftSchedule, DriftScope
from pykubeproxy.kernel import TABLES, ExternalWrite
from pykubeproxy.objects import Family
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.ruleset import ChainKey

PERIOD = 30.0
IPV4 = Family.IPV4
OURS = ChainKey("nat", "KUBE-SERVICES")


def vigil() -> DriftSchedule:
    return DriftSchedule(PERIOD, 0.0)


def heard(*chains: ChainKey, writer: str = "x") -> ExternalWrite:
    return ExternalWrite(IPV4, chains=frozenset(chains), writer=writer)


def test_a_change_is_looked_at_a_moment_later() -> None:
    """Together with all that comes within that moment, and as of the first of it."""
    it = vigil()
    it.heard(heard(OURS, writer="a"), 10.0)
    it.heard(heard(ChainKey("nat", "PREROUTING"), writer="b"), 10.05)
    it.heard(ExternalWrite(IPV4, frozenset({"filter"})), 10.06)
    assert it.due() == pytest.approx(10.1)
    chains = frozenset({OURS, ChainKey("nat", "PREROUTING")})
    assert it.take(10.1) == DriftScope(10.0, frozenset({"filter"}), chains, ("a", "b"))
    assert it.due() == PERIOD


@pytest.mark.parametrize("chain", [ChainKey("nat", "KUBE-MARK-DROP"), ChainKey("nat", "KUBE-KUBELET-CANARY")])
def test_what_is_the_kubelets_is_not_looked_at(chain: ChainKey) -> None:
    """Its chains bear names like ours."""
    it = vigil()
    it.heard(heard(chain), 10.0)
    assert it.due() == PERIOD


def test_everything_is_compared_now_and_then() -> None:
    """Every period, or as seldom as takes a thousandth of the time."""
    it = vigil()
    everything = it.take(PERIOD)
    assert everything.tables == set(TABLES)
    it.looked(everything, 0.02, PERIOD + 0.02)
    assert it.due() == pytest.approx(2 * PERIOD + 0.02)
    it.looked(it.take(it.due()), 2.0, 100.0)
    assert it.due() == 2100.0
    it.adjust(5.0, 200.0)
    assert it.due() == 205.0


def test_a_full_sync_is_as_good_as_a_comparison() -> None:
    """After a start that took longer than the period not everything is read once more."""
    it = vigil()
    it.forget()
    it.read(40.0)
    assert it.due() == 40.0 + PERIOD


def test_a_slow_look_is_not_made_all_the_time() -> None:
    """While others write and write, looking at it takes a fifth of the time at most."""
    it = vigil()
    it.heard(heard(OURS), 1.0)
    it.looked(it.take(1.1), 0.8, 1.9)
    it.heard(heard(OURS), 2.0)
    assert it.due() == pytest.approx(1.9 + 4.0)


def test_repairs_wait_ever_longer_in_a_quarrel_and_not_for_ever() -> None:
    """Three are made at once; then half a second passes, then one, two and so on up to a minute."""
    it = DriftSchedule(1e6, 0.0)
    now, waits = 100.0, []
    for _ in range(14):
        it.heard(heard(OURS), now)
        waits.append(round(it.due() - now, 3))
        now = it.due()
        it.take(now)
        it.repaired(now)
    assert waits == [0.1, 0.1, 0.1, 0.5, 1, 2, 4, 8, 16, 32, 60, 60, 60, 60]


def test_a_quarrel_is_over_when_the_tables_are_left_alone() -> None:
    """Some seconds and twice the pause after the last repair; the next one is made at once again."""
    it = vigil()
    assert not it.contested
    for _ in range(4):
        it.repaired(10.0)
    assert it.contested
    assert it.calm_at == 10.0 + 5.0 + 2.0
    it.calm()
    assert not it.contested
    assert it.calm_at == math.inf
    it.heard(heard(OURS), 20.0)
    assert it.due() == pytest.approx(20.1)


def test_three_repairs_are_no_quarrel() -> None:
    """Somebody may need a few commands for what they do."""
    it = vigil()
    for _ in range(3):
        it.repaired(10.0)
    assert not it.contested


def test_what_could_not_be_looked_at_is_not_forgotten() -> None:
    """It is tried again ever more slowly, and at the latest after a period."""
    it = vigil()
    now, waits = 0.0, []
    it.heard(heard(skeleton.NAT_SERVICES), 0.0)
    for _ in range(9):
        it.failed(it.take(it.due()), now)
        waits.append(it.due() - now)
        now = it.due()
    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert it.take(now).chains == {OURS}
