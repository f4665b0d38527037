"""Dispatch trees and balancing in groups, on real tables."""

from ipaddress import ip_address

import pytest

from pykubeproxy.agent.sync.tables import FamilyTables
from pykubeproxy.config import load
from pykubeproxy.kernel import Backend, Iptables
from pykubeproxy.objects import Family, Key, Kind, Listed, Port, Protocol, Updated
from pykubeproxy.rules.blocks import NFT_CHAINS_PER_BLOCK
from pykubeproxy.rules.context import KernelFacts, RuleContext, rule_context
from pykubeproxy.services.cluster import Cluster
from tests.objects import endpoint, service, slice_of

SERVICES = 400

pytestmark = pytest.mark.root


def address(family: Family, number: int) -> str:
    base = ip_address("10.96.0.0" if family is Family.IPV4 else "fd00:96::")
    return str(base + number * 37)


def pods(family: Family, count: int) -> list[str]:
    return [f"10.244.1.{n}" if family is Family.IPV4 else f"fd00:244::{n:x}" for n in range(1, count + 1)]


def full_cluster(family: Family) -> Cluster:
    """Many services with node ports, the first of them with many endpoints."""
    cluster = Cluster()
    services = tuple(
        service(
            f"s{n}",
            cluster_ip=address(family, n),
            ports=(Port("http", Protocol.TCP, 80, 30000 + n * 3),),
        )
        for n in range(SERVICES)
    )
    slices = tuple(slice_of(*pods(family, 200 if n == 0 else 2), service=f"s{n}") for n in range(SERVICES))
    cluster.apply(Listed(Kind.SERVICE, services))
    cluster.apply(Listed(Kind.ENDPOINT_SLICE, slices))
    return cluster


def plain_terms(family: Family) -> RuleContext:
    return rule_context(load(None, {}).config, "node1", None, KernelFacts(nfacct=False), family)


@pytest.fixture
def tables(iptables: Iptables) -> FamilyTables:
    return FamilyTables(iptables, NFT_CHAINS_PER_BLOCK if iptables.backend is Backend.NFT else None)


def test_trees_read_back_as_written(tables: FamilyTables, iptables: Iptables) -> None:
    """A full sync over them has nothing to write, whatever masks and ranges they are made of."""
    cluster, on = full_cluster(iptables.family), plain_terms(iptables.family)
    assert tables.sync(cluster, (), on).wrote
    tables.require_resync()
    assert not tables.sync(cluster, (), on).wrote


def test_a_new_service_touches_its_own_chains_and_leaves(tables: FamilyTables, iptables: Iptables) -> None:
    """Of hundreds of chains two leaves are written besides the chains of the service, and the roots stay."""
    family = iptables.family
    cluster, on = full_cluster(family), plain_terms(family)
    tables.sync(cluster, (), on)
    fresh = service(
        "new",
        cluster_ip=str(ip_address(address(family, 100)) + 1),
        ports=(Port("http", Protocol.TCP, 80, 30301),),
    )
    cluster.apply(Updated(slice_of(*pods(family, 1), service="new")))
    report = tables.sync(cluster, cluster.apply(Updated(fresh)), on)
    # KUBE-EXT, KUBE-SVC and KUBE-SEP of its own, a leaf of each tree.
    assert report.chains_written <= 5
    report = tables.sync(cluster, {Key("ns", "new")} if not cluster.apply(Listed(Kind.NODE, ())) else (), on)
    assert not report.wrote


def test_one_endpoint_of_many_changes_one_group(tables: FamilyTables, iptables: Iptables) -> None:
    """Its own chain, its group and the shares of the groups are written; the trees are not."""
    family = iptables.family
    cluster, on = full_cluster(family), plain_terms(family)
    tables.sync(cluster, (), on)
    changed = slice_of(*(endpoint(pod) for pod in pods(family, 201)), service="s0")
    report = tables.sync(cluster, cluster.apply(Updated(changed)), on)
    assert report.chains_written == 3
