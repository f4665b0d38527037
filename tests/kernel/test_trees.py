"""Dispatch trees and balancing groups in real tables."""

from ipaddress import ip_address

import pytest

from pykubeproxy.agent.tables import FamilyTables
from pykubeproxy.agent.work import Changes
from pykubeproxy.config import load
from pykubeproxy.kernel import Backend, Iptables
from pykubeproxy.objects import Deleted, Family, Key, Kind, Listed, Port, Protocol, Updated
from pykubeproxy.rules.blocks import NFT_CHAINS_PER_BLOCK
from pykubeproxy.rules.context import KernelFacts, RuleContext, rule_context
from pykubeproxy.rules.ownership import is_owned
from pykubeproxy.rules.skeleton import FILTER_EXTERNAL, FILTER_SERVICES
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
    """Return many services with node ports; the first has many endpoints."""
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


def without_endpoints(cluster: Cluster, family: Family) -> Cluster:
    """Remove the endpoints of all Services, and add one with many ports and none either."""
    ports = tuple(Port(f"p{n}", Protocol(kind), n) for kind in ("TCP", "SCTP") for n in range(1, 701))
    cluster.apply(Listed(Kind.ENDPOINT_SLICE, ()))
    cluster.apply(Updated(service("wide", cluster_ip=address(family, SERVICES), ports=ports)))
    return cluster


def default_context(family: Family) -> RuleContext:
    return rule_context(load(None, {}).config, "node1", None, KernelFacts(nfacct=False), family)


@pytest.fixture
def tables(iptables: Iptables) -> FamilyTables:
    return FamilyTables(iptables, NFT_CHAINS_PER_BLOCK if iptables.backend is Backend.NFT else None)


def test_dispatch_trees_read_back(tables: FamilyTables, iptables: Iptables) -> None:
    """A second full sync has nothing to write."""
    cluster, rules_context = full_cluster(iptables.family), default_context(iptables.family)
    assert tables.sync(cluster, Changes(), rules_context).wrote
    tables.work.distrust()
    assert not tables.sync(cluster, Changes(), rules_context).wrote


def test_trees_in_table_filter_read_back(tables: FamilyTables, iptables: Iptables) -> None:
    """Without endpoints, all Services have a rule there, and node ports another one."""
    family = iptables.family
    cluster, rules_context = full_cluster(family), default_context(family)
    tables.sync(cluster, Changes(), rules_context)
    everything = {service.key for service in cluster.services()}
    report = tables.sync(
        without_endpoints(cluster, family), Changes(everything | {Key("ns", "wide")}), rules_context
    )
    assert report.rules_written["filter"] > 2 * SERVICES + 1400
    tables.work.distrust()
    assert not tables.sync(cluster, Changes(), rules_context).wrote
    live = iptables.save(("filter",))
    for root in (FILTER_SERVICES, FILTER_EXTERNAL):
        assert len(live.chains[root]) <= 3 * 16
    lost = tables.sync(
        cluster, Changes(cluster.apply(Deleted(Kind.SERVICE, Key("ns", "wide")))), rules_context
    )
    assert lost.chains_deleted >= 4
    back = full_cluster(family)
    tables.sync(back, Changes(everything), rules_context)
    assert not any(is_owned(key) for key in iptables.save(("filter",)).chains)


def test_a_new_service_changes_one_leaf_per_tree(tables: FamilyTables, iptables: Iptables) -> None:
    """Besides its own chains."""
    family = iptables.family
    cluster, rules_context = full_cluster(family), default_context(family)
    tables.sync(cluster, Changes(), rules_context)
    fresh = service(
        "new",
        cluster_ip=str(ip_address(address(family, 100)) + 1),
        ports=(Port("http", Protocol.TCP, 80, 30301),),
    )
    cluster.apply(Updated(slice_of(*pods(family, 1), service="new")))
    report = tables.sync(cluster, Changes(cluster.apply(Updated(fresh))), rules_context)
    # Its own KUBE-EXT, KUBE-SVC and KUBE-SEP chains, and one leaf of each tree.
    assert report.chains_written <= 5
    report = tables.sync(
        cluster,
        Changes({Key("ns", "new")} if not cluster.apply(Listed(Kind.NODE, ())) else ()),
        rules_context,
    )
    assert not report.wrote


def test_one_endpoint_of_many_changes_one_group(tables: FamilyTables, iptables: Iptables) -> None:
    """Besides its own chain and the shares of the groups."""
    family = iptables.family
    cluster, rules_context = full_cluster(family), default_context(family)
    tables.sync(cluster, Changes(), rules_context)
    changed = slice_of(*(endpoint(pod) for pod in pods(family, 201)), service="s0")
    report = tables.sync(cluster, Changes(cluster.apply(Updated(changed))), rules_context)
    assert report.chains_written == 3
