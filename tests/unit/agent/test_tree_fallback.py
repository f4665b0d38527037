"""A flat chain replaces a dispatch tree that iptables rejects."""

import msgspec
import pytest
from structlog.testing import capture_logs

from pykubeproxy.agent.tables import SyncFailed
from pykubeproxy.config import load
from pykubeproxy.kernel import Backend, Rejected
from pykubeproxy.objects import Updated
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.dispatch import TREE_ABOVE
from tests.fakes.iptables import fail_on
from tests.fakes.recorder import FakeRecorder, observers
from tests.fakes.synced import SyncedFamily, flags_context
from tests.objects import numbered, service, slice_of
from tests.reports import report

SERVICES = TREE_ABOVE + 50
LINKS = Rejected(9, "-I PREROUTING -j KUBE-SERVICES", "RULE_INSERT failed (Too many links)", 4)


def tables_of_many(backend: Backend) -> SyncedFamily:
    """Return a cluster large enough for a tree, not synced yet."""
    return SyncedFamily(*numbered(*range(SERVICES)), backend=backend)


def is_flat(synced: SyncedFamily) -> bool:
    return len(synced.chains()[skeleton.NAT_SERVICES]) == SERVICES + 1


def reject_trees(synced: SyncedFamily) -> None:
    """Let the kernel find too many jumps in a tree: another program may jump to our chains from deep below."""
    synced.live.on_restore = fail_on("services at", LINKS)


def accept_trees(synced: SyncedFamily) -> None:
    synced.live.on_restore = lambda _: None


@pytest.fixture(params=[Backend.NFT, Backend.LEGACY], ids=lambda backend: backend.value)
def synced(request: pytest.FixtureRequest) -> SyncedFamily:
    return tables_of_many(request.param)


def test_a_rejected_tree_is_replaced_by_a_flat_chain(synced: SyncedFamily) -> None:
    """In the same sync. All services are served; none is tried alone or quarantined."""
    reject_trees(synced)
    done = synced.sync()
    assert LINKS.message in done.rejected_tree
    assert (done.services, done.quarantined, done.held, is_flat(synced)) == (SERVICES, (), 0, True)
    assert len(synced.live.texts) == 2


def test_changes_do_not_try_the_rejected_tree_again(synced: SyncedFamily) -> None:
    """Only the hourly full sync does."""
    reject_trees(synced)
    synced.sync()
    synced.live.texts.clear()
    done = synced.sync(Updated(slice_of("10.244.9.9", service="svc7")))
    assert (bool(done.rejected_tree), done.full, len(synced.live.texts)) == (True, False, 1)
    synced.tables.distrust()
    assert synced.sync().rejected_tree
    accept_trees(synced)
    assert synced.sync(Updated(slice_of("10.244.9.8", service="svc7"))).rejected_tree
    synced.tables.retry_tree()
    assert not synced.sync().rejected_tree
    assert not is_flat(synced)


def test_other_options_try_the_rejected_tree_again(synced: SyncedFamily) -> None:
    reject_trees(synced)
    synced.sync()
    accept_trees(synced)
    assert not synced.sync(context=flags_context(masquerade_all="true")).rejected_tree
    assert not is_flat(synced)


def test_a_fault_of_the_node_does_not_reject_the_tree(synced: SyncedFamily) -> None:
    """A flat chain is rejected too, so the next sync uses the tree again."""
    synced.live.rejects = lambda rule: "-j DNAT" in rule
    with pytest.raises(SyncFailed):
        synced.sync()
    synced.live.rejects = lambda rule: False
    assert not synced.sync().rejected_tree
    assert not is_flat(synced)


def test_a_rejected_service_does_not_reject_the_tree(synced: SyncedFamily) -> None:
    """It is quarantined, and all others are dispatched by tree."""
    synced.live.rejects = lambda rule: "--to-destination 10.244.0.5:" in rule
    done = synced.sync_and_retry()
    assert ([it.name for it in done.quarantined], done.rejected_tree) == (["svc5"], "")
    assert not is_flat(synced)


def test_a_chain_that_cannot_be_deleted_does_not_reject_the_tree() -> None:
    """Another proxy refers to it. The next attempt reads which chains these are."""
    synced = tables_of_many(Backend.NFT)
    busy = Rejected(1, "-X KUBE-SEP-A", "CHAIN_DEL failed (Device or resource busy): chain KUBE-SEP-A", 4)
    synced.live.on_restore = fail_on("services at", busy, times=2)
    report = synced.sync()
    assert not (report.rejected_tree or report.held)
    assert not is_flat(synced)


def test_a_small_cluster_has_no_tree_to_reject() -> None:
    """The sync fails as before."""
    synced = tables_of_many(Backend.NFT)
    synced.live.on_restore = fail_on("", LINKS)
    with pytest.raises(SyncFailed):
        synced.sync(context=flags_context(dispatch="flat"))


def test_a_rejected_tree_is_reported_once() -> None:
    """By a warning, a metric and the status, until iptables accepts the tree again."""
    made = observers(load(None, {}).config, FakeRecorder())
    done = report(service())
    gauge = "pykubeproxy_dispatch_tree_rejected"

    def noted(reason: str) -> float | None:
        made.notice(msgspec.structs.replace(done, rejected_tree=reason))
        families = made.history.families(made.health.state())
        assert [it.rejected_tree for it in families] == [reason, ""]
        return made.metrics.registry.get_sample_value(gauge, {"ip_family": "IPv4"})

    with capture_logs() as lines:
        assert [noted("a"), noted("b"), noted(""), noted("")] == [1, 1, 0, 0]
    assert [(line["event"], line.get("reason")) for line in lines] == [
        ("dispatch tree rejected, using a flat chain", "a"),
        ("dispatch tree accepted again", None),
    ]
