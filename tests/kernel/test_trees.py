"""Dispatch trees and balancing groups in real tables."""

from collections.abc import Iterator
from ipaddress import ip_address

import pytest

from pykubeproxy.kernel import Iptables
from pykubeproxy.objects import Deleted, Event, Family, Kind, Listed, Port, Protocol, Updated
from pykubeproxy.rules.ownership import is_owned
from pykubeproxy.rules.skeleton import FILTER_EXTERNAL, FILTER_SERVICES
from tests.fakes.synced import SyncedFamily
from tests.objects import endpoint, service, slice_of

SERVICES = 400

pytestmark = pytest.mark.root


def address(family: Family, number: int) -> str:
    base = ip_address("10.96.0.0" if family is Family.IPV4 else "fd00:96::")
    return str(base + number * 37)


def pods(family: Family, count: int) -> list[str]:
    return [f"10.244.1.{n}" if family is Family.IPV4 else f"fd00:244::{n:x}" for n in range(1, count + 1)]


def world(family: Family) -> Iterator[Event]:
    """Yield many services with node ports; the first has many endpoints."""
    services = tuple(
        service(
            f"s{n}",
            cluster_ip=address(family, n),
            ports=(Port("http", Protocol.TCP, 80, 30000 + n * 3),),
        )
        for n in range(SERVICES)
    )
    slices = tuple(slice_of(*pods(family, 200 if n == 0 else 2), service=f"s{n}") for n in range(SERVICES))
    yield Listed(Kind.SERVICE, services)
    yield Listed(Kind.ENDPOINT_SLICE, slices)


@pytest.fixture
def synced(iptables: Iptables) -> SyncedFamily:
    made = SyncedFamily(*world(iptables.family), live=iptables)
    assert made.sync().wrote
    return made


def is_stable(synced: SyncedFamily) -> bool:
    """Return whether a second full sync has nothing to write."""
    synced.tables.distrust()
    return not synced.sync().wrote


def test_dispatch_trees_read_back(synced: SyncedFamily) -> None:
    assert is_stable(synced)


def test_trees_in_table_filter_read_back(synced: SyncedFamily, iptables: Iptables) -> None:
    """Without endpoints, all Services have a rule there, and node ports another one. One has many ports."""
    ports = tuple(Port(f"p{n}", Protocol(kind), n) for kind in ("TCP", "SCTP") for n in range(1, 701))
    wide = service("wide", cluster_ip=address(iptables.family, SERVICES), ports=ports)
    report = synced.sync(Listed(Kind.ENDPOINT_SLICE, ()), Updated(wide))
    assert report.rules_written["filter"] > 2 * SERVICES + 1400
    assert is_stable(synced)
    live = iptables.save(("filter",))
    for root in (FILTER_SERVICES, FILTER_EXTERNAL):
        assert len(live.chains[root]) <= 3 * 16
    assert synced.sync(Deleted(Kind.SERVICE, wide.key)).chains_deleted >= 4
    synced.sync(*world(iptables.family))
    assert not any(is_owned(key) for key in iptables.save(("filter",)).chains)


def test_a_new_service_changes_one_leaf_per_tree(synced: SyncedFamily, iptables: Iptables) -> None:
    """Besides its own chains."""
    family = iptables.family
    fresh = service(
        "new",
        cluster_ip=str(ip_address(address(family, 100)) + 1),
        ports=(Port("http", Protocol.TCP, 80, 30301),),
    )
    report = synced.sync(Updated(slice_of(*pods(family, 1), service="new")), Updated(fresh))
    # Its own KUBE-EXT, KUBE-SVC and KUBE-SEP chains, and one leaf of each tree.
    assert report.chains_written <= 5
    synced.tables.pending.mark({fresh.key})
    assert not synced.sync().wrote


def test_one_endpoint_of_many_changes_one_group(synced: SyncedFamily, iptables: Iptables) -> None:
    """Besides its own chain and the shares of the groups."""
    changed = slice_of(*(endpoint(pod) for pod in pods(iptables.family, 201)), service="s0")
    assert synced.sync(Updated(changed)).chains_written == 3
