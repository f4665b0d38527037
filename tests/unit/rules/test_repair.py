"""After a drift check and a sync, the tables equal a full sync's and foreign rules are kept."""

from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pykubeproxy.agent.tables import FamilyTables
from pykubeproxy.agent.work import Changes
from pykubeproxy.kernel import TABLES, Backend
from pykubeproxy.objects import Event, Updated
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.drift import TableDrift
from pykubeproxy.rules.ownership import is_ours
from pykubeproxy.rules.ruleset import ChainKey
from pykubeproxy.services.cluster import Cluster
from tests.fakes.drift import scope
from tests.fakes.iptables import FakeIptables
from tests.objects import service, slice_of
from tests.strategies import events
from tests.unit.rules.test_partial_syncs import context, empty_tables

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
    cluster, live, rules_context = Cluster(), empty_tables(Backend.NFT), context((), False, dispatch)
    tables = FamilyTables(live, 5)
    tables.sync(cluster, Changes({key for event in before for key in cluster.apply(event)}), rules_context)
    original = dict(live.save().chains)
    named = {key for tampering in tamperings for key in tamper(live, tampering)}
    changed = dict(live.save().chains) != original
    foreign_rules_before = foreign_rules_by_chain(live)
    drift_found = tables.note_drift(scope((), named)) if by_name else tables.note_drift(scope(TABLES))
    assert changed or not drift_found
    tables.sync(cluster, Changes({key for event in after for key in cluster.apply(event)}), rules_context)
    fresh = empty_tables(Backend.NFT)
    FamilyTables(fresh, None).sync(cluster, Changes(), rules_context)
    ours = {key: rules for key, rules in live.save().chains.items() if is_ours(key)}
    assert ours == {key: rules for key, rules in fresh.save().chains.items() if is_ours(key)}
    assert foreign_rules_by_chain(live) == foreign_rules_before
    for key, jumps in skeleton.JUMPS.items():
        assert set(jumps) <= set(live.save().chains[key])
    assert not tables.note_drift(scope(TABLES))


def test_drift_is_described_in_words() -> None:
    """Missing and added rules are counted."""
    assert str(TableDrift("nat", chains=1, rules=2, jumps=1)) == "1 chain, 2 rules, 1 jump missing"
    assert str(TableDrift("nat", foreign_rules=3)) == "3 rules added"
    assert str(TableDrift("nat", rules=1, foreign_chains=1)) == "1 rule missing; 1 chain added"
    assert str(TableDrift("nat")) == "rules in another order"


def test_a_check_without_drift_causes_no_write() -> None:
    """The next sync reports no repair."""
    live = empty_tables(Backend.NFT)
    tables, rules_context = FamilyTables(live, 5), context((), False)
    tables.sync(Cluster(), Changes(), rules_context)
    texts = len(live.texts)
    assert not tables.note_drift(scope(TABLES))
    assert tables.sync(Cluster(), Changes(), rules_context).drift == ()
    assert len(live.texts) == texts


@pytest.mark.parametrize("dispatch", ["flat", "tree"])
def test_each_flushed_chain_is_repaired_alone(dispatch: str) -> None:
    """No other chain is written."""
    cluster, live, rules_context = Cluster(), empty_tables(Backend.NFT), context((), False, dispatch)
    for number in range(1, 7):
        name = f"s{number}"
        cluster.apply(Updated(service(name, cluster_ip=f"10.96.{number % 2 * 16}.{number}")))
        if number < 6:
            cluster.apply(Updated(slice_of("10.244.1.1", "10.244.1.2", service=name)))
    tables = FamilyTables(live, 5)
    tables.sync(cluster, Changes(), rules_context)
    before = dict(live.save().chains)
    for key, rules in before.items():
        if is_ours(key) and rules:
            live.tables[key.table][key.chain] = ()
            assert tables.note_drift(scope((), {key})), key
            report = tables.sync(cluster, Changes(), rules_context)
            assert report.drift == (TableDrift(key.table, rules=len(rules)),)
            assert report.chains_written == 1, key
            assert live.save().chains == before
