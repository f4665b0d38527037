"""After a drift check and a sync, the tables equal a full sync's and foreign rules are kept."""

from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pykubeproxy.objects import Event, Updated
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.drift import TableDrift
from pykubeproxy.rules.ownership import is_ours
from pykubeproxy.rules.ruleset import ChainKey
from tests.fakes.drift import scope
from tests.fakes.iptables import FakeIptables
from tests.fakes.synced import SyncedFamily, flags_context
from tests.objects import service, slice_of
from tests.strategies import events

pytestmark = pytest.mark.usefixtures("small_trees")

FOREIGN = "-p udp -m udp --dport 7777 -j ACCEPT"


class Tampering(NamedTuple):
    """An external change `how` of a chain; `where` picks the chain and `which` the rule, from 0 to 1."""

    how: str
    where: float
    which: float


TAMPERINGS = st.builds(
    Tampering,
    st.sampled_from(
        ["drop a rule", "add a rule", "reverse", "flush", "delete", "flush table", "make a chain"]
    ),
    st.floats(0, 0.999),
    st.floats(0, 0.999),
)


def tamper(live: FakeIptables, tampering: Tampering) -> set[ChainKey]:
    """Change the tables; return the chains that a watch would report."""
    keys = [key for key in live.save().chains if is_ours(key) or key in skeleton.JUMPS]
    key = keys[int(tampering.where * len(keys))]
    chains = live.tables[key.table]
    rules = list(chains[key.chain])
    at = int(tampering.which * len(rules))
    match tampering.how:
        case "drop a rule":
            del rules[at : at + 1]
        case "add a rule":
            rules.insert(at, FOREIGN)
        case "reverse":
            rules.reverse()
        case "flush":
            rules = []
        case "make a chain":
            chains["KUBE-SVC-STRANGE"] = (FOREIGN,)
            return {ChainKey(key.table, "KUBE-SVC-STRANGE")} if key.table != "mangle" else set()
        case "flush table":
            named = {ChainKey(key.table, chain) for chain in chains}
            live.tables[key.table] = {name: () for name in chains if not name.startswith("KUBE-")}
            return named
    chains[key.chain] = tuple(rules)
    if tampering.how != "delete" or key in skeleton.JUMPS:
        return {key}
    # The kernel deletes no chain that other rules refer to.
    del chains[key.chain]
    named = {key}
    for name, rules_of_chain in chains.items():
        kept = tuple(rule for rule in rules_of_chain if key.chain not in rule.split())
        if kept != rules_of_chain:
            chains[name] = kept
            named.add(ChainKey(key.table, name))
    return named


def foreign_rules_by_chain(live: FakeIptables) -> dict[ChainKey, tuple[str, ...]]:
    """Return the foreign rules in built-in chains."""
    chains = live.save().chains
    return {
        key: tuple(rule for rule in chains.get(key, ()) if rule not in jumps)
        for key, jumps in skeleton.JUMPS.items()
    }


@settings(max_examples=100, deadline=None)
@example(
    before=[],
    tamperings=[Tampering("make a chain", 0.5, 0.0), Tampering("make a chain", 0.75, 0.0)],
    after=[],
    dispatch="flat",
    by_name=False,
)
@given(
    before=st.lists(events(), max_size=6),
    tamperings=st.lists(TAMPERINGS, min_size=1, max_size=4),
    after=st.lists(events(), max_size=2),
    dispatch=st.sampled_from(["flat", "tree"]),
    by_name=st.booleans(),
)
def test_a_repair_equals_a_full_sync(
    before: list[Event], tamperings: list[Tampering], after: list[Event], dispatch: str, by_name: bool
) -> None:
    """For reported chains and for whole tables, also together with changes of the cluster."""
    node = SyncedFamily(*before, context=flags_context(dispatch=dispatch), chains_per_block=5)
    node.sync()
    original = node.chains()
    named = {key for tampering in tamperings for key in tamper(node.live, tampering)}
    changed = node.chains() != original
    foreign_rules_before = foreign_rules_by_chain(node.live)
    drift_found = node.tables.note_drift(scope((), named) if by_name else scope())
    assert changed or not drift_found
    node.sync(*after)
    fresh = node.fresh()
    fresh.sync()
    assert node.our_chains() == fresh.our_chains()
    assert foreign_rules_by_chain(node.live) == foreign_rules_before
    for key, jumps in skeleton.JUMPS.items():
        assert set(jumps) <= set(node.chains()[key])
    assert not node.tables.note_drift(scope())


def test_drift_is_described_in_words() -> None:
    """Missing and added rules are counted."""
    assert str(TableDrift("nat", chains=1, rules=2, jumps=1)) == "1 chain, 2 rules, 1 jump missing"
    assert str(TableDrift("nat", foreign_rules=3)) == "3 rules added"
    assert str(TableDrift("nat", rules=1, foreign_chains=1)) == "1 rule missing; 1 chain added"
    assert str(TableDrift("nat")) == "rules in another order"


def test_a_check_without_drift_causes_no_write() -> None:
    """The next sync reports no repair."""
    node = SyncedFamily()
    node.sync()
    texts = len(node.live.texts)
    assert not node.tables.note_drift(scope())
    assert node.sync().drift == ()
    assert len(node.live.texts) == texts


@pytest.mark.parametrize("dispatch", ["flat", "tree"])
def test_each_flushed_chain_is_repaired_alone(dispatch: str) -> None:
    """No other chain is written."""
    node = SyncedFamily(context=flags_context(dispatch=dispatch))
    for number in range(1, 7):
        name = f"s{number}"
        node.apply(Updated(service(name, cluster_ip=f"10.96.{number % 2 * 16}.{number}")))
        if number < 6:
            node.apply(Updated(slice_of("10.244.1.1", "10.244.1.2", service=name)))
    node.sync()
    before = node.chains()
    for key, rules in node.our_chains().items():
        if rules:
            node.live.tables[key.table][key.chain] = ()
            assert node.tables.note_drift(scope((), {key})), key
            report = node.sync()
            assert report.drift == (TableDrift(key.table, rules=len(rules)),)
            assert report.chains_written == 1, key
            assert node.chains() == before
