"""A first sync writes the own chains of many Services while it computes the rest."""

import pytest

from pykubeproxy.agent import coverage, tables
from pykubeproxy.agent.write import SyncFailed
from pykubeproxy.kernel import Backend, Failed
from pykubeproxy.objects import Updated
from tests.fakes.synced import SyncedFamily
from tests.objects import numbered, service, slice_of

SERVICES = range(1, 21)
MANY = [f"10.244.9.{number}" for number in range(1, 31)]


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "LEAST_SERVICES", len(SERVICES))
    monkeypatch.setattr(coverage, "LARGE_CLUSTER_ENDPOINTS", len(SERVICES) - 1)


def node(backend: Backend = Backend.NFT, chains_per_block: int = 10) -> SyncedFamily:
    """Return a node with twenty Services, and one of which the chains do not fit in a block."""
    large = Updated(service("large", cluster_ip="10.96.1.1"))
    return SyncedFamily(
        *numbered(*SERVICES),
        large,
        Updated(slice_of(*MANY, service="large")),
        backend=backend,
        chains_per_block=chains_per_block,
    )


def test_own_chains_come_first_and_are_written_once() -> None:
    """Those of a Service with too many chains come with the rest. The tables are as without a head start."""
    synced = node()
    report = synced.sync()
    ahead, rest = synced.live.texts
    assert ahead.count("COMMIT") > 2
    assert ":KUBE-SERVICES" not in ahead
    assert (ahead.count(":KUBE-SEP-"), rest.count(":KUBE-SEP-")) == (len(SERVICES), len(MANY))
    assert report.chains_written == ahead.count("\n:") + rest.count("\n:")
    fresh = synced.fresh()
    fresh.sync()
    assert synced.chains() == fresh.chains()
    assert not synced.sync().wrote


def test_tables_with_our_chains_get_none() -> None:
    """A restart compares first. On legacy, each block replaces a whole table."""
    synced = node()
    synced.sync()
    synced.restart()
    assert not synced.sync().wrote
    legacy = node(Backend.LEGACY)
    legacy.tables = tables.FamilyTables(legacy.live, None)
    legacy.sync()
    assert len(legacy.live.texts) == 1


def test_a_small_cluster_keeps_its_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only rules of a large cluster have none, which a head start takes for granted."""
    monkeypatch.setattr(coverage, "LARGE_CLUSTER_ENDPOINTS", 1000)
    synced, fresh = node(), node().fresh()
    synced.sync()
    fresh.cluster = synced.cluster
    fresh.sync()
    assert synced.chains() == fresh.chains()


@pytest.mark.parametrize("chains_per_block", [10, 1000])
def test_a_rejected_service_is_found(chains_per_block: int) -> None:
    """As without a head start: the others get their rules, even if the first block was rejected."""
    synced = node(chains_per_block=chains_per_block)
    rejected = min(_targets())
    synced.live.rejects = lambda rule: rule.endswith(f"--to-destination {rejected}")
    report = synced.sync_and_retry()
    assert len(report.quarantined) == 1
    assert synced.targets() == _targets() - {rejected}


def test_a_failure_fails_the_sync() -> None:
    """The next one goes on."""
    synced = node()

    def fail(text: str) -> None:
        raise Failed("iptables-restore", 1, "out of memory")

    synced.live.on_restore = fail
    with pytest.raises(SyncFailed, match="out of memory"):
        synced.sync()
    assert len(synced.live.texts) == 1
    synced.live.on_restore = lambda _: None
    synced.sync()
    assert synced.targets() == _targets()


def _targets() -> set[str]:
    synced = node()
    synced.sync()
    return synced.targets()
