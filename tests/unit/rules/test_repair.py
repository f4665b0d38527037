"""Whatever others do to the tables, a look and a sync leave what a full sync would write, and what is theirs."""

from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykubeproxy.agent.sync.tables import FamilyTables
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
from tests.unit.rules.test_partial_is_full import empty_tables, terms_for

pytestmark = pytest.mark.usefixtures("small_trees")

FOREIGN = "-p udp -m udp --dport 7777 -j ACCEPT"


class Foul(NamedTuple):
    """What somebody does: `how` to the chain, of those that there are, at a place from 0 to 1."""

    how: str
    where: float
    which: float


FOULS = st.builds(
    Foul,
    st.sampled_from(
        ["drop a rule", "add a rule", "reverse", "flush", "delete", "flush table", "make a chain"]
    ),
    st.floats(0, 0.999),
    st.floats(0, 0.999),
)


def commit(live: FakeIptables, foul: Foul) -> set[ChainKey]:
    """Do it; returns the chains that an event would name."""
    keys = [key for key in live.save().chains if is_ours(key) or key in skeleton.JUMPS]
    key = keys[int(foul.where * len(keys))]
    chains = live.tables[key.table]
    rules = list(chains[key.chain])
    at = int(foul.which * len(rules))
    match foul.how:
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
            return {ChainKey("nat", "KUBE-SVC-STRANGE")} if key.table == "nat" else set()
        case "flush table":
            named = {ChainKey(key.table, chain) for chain in chains}
            live.tables[key.table] = {name: () for name in chains if not name.startswith("KUBE-")}
            return named
    chains[key.chain] = tuple(rules)
    if foul.how != "delete" or key in skeleton.JUMPS:
        return {key}
    # Nobody can delete a chain that others refer to.
    del chains[key.chain]
    named = {key}
    for name, of in chains.items():
        left = tuple(rule for rule in of if key.chain not in rule.split())
        if left != of:
            chains[name] = left
            named.add(ChainKey(key.table, name))
    return named


def theirs(live: FakeIptables) -> dict[ChainKey, tuple[str, ...]]:
    """The rules of others in the kernel's own chains."""
    chains = live.save().chains
    return {
        key: tuple(rule for rule in chains.get(key, ()) if rule not in jumps)
        for key, jumps in skeleton.JUMPS.items()
    }


@settings(max_examples=100, deadline=None)
@given(
    before=st.lists(events(), max_size=6),
    fouls=st.lists(FOULS, min_size=1, max_size=4),
    after=st.lists(events(), max_size=2),
    dispatch=st.sampled_from(["flat", "tree"]),
    by_name=st.booleans(),
)
def test_a_repair_leaves_what_a_full_sync_writes(
    before: list[Event], fouls: list[Foul], after: list[Event], dispatch: str, by_name: bool
) -> None:
    """Be it of named chains or of whole tables, and with changes of the cluster at the same time."""
    cluster, live, on = Cluster(), empty_tables(Backend.NFT), terms_for((), False, dispatch)
    tables = FamilyTables(live, 5)
    tables.sync(cluster, {key for event in before for key in cluster.apply(event)}, on)
    was = dict(live.save().chains)
    named = {key for foul in fouls for key in commit(live, foul)}
    harmed = dict(live.save().chains) != was
    others = theirs(live)
    found = tables.detect_drift(scope((), named)) if by_name else tables.detect_drift(scope(TABLES))
    assert harmed or not found
    tables.sync(cluster, {key for event in after for key in cluster.apply(event)}, on)
    fresh = empty_tables(Backend.NFT)
    FamilyTables(fresh, None).sync(cluster, (), on)
    ours = {key: rules for key, rules in live.save().chains.items() if is_ours(key)}
    assert ours == {key: rules for key, rules in fresh.save().chains.items() if is_ours(key)}
    assert theirs(live) == others
    for key, jumps in skeleton.JUMPS.items():
        assert set(jumps) <= set(live.save().chains[key])
    assert not tables.detect_drift(scope(TABLES))


def test_damage_in_words() -> None:
    """What is missing, and what is there too much."""
    assert str(TableDrift("nat", chains=1, rules=2, jumps=1)) == "1 chain, 2 rules, 1 jump missing"
    assert str(TableDrift("nat", foreign_rules=3)) == "3 rules added"
    assert str(TableDrift("nat", rules=1, foreign_chains=1)) == "1 rule missing; 1 chain added"
    assert str(TableDrift("nat")) == "rules in another order"


def test_a_quiet_look_remembers_nothing() -> None:
    """Where nothing is wrong the next sync writes nothing, and tells of no repair."""
    live = empty_tables(Backend.NFT)
    tables, on = FamilyTables(live, 5), terms_for((), False)
    tables.sync(Cluster(), (), on)
    texts = len(live.texts)
    assert not tables.detect_drift(scope(TABLES))
    assert tables.sync(Cluster(), (), on).drift.tables == ()
    assert len(live.texts) == texts


@pytest.mark.parametrize("dispatch", ["flat", "tree"])
def test_each_chain_by_itself(dispatch: str) -> None:
    """Flushed, and only it is looked at: it is as before, and no other chain is written."""
    cluster, live, on = Cluster(), empty_tables(Backend.NFT), terms_for((), False, dispatch)
    for number in range(1, 7):
        name = f"s{number}"
        cluster.apply(Updated(service(name, cluster_ip=f"10.96.{number % 2 * 16}.{number}")))
        if number < 6:
            cluster.apply(Updated(slice_of("10.244.1.1", "10.244.1.2", service=name)))
    tables = FamilyTables(live, 5)
    tables.sync(cluster, (), on)
    before = dict(live.save().chains)
    for key, rules in before.items():
        if is_ours(key) and rules:
            live.tables[key.table][key.chain] = ()
            assert tables.detect_drift(scope((), {key})), key
            report = tables.sync(cluster, (), on)
            assert report.drift.tables == (TableDrift(key.table, rules=len(rules)),)
            assert report.chains_written == 1, key
            assert live.save().chains == before
