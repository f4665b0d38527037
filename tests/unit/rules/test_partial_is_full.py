"""Whatever changes come in whatever order, partial syncs leave what a full sync of the last state would write."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykubeproxy.agent.sync.tables import FamilyTables
from pykubeproxy.config import load
from pykubeproxy.kernel import Backend
from pykubeproxy.objects import Event, Family
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.context import KernelFacts, RuleContext, rule_context
from pykubeproxy.rules.ruleset import ChainKey
from pykubeproxy.services.cluster import Cluster
from tests.fakes.iptables import FakeIptables
from tests.strategies import NODE, events

pytestmark = pytest.mark.usefixtures("small_trees")


def terms_for(
    node_port_addresses: tuple[str, ...], masquerade_all: bool, dispatch: str = "auto"
) -> RuleContext:
    config = load(
        {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "clusterCIDR": "10.244.0.0/16",
            "nodePortAddresses": list(node_port_addresses),
            "iptables": {"masqueradeAll": masquerade_all},
            "pykubeproxy": {"dispatch": dispatch},
        },
        {},
    ).config
    return rule_context(config, NODE, None, KernelFacts(("192.168.99.10",)), Family.IPV4)


def without_kubelets(tables: FakeIptables) -> dict[ChainKey, tuple[str, ...]]:
    return {key: rules for key, rules in tables.save().chains.items() if key != skeleton.KUBELET_FIREWALL}


def empty_tables(backend: Backend = Backend.NFT) -> FakeIptables:
    tables = FakeIptables(backend)
    tables.counters.update(skeleton.NFACCT_NAMES)
    return tables


varied_terms = st.builds(
    terms_for, st.sampled_from([(), ("192.168.99.0/24",)]), st.booleans(), st.sampled_from(["flat", "tree"])
)


@settings(max_examples=300, deadline=None)
@given(
    steps=st.lists(st.tuples(st.lists(events(), max_size=3), varied_terms), min_size=1, max_size=8),
    backend=st.sampled_from(Backend),
    chains_per_block=st.sampled_from([None, 1, 5]),
)
def test_partial_syncs_leave_what_a_full_one_writes(
    steps: list[tuple[list[Event], RuleContext]], backend: Backend, chains_per_block: int | None
) -> None:
    """Also when the terms change on the way, and with any size of blocks."""
    cluster = Cluster()
    live = empty_tables(backend)
    followed = FamilyTables(live, chains_per_block)
    for changes, on in steps:
        touched = {key for change in changes for key in cluster.apply(change)}
        followed.sync(cluster, touched, on)
    fresh = empty_tables(backend)
    FamilyTables(fresh, None).sync(cluster, (), steps[-1][1])
    # Rules of ours in the kubelet's chain stay there: it may want them itself.
    assert without_kubelets(live) == without_kubelets(fresh)


@settings(max_examples=100, deadline=None)
@given(changes=st.lists(events(), max_size=12), on=varied_terms)
def test_a_second_full_sync_writes_nothing(changes: list[Event], on: RuleContext) -> None:
    """A restart over unchanged objects, and a full sync over tables that are right, leave the tables alone."""
    cluster = Cluster()
    for change in changes:
        cluster.apply(change)
    live = empty_tables()
    FamilyTables(live, 200).sync(cluster, (), on)
    restores = len(live.texts)
    report = FamilyTables(live, 200).sync(cluster, (), on)
    assert not report.wrote
    assert len(live.texts) == restores


def test_node_ports_on_loopback_bring_their_guard() -> None:
    """Turned on while the agent runs, they are kept from neighbours from the first moment."""
    cluster = Cluster()
    live = empty_tables()
    followed = FamilyTables(live, None)
    followed.sync(cluster, (), terms_for(("192.168.99.0/24",), False))
    assert live.save().chains[skeleton.KUBELET_FIREWALL] == ()
    followed.sync(cluster, (), terms_for((), False))
    assert len(live.save().chains[skeleton.KUBELET_FIREWALL]) == 1


def test_terms_are_compared_without_the_way_to_node_ports() -> None:
    """Another address for node ports rewrites KUBE-SERVICES alone."""
    cluster = Cluster()
    live = empty_tables()
    followed = FamilyTables(live, None)
    on = terms_for((), False)
    followed.sync(cluster, (), on)
    followed.sync(
        cluster, (), msgspec.structs.replace(on, node_port_jumps=("-d 192.0.2.1/32 -j KUBE-NODEPORTS",))
    )
    assert live.texts[-1].splitlines()[:2] == ["*nat", ":KUBE-SERVICES - [0:0]"]
    assert live.texts[-1].count(":KUBE-") == 1
