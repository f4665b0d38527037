"""How the metrics count object events, with the numbers of kube-proxy."""

import msgspec
import pytest

from pykubeproxy.agent.observe.metrics import Metrics
from pykubeproxy.objects import Deleted, Event, Family, Kind, Listed, Node, Updated
from pykubeproxy.services.cluster import Cluster
from tests.objects import service, slice_of

A, A_SLICE = service("a"), slice_of("10.244.0.1", service="a")
B = service("b", cluster_ips=("10.96.0.20", "fd00:96::20"))
B_IPV4, B_IPV6 = slice_of("10.244.0.1", service="b"), slice_of("fd00:244::1", service="b")
EXTERNAL_NAME = service("ext", type="ExternalName", cluster_ips=())
FQDN = msgspec.structs.replace(B_IPV4, name="fqdn", family=None)
HEADLESS = msgspec.structs.replace(B_IPV4, name="headless", headless=True)
LOCAL = service("a", internal_local=True)

# Events with what they add to the changes of Services and of endpoints, for both families and for IPv4 alone.
SEQUENCE: list[tuple[str, Event, tuple[int, int], tuple[int, int]]] = [
    ("an IPv4 Service", Updated(A), (2, 0), (1, 0)),
    ("its slice", Updated(A_SLICE), (0, 1), (0, 1)),
    ("an annotation of the Service", Updated(A), (2, 0), (1, 0)),
    ("an annotation of the slice", Updated(A_SLICE), (0, 1), (0, 1)),
    ("a dual-stack Service", Updated(B), (2, 0), (1, 0)),
    ("its IPv4 slice", Updated(B_IPV4), (0, 1), (0, 1)),
    ("its IPv6 slice", Updated(B_IPV6), (0, 1), (0, 0)),
    ("a slice of names", Updated(FQDN), (0, 0), (0, 0)),
    ("a slice of no Service", Updated(slice_of("10.244.0.9", service="")), (0, 0), (0, 0)),
    ("a headless slice", Updated(HEADLESS), (0, 0), (0, 0)),
    ("an ExternalName", Updated(EXTERNAL_NAME), (2, 0), (1, 0)),
    ("a slice of an unknown Service", Updated(slice_of("10.244.0.3", service="c")), (0, 1), (0, 1)),
    ("a changed policy", Updated(LOCAL), (2, 0), (1, 0)),
    ("a node", Updated(Node("node1")), (0, 0), (0, 0)),
    ("the same lists again", Listed(Kind.SERVICE, (LOCAL, B, EXTERNAL_NAME)), (0, 0), (0, 0)),
    ("a list without two slices", Listed(Kind.ENDPOINT_SLICE, (A_SLICE, B_IPV4)), (0, 2), (0, 1)),
    ("a list without Services", Listed(Kind.SERVICE, (B,)), (4, 0), (2, 0)),
    ("a deleted slice", Deleted(Kind.ENDPOINT_SLICE, B_IPV4.key), (0, 1), (0, 1)),
    ("a deleted Service", Deleted(Kind.SERVICE, B.key), (2, 0), (1, 0)),
]


@pytest.mark.parametrize("families", [tuple(Family), (Family.IPV4,)], ids=["both", "IPv4"])
def test_events_count_as_in_kube_proxy(families: tuple[Family, ...]) -> None:
    """Every family counts each event about a Service, its own family each event about an EndpointSlice."""
    cluster, metrics, before = Cluster(), Metrics(families=families), (0.0, 0.0)
    for name, event, both, ipv4 in SEQUENCE:
        metrics.event_applied(event, cluster.apply(event))
        now = total(metrics, "service"), total(metrics, "endpoint")
        added = now[0] - before[0], now[1] - before[1]
        assert (name, added) == (name, both if len(families) == 2 else ipv4)
        before = now


def test_the_first_lists_count() -> None:
    """Each object of them is one that was added."""
    cluster, metrics = Cluster(), Metrics()
    slices = A_SLICE, B_IPV4, B_IPV6, FQDN
    for event in (Listed(Kind.SERVICE, (A, B, EXTERNAL_NAME)), Listed(Kind.ENDPOINT_SLICE, slices)):
        metrics.event_applied(event, cluster.apply(event))
    assert (total(metrics, "service"), total(metrics, "endpoint")) == (6, 3)
    assert metrics.pending() == (2, 2)


@pytest.mark.parametrize("event", [Updated(EXTERNAL_NAME), Updated(FQDN), Updated(HEADLESS), Updated(B_IPV6)])
def test_nothing_waits_for_a_sync_that_will_not_come(event: Event) -> None:
    """Objects without rules, or only with rules of a family that is not served."""
    cluster, metrics = Cluster(), Metrics(families=(Family.IPV4,))
    metrics.event_applied(event, cluster.apply(event))
    assert metrics.pending() == (0, 0)


def test_changes_of_slices_wait_one_by_one() -> None:
    """Two slices of a Service, one of them changed twice."""
    cluster, metrics = Cluster(), Metrics()
    for slice_ in (B_IPV4, B_IPV6, slice_of("10.244.0.2", service="b")):
        metrics.event_applied(Updated(slice_), cluster.apply(Updated(slice_)))
    pending = "kubeproxy_sync_proxy_rules_endpoint_changes_pending"
    assert metrics.registry.get_sample_value(pending) == 3
    assert metrics.pending() == (0, 1)
    metrics.changes_synced()
    assert metrics.registry.get_sample_value(pending) == 0


def total(metrics: Metrics, what: str) -> float:
    value = metrics.registry.get_sample_value(f"kubeproxy_sync_proxy_rules_{what}_changes_total")
    assert value is not None
    return value
