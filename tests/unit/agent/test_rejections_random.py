"""iptables rejects rules of some Services, at random: the others stay served, and what the agent knows stays true."""

from collections.abc import Callable, Collection

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykubeproxy.kernel import Backend
from pykubeproxy.objects import Deleted, Event, Key, Kind, Updated
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.digests import comparable
from pykubeproxy.rules.ruleset import ChainKey
from pykubeproxy.services.ports import PortName
from tests.fakes.iptables import FakeIptables
from tests.fakes.synced import SyncedFamily, flags_context
from tests.objects import service, slice_of
from tests.packet_model import Packet, Walker

NAMES = ("a", "b", "c", "d", "e", "f")
# iptables rejects endpoints of this network, and this external IP.
BAD, BAD_IP = "10.246.0.", "192.0.2.66"
Step = Callable[[SyncedFamily], object]


def address(name: str) -> str:
    return f"10.96.0.{NAMES.index(name) + 1}"


class Judge:
    """After each block: a Service that was served is served, by an endpoint that it has or had."""

    def __init__(self) -> None:
        self.endpoints: dict[str, set[str]] = {}
        self.bad: set[str] = set()  # without endpoints, rejected or deleted
        self.served: set[str] = set()
        self.quarantined: Callable[[], Collection[PortName]] = tuple

    def changed(self, name: str, hosts: list[str], is_bad: bool) -> None:
        self.endpoints.setdefault(name, set()).update(hosts)
        if is_bad or not hosts:
            self.bad.add(name)
        else:
            self.bad.discard(name)

    def __call__(self, tables: FakeIptables) -> None:
        live = tables.save()
        if skeleton.NAT_SERVICES not in live.chains:
            return
        self.served -= self.bad | {it.service for it in self.quarantined()}
        for name in self.endpoints.keys() - self.bad:
            packet = Packet("10.244.9.9", address(name), "tcp", 80, states=frozenset({"NEW"}))
            verdicts = {it.verdict for it in Walker(live).walk(packet, *skeleton.NAT_SERVICES)}
            good = {f"to {host}:8080" for host in self.endpoints[name]}
            if verdicts <= good:
                self.served.add(name)
            assert name not in self.served or verdicts <= good, (name, verdicts)


@st.composite
def changes(draw: st.DrawFn) -> Step:
    """Return a step that changes a Service or its endpoints, or deletes it."""
    name = draw(st.sampled_from(NAMES))
    hosts = [f"10.244.{NAMES.index(name)}.{n}" for n in draw(st.sets(st.integers(1, 4), max_size=3))]
    hosts += [f"{BAD}{NAMES.index(name)}"] * draw(st.sampled_from([0, 0, 0, 1]))
    ips = draw(st.sampled_from([(), (), ("192.0.2.1",), (BAD_IP,)]))
    affinity = draw(st.sampled_from([None, 60]))
    is_deleted = draw(st.sampled_from([False] * 5 + [True]))
    made = service(name, cluster_ip=address(name), external_ips=ips, affinity_seconds=affinity)

    def step(node: SyncedFamily) -> None:
        judge: Judge = node.judge  # type: ignore[attr-defined]
        events: list[Event] = [Updated(made), Updated(slice_of(*hosts, service=name))]
        if is_deleted:
            events = [Deleted(Kind.SERVICE, Key("ns", name))]
        judge.changed(name, hosts, is_deleted or BAD_IP in ips or any(it.startswith(BAD) for it in hosts))
        node.apply(*events)

    return step


def flush(node: SyncedFamily) -> None:
    """Let another program empty the table nat."""
    node.judge.served.clear()  # type: ignore[attr-defined]
    node.live.tables["nat"] = dict.fromkeys(node.live.tables.get("nat", {}), ())
    node.repair()


def restart(node: SyncedFamily) -> None:
    node.restart()
    node.round()


def attempt(node: SyncedFamily) -> None:
    if node.tables.may_try and node.tables.quarantine.has_tries:
        node._attempt(lambda: node.tables.try_next(node.cluster))


def retry(node: SyncedFamily) -> None:
    """Retry all rejected ports."""
    node.tables.quarantine.retry(tuple(node.tables.quarantine.rejected()))
    attempt(node)


def accept_all(node: SyncedFamily) -> None:
    node.live.rejects = lambda rule: False


def rejects(rule: str) -> bool:
    return f"--to-destination {BAD}" in rule or f"-d {BAD_IP}/" in rule


WORK = st.sampled_from([SyncedFamily.round, SyncedFamily.round, attempt, attempt, SyncedFamily.turn_if_due])
STEPS = st.lists(
    st.one_of(
        changes(),
        changes(),
        WORK,
        WORK,
        st.builds(lambda n, work: lambda node: node.fail_after(n, work), st.integers(0, 9), WORK),
        st.sampled_from([flush, restart, retry, accept_all]),
    ),
    max_size=20,
)


def written(node: SyncedFamily) -> dict[ChainKey, tuple[str, ...]]:
    return {key: comparable(key, rules) for key, rules in node.chains().items()}


@pytest.mark.parametrize("backend", Backend, ids=lambda backend: backend.value)
@settings(max_examples=150, deadline=None)
@given(
    first=st.lists(changes(), min_size=3, max_size=8),
    steps=STEPS,
    chains_per_block=st.sampled_from([1, 3, 200]),
)
def test_rejected_rules_harm_no_other_service(
    backend: Backend, first: list[Step], steps: list[Step], chains_per_block: int
) -> None:
    judge = Judge()
    node = SyncedFamily(
        context=flags_context(cluster_cidr="10.244.0.0/16"),
        backend=backend,
        chains_per_block=chains_per_block if backend is Backend.NFT else None,
        after_block=judge,
    )
    node.judge = judge  # type: ignore[attr-defined]
    judge.quarantined = lambda: node.tables.quarantine.rejected()
    node.live.rejects = rejects
    node.write_block_by_block()
    for step in (*first, SyncedFamily.round, *steps):
        step(node)
        node.check_known()
    try_all(node)
    assert not node.tables.quarantine.has_tries
    if accept_all not in steps:  # else the tables may hold rules that iptables would reject now
        assert_equal_to_first_agent(node)
    accept_all(node)
    assert_equal_to_first_agent(node)


def try_all(node: SyncedFamily) -> None:
    node.settle(50)
    for _ in range(200):
        if not node.tables.quarantine.has_tries:
            break
        attempt(node)
        node.settle(50)


def assert_equal_to_first_agent(node: SyncedFamily) -> None:
    node.retry()
    node.settle(50)
    fresh = node.fresh()
    fresh.live.rejects = node.live.rejects
    fresh.sync_and_retry()
    fresh.settle(50)
    quarantined, expected = ({it.port_name for it in one.tables.quarantined()} for one in (node, fresh))
    assert quarantined == expected
    assert written(node) == written(fresh)
