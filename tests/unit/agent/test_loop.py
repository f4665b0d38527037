"""The agent's reconcile loop, on a test clock and tables in memory."""

import math
import re
from collections.abc import Callable, Collection
from concurrent.futures import Future
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import call, create_autospec

import msgspec
import pytest
from structlog.testing import capture_logs

from pykubeproxy.agent import loop
from pykubeproxy.agent.family import FamilyController
from pykubeproxy.agent.flow_cleaner import FlowCleaner
from pykubeproxy.agent.loop import Agent
from pykubeproxy.agent.mailbox import AddressesChanged, Mailbox, Message, Stop
from pykubeproxy.agent.observe.observers import Observers
from pykubeproxy.agent.observe.query import Query, list_services
from pykubeproxy.agent.observe.status import Filter
from pykubeproxy.agent.quarantine.bisect import Split
from pykubeproxy.agent.sync import large as large_services
from pykubeproxy.agent.sync.tables import FamilyTables
from pykubeproxy.config import Config, load
from pykubeproxy.kernel import Backend, ExternalWrite, Failed, KernelError
from pykubeproxy.objects import (
    Deleted,
    EndpointPort,
    Event,
    Family,
    Key,
    Kind,
    Listed,
    Node,
    Port,
    Protocol,
    Updated,
)
from pykubeproxy.rules import names, skeleton
from pykubeproxy.rules.context import KernelFacts
from pykubeproxy.rules.drift import TableDrift
from pykubeproxy.rules.ruleset import ChainKey
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.ports import PortName
from tests.fakes.iptables import FakeIptables
from tests.objects import endpoint, service, slice_of
from tests.strategies import NODE

HERE = Node(NODE, ("192.168.99.10",), ("10.244.1.0/24",), "zone-a")
WEB = ChainKey("nat", names.cluster_chain(PortName("ns", "web", "http", "TCP")))
LISTS: tuple[Message, ...] = (
    Listed(Kind.SERVICE, (service(),)),
    Listed(Kind.ENDPOINT_SLICE, (slice_of("10.244.1.5"),)),
)
BROKEN = Failed("iptables-restore", 1, "out of order")


class Clock:
    """A clock that advances only while the agent waits."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class ScriptedMailbox(Mailbox):
    """Delivers messages and runs functions at set times, in seconds since the start."""

    def __init__(self, clock: Clock, *steps: tuple[float, object]) -> None:
        super().__init__()
        self._clock = clock
        self._start = clock.now
        self._steps = sorted(steps, key=lambda step: step[0])
        self.waits = 0

    def take(self, seconds: float) -> list[Message]:
        self.waits += 1
        assert self.waits < 2000, "the agent never comes to rest"
        until = self._clock.now + max(seconds, 0.0)
        due = self._start + self._steps[0][0]
        self._clock.now = max(self._clock.now, min(until, due))
        messages: list[Message] = []
        while self._steps and self._start + self._steps[0][0] <= self._clock.now:
            _, step = self._steps.pop(0)
            if callable(step):
                step()
            else:
                messages.append(step)  # type: ignore[arg-type]
        return messages


class FakeFamily:
    """A family with tables in memory; `facts_error`, if set, is raised when facts are read."""

    def __init__(self, family: Family = Family.IPV4) -> None:
        self.live = FakeIptables(family=family)
        self.live.counters.update(skeleton.NFACCT_NAMES)
        self.tables = FamilyTables(self.live, 200)
        self.facts_error: KernelError | None = None

    def facts(self, with_addresses: bool) -> KernelFacts:
        if self.facts_error:
            raise self.facts_error
        return KernelFacts(("192.168.99.10",))

    def rules(self, key: ChainKey) -> tuple[str, ...]:
        return self.live.save().chains.get(key, ())


@pytest.fixture(autouse=True)
def no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the machine's nftables tables and settings alone."""
    monkeypatch.setattr(loop, "remove_leftovers", lambda *_: False)
    monkeypatch.setattr(loop, "route_loopback", lambda _: None)


@pytest.fixture
def family() -> FakeFamily:
    return FakeFamily()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def config(**fields: object) -> Config:
    kind = {"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration"}
    return load({**kind, "clusterCIDR": "10.244.0.0/16", **fields}, {}).config


def run(
    family: FakeFamily | tuple[FakeFamily, ...],
    clock: Clock,
    *steps: tuple[float, object],
    settings: Config | None = None,
    observers: Observers | None = None,
    **options: Any,
) -> tuple[int, ScriptedMailbox]:
    """Run an agent until it stops; return its exit status and the mailbox."""
    script = ScriptedMailbox(clock, *steps)
    opened = family if isinstance(family, tuple) else (family,)
    unsupported = {} if len(opened) == 2 else {Family.IPV6: "no ip6tables"}
    families = SimpleNamespace(backend=Backend.NFT, opened=opened, unsupported=unsupported, watch=None)
    observers = observers or create_autospec(Observers, instance=True)
    flows = create_autospec(FlowCleaner, instance=True)
    agent = Agent(settings or config(), NODE, families, script, observers, flows, clock=clock, **options)  # type: ignore[arg-type]
    return agent.run(), script


def at(time: float, *messages: Message) -> list[tuple[float, object]]:
    return [(time, message) for message in messages]


STOP = Stop(0, "SIGTERM")
STARTED = [*at(1, *LISTS, Listed(Kind.NODE, (HERE,)))]


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
        (Listed(Kind.SERVICE, (service(),)), [*Family]),
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
    restore = family.live.restore

    def recorded(text: str) -> None:
        times.append(clock.now - 1000)
        restore(text)

    family.live.restore = recorded  # type: ignore[method-assign]
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
    family.live.save = recorded  # type: ignore[method-assign]
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


def tamper(family: FakeFamily) -> None:
    family.live.tables["nat"][WEB.chain] = ()


EXTERNAL_WRITE = ExternalWrite(Family.IPV4, chains=frozenset({WEB}), writer="somebody")


def test_reported_drift_is_repaired_at_once(family: FakeFamily, clock: Clock) -> None:
    """The repair ignores minSyncPeriod; a write in the other family is ignored."""
    settings = config(iptables={"minSyncPeriod": "20s", "syncPeriod": "1000s"})
    other = ExternalWrite(Family.IPV6, chains=frozenset({WEB}))
    steps = [*STARTED, (5, lambda: tamper(family)), *at(5, EXTERNAL_WRITE, other), *at(5.2, STOP)]
    run(family, clock, *steps, settings=settings)
    assert family.rules(WEB)
    assert len(family.live.texts) == 2


def test_a_change_that_a_drift_repair_applies_is_no_longer_queued(family: FakeFamily, clock: Clock) -> None:
    """A sync reported as queued after it has ended would make the node unhealthy until the next change."""
    observers = create_autospec(Observers, instance=True)
    late = Updated(service("late", cluster_ip="10.96.200.1"))
    drift = ((10, lambda: tamper(family)), *at(10, EXTERNAL_WRITE))
    run(family, clock, *STARTED, *drift, *at(10.1, late), *at(20, STOP), observers=observers)
    calls = [name for name, *_ in observers.mock_calls if name in ("sync_queued", "sync_succeeded")]
    assert calls == ["sync_queued", "sync_succeeded"] * 2


def test_observers_get_each_drift_repair(family: FakeFamily, clock: Clock) -> None:
    """With drift, writers and duration."""
    observers = create_autospec(Observers, instance=True)
    steps = [*STARTED, (5, lambda: tamper(family)), *at(5, EXTERNAL_WRITE), *at(20, STOP)]
    run(family, clock, *steps, observers=observers)
    ((report, writers, seconds, contested), _) = observers.drift_repaired.call_args
    assert report.drift.tables == (TableDrift("nat", rules=2),)
    assert (writers, round(seconds, 3), contested) == (("somebody",), 0.1, False)
    observers.drift_calm.assert_called_once_with(Family.IPV4)


def test_missing_rules_are_noticed_while_the_repair_waits(family: FakeFamily, clock: Clock) -> None:
    """The backoff of contested repairs delays writes, not the look that makes the node not ready."""
    observers = create_autospec(Observers, instance=True)
    flushes = [
        step
        for n in range(8)
        for step in ((5 + 4 * n, lambda: tamper(family)), *at(5 + 4 * n, EXTERNAL_WRITE))
    ]
    seen: list[tuple[float, bool]] = []
    observers.rules_missing.side_effect = lambda _, since: seen.append((clock.now - 1000, since is not None))
    observers.drift_repaired.side_effect = lambda *_: seen.append((clock.now - 1000, False))
    run(family, clock, *STARTED, *flushes, *at(60, STOP), observers=observers)
    missing = [when for when, lacking in seen if lacking]
    assert missing[:6] == [pytest.approx(5.1 + 4 * n) for n in range(6)]
    # The last repairs come seconds after the writes.
    repairs = [
        when for (when, lacking), (_, before) in zip(seen[1:], seen, strict=False) if before and not lacking
    ]
    assert max(repairs) > 33 + 4
    assert family.rules(WEB)
    assert not seen[-1][1]


def test_an_added_rule_is_no_missing_rule(family: FakeFamily, clock: Clock) -> None:
    """It is removed like any drift, but the node serves meanwhile."""
    observers = create_autospec(Observers, instance=True)

    def add() -> None:
        family.live.tables["nat"][WEB.chain] = ("-j LOG", *family.rules(WEB))

    run(family, clock, *STARTED, (5, add), *at(5, EXTERNAL_WRITE), *at(9, STOP), observers=observers)
    assert observers.drift_repaired.call_count == 1
    assert {args[1] for args, _ in observers.rules_missing.call_args_list} == {None}


def test_a_failed_repair_keeps_the_rules_missing(family: FakeFamily, clock: Clock) -> None:
    """Until a full sync succeeds."""
    observers = create_autospec(Observers, instance=True)

    def broken(_: str) -> None:
        raise BROKEN

    restore = family.live.restore
    steps = [
        *STARTED,
        (5, lambda: tamper(family)),
        (5, lambda: setattr(family.live, "restore", broken)),
        *at(5, EXTERNAL_WRITE),
        *at(6.5, EXTERNAL_WRITE),
    ]
    run(family, clock, *steps, *at(7, STOP), observers=observers)
    assert observers.rules_missing.call_args == call(Family.IPV4, 1005.0)
    family.live.restore = restore  # type: ignore[method-assign]


def test_an_external_write_without_drift_is_no_repair(family: FakeFamily, clock: Clock) -> None:
    """The external program wrote what was there already."""
    observers = create_autospec(Observers, instance=True)
    run(family, clock, *STARTED, *at(5, EXTERNAL_WRITE), *at(20, STOP), observers=observers)
    assert len(family.live.texts) == 1
    observers.drift_repaired.assert_not_called()


def test_a_failed_drift_check_is_retried(family: FakeFamily, clock: Clock) -> None:
    """The retry repairs the drift."""

    def break_kernel() -> None:
        tamper(family)
        family.live.failure = BROKEN

    def repair_kernel() -> None:
        family.live.failure = None

    settings = config(iptables={"syncPeriod": "1000s"})
    steps = [*STARTED, (5, break_kernel), *at(5, EXTERNAL_WRITE), (9, repair_kernel), *at(15, STOP)]
    run(family, clock, *steps, settings=settings)
    assert family.rules(WEB)


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
        Query(lambda cluster, tables: list_services(cluster, tables, Filter()), Future()) for _ in range(2)
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
        family.live.rejects = lambda rule, yes=rejected: yes and "ns/web" in rule and "-j DNAT" in rule
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


def test_a_large_service_delays_no_small_one(
    family: FakeFamily, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is synced on its own, and then waits three times as long as that took."""
    monkeypatch.setattr(large_services, "LARGE_PAIRS", 2)
    synced: list[tuple[float, set[str]]] = []
    restore = family.live.restore

    def slow_with_large_services(text: str) -> None:
        names_written = set(re.findall(r"ns/(web|large):http -> ", text))
        synced.append((clock.now - 1000, names_written))
        if "large" in names_written:
            clock.now += 2.0
        restore(text)

    family.live.restore = slow_with_large_services  # type: ignore[method-assign]
    large = service("large", cluster_ip="10.96.0.11")
    small = [Updated(slice_of(f"10.244.1.{5 + n}")) for n in range(4)]
    changes = [Updated(slice_of(*(f"10.244.2.{n + k}" for k in range(3)), service="large")) for n in range(9)]
    steps = [step for n, change in enumerate(changes) for step in at(10.5 + n, change)]
    steps += [step for n, change in enumerate(small) for step in at(10 + 2 * n, change)]
    run(family, clock, *STARTED, *at(5, Updated(large)), *steps, *at(30, STOP))
    turns = [when for when, services in synced if services == {"large"}]
    assert [after - before for before, after in pairwise(turns)] == [8.0, 8.0][: len(turns) - 1]
    assert len(turns) >= 2
    assert not any(len(services) > 1 for _, services in synced)


def fail_on(target: str, family: FakeFamily, note: Callable[[], None] = lambda: None) -> None:
    """Let each restore of rules with this text fail, after a note."""
    restore = family.live.restore

    def fail(text: str) -> None:
        if target in text:
            note()
            raise BROKEN
        restore(text)

    family.live.restore = fail  # type: ignore[method-assign]


def test_once_syncs_large_services_too(
    family: FakeFamily, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_services, "LARGE_PAIRS", 0)
    code, _ = run(family, clock, *STARTED, *at(20, STOP), once=True)
    assert code == 0
    assert family.rules(WEB)


def test_once_syncs_large_services_after_a_failing_one(
    family: FakeFamily, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_services, "LARGE_PAIRS", 0)
    fail_on("10.244.2.1:", family)
    services = Listed(Kind.SERVICE, (service(), service("failing", cluster_ip="10.96.0.11")))
    slices = Listed(Kind.ENDPOINT_SLICE, (slice_of("10.244.1.5"), slice_of("10.244.2.1", service="failing")))
    lists = at(1, services, slices, Listed(Kind.NODE, (HERE,)))
    code, _ = run(family, clock, *lists, *at(20, STOP), once=True)
    assert code == 1
    assert family.rules(WEB)


def test_a_failing_large_service_causes_ever_fewer_syncs(
    family: FakeFamily, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each failure, the agent goes through all Services."""
    monkeypatch.setattr(large_services, "LARGE_PAIRS", 2)
    failed: list[float] = []
    fail_on("10.244.1.66:", family, lambda: failed.append(clock.now - 1000))
    change = Updated(slice_of("10.244.1.66", "10.244.1.67", "10.244.1.68"))
    run(family, clock, *STARTED, *at(10, change), *at(130, STOP))
    assert failed == [10, 11, 13, 17, 25, 41, 71, 101]


def test_a_quarantined_port_that_no_longer_exists_is_not_retried_in_vain(
    family: FakeFamily, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large Service keeps its rules, and its quarantine, until its turn."""
    monkeypatch.setattr(large_services, "LARGE_PAIRS", 2)
    monkeypatch.setattr(FamilyController, "next_deferred", lambda _: math.inf)
    family.live.rejects = lambda rule: "--to-destination 10.244.1.66:" in rule
    retries: list[float] = []
    retry = family.tables.retry_quarantined

    def noted(cluster: Cluster, ports: Collection[PortName]) -> Split:
        retries.append(clock.now)
        clock.now += 0.001
        return retry(cluster, ports)

    family.tables.retry_quarantined = noted  # type: ignore[method-assign]
    ports = (EndpointPort("renamed", Protocol.TCP, 8080),)
    changed = (
        Updated(slice_of("10.244.1.66", "10.244.1.67", "10.244.1.68", ports=ports)),
        Updated(service(ports=(Port("renamed", Protocol.TCP, 80),))),
    )
    run(
        family,
        clock,
        *STARTED,
        *at(10, Updated(slice_of("10.244.1.66"))),
        *at(15, *changed),
        *at(20, STOP),
    )
    assert retries == [1011.0, 1015.0]


def test_a_quarantined_service_is_retried_after_others_are_served(family: FakeFamily, clock: Clock) -> None:
    """A second after its change; its rules are written with the sync that follows."""
    family.live.rejects = lambda rule: "--to-destination 10.244.1.66:" in rule
    steps = (
        *at(10, Updated(slice_of("10.244.1.66"))),
        *at(15, Updated(slice_of("10.244.1.67"))),
        *at(16, STOP),
    )
    run(family, clock, *STARTED, *steps)
    assert family.tables.quarantined() == ()
    assert family.rules(WEB)


def test_a_failing_retry_is_logged(family: FakeFamily, clock: Clock) -> None:
    """And repeated, not at once."""
    family.live.rejects = lambda rule: "--to-destination 10.244.1.66:" in rule

    def fail() -> None:
        family.live.failure = BROKEN

    steps = (
        *at(10, Updated(slice_of("10.244.1.66"))),
        (11, fail),
        *at(15, Updated(slice_of("10.244.1.67"))),
        *at(100, STOP),
    )
    with capture_logs() as logged:
        run(family, clock, *STARTED, *steps)
    assert 0 < [line["event"] for line in logged].count("quarantine retry failed") < 10


def test_a_new_address_of_the_api_server_is_no_longer_served(family: FakeFamily, clock: Clock) -> None:
    """Even if the agent hears nothing more, because a Service redirects that address."""
    known: set[tuple[str, int]] = set()
    claiming = (Updated(service(external_ips=("203.0.113.7",))), Updated(slice_of("10.244.1.5")))
    served: list[bool] = []

    def note() -> None:
        rules = (rule for chain in family.live.save().chains.values() for rule in chain)
        served.append(any("203.0.113.7" in rule for rule in rules))

    steps: list[tuple[float, object]] = [(10, note), (11, lambda: known.add(("203.0.113.7", 80))), (45, note)]
    run(
        family,
        clock,
        *STARTED,
        *at(2, *claiming),
        *steps,
        *at(50, STOP),
        api_servers=lambda: frozenset(known),
    )
    assert served == [True, False]
