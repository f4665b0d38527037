"""The agent's reconcile loop, on a test clock and tables in memory."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from pykubeproxy.agent.mailbox import AddressesChanged, Message
from pykubeproxy.agent.notices import EventApplied, SyncFailure, SyncQueued, SyncReport
from pykubeproxy.agent.observe.status import LoopQuery, list_services
from pykubeproxy.agent.tables import FamilyTables
from pykubeproxy.kernel import KernelError
from pykubeproxy.objects import Deleted, Event, Family, Key, Kind, Listed, Node, Updated
from pykubeproxy.pages.statusz import PageFilter
from pykubeproxy.rules import skeleton
from tests.fakes.loop import (
    HERE,
    LISTS,
    STARTED,
    STOP,
    WEB,
    FakeFamily,
    Loop,
    ScriptedMailbox,
    at,
    config,
)
from tests.objects import endpoint, service, slice_of
from tests.strategies import NODE

pytestmark = pytest.mark.usefixtures("no_kernel")


def test_events_without_effect_on_rules_trigger_no_sync(loop: Loop) -> None:
    """A node heartbeat must not delay the next change."""
    unrelated = (
        Updated(service()),
        Updated(HERE),
        Updated(msgspec.structs.replace(HERE, taints=("node.kubernetes.io/not-ready",))),
        Deleted(Kind.SERVICE, Key("ns", "gone")),
        AddressesChanged(),
    )
    relevant = Updated(slice_of("10.244.1.5", "10.244.1.6"))
    loop.run(*STARTED, *at(10, *unrelated), *at(10.5, relevant), *at(10.6, STOP))
    assert len(loop.told(SyncReport)) == 2
    assert len(loop.rules(WEB)) == 3


@pytest.mark.parametrize(
    ("message", "synced"),
    [
        (Updated(slice_of("10.244.1.5", "10.244.1.6")), [Family.IPV4]),
        (Updated(slice_of("fd00:10::1")), [Family.IPV6]),
        (Updated(service(internal_local=True)), [Family.IPV4]),
        (Updated(service(cluster_ips=("10.96.0.10", "fd00:96::10"))), [*Family]),
        (Updated(service("six", cluster_ip="fd00:96::11")), [Family.IPV6]),
        (Deleted(Kind.ENDPOINT_SLICE, slice_of("10.244.1.5").key), [Family.IPV4]),
        (Updated(service("name", cluster_ips=())), []),
        (Updated(slice_of("10.244.1.9", service="")), []),
        (Updated(slice_of("10.244.1.9", headless=True, name="headless")), []),
        (Updated(msgspec.structs.replace(HERE, zone="zone-b")), [*Family]),
        (Listed(Kind.SERVICE, (service(),)), []),
        (LISTS[1], []),
        (Listed(Kind.NODE, (HERE,)), []),
        (Listed(Kind.SERVICE, ()), [Family.IPV4]),
    ],
)
def test_only_families_with_changes_are_synced(message: Message, synced: list[Family]) -> None:
    """As in kube-proxy, metrics and health tell which family had something to do."""
    loop = Loop(FakeFamily(), FakeFamily(Family.IPV6))
    loop.run(*STARTED, *at(10, message), *at(20, STOP))
    reports = [it.family for it in loop.told(SyncReport)]
    assert reports == [*Family, *synced]
    assert [it.family for it in loop.told(SyncQueued)] == [*Family, *synced]


def test_a_failed_family_is_retried_alone() -> None:
    """The other one has nothing to do."""
    loop = Loop(FakeFamily(Family.IPV6), FakeFamily())
    change = Updated(service(cluster_ips=("10.96.0.10", "fd00:96::10")))
    loop.run(*STARTED, (9, loop.break_), *at(10, change), (10.5, loop.repair), *at(20, STOP))
    reports = [it.family for it in loop.told(SyncReport)]
    assert reports == [Family.IPV6, Family.IPV4, Family.IPV4, Family.IPV6]
    assert len(loop.told(SyncFailure)) == 1


def test_an_address_change_triggers_a_sync_with_node_port_addresses(loop: Loop) -> None:
    settings = config(nodePortAddresses=["192.168.99.0/24"])
    steps = (*STARTED, *at(10, AddressesChanged()), *at(11, STOP))
    loop.run(*steps, settings=settings)
    assert len(loop.told(SyncReport)) == 2


def test_an_address_change_is_retried_after_a_failure(loop: Loop) -> None:
    """No Service has changed."""
    settings = config(nodePortAddresses=["192.168.99.0/24"])
    steps = ((9, loop.break_facts), *at(10, AddressesChanged()), (10.5, loop.repair_facts), *at(20, STOP))
    loop.run(*STARTED, *steps, settings=settings)
    assert (len(loop.told(SyncFailure)), len(loop.told(SyncReport))) == (1, 2)


def test_nothing_is_written_before_all_kinds_are_listed(loop: Loop) -> None:
    """The rules of half a cluster are worse than the old ones. Waiting does not poll."""
    steps = [*at(0, LISTS[0], Listed(Kind.NODE, (HERE,))), *at(900, STOP)]
    assert loop.run(*steps) == 0
    assert loop.live.texts == []
    assert loop.waits < 60


def test_a_stop_keeps_the_rules(loop: Loop) -> None:
    """SIGTERM ends the loop with status 0."""
    assert loop.run(*STARTED, *at(20, STOP)) == 0
    assert len(loop.live.texts) == 1
    assert loop.rules(WEB)


def test_changes_within_min_sync_period_are_coalesced(loop: Loop) -> None:
    """The first change is synced at once; twenty changes take two restores."""
    changes = [
        step
        for n in range(20)
        for step in at(10 + n / 10, Updated(slice_of("10.244.1.5", f"10.244.1.{10 + n}")))
    ]
    times: list[float] = []
    loop.live.restored = lambda: times.append(loop.now)
    settings = config(iptables={"minSyncPeriod": "5s"})
    loop.run(*STARTED, *changes, *at(20, STOP), settings=settings)
    assert times == [1, 10, 15]
    assert "10.244.1.29:8080" in loop.live.texts[-1]


def test_an_endpoint_change_writes_only_chains_of_its_service(loop: Loop) -> None:
    loop.run(*STARTED, *at(10, Updated(slice_of("10.244.1.5", "10.244.1.6"))), *at(20, STOP))
    lines = loop.live.texts[-1].splitlines()
    named = [line.split()[0] for line in lines if line.startswith(":")]
    assert lines[0] == "*nat"
    assert sorted(name[:10] for name in named) == [":KUBE-SEP-", ":KUBE-SVC-"]


def test_a_change_during_failing_facts_is_written_later(loop: Loop) -> None:
    """The retry needs no further change."""

    def fail(failure: KernelError | None) -> Callable[[], None]:
        return lambda: setattr(loop.family, "facts_error", failure)

    changed = Updated(slice_of("10.244.1.6"))
    broken, repaired = fail(KernelError("no answer")), fail(None)
    loop.run(*STARTED, (10, broken), *at(10, changed), (12, repaired), *at(60, STOP))
    assert any("10.244.1.6:8080" in rule for rule in loop.rules(WEB))


def test_a_failed_restore_is_retried_with_backoff(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Delays are 1, 2, 4 ... seconds up to syncPeriod; changes of that time are written."""
    attempts: list[float] = []
    sync = FamilyTables.sync

    def recorded(*arguments: Any) -> Any:
        attempts.append(loop.now)
        return sync(*arguments)

    monkeypatch.setattr(FamilyTables, "sync", recorded)
    change = Updated(slice_of("10.244.1.6"))
    loop.run(*STARTED, (5, loop.break_), *at(10, change), (90, loop.repair), *at(110, STOP))
    assert attempts == [1, 10, 11, 13, 17, 25, 41, 71, 101]
    assert any("10.244.1.6:8080" in rule for rule in loop.rules(WEB))


def test_a_flushed_table_is_repaired_within_sync_period(loop: Loop) -> None:
    """Also if the watch reports nothing."""
    loop.run(*STARTED, (40, loop.live.tables.clear), *at(70, STOP))
    assert loop.rules(WEB)


def test_an_idle_hour_writes_nothing(loop: Loop) -> None:
    """Neither periodic drift checks nor the hourly full sync write."""
    loop.run(*STARTED, *at(3700, STOP))
    assert len(loop.live.texts) == 1


def test_the_start_waits_up_to_30_seconds_for_node_addresses(loop: Loop) -> None:
    loop.run(*at(1, *LISTS, Listed(Kind.NODE, ())), *at(29, STOP))
    assert loop.live.texts == []
    loop.run(*at(1, *LISTS, Listed(Kind.NODE, ())), *at(40, STOP))
    assert loop.rules(WEB)
    assert loop.waits < 20


def test_node_cidr_mode_requires_pod_cidrs(loop: Loop) -> None:
    """The agent waits for them; after five minutes it exits with status 1."""
    settings = config(detectLocalMode="NodeCIDR", clusterCIDR="")
    no_pod_cidrs = Listed(Kind.NODE, (msgspec.structs.replace(HERE, pod_cidrs=()),))
    assert loop.run(*at(1, *LISTS, no_pod_cidrs), *at(1000, STOP), settings=settings) == 1
    assert loop.now == 300
    assert loop.live.texts == []
    steps = [*at(1, *LISTS, no_pod_cidrs), *at(50, Updated(HERE)), *at(60, STOP)]
    assert loop.run(*steps, settings=settings) == 0
    assert any("! -s 10.244.1.0/24" in rule for rule in loop.rules(WEB))


def test_a_changed_pod_cidr_changes_rules(loop: Loop) -> None:
    """In NodeCIDR mode, without a restart."""
    settings = config(detectLocalMode="NodeCIDR", clusterCIDR="")
    changed = msgspec.structs.replace(HERE, pod_cidrs=("10.244.7.0/24",))
    loop.run(*STARTED, *at(10, Updated(changed)), *at(20, STOP), settings=settings)
    assert any("! -s 10.244.7.0/24" in rule for rule in loop.rules(WEB))


def test_a_changed_zone_selects_other_endpoints(loop: Loop) -> None:
    """No Service or EndpointSlice changes."""
    hinted = slice_of(
        endpoint("10.244.1.5", zone_hints=("zone-a",)), endpoint("10.244.1.6", zone_hints=("zone-b",))
    )
    changed = msgspec.structs.replace(HERE, zone="zone-b")
    loop.run(*STARTED, *at(5, Updated(hinted)), *at(10, Updated(changed)), *at(20, STOP))
    assert [rule for rule in loop.rules(WEB) if "10.244.1.5" in rule] == []
    assert any("10.244.1.6:8080" in rule for rule in loop.rules(WEB))


@pytest.mark.parametrize("gone", [Deleted(Kind.NODE, Key("", NODE)), Listed(Kind.NODE, ())])
def test_a_deleted_node_keeps_rules_and_health(loop: Loop, gone: Event) -> None:
    """The Node object may be deleted, also while no watch sees it, and created again without addresses at first."""
    again = Updated(Node(NODE, zone=HERE.zone))
    script = (*STARTED, *at(10, gone), *at(20, again), *at(30, STOP))
    loop.run(*script, settings=config(nodePortAddresses=["primary"]))
    assert len(loop.live.texts) == 1
    assert [it.node for it in loop.told(EventApplied)][-2:] == [HERE, HERE]


def test_a_node_created_again_in_node_cidr_mode_is_served_on(loop: Loop) -> None:
    """Its new pod CIDR may be allocated minutes later."""
    gone, again = Deleted(Kind.NODE, Key("", NODE)), Updated(Node(NODE, HERE.addresses))
    late = Updated(service("late", cluster_ip="10.96.200.1"))
    steps = [*STARTED, *at(400, gone), *at(410, again), *at(420, late), *at(430, STOP)]
    assert loop.run(*steps, settings=config(detectLocalMode="NodeCIDR")) == 0
    assert any("10.96.200.1" in rule for rule in loop.rules(skeleton.FILTER_SERVICES))


def test_a_slice_that_moves_updates_both_services(loop: Loop) -> None:
    other = service("other", cluster_ip="10.96.0.11")
    changed = slice_of("10.244.1.5", service="other", name="web-ipv4")
    steps = [*STARTED, *at(5, Updated(other)), *at(10, Updated(changed)), *at(20, STOP)]
    loop.run(*steps)
    refused = loop.rules(skeleton.FILTER_SERVICES)
    assert len(refused) == 1
    assert "ns/web:http has no endpoints" in refused[0]
    assert WEB not in loop.live.save().chains


def test_once_returns_after_the_first_sync(loop: Loop) -> None:
    """The status tells whether it succeeded."""
    assert loop.run(*STARTED, once=True) == 0
    broken = Loop()
    broken.break_()
    assert broken.run(*STARTED, once=True) == 1


def test_a_node_without_its_primary_family_fails_the_start(loop: Loop) -> None:
    """The node's pods would be unreachable."""
    primary = Listed(Kind.NODE, (Node(NODE, ("fd00::1", "192.168.99.10")),))
    assert loop.run(*at(0, *LISTS, primary), *at(5, STOP)) == 1
    assert loop.live.texts == []


@pytest.mark.parametrize(
    ("fields", "node", "reason"),
    [
        ({"clusterCIDR": "fd00:10::/48"}, HERE, "clusterCIDR: fd00:10::/48 has no IPv4 network"),
        (
            {"detectLocalMode": "NodeCIDR"},
            Node(NODE, HERE.addresses, ("fd00:10:1::/64",)),
            "podCIDRs of the Node: fd00:10:1::/64 has no IPv4 network",
        ),
    ],
)
def test_networks_of_an_unsupported_family_fail_the_start(
    loop: Loop, fields: dict[str, object], node: Node, reason: str
) -> None:
    with capture_logs() as lines:
        listed = Listed(Kind.NODE, (node,))
        assert loop.run(*at(0, *LISTS, listed), *at(5, STOP), settings=config(**fields)) == 1
    assert loop.live.texts == []
    assert lines[-1]["reason"] == f"{reason}, which this node needs; no ip6tables"


def test_a_node_that_changes_its_first_family_is_served_on(loop: Loop) -> None:
    """Only a start needs a supported first family."""
    changed = Updated(Node(NODE, ("fd00::1", *HERE.addresses)))
    assert loop.run(*STARTED, *at(10, changed), *at(20, STOP)) == 0


def test_a_query_is_answered_without_a_sync(loop: Loop) -> None:
    """It reads and writes no tables."""
    first, second = (
        LoopQuery(lambda cluster, tables: list_services(cluster, tables, PageFilter()), Future())
        for _ in range(2)
    )
    loop.run(*at(0, first), *STARTED, *at(5, second), *at(6, STOP))
    assert first.future.result(0).matching == 0
    assert [port.title for port in second.future.result(0).ports] == ["ns/web:http"]
    assert len(loop.live.texts) == 1


def test_a_long_sync_reports_progress() -> None:
    """For each event, phase and chunk, and for each attempt after a rejection."""
    counts = []
    for rejected in (False, True):
        loop = Loop()
        dnat = "-j DNAT" if rejected else "no rule"
        loop.live.rejects = lambda rule: "ns/web" in rule and dnat in rule
        objects = (Listed(Kind.SERVICE, (service(), service("b"))), LISTS[1], Listed(Kind.NODE, (HERE,)))
        loop.run(*at(1, *objects), *at(2, STOP))
        begun, ended = loop.trail.index("SyncQueued"), loop.trail.index("SyncReport")
        counts.append(loop.trail[begun:ended].count("progress"))
    without, with_attempts = counts
    assert without > 4  # the phases, and at least one chunk
    assert with_attempts > without + 4


def test_a_loop_that_waits_is_idle(loop: Loop) -> None:
    """It is busy from each message on."""
    states = []

    class Watched(ScriptedMailbox):
        def take(self, seconds: float) -> list[Message]:
            states.append(loop.trail[-1])
            return super().take(seconds)

    loop.run(*STARTED, *at(20, STOP), mailbox=Watched)
    assert set(states) == {"idle"}
    assert loop.trail[-1] == "progress"


def test_a_change_counts_from_its_arrival(loop: Loop) -> None:
    """Not from when the loop gets to it."""

    class Late(ScriptedMailbox):
        def waiting_since(self) -> float:
            return loop.clock.now - 40

    loop.run(*STARTED, *at(20, STOP), mailbox=Late)
    assert loop.told(SyncQueued)[-1] == SyncQueued(Family.IPV4, 1001.0 - 40)
