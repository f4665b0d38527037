"""Random orders of changes, turns, failures, repairs and restarts with large and oversized Services."""

from collections.abc import Callable, Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykubeproxy.agent import resolution
from pykubeproxy.agent.pending import Budget
from pykubeproxy.kernel import TABLES, Backend, Failed, Rejected
from pykubeproxy.rules.context import RuleContext
from tests.fakes.drift import scope
from tests.fakes.synced import SyncedFamily, flags_context
from tests.strategies import events
from tests.unit.rules.test_partial_syncs import contexts
from tests.unit.rules.test_repair import TAMPERINGS, Tampering, tamper

pytestmark = pytest.mark.usefixtures("small_trees")

LIMIT = 8
BUDGET = Budget(changes=3, turn=3, portion=1, deleted=2)
REPAIRED = ("drop a rule", "reverse", "flush", "delete", "flush table")


@pytest.fixture(autouse=True, scope="module")
def low_thresholds() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolution, "LARGE_CLUSTER_ENDPOINTS", 12)
        yield


def tampered(node: SyncedFamily, tamperings: list[Tampering]) -> None:
    """Let other programs change the tables, and repair them."""
    if node.tables.services():
        for tampering in tamperings:
            tamper(node.live, tampering)
        node.repair()


def failing(node: SyncedFamily, blocks: int, is_rejected: bool) -> None:
    """Take a turn and sync; iptables fails after some blocks of each, and names the line or not."""
    restore = node.live.restore

    def fail(text: str) -> None:
        written = text.split("COMMIT\n")[:blocks]
        before = "".join(f"{block}COMMIT\n" for block in written if block)
        restore(before)
        if len(before) < len(text):
            number, line = before.count("\n") + 2, text[len(before) :].split("\n")[1]
            shortage = Rejected(number, line, "RULE_APPEND failed (Cannot allocate memory)", 4)
            raise shortage if is_rejected else Failed("iptables-restore", 1, "killed")

    node.live.restore = fail  # type: ignore[method-assign]
    node.turn_if_due()
    node.round()
    node.live.restore = restore  # type: ignore[method-assign]


def finish(node: SyncedFamily) -> None:
    """Sync, retry and take turns until nothing is left to do."""
    node.live.rejects = lambda _: False
    node.round()
    node.retry()
    node.settle()
    assert not node.tables.quarantine.rejected()


def limited(rules_context: RuleContext) -> RuleContext:
    return msgspec.structs.replace(rules_context, max_service_pairs=LIMIT)


def rejecting(address: str) -> Callable[[str], bool]:
    return lambda rule: bool(address) and f"-j DNAT --to-destination {address}:" in rule


STEPS = st.one_of(
    st.builds(lambda it: lambda node: node.round(*it), st.lists(events(), max_size=3)),
    st.builds(lambda it: lambda node: node.apply(*it), st.lists(events(), max_size=3)),
    st.builds(lambda it: lambda node: setattr(node, "context", limited(it)), contexts),
    st.builds(
        lambda it: lambda node: tampered(node, it),
        st.lists(TAMPERINGS.filter(lambda tampering: tampering.how in REPAIRED), max_size=2),
    ),
    st.builds(lambda n, it: lambda node: failing(node, n, it), st.integers(0, 6), st.booleans()),
    st.builds(
        lambda it: lambda node: setattr(node.live, "rejects", rejecting(it)),
        st.sampled_from(["", "10.244.1.1", "10.244.1.2"]),
    ),
    st.sampled_from(
        [
            SyncedFamily.turn_if_due,
            SyncedFamily.turn_if_due,
            SyncedFamily.retry,
            SyncedFamily.restart,
            SyncedFamily.round,
        ]
    ),
)


@settings(max_examples=100, deadline=None)
@given(
    steps=st.lists(STEPS, min_size=1, max_size=14),
    backend=st.sampled_from(Backend),
    chains_per_block=st.sampled_from([None, 1, 3, 200]),
)
def test_large_services_end_with_the_rules_of_a_full_sync(
    steps: list[Callable[[SyncedFamily], object]], backend: Backend, chains_per_block: int | None
) -> None:
    first = limited(flags_context(cluster_cidr="10.244.0.0/16", dispatch="tree"))
    node = SyncedFamily(context=first, backend=backend, chains_per_block=chains_per_block, budget=BUDGET)
    for step in steps:
        step(node)
        node.check_known()
    finish(node)
    node.check_known()
    other = node.fresh()
    other.round()
    assert node.our_chains() == other.our_chains()
    assert node.tables.services() == other.tables.services()
    assert {it.port_name for it in node.tables.quarantined()} == {
        it.port_name for it in other.tables.quarantined()
    }
    assert node.tables.note_drift(scope(TABLES)) is None
