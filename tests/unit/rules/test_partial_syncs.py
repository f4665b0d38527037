"""Partial syncs leave the same tables as a full sync of the last state."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykubeproxy.kernel import Backend
from pykubeproxy.objects import Deleted, EndpointPort, Event, Kind, Port, Protocol, Updated
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.context import RuleContext
from pykubeproxy.rules.names import cluster_chain
from pykubeproxy.rules.ruleset import ChainKey
from pykubeproxy.services.ports import PortName
from tests.fakes.drift import scope
from tests.fakes.synced import SyncedFamily, flags_context
from tests.objects import service, slice_of
from tests.strategies import events

pytestmark = pytest.mark.usefixtures("small_trees")


contexts = st.builds(
    flags_context,
    cluster_cidr=st.just("10.244.0.0/16"),
    nodeport_addresses=st.sampled_from(["", "192.168.99.0/24"]),
    masquerade_all=st.booleans(),
    dispatch=st.sampled_from(["flat", "tree"]),
    max_affinity_lists=st.sampled_from([0, 2, 5]),
)


@settings(max_examples=150, deadline=None)
@given(
    steps=st.lists(st.tuples(st.lists(events(), max_size=3), contexts), min_size=1, max_size=8),
    backend=st.sampled_from(Backend),
    chains_per_block=st.sampled_from([None, 1, 5]),
)
def test_partial_syncs_equal_a_full_sync(
    steps: list[tuple[list[Event], RuleContext]],
    backend: Backend,
    chains_per_block: int | None,
) -> None:
    """Also with changed settings between syncs, with any block size, and if Services lose affinity to older ones."""
    node = SyncedFamily(backend=backend, chains_per_block=chains_per_block)
    for changes, node.context in steps:
        node.sync(*changes)
    fresh = node.fresh()
    fresh.sync()
    # Our rules stay in the kubelet's chain, because the kubelet may need them too.
    kubelets: dict[ChainKey, tuple[str, ...]] = {skeleton.KUBELET_FIREWALL: ()}
    assert node.chains() | kubelets == fresh.chains() | kubelets


@settings(max_examples=60, deadline=None)
@given(changes=st.lists(events(), max_size=12), rules_context=contexts)
def test_a_second_full_sync_writes_nothing(changes: list[Event], rules_context: RuleContext) -> None:
    """A restart over unchanged objects leaves correct tables alone."""
    node = SyncedFamily(*changes, context=rules_context)
    node.sync()
    restores = len(node.live.texts)
    node.restart()
    assert not node.sync().wrote
    assert len(node.live.texts) == restores


def test_node_ports_on_loopback_are_protected_from_other_hosts() -> None:
    """Also if they are enabled while the agent runs."""
    node = SyncedFamily(context=flags_context(nodeport_addresses="192.168.99.0/24"))
    node.sync()
    assert node.chains()[skeleton.KUBELET_FIREWALL] == ()
    node.sync(context=flags_context())
    assert len(node.chains()[skeleton.KUBELET_FIREWALL]) == 1


def test_a_changed_node_port_address_rewrites_one_chain() -> None:
    """Only KUBE-SERVICES changes."""
    node = SyncedFamily(backend=Backend.LEGACY)
    node.sync()
    jumps = ("-d 192.0.2.1/32 -j KUBE-NODEPORTS",)
    node.sync(context=msgspec.structs.replace(node.context, node_port_jumps=jumps))
    assert node.live.texts[-1].splitlines()[:2] == ["*nat", ":KUBE-SERVICES - [0:0]"]
    assert node.live.texts[-1].count(":KUBE-") == 1


@pytest.mark.parametrize("detected", [True, False])
def test_chains_with_a_foreign_rule_between_them_are_deleted(detected: bool) -> None:
    """A rule of others may lead from a chain back to one that small blocks would delete before."""
    node = SyncedFamily(chains_per_block=1)
    first, second = Port("a", Protocol.TCP, 80), Port("b", Protocol.TCP, 81)
    endpoint_ports = (EndpointPort("a", Protocol.TCP, 8080), EndpointPort("b", Protocol.TCP, 8081))
    web = service(ports=(first, second))
    node.sync(Updated(web), Updated(slice_of("10.244.1.1", ports=endpoint_ports)))
    earlier, later = (cluster_chain(PortName("ns", "web", name, "TCP")) for name in ("a", "b"))
    node.live.restore(f"*nat\n-A {later} -j {earlier}\nCOMMIT\n")
    node.apply(Deleted(Kind.SERVICE, web.key))
    if detected:
        node.tables.note_drift(scope())
    node.sync()
    assert not any(key.chain.startswith(("KUBE-SVC-", "KUBE-SEP-")) for key in node.chains())
