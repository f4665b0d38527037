"""Quarantine services whose rules iptables rejects, and tell them from faults of the node."""

import contextlib
import re
from collections.abc import Iterator, MutableMapping
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from pykubeproxy.agent import bisect, quarantine
from pykubeproxy.agent.drift import DriftScope
from pykubeproxy.agent.report import SyncReport
from pykubeproxy.agent.tables import SyncFailed
from pykubeproxy.kernel import Backend, Failed, Rejected
from pykubeproxy.kernel.errors import LockHeld, TimedOut
from pykubeproxy.objects import Deleted, Key, Kind, Updated
from pykubeproxy.rules import skeleton
from tests.fakes.drift import scope
from tests.fakes.iptables import FakeIptables, fail_on
from tests.fakes.synced import SyncedFamily
from tests.objects import numbered, service, slice_of

BAD = ("10.244.0.1:", "10.244.0.3:")


def refused(synced: SyncedFamily) -> int:
    return sum("REJECT" in rule for rule in synced.chains()[skeleton.FILTER_SERVICES])


def family(backend: Backend) -> SyncedFamily:
    """Return empty tables in which iptables rejects two endpoints."""
    made = SyncedFamily(backend=backend)
    made.live.rejects = lambda rule: any(f"--to-destination {bad}" in rule for bad in BAD)
    return made


@pytest.fixture(params=[Backend.NFT, Backend.LEGACY], ids=lambda backend: backend.value)
def synced(request: pytest.FixtureRequest) -> SyncedFamily:
    return family(request.param)


@pytest.fixture
def logged() -> Iterator[list[MutableMapping[str, Any]]]:
    with capture_logs() as lines:
        yield lines


def quarantined(report: SyncReport) -> list[str]:
    return [it.name for it in report.quarantined]


def test_two_rejected_services_among_two_thousand_are_found(synced: SyncedFamily) -> None:
    """The number of restores grows with the logarithm of the number of services."""
    report = synced.sync_and_retry(*numbered(*range(1, 2001)))
    assert quarantined(report) == ["svc1", "svc3"]
    assert (report.services, refused(synced)) == (2000, 2)
    assert len(synced.live.texts) < 70


def test_services_with_an_unsupported_feature_are_found_by_samples(synced: SyncedFamily) -> None:
    """Samples of each kind are tried first; other services are not written one by one."""
    synced.live.rejects = lambda rule: "-m recent" in rule
    sticky = [
        Updated(service(f"svc{number}", cluster_ip=f"10.96.0.{number}", affinity_seconds=600))
        for number in range(1, 200, 2)
    ]
    report = synced.sync_and_retry(*numbered(*range(1, 2001)), *sticky)
    assert set(quarantined(report)) == {f"svc{number}" for number in range(1, 200, 2)}
    assert all(it.reason for it in report.quarantined)
    assert len(synced.live.texts) < 50
    # The samples are random.
    some = range(2, 2001, 20)
    written = [sum(f"ns/svc{number}:" in text for text in synced.live.texts) for number in some]
    assert sum(times > 4 for times in written) < 10
    # All others are written three times: at first (on nft ahead), in one try, and without those in quarantine.
    assert sum(map(len, synced.live.texts)) < 3.5 * len(synced.live.texts[0])


def test_a_change_of_a_quarantined_service_writes_no_other_rules(synced: SyncedFamily) -> None:
    """The change needs no full sync."""
    synced.sync_and_retry(*numbered(1, 2))
    synced.live.texts.clear()
    saves = synced.live.saves
    report = synced.sync_and_retry(Updated(slice_of("10.244.0.1", "10.244.0.9", service="svc1")))
    assert (quarantined(report), report.full, synced.live.saves) == (["svc1"], False, saves)
    assert not any("svc2" in text for text in synced.live.texts)


def test_a_change_of_another_service_does_not_retry_a_quarantined_one(synced: SyncedFamily) -> None:
    """No rule of the quarantined service is written."""
    synced.sync_and_retry(*numbered(1, 2))
    synced.live.texts.clear()
    assert quarantined(synced.sync_and_retry(*numbered(5))) == ["svc1"]
    assert len(synced.live.texts) == 1
    assert "svc1:" not in "".join(line for line in synced.live.texts[0].split("\n") if "KUBE-SVC" in line)


def test_a_retry_keeps_the_start_of_the_quarantine(synced: SyncedFamily) -> None:
    """A failed retry updates the reason only."""
    (first,) = synced.sync_and_retry(*numbered(1)).quarantined
    (second,) = synced.sync_and_retry(
        Updated(slice_of("10.244.0.1", "10.244.0.3", service="svc1"))
    ).quarantined
    assert second.since == first.since
    assert second.reason


def test_a_fault_of_the_node_quarantines_no_service(synced: SyncedFamily) -> None:
    """If even a plain service is rejected, the sync fails and the next one is full."""
    synced.live.rejects = lambda rule: "-j DNAT" in rule
    with pytest.raises(SyncFailed, match="rejected"):
        synced.sync_and_retry(*numbered(1, 2))
    synced.live.rejects = lambda rule: False
    report = synced.sync_and_retry()
    assert (report.quarantined, report.full) == ((), True)
    assert refused(synced) == 0


def test_a_fault_of_the_node_during_bisection_fails_the_sync(synced: SyncedFamily) -> None:
    """A plain service is tried at the end, too."""
    refuses = synced.live.rejects

    def break_node(rule: str) -> bool:
        if refuses(rule):
            synced.live.rejects = lambda rule: "-j DNAT" in rule
        return refuses(rule)

    synced.live.rejects = break_node
    with pytest.raises(SyncFailed):
        synced.sync_and_retry(*numbered(*range(1, 9)))
    synced.live.rejects = refuses
    assert quarantined(synced.sync_and_retry()) == ["svc1", "svc3"]


@pytest.mark.parametrize(
    "error",
    [
        Failed("iptables-restore", -9, ""),
        LockHeld("/run/xtables.lock", 7),
        Rejected(4, "-A KUBE-SERVICES -j ACCEPT", "RULE_APPEND failed (Cannot allocate memory)", 4),
        Rejected(4, "COMMIT", "Memory allocation problem", 1),
    ],
)
def test_other_errors_start_no_bisection(synced: SyncedFamily, error: Exception) -> None:
    """There is one restore, and the error is returned unchanged."""
    synced.live.failure = error  # type: ignore[assignment]
    synced.live.save = FakeIptables().save  # type: ignore[method-assign]
    with pytest.raises(SyncFailed) as caught:
        synced.sync_and_retry(*numbered(1, 2))
    assert caught.value.error is error
    assert len(synced.live.texts) == 1


def slow_iptables(synced: SyncedFamily, monkeypatch: pytest.MonkeyPatch, seconds: float) -> SimpleNamespace:
    """Let each restore take so many seconds of the returned clock."""
    clock = SimpleNamespace(now=0.0)

    def wait(_: str) -> None:
        clock.now += seconds

    synced.live.on_restore = wait
    fake = SimpleNamespace(monotonic=lambda: clock.now, time=lambda: clock.now)
    for module in (bisect, quarantine):
        monkeypatch.setattr(module, "time", fake)
    return clock


SIX_BAD = {f"svc{number}" for number in (7, 130, 131, 444, 800, 999)}
REJECTED_SIX = re.compile(r"--to-destination 10\.244\.(?:0\.(?:7|130|131)|1\.194|3\.(?:50|249)):")


def test_others_are_served_within_a_minute_however_slow_the_search(
    synced: SyncedFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ports that no try has decided about are rejected, not left open; retries decide about them."""
    clock = slow_iptables(synced, monkeypatch, 1.2)
    synced.live.rejects = lambda rule: bool(REJECTED_SIX.search(rule))
    report = synced.sync_and_retry(*numbered(*range(1, 1001)))
    assert clock.now < 60
    waiting = set(quarantined(report))
    assert waiting >= SIX_BAD
    assert len(waiting) < 200
    assert all(it.rejects_clients for it in report.quarantined)
    nat = (rule for rules in synced.live.tables["nat"].values() for rule in rules)
    served = sum(' cluster IP" ' in rule and "-j KUBE-SVC-" in rule for rule in nat)
    assert (served, refused(synced)) == (1000 - len(waiting), len(waiting))
    rounds = 0
    while untried := synced.tables.quarantine.untried():
        begun, rounds = clock.now, rounds + 1
        split = synced.tables.retry_quarantined(synced.cluster, untried)
        # The tries of one Service may have several blocks; one more restore empties the canary chains.
        assert clock.now - begun <= quarantine.RETRY_SECONDS + 2 * 1.2
        if split.accepted:
            report = synced.sync_and_retry()
        assert rounds < 100
    assert set(quarantined(report)) <= waiting
    assert {it.name for it in synced.tables.quarantined()} == SIX_BAD


def test_a_search_that_fails_keeps_what_it_found(synced: SyncedFamily) -> None:
    """The next one needs fewer tries than one that begins anew."""
    synced.live.rejects = lambda rule: bool(REJECTED_SIX.search(rule))
    tries, last = 0, 1000

    def fail_at_last(text: str) -> None:
        nonlocal tries
        tries += "-A KUBE-PROXY-CANARY" in text
        if tries == last:
            raise Failed("iptables-restore", -9, "killed")

    synced.live.on_restore = fail_at_last
    synced.sync_and_retry(*numbered(*range(1, 1001)))
    needed, tries = tries, 0
    synced.restart()
    synced.live.tables.clear()
    last = needed * 3 // 4
    with pytest.raises(SyncFailed, match="killed"):
        synced.sync_and_retry()
    last, tries = 1000, 0
    assert set(quarantined(synced.sync_and_retry())) == SIX_BAD
    assert tries < needed * 3 / 4


def test_a_search_that_failed_is_forgotten_once_its_services_are_served(synced: SyncedFamily) -> None:
    """A later search begins with samples, as if it were the first."""
    synced.live.rejects = lambda rule: bool(REJECTED_SIX.search(rule))

    def fail_at_last(text: str) -> None:
        if "-A KUBE-PROXY-CANARY" in text and len(synced.live.texts) > 30:
            raise Failed("iptables-restore", -9, "killed")

    synced.live.on_restore = fail_at_last
    with pytest.raises(SyncFailed, match="killed"):
        synced.sync_and_retry(*numbered(*range(1, 1001)))
    synced.live.on_restore = lambda _: None
    synced.live.rejects = lambda rule: "-m recent" in rule
    assert not quarantined(synced.sync_and_retry())
    sticky = [
        Updated(service(f"svc{number}", cluster_ip=f"10.96.0.{number}", affinity_seconds=600))
        for number in range(1, 200, 2)
    ]
    synced.tables.distrust()
    synced.live.texts.clear()
    assert len(quarantined(synced.sync_and_retry(*sticky))) == 100
    assert len(synced.live.texts) < 50


def test_a_retry_that_fails_at_its_end_releases_no_service(synced: SyncedFamily) -> None:
    """It does not write the rules of accepted Services, so they would be rejected until another full sync."""
    synced.sync_and_retry(*numbered(1, 2))
    synced.live.rejects = lambda rule: False
    (held,) = (it.port_name for it in synced.tables.quarantined())
    synced.live.on_restore = fail_on(r"\A(?!(?s:.*)-A KUBE-PROXY-CANARY)(?s:.*):KUBE-PROXY-CANARY", times=1)
    with pytest.raises(Failed):
        synced.tables.retry_quarantined(synced.cluster, [held])
    assert [it.name for it in synced.tables.quarantined()] == ["svc1"]
    assert synced.tables.retry_quarantined(synced.cluster, [held]).accepted == {held}
    assert not quarantined(synced.sync_and_retry())
    assert not refused(synced)


def test_a_try_takes_one_block_of_a_table_on_legacy() -> None:
    """Each block replaces the whole table, so many rules are no reason for another one."""
    synced = family(Backend.LEGACY)
    report = synced.sync_and_retry(*numbered(*range(1, 2501)))
    assert quarantined(report) == ["svc1", "svc3"]
    assert all(text.count("*nat\n") <= 1 for text in synced.live.texts)


def test_a_retry_that_writes_some_blocks_is_no_drift() -> None:
    """Those of a large port before the rejected one stay in force until a sync deletes them."""
    synced = SyncedFamily(chains_per_block=2)
    synced.live.rejects = lambda rule: "--to-destination 10.244.0.1:" in rule
    many = [f"10.244.0.{number}" for number in range(1, 9)]
    synced.sync_and_retry(*numbered(1, 2), Updated(slice_of(*many, service="svc1")))
    (held,) = (it.port_name for it in synced.tables.quarantined())
    assert held in synced.tables.retry_quarantined(synced.cluster, [held]).rejected
    synced.check_known()
    assert not synced.tables.find_drift(scope())
    assert not synced.sync(*numbered(3)).full
    assert synced.targets() == {"10.244.0.2:8080", "10.244.0.3:8080"}


def test_the_sync_after_a_retry_empties_the_canary_chain(synced: SyncedFamily) -> None:
    """Emptying it apart would replace the whole table once more on legacy; nor is it drift meanwhile."""
    synced.sync_and_retry(*numbered(1, 2))
    synced.live.rejects = lambda rule: False
    (held,) = (it.port_name for it in synced.tables.quarantined())
    synced.live.texts.clear()
    assert synced.tables.retry_quarantined(synced.cluster, [held]).accepted
    assert sum("*nat\n" in text for text in synced.live.texts) == 1
    canaries = frozenset(skeleton.CANARIES)
    assert synced.live.chains(canaries).chains[skeleton.CANARIES[1]]
    assert not synced.tables.work.visit_all
    assert not synced.tables.find_drift(DriftScope(0.0, chains=canaries))
    synced.sync_and_retry()
    assert not any(synced.live.chains(canaries).chains.values())


def test_a_search_without_one_accepted_service_blames_none(
    synced: SyncedFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node may be too slow for any; several searches together find out."""
    slow_iptables(synced, monkeypatch, 10)
    synced.live.rejects = lambda rule: "--to-destination" in rule and "198.51.100." not in rule
    with pytest.raises(SyncFailed):
        synced.sync_and_retry(*numbered(1, 2, 3))
    assert synced.tables.quarantined() == ()
    for _ in range(3):
        with contextlib.suppress(SyncFailed):
            synced.sync_and_retry()
    assert {it.name for it in synced.tables.quarantined()} == {"svc1", "svc2", "svc3"}


def test_services_that_the_tables_hold_already_are_not_suspected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full sync of a running node tries them together, and searches among the others only."""
    synced = family(Backend.LEGACY)
    synced.live.rejects = lambda rule: False
    synced.sync_and_retry(*numbered(*range(1, 1001)))
    clock = slow_iptables(synced, monkeypatch, 1.2)
    synced.live.rejects = lambda rule: "--to-destination 10.245." in rule
    synced.tables.distrust()
    changed = [Updated(slice_of(f"10.245.0.{number}", service=f"svc{number}")) for number in (7, 444)]
    report = synced.sync_and_retry(*changed, *numbered(*range(1001, 1006)))
    assert set(quarantined(report)) == {"svc7", "svc444"}
    assert clock.now < 60


HANG = TimedOut("iptables-restore", 60)


def test_a_service_with_which_iptables_hangs_is_quarantined(synced: SyncedFamily) -> None:
    """It is found among others, and only it."""
    synced.live.on_restore = fail_on(r"-A \S+ .*--to-destination 10\.244\.0\.6:", HANG)
    report = synced.sync_and_retry(*numbered(*range(5, 60)))
    assert quarantined(report) == ["svc6"]
    assert report.quarantined[0].reason == "iptables makes no progress with its rules for 10 s"
    assert (report.services, refused(synced)) == (55, 1)


def test_no_service_is_blamed_if_iptables_hangs_with_any(synced: SyncedFamily) -> None:
    synced.live.on_restore = fail_on("-j DNAT", HANG)
    with pytest.raises(SyncFailed, match="no progress"):
        synced.sync_and_retry(*numbered(5, 6))
    assert synced.tables.quarantined() == ()


def test_one_timeout_blames_no_service(synced: SyncedFamily) -> None:
    """A busy node may cause it once."""
    synced.live.on_restore = fail_on("10.244.0.6:", HANG, times=2)
    with pytest.raises(SyncFailed):
        synced.sync_and_retry(*numbered(5, 6))
    assert synced.sync_and_retry().quarantined == ()


def test_a_rejection_without_a_reason_is_retried() -> None:
    """Legacy rejects a block without a reason if another program writes at the same time."""
    synced = family(Backend.LEGACY)
    rejections = [("svc6",)] * 2

    def disturb(text: str) -> None:
        own = tuple(sorted(set(re.findall(r"ns/(svc\d+):http cluster IP", text))))
        if own in rejections:
            rejections.remove(own)
            raise Rejected(1, "COMMIT", "the kernel rejected the block", 1)

    synced.live.on_restore = disturb
    synced.live.rejects = lambda rule: "--to-destination 10.244.0.5:" in rule
    assert quarantined(synced.sync_and_retry(*numbered(5, 6))) == ["svc5"]
    assert not rejections


def test_a_service_deleted_during_failed_syncs_leaves_quarantine(synced: SyncedFamily) -> None:
    """The following full sync gets no event for it."""
    synced.live.on_restore = fail_on(r"\A(?!(?s:.*)-A KUBE-PROXY-CANARY)(?s:.*)is quarantined", times=1)
    for event in numbered(1, 2):
        synced.cluster.apply(event)
    with pytest.raises(SyncFailed):
        synced.sync_and_retry()
    synced.cluster.apply(Deleted(Kind.SERVICE, Key("ns", "svc1")))
    assert quarantined(synced.sync_and_retry()) == []


def test_quarantined_services_are_retried_on_empty_tables(synced: SyncedFamily) -> None:
    """The shared chains need not exist for a retry."""
    synced.sync_and_retry(*numbered(1, 2))
    synced.live.rejects = lambda rule: False
    synced.live.tables.clear()
    synced.tables.distrust()
    assert quarantined(synced.sync_and_retry(Updated(slice_of("10.244.0.9", service="svc1")))) == []


def test_progress_is_reported_per_restore(synced: SyncedFamily) -> None:
    reports: list[int] = []
    synced.tables.quarantine.progress = lambda: reports.append(len(synced.live.texts))
    synced.sync_and_retry(*numbered(2, 4))
    assert not reports
    synced.sync_and_retry(*numbered(*range(5, 9), 1))
    # Not reported: both syncs, and the restart of one of them.
    assert len(reports) == len(synced.live.texts) - 3


def test_two_rejections_blame_no_service(synced: SyncedFamily) -> None:
    """Another proxy may have deleted a chain of the service, during the sync and during the search."""
    rejections = [True] * 2

    def reject(text: str) -> None:
        if "10.244.0.6:" in text and rejections:
            rejections.pop()
            lines = text.split("\n")
            line = next(line for line in lines if re.search("-A KUBE-SVC-.*-j KUBE-SEP-", line))
            raise Rejected(lines.index(line) + 1, line, "Chain 'KUBE-SEP-A' does not exist", 2)

    synced.live.on_restore = reject
    with pytest.raises(SyncFailed):
        synced.sync_and_retry(*numbered(6))
    assert synced.sync_and_retry().quarantined == ()
