"""The agent's loop, on a clock of the test's own and tables in memory."""

from concurrent.futures import Future
from types import SimpleNamespace
from unittest.mock import call, create_autospec

import msgspec
import pytest

from pykubeproxy.agent import loop
from pykubeproxy.agent.flow_cleaner import FlowCleaner
from pykubeproxy.agent.loop import Agent
from pykubeproxy.agent.mailbox import AddressesChanged, Mailbox, Message, Stop
from pykubeproxy.agent.observe.observers import Observers
from pykubeproxy.agent.observe.query import Query, list_services
from pykubeproxy.agent.observe.status import Filter
from pykubeproxy.agent.sync.tables import FamilyTables
from pykubeproxy.config import Config, load
from pykubeproxy.kernel import ExternalWrite, Failed, KernelError
from pykubeproxy.objects import Deleted, Family, Key, Kind, Listed, Node, Updated
from pykubeproxy.rules import names, skeleton
from pykubeproxy.rules.context import KernelFacts
from pykubeproxy.rules.drift import TableDrift
from pykubeproxy.rules.ruleset import ChainKey
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
    """Goes on only when the agent waits."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Script(Mailbox):
    """Hands out messages at their times, in seconds since the start, and runs what a test wants done at a time."""

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


class Family4:
    """IPv4, opened, with tables in memory; `complaint`, if set, is what its kernel says when asked for facts."""

    def __init__(self) -> None:
        self.live = FakeIptables()
        self.live.counters.update(skeleton.NFACCT_NAMES)
        self.tables = FamilyTables(self.live, 200)
        self.complaint: KernelError | None = None

    def facts(self, with_addresses: bool) -> KernelFacts:
        if self.complaint:
            raise self.complaint
        return KernelFacts(("192.168.99.10",))

    def rules(self, key: ChainKey) -> tuple[str, ...]:
        return self.live.save().chains.get(key, ())


@pytest.fixture(autouse=True)
def no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kube-proxy in another mode may have left on this machine is none of the tests' business."""
    monkeypatch.setattr(loop, "remove_nftables_mode", lambda: None)


@pytest.fixture
def family() -> Family4:
    return Family4()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def config(**fields: object) -> Config:
    kind = {"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration"}
    return load({**kind, "clusterCIDR": "10.244.0.0/16", **fields}, {}).config


def run(
    family: Family4,
    clock: Clock,
    *steps: tuple[float, object],
    settings: Config | None = None,
    onlookers: Observers | None = None,
    **options: bool,
) -> tuple[int, Script]:
    """Run an agent to its end, which is a Stop unless it ends by itself."""
    script = Script(clock, *steps)
    families = SimpleNamespace(opened=(family,), unsupported={Family.IPV6: "no ip6tables"}, watch=None)
    onlookers = onlookers or create_autospec(Observers, instance=True)
    flows = create_autospec(FlowCleaner, instance=True)
    agent = Agent(settings or config(), NODE, families, script, onlookers, flows, clock=clock, **options)  # type: ignore[arg-type]
    return agent.run(), script


def at(time: float, *messages: Message) -> list[tuple[float, object]]:
    return [(time, message) for message in messages]


STOP = Stop(0, "SIGTERM")
STARTED = [*at(1, *LISTS, Listed(Kind.NODE, (HERE,)))]


def test_what_no_rule_follows_from_is_no_reason_for_a_sync(family: Family4, clock: Clock) -> None:
    """Else a heartbeat of the Node, or a pod's new interface, would have the next change wait."""
    onlookers = create_autospec(Observers, instance=True)
    nothing = (
        Updated(service()),
        Updated(HERE),
        Deleted(Kind.SERVICE, Key("ns", "gone")),
        AddressesChanged(),
    )
    more = Updated(slice_of("10.244.1.5", "10.244.1.6"))
    run(family, clock, *STARTED, *at(10, *nothing), *at(10.5, more), *at(10.6, STOP), onlookers=onlookers)
    assert onlookers.sync_succeeded.call_count == 2
    assert len(family.rules(WEB)) == 3


def test_addresses_count_where_node_ports_go_by_them(family: Family4, clock: Clock) -> None:
    """With nodePortAddresses a sync follows from their change."""
    onlookers = create_autospec(Observers, instance=True)
    settings = config(nodePortAddresses=["192.168.99.0/24"])
    steps = (*STARTED, *at(10, AddressesChanged()), *at(11, STOP))
    run(family, clock, *steps, settings=settings, onlookers=onlookers)
    assert onlookers.sync_succeeded.call_count == 2


def test_nothing_is_written_before_everything_is_listed(family: Family4, clock: Clock) -> None:
    """However long it takes: half a cluster's rules are worse than those of before. And it waits without haste."""
    steps = [*at(0, LISTS[0], Listed(Kind.NODE, (HERE,))), *at(900, STOP)]
    code, script = run(family, clock, *steps)
    assert code == 0
    assert family.live.texts == []
    assert script.waits < 60


def test_a_stop_leaves_the_rules(family: Family4, clock: Clock) -> None:
    """SIGTERM ends the loop with status 0 and touches nothing."""
    code, _ = run(family, clock, *STARTED, *at(20, STOP))
    assert code == 0
    assert len(family.live.texts) == 1
    assert family.rules(WEB)


def test_the_first_change_is_acted_on_at_once_and_more_of_them_together(
    family: Family4, clock: Clock
) -> None:
    """Twenty changes within minSyncPeriod give two restores."""
    changes = [
        step
        for n in range(20)
        for step in at(10 + n / 10, Updated(slice_of("10.244.1.5", f"10.244.1.{10 + n}")))
    ]
    times: list[float] = []
    restore = family.live.restore

    def noted(text: str) -> None:
        times.append(clock.now - 1000)
        restore(text)

    family.live.restore = noted  # type: ignore[method-assign]
    settings = config(iptables={"minSyncPeriod": "5s"})
    run(family, clock, *STARTED, *changes, *at(20, STOP), settings=settings)
    assert times == [1, 10, 15]
    assert "10.244.1.29:8080" in family.live.texts[-1]


def test_endpoint_churn_leaves_the_shared_chains_alone(family: Family4, clock: Clock) -> None:
    """Only the service's own chains are named."""
    run(family, clock, *STARTED, *at(10, Updated(slice_of("10.244.1.5", "10.244.1.6"))), *at(20, STOP))
    lines = family.live.texts[-1].splitlines()
    named = [line.split()[0] for line in lines if line.startswith(":")]
    assert lines[0] == "*nat"
    assert sorted(name[:10] for name in named) == [":KUBE-SEP-", ":KUBE-SVC-"]


def test_a_change_that_comes_while_the_kernel_cannot_be_asked_is_not_lost(
    family: Family4, clock: Clock
) -> None:
    """It is written as soon as the kernel answers, without another change being needed."""

    def breaks() -> None:
        family.complaint = KernelError("no answer")

    def heals() -> None:
        family.complaint = None

    changed = Updated(slice_of("10.244.1.6"))
    run(family, clock, *STARTED, (10, breaks), *at(10, changed), (12, heals), *at(60, STOP))
    assert any("10.244.1.6:8080" in rule for rule in family.rules(WEB))


def test_a_failed_restore_is_tried_again_ever_more_slowly(family: Family4, clock: Clock) -> None:
    """After 1, 2, 4 ... seconds, at most syncPeriod apart; then all is written that changed meanwhile."""

    def breaks() -> None:
        family.live.failure = BROKEN

    def heals() -> None:
        family.live.failure = None

    tried: list[float] = []
    save = family.live.save

    def noted(tables: object = None) -> object:
        tried.append(clock.now - 1000)
        return save(tables)  # type: ignore[arg-type]

    steps = [*STARTED, (5, breaks), *at(10, Updated(slice_of("10.244.1.6"))), (90, heals), *at(110, STOP)]
    family.live.save = noted  # type: ignore[method-assign]
    run(family, clock, *steps)
    assert tried == [1, 11, 13, 17, 25, 41, 71, 101]
    assert any("10.244.1.6:8080" in rule for rule in family.rules(WEB))


def test_a_flushed_table_is_noticed(family: Family4, clock: Clock) -> None:
    """Everything is looked at every syncPeriod, even if nobody has told of a change."""

    def flush() -> None:
        family.live.tables.clear()

    run(family, clock, *STARTED, (40, flush), *at(70, STOP))
    assert family.rules(WEB)


def test_a_quiet_hour_writes_nothing(family: Family4, clock: Clock) -> None:
    """Neither the looks of every syncPeriod nor the full run at its end."""
    run(family, clock, *STARTED, *at(3700, STOP))
    assert len(family.live.texts) == 1


def tamper(family: Family4) -> None:
    family.live.tables["nat"][WEB.chain] = ()


HEARD = ExternalWrite(Family.IPV4, chains=frozenset({WEB}), writer="somebody")


def test_what_is_heard_of_is_put_right_at_once(family: Family4, clock: Clock) -> None:
    """Without waiting for minSyncPeriod; what others do in another family concerns nobody."""
    settings = config(iptables={"minSyncPeriod": "20s", "syncPeriod": "1000s"})
    other = ExternalWrite(Family.IPV6, chains=frozenset({WEB}))
    steps = [*STARTED, (5, lambda: tamper(family)), *at(5, HEARD, other), *at(5.2, STOP)]
    run(family, clock, *steps, settings=settings)
    assert family.rules(WEB)
    assert len(family.live.texts) == 2


def test_a_repair_is_told_of(family: Family4, clock: Clock) -> None:
    """What it was, by whom, and how long it took."""
    onlookers = create_autospec(Observers, instance=True)
    steps = [*STARTED, (5, lambda: tamper(family)), *at(5, HEARD), *at(20, STOP)]
    run(family, clock, *steps, onlookers=onlookers)
    ((report, writers, seconds, contested), _) = onlookers.drift_repaired.call_args
    assert report.drift.tables == (TableDrift("nat", rules=2),)
    assert (writers, round(seconds, 3), contested) == (("somebody",), 0.1, False)
    onlookers.drift_calm.assert_called_once_with(Family.IPV4)


def test_a_change_that_harms_nothing_is_no_repair(family: Family4, clock: Clock) -> None:
    """Somebody wrote what was there already."""
    onlookers = create_autospec(Observers, instance=True)
    run(family, clock, *STARTED, *at(5, HEARD), *at(20, STOP), onlookers=onlookers)
    assert len(family.live.texts) == 1
    onlookers.drift_repaired.assert_not_called()


def test_tables_that_cannot_be_looked_at_are_looked_at_later(family: Family4, clock: Clock) -> None:
    """And what was wrong with them is put right then."""

    def breaks() -> None:
        tamper(family)
        family.live.failure = BROKEN

    def heals() -> None:
        family.live.failure = None

    settings = config(iptables={"syncPeriod": "1000s"})
    steps = [*STARTED, (5, breaks), *at(5, HEARD), (9, heals), *at(15, STOP)]
    run(family, clock, *steps, settings=settings)
    assert family.rules(WEB)


def test_addresses_of_the_node_are_waited_for_but_not_for_ever(family: Family4, clock: Clock) -> None:
    """Without them it goes on after 30 seconds."""
    run(family, clock, *at(1, *LISTS, Listed(Kind.NODE, ())), *at(29, STOP))
    assert family.live.texts == []
    again = Clock()
    _, script = run(family, again, *at(1, *LISTS, Listed(Kind.NODE, ())), *at(40, STOP))
    assert family.rules(WEB)
    assert script.waits < 20


def test_pod_cidrs_are_waited_for_and_then_required(family: Family4, clock: Clock) -> None:
    """In NodeCIDR mode: after five minutes without, status 1; as soon as they are there, rules."""
    settings = config(detectLocalMode="NodeCIDR", clusterCIDR="")
    bare = Listed(Kind.NODE, (msgspec.structs.replace(HERE, pod_cidrs=()),))
    code, _ = run(family, clock, *at(1, *LISTS, bare), *at(1000, STOP), settings=settings)
    assert code == 1
    assert clock.now == 1300
    assert family.live.texts == []
    steps = [*at(1, *LISTS, bare), *at(50, Updated(HERE)), *at(60, STOP)]
    code, _ = run(family, Clock(), *steps, settings=settings)
    assert code == 0
    assert any("! -s 10.244.1.0/24" in rule for rule in family.rules(WEB))


def test_a_changed_pod_cidr_is_taken_up(family: Family4, clock: Clock) -> None:
    """In NodeCIDR mode, live."""
    settings = config(detectLocalMode="NodeCIDR", clusterCIDR="")
    moved = msgspec.structs.replace(HERE, pod_cidrs=("10.244.7.0/24",))
    run(family, clock, *STARTED, *at(10, Updated(moved)), *at(20, STOP), settings=settings)
    assert any("! -s 10.244.7.0/24" in rule for rule in family.rules(WEB))


def test_a_changed_zone_chooses_anew(family: Family4, clock: Clock) -> None:
    """No service has changed, and still the rules follow the node's label."""
    hinted = slice_of(
        endpoint("10.244.1.5", zone_hints=("zone-a",)), endpoint("10.244.1.6", zone_hints=("zone-b",))
    )
    moved = msgspec.structs.replace(HERE, zone="zone-b")
    run(family, clock, *STARTED, *at(5, Updated(hinted)), *at(10, Updated(moved)), *at(20, STOP))
    assert [rule for rule in family.rules(WEB) if "10.244.1.5" in rule] == []
    assert any("10.244.1.6:8080" in rule for rule in family.rules(WEB))


def test_a_deleted_node_object_changes_nothing(family: Family4, clock: Clock) -> None:
    """A Node that is removed for a moment does not turn the rules over."""
    gone = Deleted(Kind.NODE, Key("", NODE))
    run(family, clock, *STARTED, *at(10, gone), *at(20, STOP))
    assert len(family.live.texts) == 1


def test_a_slice_that_moves_to_another_service(family: Family4, clock: Clock) -> None:
    """Both services follow."""
    other = service("other", cluster_ip="10.96.0.11")
    moved = slice_of("10.244.1.5", service="other", name="web-ipv4")
    steps = [*STARTED, *at(5, Updated(other)), *at(10, Updated(moved)), *at(20, STOP)]
    run(family, clock, *steps)
    refused = family.rules(skeleton.FILTER_SERVICES)
    assert len(refused) == 1
    assert "ns/web:http has no endpoints" in refused[0]
    assert WEB not in family.live.save().chains


def test_once_returns_after_the_first_sync(family: Family4, clock: Clock) -> None:
    """With the status that tells whether it succeeded."""
    assert run(family, clock, *STARTED, once=True)[0] == 0
    broken = Family4()
    broken.live.failure = BROKEN
    assert run(broken, Clock(), *STARTED, once=True)[0] == 1


def test_a_node_without_its_primary_family_is_refused(family: Family4, clock: Clock) -> None:
    """Its pods could not be reached at all."""
    primary = Listed(Kind.NODE, (Node(NODE, ("fd00::1", "192.168.99.10")),))
    code, _ = run(family, clock, *at(0, *LISTS, primary), *at(5, STOP))
    assert code == 1
    assert family.live.texts == []


def test_an_enquiry_is_answered_and_causes_no_sync(family: Family4, clock: Clock) -> None:
    """Whoever asks gets what is served by then, and nothing is read from or written to the kernel for it."""
    first, second = (
        Query(lambda cluster, tables: list_services(cluster, tables, Filter()), Future()) for _ in range(2)
    )
    run(family, clock, *at(0, first), *STARTED, *at(5, second), *at(6, STOP))
    assert first.future.result(0).matching == 0
    assert [port.title for port in second.future.result(0).ports] == ["ns/web:http"]
    assert len(family.live.texts) == 1


def test_whoever_waits_hears_that_a_long_sync_gets_on(family: Family4, clock: Clock) -> None:
    """While services are tried one by one because one of them is refused."""
    onlookers = create_autospec(Observers, instance=True)
    family.live.refuses = lambda rule: "ns/web" in rule and "-j DNAT" in rule
    run(family, clock, *STARTED, *at(2, STOP), onlookers=onlookers)
    assert onlookers.sync_progress.call_args_list[0] == call(Family.IPV4)
