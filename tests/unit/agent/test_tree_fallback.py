"""A flat chain replaces a dispatch tree that iptables rejects."""

import msgspec
import pytest
from structlog.testing import capture_logs

from pykubeproxy.agent.observe.observers import Observers
from pykubeproxy.agent.sync.report import SyncReport
from pykubeproxy.agent.sync.tables import FamilyTables, SyncFailed
from pykubeproxy.config import load
from pykubeproxy.kernel import Backend, Rejected
from pykubeproxy.objects import Event, Family, Updated
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.context import KernelFacts, RuleContext, rule_context
from pykubeproxy.rules.dispatch import TREE_ABOVE
from pykubeproxy.services.cluster import Cluster
from tests.fakes.iptables import FakeIptables
from tests.fakes.recorder import FakeRecorder
from tests.objects import service, slice_of
from tests.reports import HERE, report

SERVICES = TREE_ABOVE + 50
LINKS = Rejected(9, "-I PREROUTING -j KUBE-SERVICES", "RULE_INSERT failed (Too many links)", 4)


def context(**flags: str) -> RuleContext:
    return rule_context(load(None, flags).config, HERE, None, KernelFacts(nfacct=False), Family.IPV4)


class SyncedTables:
    """A cluster large enough for a tree, in the fake's tables."""

    def __init__(self, backend: Backend) -> None:
        self.cluster = Cluster()
        self.live = FakeIptables(backend)
        self.tables = FamilyTables(self.live, 200 if backend is Backend.NFT else None)
        for number in range(SERVICES):
            address = f"10.96.0.{number}"
            self.cluster.apply(Updated(service(f"svc{number}", cluster_ip=address)))
            self.cluster.apply(Updated(slice_of(f"10.244.0.{number}", service=f"svc{number}")))

    def sync(self, *events: Event, **flags: str) -> SyncReport:
        touched = {key for event in events for key in self.cluster.apply(event)}
        return self.tables.sync(self.cluster, touched, context(**flags))

    def is_flat(self) -> bool:
        rules = self.live.save().chains[skeleton.NAT_SERVICES]
        return len(rules) == SERVICES + 1


def rejects_branches(rule: str) -> bool:
    """The kernel rejects a rule in each branch."""
    return "services at" in rule


@pytest.fixture(params=[Backend.NFT, Backend.LEGACY], ids=lambda backend: backend.value)
def synced(request: pytest.FixtureRequest) -> SyncedTables:
    return SyncedTables(request.param)


def test_a_rejected_tree_is_replaced_by_a_flat_chain(synced: SyncedTables) -> None:
    """All services are served; none is quarantined."""
    synced.live.rejects = rejects_branches
    done = synced.sync()
    assert done.rejected_tree
    assert (done.services, done.quarantined, synced.is_flat()) == (SERVICES, (), True)


def test_changes_do_not_try_the_rejected_tree_again(synced: SyncedTables) -> None:
    """Only the hourly full sync does."""
    synced.live.rejects = rejects_branches
    synced.sync()
    synced.live.texts.clear()
    done = synced.sync(Updated(slice_of("10.244.9.9", service="svc7")))
    assert (bool(done.rejected_tree), done.full, len(synced.live.texts)) == (True, False, 1)
    synced.tables.require_resync()
    assert synced.sync().rejected_tree
    synced.live.rejects = lambda rule: False
    assert synced.sync(Updated(slice_of("10.244.9.8", service="svc7"))).rejected_tree
    synced.tables.retry_tree()
    assert not synced.sync().rejected_tree
    assert not synced.is_flat()


def test_other_options_try_the_rejected_tree_again(synced: SyncedTables) -> None:
    synced.live.rejects = rejects_branches
    synced.sync()
    synced.live.rejects = lambda rule: False
    assert not synced.sync(**{"masquerade-all": "true"}).rejected_tree
    assert not synced.is_flat()


def test_too_many_jumps_reject_the_tree_at_once(synced: SyncedTables) -> None:
    """No service is tried alone: every one would be accepted."""
    restore = synced.live.restore

    def shallow_restore(text: str) -> None:
        if "services at" in text:
            synced.live.texts.append(text)
            raise LINKS
        restore(text)

    synced.live.restore = shallow_restore  # type: ignore[method-assign]
    assert synced.sync().rejected_tree == LINKS.message
    assert (synced.is_flat(), len(synced.live.texts)) == (True, 2)


def test_a_fault_of_the_node_does_not_reject_the_tree(synced: SyncedTables) -> None:
    """A flat chain is rejected too, so the next sync uses the tree again."""
    synced.live.rejects = lambda rule: "-j DNAT" in rule
    with pytest.raises(SyncFailed):
        synced.sync()
    synced.live.rejects = lambda rule: False
    assert not synced.sync().rejected_tree
    assert not synced.is_flat()


def test_a_rejected_service_does_not_reject_the_tree(synced: SyncedTables) -> None:
    """It is quarantined, and all others are dispatched by tree."""
    synced.live.rejects = lambda rule: "--to-destination 10.244.0.5:" in rule
    done = synced.sync()
    assert ([it.name for it in done.quarantined], done.rejected_tree) == (["svc5"], "")
    assert not synced.is_flat()


@pytest.mark.parametrize(
    "rejection",
    [
        Rejected(1, "COMMIT", "the kernel rejected the block", 1),
        Rejected(1, "-A KUBE-SVC-A -j KUBE-SVC-B", "Chain 'KUBE-SVC-B' does not exist", 2),
    ],
    ids=["legacy", "nft"],
)
def test_a_single_rejection_does_not_reject_the_tree(rejection: Rejected) -> None:
    """Another program may have written at the same time."""
    synced = SyncedTables(Backend.LEGACY)
    disturb(synced, [rejection])
    assert not synced.sync().rejected_tree
    assert not synced.is_flat()


def test_a_chain_that_cannot_be_deleted_does_not_reject_the_tree() -> None:
    """Another proxy refers to it. The sync fails, and the next one tries again."""
    synced = SyncedTables(Backend.NFT)
    busy = Rejected(1, "-X KUBE-SEP-A", "CHAIN_DEL failed (Device or resource busy): chain KUBE-SEP-A", 4)
    disturb(synced, [busy, busy])
    for _ in range(2):
        with pytest.raises(SyncFailed):
            synced.sync()
    assert not synced.sync().rejected_tree
    assert not synced.is_flat()


def disturb(synced: SyncedTables, rejections: list[Rejected]) -> None:
    """Make restores with branches fail, one for each rejection."""
    restore = synced.live.restore

    def disturbed_restore(text: str) -> None:
        if "services at" in text and rejections:
            raise rejections.pop()
        restore(text)

    synced.live.restore = disturbed_restore  # type: ignore[method-assign]


def test_a_small_cluster_has_no_tree_to_reject() -> None:
    """The sync fails as before."""
    synced = SyncedTables(Backend.NFT)
    synced.live.restore = lambda text: (_ for _ in ()).throw(LINKS)  # type: ignore[method-assign]
    with pytest.raises(SyncFailed):
        synced.sync(dispatch="flat")


def test_a_rejected_tree_is_reported_once() -> None:
    """By a warning, a metric and the status, until iptables accepts the tree again."""
    observers = Observers(load(None, {}).config, HERE, Family, FakeRecorder())
    done = report(service())
    gauge = "pykubeproxy_dispatch_tree_rejected"

    def noted(reason: str) -> float | None:
        observers.sync_succeeded(msgspec.structs.replace(done, rejected_tree=reason), ())
        families = observers.history.families(observers.health.state())
        assert [it.rejected_tree for it in families] == [reason, ""]
        return observers.metrics.registry.get_sample_value(gauge, {"ip_family": "IPv4"})

    with capture_logs() as lines:
        assert [noted("a"), noted("b"), noted(""), noted("")] == [1, 1, 0, 0]
    assert [(line["event"], line.get("reason")) for line in lines] == [
        ("dispatch tree rejected, using a flat chain", "a"),
        ("dispatch tree accepted again", None),
    ]
