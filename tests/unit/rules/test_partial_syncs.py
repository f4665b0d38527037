"""Partial syncs leave the same tables as a full sync of the last state."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykubeproxy.agent.drift import DriftScope
from pykubeproxy.agent.tables import FamilyTables
from pykubeproxy.agent.work import Changes
from pykubeproxy.agent.write import SyncFailed
from pykubeproxy.config import load
from pykubeproxy.kernel import TABLES, Backend
from pykubeproxy.objects import Deleted, EndpointPort, Event, Family, Kind, Port, Protocol, Updated
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.context import KernelFacts, RuleContext, rule_context
from pykubeproxy.rules.names import cluster_chain
from pykubeproxy.rules.ruleset import ChainKey
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.ports import PortName
from tests.fakes.iptables import FakeIptables
from tests.objects import service, slice_of
from tests.strategies import NODE, events

pytestmark = pytest.mark.usefixtures("small_trees")


def context(
    node_port_addresses: tuple[str, ...],
    masquerade_all: bool,
    dispatch: str = "auto",
    max_affinity_lists: int = 0,
) -> RuleContext:
    config = load(
        {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "clusterCIDR": "10.244.0.0/16",
            "nodePortAddresses": list(node_port_addresses),
            "iptables": {"masqueradeAll": masquerade_all},
            "pykubeproxy": {"dispatch": dispatch, "maxAffinityLists": max_affinity_lists},
        },
        {},
    ).config
    return rule_context(config, NODE, None, KernelFacts(("192.168.99.10",)), Family.IPV4)


def without_kubelet_chain(tables: FakeIptables) -> dict[ChainKey, tuple[str, ...]]:
    return {key: rules for key, rules in tables.save().chains.items() if key != skeleton.KUBELET_FIREWALL}


def empty_tables(backend: Backend = Backend.NFT) -> FakeIptables:
    tables = FakeIptables(backend)
    tables.counters.update(skeleton.NFACCT_NAMES)
    return tables


contexts = st.builds(
    context,
    st.sampled_from([(), ("192.168.99.0/24",)]),
    st.booleans(),
    st.sampled_from(["flat", "tree"]),
    st.sampled_from([0, 2, 5]),
)


@settings(max_examples=150, deadline=None)
@given(
    steps=st.lists(st.tuples(st.lists(events(), max_size=3), contexts), min_size=1, max_size=8),
    backend=st.sampled_from(Backend),
    chains_per_block=st.sampled_from([None, 1, 5]),
)
def test_partial_syncs_equal_a_full_sync(
    steps: list[tuple[list[Event], RuleContext]], backend: Backend, chains_per_block: int | None
) -> None:
    """Also with changed settings between syncs, with any block size, and if Services lose affinity to older ones."""
    cluster = Cluster()
    live = empty_tables(backend)
    synced = FamilyTables(live, chains_per_block)
    for changes, rules_context in steps:
        changed = {key for change in changes for key in cluster.apply(change)}
        synced.sync(cluster, Changes(changed), rules_context)
    fresh = empty_tables(backend)
    FamilyTables(fresh, None).sync(cluster, Changes(), steps[-1][1])
    # Our rules stay in the kubelet's chain, because the kubelet may need them too.
    assert without_kubelet_chain(live) == without_kubelet_chain(fresh)


@settings(max_examples=60, deadline=None)
@given(changes=st.lists(events(), max_size=12), rules_context=contexts)
def test_a_second_full_sync_writes_nothing(changes: list[Event], rules_context: RuleContext) -> None:
    """A restart over unchanged objects leaves correct tables alone."""
    cluster = Cluster()
    for change in changes:
        cluster.apply(change)
    live = empty_tables()
    FamilyTables(live, 200).sync(cluster, Changes(), rules_context)
    restores = len(live.texts)
    report = FamilyTables(live, 200).sync(cluster, Changes(), rules_context)
    assert not report.wrote
    assert len(live.texts) == restores


def test_node_ports_on_loopback_are_protected_from_other_hosts() -> None:
    """Also if they are enabled while the agent runs."""
    cluster = Cluster()
    live = empty_tables()
    synced = FamilyTables(live, None)
    synced.sync(cluster, Changes(), context(("192.168.99.0/24",), False))
    assert live.save().chains[skeleton.KUBELET_FIREWALL] == ()
    synced.sync(cluster, Changes(), context((), False))
    assert len(live.save().chains[skeleton.KUBELET_FIREWALL]) == 1


def test_a_changed_node_port_address_rewrites_one_chain() -> None:
    """Only KUBE-SERVICES changes."""
    cluster = Cluster()
    live = empty_tables()
    synced = FamilyTables(live, None)
    rules_context = context((), False)
    synced.sync(cluster, Changes(), rules_context)
    synced.sync(
        cluster,
        Changes(),
        msgspec.structs.replace(rules_context, node_port_jumps=("-d 192.0.2.1/32 -j KUBE-NODEPORTS",)),
    )
    assert live.texts[-1].splitlines()[:2] == ["*nat", ":KUBE-SERVICES - [0:0]"]
    assert live.texts[-1].count(":KUBE-") == 1


@pytest.mark.parametrize("detected", [True, False])
def test_chains_with_a_foreign_rule_between_them_are_deleted(detected: bool) -> None:
    """A rule of others may lead from a chain back to one that small blocks would delete before."""
    cluster, live = Cluster(), empty_tables()
    synced = FamilyTables(live, 1)
    first, second = Port("a", Protocol.TCP, 80), Port("b", Protocol.TCP, 81)
    endpoint_ports = (EndpointPort("a", Protocol.TCP, 8080), EndpointPort("b", Protocol.TCP, 8081))
    created = service(ports=(first, second)), slice_of("10.244.1.1", ports=endpoint_ports)
    changed = {key for it in created for key in cluster.apply(Updated(it))}
    rules_context = context((), False)
    synced.sync(cluster, Changes(changed), rules_context)
    earlier, later = (cluster_chain(PortName("ns", "web", name, "TCP")) for name in ("a", "b"))
    live.restore(f"*nat\n-A {later} -j {earlier}\nCOMMIT\n")
    cluster.apply(Deleted(Kind.SERVICE, created[0].key))
    if detected:
        synced.note_drift(DriftScope(0.0, frozenset(TABLES)))
    else:
        with pytest.raises(SyncFailed):
            synced.sync(cluster, Changes(changed), rules_context)
    synced.sync(cluster, Changes(changed), rules_context)
    assert not any(key.chain.startswith(("KUBE-SVC-", "KUBE-SEP-")) for key in live.save().chains)
