"""The agent's reconcile loop, on a test clock and tables in memory."""

from concurrent.futures import Future
from types import SimpleNamespace
from unittest.mock import call, create_autospec

import msgspec
import pytest
from structlog.testing import capture_logs

from pykubeproxy.agent.flow_cleaner import FlowCleaner
from pykubeproxy.agent.loop import Agent
from pykubeproxy.agent.mailbox import AddressesChanged, Message
from pykubeproxy.agent.observe.observers import Observers
from pykubeproxy.agent.observe.status import LoopQuery, list_services
from pykubeproxy.kernel import Backend, KernelError
from pykubeproxy.objects import Deleted, Event, Family, Key, Kind, Listed, Node, Updated
from pykubeproxy.pages.statusz import PageFilter
from pykubeproxy.rules import skeleton
from tests.fakes.loop import (
    BROKEN,
    HERE,
    LISTS,
    STARTED,
    STOP,
    WEB,
    Clock,
    FakeFamily,
    ScriptedMailbox,
    at,
    config,
    run,
)
from tests.objects import endpoint, service, slice_of
from tests.strategies import NODE

pytestmark = pytest.mark.usefixtures("no_kernel")


def test_events_without_effect_on_rules_trigger_no_sync(family: FakeFamily, clock: Clock) -> None:
    """A node heartbeat must not delay the next change."""
    observers = create_autospec(Observers, instance=True)
    unrelated = (
        Updated(service()),
        Updated(HERE),
        Deleted(Kind.SERVICE, Key("ns", "gone")),
        AddressesChanged(),
    )
    relevant = Updated(slice_of("10.244.1.5", "10.244.1.6"))
    run(
        family,
        clock,
        *STARTED,
        *at(10, *unrelated),
        *at(10.5, relevant),
        *at(10.6, STOP),
        observers=observers,
    )
    assert observers.sync_succeeded.call_count == 2
    assert len(family.rules(WEB)) == 3


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
def test_only_families_with_changes_are_synced(clock: Clock, message: Message, synced: list[Family]) -> None:
    """As in kube-proxy, metrics and health tell which family had something to do."""
    observers = create_autospec(Observers, instance=True)
    both = FakeFamily(), FakeFamily(Family.IPV6)
    run(both, clock, *STARTED, *at(10, message), *at(20, STOP), observers=observers)
    reports = [it.args[0].family for it in observers.sync_succeeded.call_args_list]
    assert reports == [*Family, *synced]
    assert [it.args[0] for it in observers.sync_queued.call_args_list] == [*Family, *synced]


def test_a_failed_family_is_retried_alone(clock: Clock) -> None:
    """The other one has nothing to do."""
    observers = create_autospec(Observers, instance=True)
    four, six = FakeFamily(), FakeFamily(Family.IPV6)

    def break_six() -> None:
        six.live.failure = BROKEN

    def repair_six() -> None:
        six.live.failure = None

    change = Updated(service(cluster_ips=("10.96.0.10", "fd00:96::10")))
    steps = (*STARTED, (9, break_six), *at(10, change), (10.5, repair_six), *at(20, STOP))
    run((four, six), clock, *steps, observers=observers)
    reports = [it.args[0].family for it in observers.sync_succeeded.call_args_list]
    assert reports == [*Family, Family.IPV4, Family.IPV6]
    assert observers.sync_failed.call_count == 1


def test_an_address_change_triggers_a_sync_with_node_port_addresses(family: FakeFamily, clock: Clock) -> None:
    observers = create_autospec(Observers, instance=True)
    settings = config(nodePortAddresses=["192.168.99.0/24"])
    steps = (*STARTED, *at(10, AddressesChanged()), *at(11, STOP))
    run(family, clock, *steps, settings=settings, observers=observers)
    assert observers.sync_succeeded.call_count == 2


def test_nothing_is_written_before_all_kinds_are_listed(family: FakeFamily, clock: Clock) -> None:
    """The rules of half a cluster are worse than the old ones. Waiting does not poll."""
    steps = [*at(0, LISTS[0], Listed(Kind.NODE, (HERE,))), *at(900, STOP)]
    code, script = run(family, clock, *steps)
    assert code == 0
    assert family.live.texts == []
    assert script.waits < 60


def test_a_stop_keeps_the_rules(family: FakeFamily, clock: Clock) -> None:
    """SIGTERM ends the loop with status 0."""
    code, _ = run(family, clock, *STARTED, *at(20, STOP))
    assert code == 0
    assert len(family.live.texts) == 1
    assert family.rules(WEB)


def test_changes_within_min_sync_period_are_coalesced(family: FakeFamily, clock: Clock) -> None:
    """The first change is synced at once; twenty changes take two restores."""
    changes = [
        step
        for n in range(20)
        for step in at(10 + n / 10, Updated(slice_of("10.244.1.5", f"10.244.1.{10 + n}")))
    ]
    times: list[float] = []
    family.live.restored = lambda: times.append(clock.now - 1000)
    settings = config(iptables={"minSyncPeriod": "5s"})
    run(family, clock, *STARTED, *changes, *at(20, STOP), settings=settings)
    assert times == [1, 10, 15]
    assert "10.244.1.29:8080" in family.live.texts[-1]


def test_an_endpoint_change_writes_only_chains_of_its_service(family: FakeFamily, clock: Clock) -> None:
    run(family, clock, *STARTED, *at(10, Updated(slice_of("10.244.1.5", "10.244.1.6"))), *at(20, STOP))
    lines = family.live.texts[-1].splitlines()
    named = [line.split()[0] for line in lines if line.startswith(":")]
    assert lines[0] == "*nat"
    assert sorted(name[:10] for name in named) == [":KUBE-SEP-", ":KUBE-SVC-"]


def test_a_change_during_failing_facts_is_written_later(family: FakeFamily, clock: Clock) -> None:
    """The retry needs no further change."""

    def break_kernel() -> None:
        family.facts_error = KernelError("no answer")

    def repair_kernel() -> None:
        family.facts_error = None

    changed = Updated(slice_of("10.244.1.6"))
    run(family, clock, *STARTED, (10, break_kernel), *at(10, changed), (12, repair_kernel), *at(60, STOP))
    assert any("10.244.1.6:8080" in rule for rule in family.rules(WEB))


def test_a_failed_restore_is_retried_with_backoff(family: FakeFamily, clock: Clock) -> None:
    """Delays are 1, 2, 4 ... seconds up to syncPeriod; changes of that time are written."""

    def break_kernel() -> None:
        family.live.failure = BROKEN

    def repair_kernel() -> None:
        family.live.failure = None

    attempts: list[float] = []
    save = family.live.save

    def recorded(tables: object = None) -> object:
        attempts.append(clock.now - 1000)
        return save(tables)  # type: ignore[arg-type]

    steps = [
        *STARTED,
        (5, break_kernel),
        *at(10, Updated(slice_of("10.244.1.6"))),
        (90, repair_kernel),
        *at(110, STOP),
    ]
    family.live.save = recorded  # type: ignore[method-assign,assignment]
    run(family, clock, *steps)
    assert attempts == [1, 11, 13, 17, 25, 41, 71, 101]
    assert any("10.244.1.6:8080" in rule for rule in family.rules(WEB))


def test_a_flushed_table_is_repaired_within_sync_period(family: FakeFamily, clock: Clock) -> None:
    """Also if the watch reports nothing."""

    def flush() -> None:
        family.live.tables.clear()

    run(family, clock, *STARTED, (40, flush), *at(70, STOP))
    assert family.rules(WEB)


def test_an_idle_hour_writes_nothing(family: FakeFamily, clock: Clock) -> None:
    """Neither periodic drift checks nor the hourly full sync write."""
    run(family, clock, *STARTED, *at(3700, STOP))
    assert len(family.live.texts) == 1


def test_the_start_waits_up_to_30_seconds_for_node_addresses(family: FakeFamily, clock: Clock) -> None:
    run(family, clock, *at(1, *LISTS, Listed(Kind.NODE, ())), *at(29, STOP))
    assert family.live.texts == []
    again = Clock()
    _, script = run(family, again, *at(1, *LISTS, Listed(Kind.NODE, ())), *at(40, STOP))
    assert family.rules(WEB)
    assert script.waits < 20


def test_node_cidr_mode_requires_pod_cidrs(family: FakeFamily, clock: Clock) -> None:
    """The agent waits for them; after five minutes it exits with status 1."""
    settings = config(detectLocalMode="NodeCIDR", clusterCIDR="")
    no_pod_cidrs = Listed(Kind.NODE, (msgspec.structs.replace(HERE, pod_cidrs=()),))
    code, _ = run(family, clock, *at(1, *LISTS, no_pod_cidrs), *at(1000, STOP), settings=settings)
    assert code == 1
    assert clock.now == 1300
    assert family.live.texts == []
    steps = [*at(1, *LISTS, no_pod_cidrs), *at(50, Updated(HERE)), *at(60, STOP)]
    code, _ = run(family, Clock(), *steps, settings=settings)
    assert code == 0
    assert any("! -s 10.244.1.0/24" in rule for rule in family.rules(WEB))


def test_a_changed_pod_cidr_changes_rules(family: FakeFamily, clock: Clock) -> None:
    """In NodeCIDR mode, without a restart."""
    settings = config(detectLocalMode="NodeCIDR", clusterCIDR="")
    changed = msgspec.structs.replace(HERE, pod_cidrs=("10.244.7.0/24",))
    run(family, clock, *STARTED, *at(10, Updated(changed)), *at(20, STOP), settings=settings)
    assert any("! -s 10.244.7.0/24" in rule for rule in family.rules(WEB))


def test_a_changed_zone_selects_other_endpoints(family: FakeFamily, clock: Clock) -> None:
    """No Service or EndpointSlice changes."""
    hinted = slice_of(
        endpoint("10.244.1.5", zone_hints=("zone-a",)), endpoint("10.244.1.6", zone_hints=("zone-b",))
    )
    changed = msgspec.structs.replace(HERE, zone="zone-b")
    run(family, clock, *STARTED, *at(5, Updated(hinted)), *at(10, Updated(changed)), *at(20, STOP))
    assert [rule for rule in family.rules(WEB) if "10.244.1.5" in rule] == []
    assert any("10.244.1.6:8080" in rule for rule in family.rules(WEB))


@pytest.mark.parametrize("gone", [Deleted(Kind.NODE, Key("", NODE)), Listed(Kind.NODE, ())])
def test_a_deleted_node_keeps_rules_and_health(family: FakeFamily, clock: Clock, gone: Event) -> None:
    """The Node object may be deleted, also while no watch sees it, and created again without addresses at first."""
    observers = create_autospec(Observers, instance=True)
    again = Updated(Node(NODE, zone=HERE.zone))
    script = (*STARTED, *at(10, gone), *at(20, again), *at(30, STOP))
    run(family, clock, *script, observers=observers, settings=config(nodePortAddresses=["primary"]))
    assert len(family.live.texts) == 1
    last = [call.args[0] for call in observers.node_changed.call_args_list]
    assert last[-2:] == [HERE, HERE]


def test_a_node_created_again_in_node_cidr_mode_is_served_on(family: FakeFamily, clock: Clock) -> None:
    """Its new pod CIDR may be allocated minutes later."""
    gone, again = Deleted(Kind.NODE, Key("", NODE)), Updated(Node(NODE, HERE.addresses))
    late = Updated(service("late", cluster_ip="10.96.200.1"))
    steps = [*STARTED, *at(400, gone), *at(410, again), *at(420, late), *at(430, STOP)]
    code, _ = run(family, clock, *steps, settings=config(detectLocalMode="NodeCIDR"))
    assert code == 0
    assert any("10.96.200.1" in rule for rule in family.rules(skeleton.FILTER_SERVICES))


def test_a_slice_that_moves_updates_both_services(family: FakeFamily, clock: Clock) -> None:
    other = service("other", cluster_ip="10.96.0.11")
    changed = slice_of("10.244.1.5", service="other", name="web-ipv4")
    steps = [*STARTED, *at(5, Updated(other)), *at(10, Updated(changed)), *at(20, STOP)]
    run(family, clock, *steps)
    refused = family.rules(skeleton.FILTER_SERVICES)
    assert len(refused) == 1
    assert "ns/web:http has no endpoints" in refused[0]
    assert WEB not in family.live.save().chains


def test_once_returns_after_the_first_sync(family: FakeFamily, clock: Clock) -> None:
    """The status tells whether it succeeded."""
    assert run(family, clock, *STARTED, once=True)[0] == 0
    broken = FakeFamily()
    broken.live.failure = BROKEN
    assert run(broken, Clock(), *STARTED, once=True)[0] == 1


def test_a_node_without_its_primary_family_fails_the_start(family: FakeFamily, clock: Clock) -> None:
    """The node's pods would be unreachable."""
    primary = Listed(Kind.NODE, (Node(NODE, ("fd00::1", "192.168.99.10")),))
    code, _ = run(family, clock, *at(0, *LISTS, primary), *at(5, STOP))
    assert code == 1
    assert family.live.texts == []


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
    family: FakeFamily, clock: Clock, fields: dict[str, object], node: Node, reason: str
) -> None:
    with capture_logs() as lines:
        listed = Listed(Kind.NODE, (node,))
        code, _ = run(family, clock, *at(0, *LISTS, listed), *at(5, STOP), settings=config(**fields))
    assert code == 1
    assert family.live.texts == []
    assert lines[-1]["reason"] == f"{reason}, which this node needs; no ip6tables"


def test_a_node_that_changes_its_first_family_is_served_on(family: FakeFamily, clock: Clock) -> None:
    """Only a start needs a supported first family."""
    changed = Updated(Node(NODE, ("fd00::1", *HERE.addresses)))
    code, _ = run(family, clock, *STARTED, *at(10, changed), *at(20, STOP))
    assert code == 0


def test_a_query_is_answered_without_a_sync(family: FakeFamily, clock: Clock) -> None:
    """It reads and writes no tables."""
    first, second = (
        LoopQuery(lambda cluster, tables: list_services(cluster, tables, PageFilter()), Future())
        for _ in range(2)
    )
    run(family, clock, *at(0, first), *STARTED, *at(5, second), *at(6, STOP))
    assert first.future.result(0).matching == 0
    assert [port.title for port in second.future.result(0).ports] == ["ns/web:http"]
    assert len(family.live.texts) == 1


def test_a_long_sync_reports_progress(clock: Clock) -> None:
    """For each event, phase and chunk, and for each try while it bisects the services."""
    counts = []
    for rejected in (False, True):
        family, observers = FakeFamily(), create_autospec(Observers, instance=True)
        dnat = "-j DNAT" if rejected else "no rule"
        family.live.rejects = lambda rule: "ns/web" in rule and dnat in rule
        objects = (Listed(Kind.SERVICE, (service(), service("b"))), LISTS[1], Listed(Kind.NODE, (HERE,)))
        run(family, clock, *at(1, *objects), *at(2, STOP), observers=observers)
        names_ = [name for name, _, _ in observers.method_calls]
        begun = len(names_) - 1 - names_[::-1].index("sync_queued")
        counts.append(names_[begun : names_.index("sync_succeeded")].count("progress"))
    without, with_bisection = counts
    assert without > 4  # the phases, and at least one chunk
    assert with_bisection > without + 4


def test_a_loop_that_waits_is_idle(family: FakeFamily, clock: Clock) -> None:
    """It is busy from each message on."""
    observers = create_autospec(Observers, instance=True)
    states = []

    class Watched(ScriptedMailbox):
        def take(self, seconds: float) -> list[Message]:
            states.append([name for name, _, _ in observers.method_calls if name in ("idle", "progress")][-1])
            return super().take(seconds)

    families = SimpleNamespace(
        backend=Backend.NFT, opened=(family,), unsupported={Family.IPV6: "no ip6tables"}, watch=None
    )
    script = Watched(clock, *STARTED, *at(20, STOP))
    flows = create_autospec(FlowCleaner, instance=True)
    assert Agent(config(), NODE, families, script, observers, flows, clock=clock).run() == 0  # type: ignore[arg-type]
    assert set(states) == {"idle"}
    assert observers.method_calls[-1] == call.progress()


def test_a_change_counts_from_its_arrival(family: FakeFamily, clock: Clock) -> None:
    """Not from when the loop gets to it."""
    observers = create_autospec(Observers, instance=True)

    class Late(ScriptedMailbox):
        def waiting_since(self) -> float:
            return clock.now - 40

    families = SimpleNamespace(
        backend=Backend.NFT, opened=(family,), unsupported={Family.IPV6: "no ip6tables"}, watch=None
    )
    script = Late(clock, *STARTED, *at(20, STOP))
    flows = create_autospec(FlowCleaner, instance=True)
    assert Agent(config(), NODE, families, script, observers, flows, clock=clock).run() == 0  # type: ignore[arg-type]
    assert observers.sync_queued.call_args == call(Family.IPV4, 1001.0 - 40)
