"""Quarantine services whose rules iptables rejects, and tell them from faults of the node."""

import re
from collections.abc import Iterator, MutableMapping
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from pykubeproxy.agent.notices import SyncReport
from pykubeproxy.agent.tables import SyncFailed
from pykubeproxy.kernel import Backend, Failed, Rejected
from pykubeproxy.kernel.errors import LockHeld, TimedOut
from pykubeproxy.objects import Deleted, EndpointPort, Key, Kind, Port, Protocol, Updated
from pykubeproxy.rules import names, skeleton
from pykubeproxy.services.ports import PortName
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
    synced.check_known()


def sticky(*numbers: int) -> list[Updated]:
    """Return Services with affinity, which iptables rejects without the match recent."""
    ips = ((number, f"10.96.{number // 250}.{number % 250}") for number in numbers)
    return [Updated(service(f"svc{number}", cluster_ip=ip, affinity_seconds=600)) for number, ip in ips]


def test_many_rejected_services_are_found(synced: SyncedFamily) -> None:
    """On nft, a line tells each of the first; then all of a block are suspect."""
    synced.live.rejects = lambda rule: "-m recent" in rule
    report = synced.sync_and_retry(*numbered(*range(1, 301)), *sticky(*range(1, 200, 2)))
    assert set(quarantined(report)) == {f"svc{number}" for number in range(1, 200, 2)}
    assert all(it.reason for it in report.quarantined)
    assert len(synced.targets()) == 200
    assert len(synced.live.texts) < 600  # six for each of them
    synced.check_known()


def test_many_rejected_services_take_no_others_with_them(synced: SyncedFamily) -> None:
    """A tenant may have many of which nothing but the endpoints is special."""
    bad = [Updated(slice_of(f"10.246.0.{number}", service=f"svc{number}")) for number in range(1, 101)]
    synced.live.rejects = lambda rule: "--to-destination 10.246." in rule
    report = synced.sync_and_retry(*numbered(*range(1, 301)), *bad)
    assert set(quarantined(report)) == {f"svc{number}" for number in range(1, 101)}
    assert len(synced.targets()) == 200


def test_services_of_sctp_are_refused_on_a_node_without_it(synced: SyncedFamily) -> None:
    """Nothing has to be tried, and the next agent with the module serves them."""
    synced.live.rejects = lambda rule: "-m sctp" in rule
    port, target = Port("sctp", Protocol.SCTP, 80), EndpointPort("sctp", Protocol.SCTP, 8080)
    sctp = [
        changed
        for n in range(1, 101)
        for changed in (
            Updated(service(f"sctp{n}", ports=(port,), cluster_ip=f"10.96.9.{n}")),
            Updated(slice_of(f"10.247.0.{n}", service=f"sctp{n}", ports=(target,))),
        )
    ]
    synced.context = msgspec.structs.replace(synced.context, sctp=False)
    report = synced.sync(*numbered(*range(11, 21)), *sctp)
    assert (len(report.quarantined), report.held, synced.tables.quarantine.has_tries) == (100, 0, False)
    assert "xt_sctp" in report.quarantined[0].reason
    assert not report.quarantined[0].rejects_clients
    assert len(synced.targets()) == 10
    synced.live.rejects = lambda rule: False
    synced.context = msgspec.structs.replace(synced.context, sctp=True)
    assert not synced.sync().quarantined
    assert len(synced.targets()) == 110


def test_a_change_of_a_quarantined_service_writes_no_other_rules(synced: SyncedFamily) -> None:
    """The change needs no full sync."""
    synced.sync_and_retry(*numbered(1, 2))
    synced.live.texts.clear()
    saves = synced.live.saves
    report = synced.sync_and_retry(Updated(slice_of("10.244.0.1", "10.244.0.9", service="svc1")))
    assert (quarantined(report), report.full, synced.live.saves) == (["svc1"], False, saves)
    assert not any(
        "-A KUBE-SEP-" in line and "svc2:" in line for text in synced.live.texts for line in text.split("\n")
    )


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


def test_a_fault_of_the_node_during_a_search_blames_no_service(synced: SyncedFamily) -> None:
    """An ordinary service is tried before a decision, too."""
    refuses = synced.live.rejects
    assert synced.sync(*numbered(*range(1, 9))).held
    synced.live.rejects = lambda rule: "-j DNAT" in rule
    with pytest.raises(SyncFailed):
        synced.try_all()
    assert not synced.tables.quarantined()
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
def test_other_errors_start_no_search(synced: SyncedFamily, error: Exception) -> None:
    """There is one restore, and the error is returned unchanged."""
    synced.live.failure = error  # type: ignore[assignment]
    synced.live.save = FakeIptables().save  # type: ignore[method-assign]
    with pytest.raises(SyncFailed) as caught:
        synced.sync_and_retry(*numbered(1, 2))
    assert caught.value.error is error
    assert len(synced.live.texts) == 1


SIX_BAD = {f"svc{number}" for number in (7, 130, 131, 444, 800, 999)}
REJECTED_SIX = re.compile(r"--to-destination 10\.244\.(?:0\.(?:7|130|131)|1\.194|3\.(?:50|249)):")


def test_each_try_serves_those_that_it_accepts(synced: SyncedFamily) -> None:
    """Suspect Services keep the rules that they have; nothing of a search is left in the tables."""
    synced.live.rejects = lambda rule: False
    synced.sync(*numbered(*range(1, 1001)))
    before = synced.targets()
    synced.live.rejects = lambda rule: "--to-destination 10.245.0.7:" in rule
    moved = [Updated(slice_of(f"10.245.0.{n}", service=f"svc{n}")) for n in range(1, 100)]
    report = synced.sync(*moved)
    assert report.held
    served = [synced.targets()]
    assert all(len({f"10.244.0.{n}:8080", f"10.245.0.{n}:8080"} & served[0]) == 1 for n in range(1, 100))
    while synced.tables.quarantine.has_tries:
        tried = synced.tables.try_next(synced.cluster)
        synced.check_known()
        served.append({it for it in synced.targets() if not it.startswith("198.51.100.")})
        assert served[-1] - before >= served[-2] - before
        assert bool(tried.report) == (served[-1] != served[-2])
    assert quarantined(synced.sync()) == ["svc7"]
    fresh = synced.fresh()
    fresh.live.rejects = synced.live.rejects
    fresh.sync_and_retry()
    assert synced.our_chains() == fresh.our_chains()


def test_suspects_of_a_first_sync_keep_the_rules_of_an_earlier_agent(synced: SyncedFamily) -> None:
    """Nobody has owned these until then."""
    synced.live.rejects = lambda rule: False
    synced.sync(*numbered(*range(1, 300)))
    before = synced.targets()
    synced.restart()
    synced.live.rejects = lambda rule: "--to-destination 10.245.0.7:" in rule
    synced.apply(*(Updated(slice_of(f"10.245.0.{n}", service=f"svc{n}")) for n in range(1, 100)))
    while synced.sync().held:
        targets = synced.targets()
        for n in range(1, 300):
            assert {f"10.244.{n // 250}.{n % 250}:8080", f"10.245.0.{n}:8080"} & targets, n
        synced.tables.try_next(synced.cluster)
        synced.check_known()
    assert [it.name for it in synced.tables.quarantined()] == ["svc7"]
    assert len(synced.targets()) == len(before) - 1


def test_rejected_services_harm_no_earlier_rules_of_others(synced: SyncedFamily) -> None:
    """At a first sync, nobody owns the rules of an earlier agent yet."""
    synced.live.rejects = lambda rule: False
    synced.sync(*numbered(*range(1, 41)))
    synced.restart()
    bad = [Updated(slice_of(f"10.246.0.{n}", service=f"svc{n}")) for n in range(1, 13)]
    synced.live.rejects = lambda rule: "--to-destination 10.246." in rule
    report = synced.sync(*bad)
    assert synced.targets() >= {f"10.244.0.{n}:8080" for n in range(13, 41)}
    assert report.held or report.quarantined
    assert len(quarantined(synced.sync_and_retry())) == 12


def test_many_existing_services_that_change_to_rejected_rules_fail_no_sync() -> None:
    """All others of their block are tried with them."""
    synced = family(Backend.NFT)
    synced.live.rejects = lambda rule: "-m recent" in rule
    synced.sync(*numbered(*range(1, 301)))
    report = synced.sync(*sticky(*range(2, 301)), Updated(slice_of("10.245.0.1", service="svc1")))
    assert report.held >= 299
    assert len(quarantined(synced.sync_and_retry())) == 299
    assert synced.targets() == {"10.245.0.1:8080"}


def test_many_services_with_rejected_entries_fail_no_sync() -> None:
    """Their own chains are accepted."""
    synced = family(Backend.NFT)
    synced.live.rejects = lambda rule: "-d 10.96.0." in rule and "cluster IP" in rule
    report = synced.sync(*numbered(*range(1, 60), *range(250, 290)))
    assert report.held >= 59
    assert len(quarantined(synced.sync_and_retry())) == 59
    assert len(synced.targets()) == 40


def test_rejected_services_take_no_later_one_with_them(synced: SyncedFamily) -> None:
    """Each of these is tried on its own."""
    synced.live.rejects = lambda rule: "--to-destination 10.246." in rule
    bad = [Updated(slice_of(f"10.246.0.{n}", service=f"svc{n}")) for n in range(1, 26)]
    synced.sync_and_retry(*numbered(*range(1, 25)), *bad[:24])
    report = synced.sync_and_retry(*numbered(25, 26), bad[24])
    assert len(quarantined(report)) == 25
    assert synced.targets() == {"10.244.0.26:8080"}


def test_a_foreign_rule_quarantines_no_service(synced: SyncedFamily) -> None:
    """The chain to which it jumps cannot be deleted."""
    synced.live.rejects = lambda rule: False
    synced.sync(*numbered(1, 2))
    chain = names.endpoint_chain(PortName("ns", "svc1", "http", "TCP"), "10.244.0.1:8080")
    synced.live.tables["nat"] = {**synced.live.tables["nat"], "MINE": (f"-j {chain}",)}
    report = synced.sync_and_retry(Updated(slice_of("10.244.0.99", service="svc1")))
    assert not (report.quarantined or report.held)
    assert synced.targets() >= {"10.244.0.99:8080", "10.244.0.2:8080"}


def test_suspects_take_over_no_rules_of_others(synced: SyncedFamily) -> None:
    """A user's chain jumps to the chain of a Service."""
    synced.live.rejects = lambda rule: False
    synced.sync(*numbered(1, 2))
    jump = f"-p tcp -m tcp --dport 443 -j {names.cluster_chain(PortName('ns', 'svc1', 'http', 'TCP'))}"
    synced.live.tables["nat"] = {**synced.live.tables["nat"], "MINE": (jump,)}
    synced.restart()
    synced.live.rejects = lambda rule: "--to-destination 10.245.0.2:" in rule
    synced.sync(*(Updated(slice_of(f"10.245.0.{n}", service=f"svc{n}")) for n in (1, 2)))
    places = [key.chain for key, rules in synced.chains().items() if jump in rules]
    assert places == ["MINE"]


def test_a_search_goes_on_after_a_failure(synced: SyncedFamily) -> None:
    """What it has found is kept."""
    synced.live.rejects = lambda rule: bool(REJECTED_SIX.search(rule))
    synced.sync(*numbered(*range(1, 1001)))
    before = len(synced.tables.quarantine.held())
    synced.live.on_restore = fail_on("", Failed("iptables-restore", -9, "killed"), times=1)
    with pytest.raises(SyncFailed, match="killed"):
        synced.try_all()
    assert len(synced.tables.quarantine.held()) == before
    assert set(quarantined(synced.sync_and_retry())) == SIX_BAD


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
    held = [it.port_name for it in synced.tables.quarantined()]
    synced.tables.quarantine.retry(held)
    assert synced.tables.try_next(synced.cluster).rejected == tuple(held)
    synced.check_known()
    assert not synced.tables.find_drift(scope())
    assert not synced.sync(*numbered(3)).full
    assert synced.targets() == {"10.244.0.2:8080", "10.244.0.3:8080"}


def test_services_that_the_tables_hold_already_are_not_suspected() -> None:
    """A full sync of a running node searches among the others only."""
    synced = family(Backend.LEGACY)
    synced.live.rejects = lambda rule: False
    synced.sync(*numbered(*range(1, 1001)))
    synced.live.rejects = lambda rule: "--to-destination 10.245." in rule
    synced.tables.distrust()
    changed = [Updated(slice_of(f"10.245.0.{number}", service=f"svc{number}")) for number in (7, 444)]
    assert synced.sync(*changed, *numbered(*range(1001, 1006))).held == 7
    assert set(quarantined(synced.sync_and_retry())) == {"svc7", "svc444"}


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
    assert synced.sync_and_retry(*numbered(5, 6)).quarantined == ()
    assert synced.targets() == {"10.244.0.5:8080", "10.244.0.6:8080"}


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
    synced.live.on_restore = fail_on("is quarantined", times=1)
    with pytest.raises(SyncFailed):
        synced.sync_and_retry(*numbered(1, 2))
    synced.cluster.apply(Deleted(Kind.SERVICE, Key("ns", "svc1")))
    assert quarantined(synced.sync_and_retry()) == []


def test_a_suspect_service_that_is_deleted_is_forgotten(synced: SyncedFamily) -> None:
    assert synced.sync(*numbered(1, 2)).held
    assert not synced.sync(
        Deleted(Kind.SERVICE, Key("ns", "svc1")), Deleted(Kind.SERVICE, Key("ns", "svc2"))
    ).held
    assert not synced.tables.quarantine.has_tries
    assert not synced.targets()


def test_quarantined_services_are_retried_on_empty_tables(synced: SyncedFamily) -> None:
    """The shared chains need not exist for a retry."""
    synced.sync_and_retry(*numbered(1, 2))
    synced.live.rejects = lambda rule: False
    synced.live.tables.clear()
    synced.tables.distrust()
    assert quarantined(synced.sync_and_retry(Updated(slice_of("10.244.0.9", service="svc1")))) == []


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
    assert synced.sync_and_retry(*numbered(6)).quarantined == ()
    assert synced.targets() == {"10.244.0.6:8080"}
