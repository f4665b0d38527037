"""How the reconcile loop checks and repairs rules that others changed."""

import msgspec
import pytest

from pykubeproxy.agent.notices import DriftCalm, DriftRepaired, Notice, RulesMissing
from pykubeproxy.kernel import ExternalWrite
from pykubeproxy.objects import Family, Updated
from pykubeproxy.rules.drift import TableDrift
from tests.fakes.iptables import fail_on
from tests.fakes.loop import HERE, STARTED, STOP, WEB, Loop, at, config
from tests.objects import service

pytestmark = pytest.mark.usefixtures("no_kernel")


def tamper(loop: Loop) -> None:
    loop.live.tables["nat"][WEB.chain] = ()


EXTERNAL_WRITE = ExternalWrite(Family.IPV4, chains=frozenset({WEB}), writer="somebody")


def test_reported_drift_is_repaired_at_once(loop: Loop) -> None:
    """The repair ignores minSyncPeriod; a write in the other family is ignored."""
    settings = config(iptables={"minSyncPeriod": "20s", "syncPeriod": "1000s"})
    other = ExternalWrite(Family.IPV6, chains=frozenset({WEB}))
    steps = [*STARTED, (5, lambda: tamper(loop)), *at(5, EXTERNAL_WRITE, other), *at(5.2, STOP)]
    loop.run(*steps, settings=settings)
    assert loop.rules(WEB)
    assert len(loop.live.texts) == 2


def test_reported_drift_is_repaired_although_a_changed_node_comes_first(loop: Loop) -> None:
    """A sync of all Services reads no tables, so it does not find the drift by itself."""
    moved = Updated(msgspec.structs.replace(HERE, zone="zone-b"))
    steps = [*STARTED, (5, lambda: tamper(loop)), *at(5, EXTERNAL_WRITE, moved), *at(7, STOP)]
    loop.run(*steps)
    assert loop.rules(WEB)


def test_a_change_that_a_drift_repair_applies_is_no_longer_queued(loop: Loop) -> None:
    """A sync reported as queued after it has ended would make the node unhealthy until the next change."""
    late = Updated(service("late", cluster_ip="10.96.200.1"))
    drift = ((10, lambda: tamper(loop)), *at(10, EXTERNAL_WRITE))
    loop.run(*STARTED, *drift, *at(10.1, late), *at(20, STOP))
    calls = [name for name in loop.trail if name in ("SyncQueued", "SyncReport")]
    assert calls == ["SyncQueued", "SyncReport"] * 2


def test_observers_get_each_drift_repair(loop: Loop) -> None:
    """With drift, writers and duration."""
    steps = [*STARTED, (5, lambda: tamper(loop)), *at(5, EXTERNAL_WRITE), *at(20, STOP)]
    loop.run(*steps)
    (repaired,) = loop.told(DriftRepaired)
    assert repaired.drift == (TableDrift("nat", rules=2),)
    assert (repaired.writers, round(repaired.seconds, 3), repaired.contested) == (("somebody",), 0.1, False)
    assert loop.told(DriftCalm) == [DriftCalm(Family.IPV4)]


def test_missing_rules_are_noticed_while_the_repair_waits(loop: Loop) -> None:
    """The backoff of contested repairs delays writes, not the look that makes the node not ready."""
    flushes = [
        step for n in range(8) for step in ((5 + 4 * n, lambda: tamper(loop)), *at(5 + 4 * n, EXTERNAL_WRITE))
    ]
    seen: list[tuple[float, bool]] = []

    def look(notice: Notice) -> None:
        if isinstance(notice, RulesMissing | DriftRepaired):
            missing = isinstance(notice, RulesMissing) and notice.since is not None
            seen.append((loop.now, missing))

    loop.on_notice = look
    loop.run(*STARTED, *flushes, *at(60, STOP))
    missing = [when for when, lacking in seen if lacking]
    assert missing[:6] == [pytest.approx(5.1 + 4 * n) for n in range(6)]
    # The last repairs come seconds after the writes.
    repairs = [
        when for (when, lacking), (_, before) in zip(seen[1:], seen, strict=False) if before and not lacking
    ]
    assert max(repairs) > 33 + 4
    assert loop.rules(WEB)
    assert not seen[-1][1]


def test_an_added_rule_is_no_missing_rule(loop: Loop) -> None:
    """It is removed like any drift, but the node serves meanwhile, also while the repair waits."""

    def add() -> None:
        loop.live.tables["nat"][WEB.chain] = ("-j LOG", *loop.rules(WEB))

    writes = [step for n in range(8) for step in ((5 + 4 * n, add), *at(5 + 4 * n, EXTERNAL_WRITE))]
    loop.run(*STARTED, *writes, *at(60, STOP))
    contested = [it.contested for it in loop.told(DriftRepaired)]
    assert contested[:4] == [False, False, False, True]
    assert {it.since for it in loop.told(RulesMissing)} == {None}


def test_a_failed_repair_keeps_the_rules_missing(loop: Loop) -> None:
    """Until a full sync succeeds."""

    steps = [
        *STARTED,
        (5, lambda: tamper(loop)),
        (5, lambda: setattr(loop.live, "on_restore", fail_on(""))),
        *at(5, EXTERNAL_WRITE),
        *at(6.5, EXTERNAL_WRITE),
    ]
    loop.run(*steps, *at(7, STOP))
    assert loop.told(RulesMissing)[-1] == RulesMissing(Family.IPV4, 1005.0)


def test_an_external_write_without_drift_is_no_repair(loop: Loop) -> None:
    """The external program wrote what was there already."""
    loop.run(*STARTED, *at(5, EXTERNAL_WRITE), *at(20, STOP))
    assert len(loop.live.texts) == 1
    assert not loop.told(DriftRepaired)


def test_a_failed_drift_check_is_retried(loop: Loop) -> None:
    """The retry repairs the drift."""

    def break_kernel() -> None:
        tamper(loop)
        loop.break_()

    settings = config(iptables={"syncPeriod": "1000s"})
    steps = [*STARTED, (5, break_kernel), *at(5, EXTERNAL_WRITE), (9, loop.repair), *at(15, STOP)]
    loop.run(*steps, settings=settings)
    assert loop.rules(WEB)
