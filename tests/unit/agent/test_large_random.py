"""Random orders of changes, turns, failures, repairs and restarts with large and oversized Services."""

from collections.abc import Callable, Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykubeproxy.agent.sync import large, resolution
from pykubeproxy.agent.sync.tables import FamilyTables
from pykubeproxy.agent.sync.write import SyncFailed
from pykubeproxy.kernel import TABLES, Backend, Failed, KernelError
from pykubeproxy.objects import Event, Key
from pykubeproxy.rules.context import RuleContext
from pykubeproxy.rules.ownership import is_ours
from pykubeproxy.rules.ruleset import ChainKey
from pykubeproxy.services.cluster import Cluster
from tests.fakes.drift import scope
from tests.fakes.iptables import FakeIptables
from tests.strategies import events
from tests.unit.rules.test_partial_syncs import context, contexts, empty_tables
from tests.unit.rules.test_repair import TAMPERINGS, Tampering, tamper

pytestmark = pytest.mark.usefixtures("small_trees")

LIMIT = 8
REPAIRED = ("drop a rule", "reverse", "flush", "delete", "flush table")


@pytest.fixture(autouse=True, scope="module")
def low_thresholds() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large, "LARGE_PAIRS", 3)
        patch.setattr(large, "PORT_PAIRS", 1)
        patch.setattr(large, "MOST_DELETED", 2)
        patch.setattr(resolution, "LARGE_CLUSTER_ENDPOINTS", 12)
        yield


class Agent:
    """The tables of one family, and the work of the reconcile loop on them."""

    def __init__(self, live: FakeIptables, chains_per_block: int | None) -> None:
        self.live, self.cluster = live, Cluster()
        self.context = limited(context((), False, "tree"))
        self._chains_per_block = chains_per_block
        self._changed: set[Key] = set()
        self.restart()

    def restart(self) -> None:
        self.tables = FamilyTables(self.live, self._chains_per_block)

    def apply(self, changes: list[Event]) -> None:
        self._changed |= {key for change in changes for key in self.cluster.apply(change)}

    def sync(self) -> None:
        changed, self._changed = self._changed, set()
        self._attempt(lambda: self.tables.sync(self.cluster, changed, self.context))
        if self.tables.has_losses:
            self._attempt(lambda: self.tables.sync_losses(self.cluster, self.context))

    def turn(self) -> None:
        if self.tables.deferred:
            self._attempt(lambda: self.tables.sync_deferred(self.cluster, self.context))

    def retry(self) -> None:
        if ports := tuple(self.tables.quarantine.rejected()):
            self._attempt(lambda: self.tables.retry_quarantined(self.cluster, ports))

    def repair(self, tamperings: list[Tampering]) -> None:
        if self.tables.services():
            for tampering in tamperings:
                tamper(self.live, tampering)
            self._attempt(lambda: self.tables.detect_drift(scope(TABLES)))
            self.sync()

    def fail_after(self, blocks: int) -> None:
        """Sync, but fail after some blocks; then take a turn that fails too."""
        restore = self.live.restore

        def fail(text: str) -> None:
            written = text.split("COMMIT\n")[:blocks]
            restore("".join(f"{block}COMMIT\n" for block in written if block))
            raise Failed("iptables-restore", 1, "out of memory")

        self.live.restore = fail  # type: ignore[method-assign]
        self.turn()
        self.sync()
        self.live.restore = restore  # type: ignore[method-assign]

    def finish(self) -> None:
        """Sync, retry and take turns until nothing is left to do."""
        self.live.rejects = lambda _: False
        self.sync()
        self.retry()
        self.sync()
        for _ in range(40):
            self.turn()
        assert not self.tables.deferred
        assert not self.tables.quarantine.rejected()

    def _attempt(self, work: Callable[[], object]) -> None:
        try:
            work()
        except (KernelError, SyncFailed):
            self.tables.require_resync()


def limited(rules_context: RuleContext) -> RuleContext:
    return msgspec.structs.replace(rules_context, max_service_pairs=LIMIT)


def our_chains(live: FakeIptables) -> dict[ChainKey, tuple[str, ...]]:
    return {key: rules for key, rules in live.save().chains.items() if is_ours(key)}


def rejecting(address: str) -> Callable[[str], bool]:
    return lambda rule: bool(address) and f"-j DNAT --to-destination {address}:" in rule


STEPS = st.one_of(
    st.builds(lambda it: lambda agent: (agent.apply(it), agent.sync()), st.lists(events(), max_size=3)),
    st.builds(lambda it: lambda agent: agent.apply(it), st.lists(events(), max_size=3)),
    st.builds(lambda it: lambda agent: setattr(agent, "context", limited(it)), contexts),
    st.builds(
        lambda it: lambda agent: agent.repair(it),
        st.lists(TAMPERINGS.filter(lambda tampering: tampering.how in REPAIRED), max_size=2),
    ),
    st.builds(lambda it: lambda agent: agent.fail_after(it), st.integers(0, 6)),
    st.builds(
        lambda it: lambda agent: setattr(agent.live, "rejects", rejecting(it)),
        st.sampled_from(["", "10.244.1.1", "10.244.1.2"]),
    ),
    st.sampled_from([Agent.turn, Agent.turn, Agent.retry, Agent.restart, Agent.sync]),
)


@settings(max_examples=100, deadline=None)
@given(
    steps=st.lists(STEPS, min_size=1, max_size=14),
    backend=st.sampled_from(Backend),
    chains_per_block=st.sampled_from([None, 1, 3, 200]),
)
def test_large_services_end_with_the_rules_of_a_full_sync(
    steps: list[Callable[[Agent], object]], backend: Backend, chains_per_block: int | None
) -> None:
    agent = Agent(empty_tables(backend), chains_per_block)
    for step in steps:
        step(agent)
    agent.finish()
    other = Agent(empty_tables(backend), None)
    other.cluster, other.context = agent.cluster, agent.context
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large, "LARGE_PAIRS", 1_000_000)
        patch.setattr(large, "MOST_DELETED", 1_000_000)
        other.sync()
    assert our_chains(agent.live) == our_chains(other.live)
    assert agent.tables.services() == other.tables.services()
    assert {it.port_name for it in agent.tables.quarantined()} == {
        it.port_name for it in other.tables.quarantined()
    }
    assert agent.tables.detect_drift(scope(TABLES)) is None
