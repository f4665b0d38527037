"""The metrics: those recorded from kube-proxy, what events count, and the programming latency."""

import pickle
import re
from collections.abc import Iterable
from fnmatch import fnmatch

import msgspec
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from pykubeproxy.agent.notices import EventApplied, Notice, SyncFailure, SyncQueued, SyncsEnded
from pykubeproxy.agent.observe.metrics import Latencies, Metrics
from pykubeproxy.objects import Deleted, EndpointSlice, Event, Family, Key, Kind, Listed, Node, Updated
from pykubeproxy.pages.servicez import Quarantined
from pykubeproxy.services.cluster import Cluster, ServiceChange
from pykubeproxy.services.ports import PortName
from pykubeproxy.sources import Outage
from pykubeproxy.sources.manifests import ManifestWatch
from tests.docs.pages import DOCS
from tests.fakes.http_client import recorded_response
from tests.objects import endpoint, service, slice_of
from tests.reports import ELSEWHERE, HERE, port_names, report

V4, V6 = Family.IPV4, Family.IPV6
DIFFERENCES = DOCS / "differences.md"
POWERS = [0.001 * 2**n for n in range(15)]
RULES = {"filter": 7, "nat": 84}
FAILURES = "sync_proxy_rules_iptables_restore_failures"
PARTIAL_FAILURES = "sync_proxy_rules_iptables_partial_restore_failures"
_TYPE = re.compile(r"^# TYPE (\S+) (\S+)", re.MULTILINE)
PROGRAMMING = [0, 0.25, 0.5, *range(1, 60), *range(60, 120, 5), *range(120, 301, 30)]


def parse(text: str) -> dict[str, Metric]:
    """Return kube-proxy's metrics from a response of /metrics."""
    families = text_string_to_metric_families(text)
    return {it.name: it for it in families if it.name.startswith("kubeproxy_")}


def scrape(metrics: Metrics) -> dict[str, Metric]:
    return parse(metrics.page().body.decode())


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    """Return the value of one sample, None if there is none."""
    return metrics.registry.get_sample_value(f"kubeproxy_{name}", labels)


def series(samples: Iterable[Sample]) -> set[tuple[str, frozenset[tuple[str, str]]]]:
    """Return names and labels, without bucket bounds."""
    return {(it.name, frozenset((k, v) for k, v in it.labels.items() if k != "le")) for it in samples}


def stability(metric: Metric) -> str:
    """Return the stability level that a help text begins with; "" without one or without further text."""
    level = re.match(r"\[([A-Z]+)\] \S", metric.documentation)
    return level[1] if level else ""


def bounds(metric: Metric) -> list[str]:
    """Return the bucket bounds of a histogram's first series, as text."""
    first = next(it.labels for it in metric.samples if "le" in it.labels)
    same = (it.labels for it in metric.samples if "le" in it.labels)
    return [it["le"] for it in same if it["ip_family"] == first["ip_family"]]


def changed(metrics: Metrics, kind: Kind, *services: str) -> None:
    """Apply an event of this kind that changes these Services in IPv4."""
    changes = {Key("ns", name): ServiceChange(ipv4=1) for name in services}
    metrics.notice(EventApplied(Deleted(kind, Key("ns", "object")), changes))


BAD = Quarantined.from_port(V4, PortName("ns", "bad", "http", "TCP"), "rejected", 1.0)


def tell(metrics: Metrics, notice: Notice, now: float = 0.0) -> None:
    """Let something happen at this time."""
    metrics._clock = lambda: now
    metrics.notice(notice)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(lambda _: 0, started=0.0)


@pytest.fixture
def lived(metrics: Metrics) -> Metrics:
    """Metrics after the same events as in the recorded kube-proxy."""
    changed(metrics, Kind.SERVICE, "web")
    changed(metrics, Kind.ENDPOINT_SLICE, "web")
    for family in Family:
        tell(metrics, SyncQueued(family, 0.0), 1.0)
        tell(metrics, report(family=family, full=True, rules=RULES), 2.0)
    metrics.notice(EventApplied(Updated(slice_at(2.5)), {}))
    tell(metrics, report(rules=RULES), 3.0)
    metrics.reconciled(V4, 0.01, 0)
    for page, status in (("healthz", 200), ("healthz", 503), ("livez", 200), ("readyz", 200)):
        metrics.health_served(page, status)
    metrics.notice(SyncsEnded(True, None))
    return metrics


def test_names_types_and_labels_equal_kube_proxys(lived: Metrics) -> None:
    """The same metrics with the same types, stability levels and series, beside counters that are still 0."""
    ours, theirs = scrape(lived), parse(recorded_response("GET :10249/metrics").body)
    assert len(theirs) == 19
    assert ours.keys() - theirs.keys() == {f"kubeproxy_{name}" for name in (FAILURES, PARTIAL_FAILURES)}
    assert {name: ours[name].type for name in theirs} == {name: it.type for name, it in theirs.items()}
    for name, metric in theirs.items():
        started = [it for it in ours[name].samples if metric.type != "counter" or it.value]
        assert series(started) <= series(metric.samples) <= series(ours[name].samples)
        assert stability(ours[name]) == stability(metric) == "ALPHA"


def test_metrics_of_libraries_are_served_or_listed_as_missing(lived: Metrics) -> None:
    """Each metric that kube-proxy has besides its own: with its type, or in docs/differences.md."""
    recorded = recorded_response("GET :10249/metrics (types of the others; of go_, one)").body
    ours, theirs = (dict(_TYPE.findall(it)) for it in (lived.page().body.decode(), recorded))
    served = {name: type_ for name, type_ in theirs.items() if name in ours}
    assert served == {name: ours[name] for name in served}
    assert len(served) == 6
    (row,) = (
        it for it in DIFFERENCES.read_text().splitlines() if it.startswith("| metrics of its libraries:")
    )
    listed = re.findall(r"`([a-z_*]+)`", row.split("|")[1])
    assert [it for it in theirs.keys() - served if not any(fnmatch(it, name) for name in listed)] == []
    assert [it for it in listed if not any(fnmatch(name, it) for name in theirs)] == []


def test_buckets_equal_kube_proxys(lived: Metrics) -> None:
    """Bounds equal the specification, in the recorded format."""
    ours, theirs = scrape(lived), parse(recorded_response("GET :10249/metrics").body)
    for name, metric in theirs.items():
        if metric.type == "histogram":
            assert set(bounds(metric)) <= set(bounds(ours[name]))
            numbers = PROGRAMMING if "programming" in name else POWERS
            assert [float(it) for it in bounds(ours[name])] == pytest.approx([*numbers, float("inf")])
    assert {"0", "0.25", "1", "59", "115", "300"} <= set(
        bounds(ours["kubeproxy_network_programming_duration_seconds"])
    )


def test_every_metric_has_help_and_type(lived: Metrics) -> None:
    """Each metric appears once, and no series is called _created."""
    text = lived.page().body.decode()
    named = re.findall(r"^# TYPE (kubeproxy_\S+)", text, re.MULTILINE)
    assert (
        sorted(named)
        == sorted(set(named))
        == sorted(set(re.findall(r"^# HELP (kubeproxy_\S+)", text, re.MULTILINE)))
    )
    assert "_created" not in text
    assert lived.page().content_type == "text/plain; version=0.0.4; charset=utf-8; escaping=underscores"
    assert "process_resident_memory_bytes" in text


def test_counters_start_at_0(metrics: Metrics) -> None:
    """In the families that the node serves, so that a rate shows the first increase."""
    for made, families in ((metrics, Family), (Metrics(families=(V4,)), (V4,))):
        counters = [
            it for it in made.registry.collect() if it.type == "counter" and it.name != "process_cpu_seconds"
        ]
        assert all(it.samples and all(not sample.value for sample in it.samples) for it in counters)
        by_family = [it for it in counters if "ip_family" in it.samples[0].labels]
        assert len(by_family) == 4
        for it in by_family:
            assert {sample.labels["ip_family"] for sample in it.samples} == {
                family.value for family in families
            }


def test_failures_are_counted(lived: Metrics) -> None:
    """Partial failures count only for partial syncs. A rejected service port or tree counts once."""
    tell(lived, SyncFailure(V4, True, 0.1, True, "refused"))
    whole, partial = f"{FAILURES}_total", f"{PARTIAL_FAILURES}_total"
    assert (value(lived, whole, ip_family="IPv4"), value(lived, partial, ip_family="IPv4")) == (1, 0)
    tell(lived, SyncFailure(V4, False, 0.1, False, "no such file"))
    assert (value(lived, whole, ip_family="IPv4"), value(lived, partial, ip_family="IPv4")) == (1, 1)
    for rejected in ((), (BAD,), (BAD,), ()):
        tell(lived, msgspec.structs.replace(report(), quarantined=rejected), 4.0)
    assert value(lived, whole, ip_family="IPv4") == 2
    for reason in ("too many links", "too many links in another chain"):
        tell(lived, msgspec.structs.replace(report(), rejected_tree=reason), 4.0)
    assert value(lived, whole, ip_family="IPv4") == 3
    assert value(lived, whole, ip_family="IPv6") == 0
    assert value(lived, "sync_proxy_rules_duration_seconds_count", ip_family="IPv4") == 10


def test_syncs_are_measured(metrics: Metrics) -> None:
    """Duration of all, full and partial syncs; time and rules of the last success."""
    tell(metrics, SyncQueued(V4, 0.0), 1000.5)
    first = report(full=True, seconds=0.5, rules_written={"nat": 26, "mangle": 0}, rules=RULES)
    tell(metrics, first, 1001.5)
    second = report(full=False, seconds=0.25, rules_written={"filter": 3}, rules={"nat": 85, "filter": 8})
    tell(metrics, second, 1002.5)
    for name, sum_ in (("sync", 0.75), ("sync_full", 0.5), ("sync_partial", 0.25)):
        assert value(metrics, f"{name}_proxy_rules_duration_seconds_sum", ip_family="IPv4") == sum_
    assert value(metrics, "sync_proxy_rules_last_queued_timestamp_seconds", ip_family="IPv4") == 1000.5
    assert value(metrics, "sync_proxy_rules_last_timestamp_seconds", ip_family="IPv4") == 1002.5
    for table, last, total in (("nat", 0, 85), ("filter", 3, 8)):
        assert value(metrics, "sync_proxy_rules_iptables_last", table=table, ip_family="IPv4") == last
        assert value(metrics, "sync_proxy_rules_iptables_total", table=table, ip_family="IPv4") == total


def test_services_without_local_endpoints_are_counted(metrics: Metrics) -> None:
    """Service ports under policy Local whose endpoints are on other nodes, by policy."""

    def counts() -> tuple[float | None, ...]:
        name = "sync_proxy_rules_no_local_endpoints_total"
        return tuple(
            value(metrics, name, traffic_policy=policy, ip_family="IPv4")
            for policy in ("internal", "external")
        )

    def sync(*objects: object, gone: Iterable[object] = ()) -> None:
        tell(metrics, report(*objects, gone=gone), 1.0)  # type: ignore[arg-type]

    internal = service("internal", internal_local=True)
    external = service(
        "external", type="LoadBalancer", external_local=True, load_balancer_ips=("198.51.100.1",)
    )
    elsewhere = [
        slice_of(endpoint("10.1.0.9", node_name=ELSEWHERE), service=name) for name in ("internal", "external")
    ]
    here = slice_of(endpoint("10.1.0.1", node_name=HERE), service="internal")
    sync(internal, external)
    assert counts() == (0, 0)
    sync(internal, external, *elsewhere)
    assert counts() == (1, 1)
    sync(internal, here)
    assert counts() == (0, 1)
    sync(gone=port_names(external))
    assert counts() == (0, 0)


def test_packet_counters_are_read_at_each_scrape() -> None:
    """A counter that cannot be read has no metric."""
    packets: dict[str, int] = {}
    metrics = Metrics(packets.get)
    name = "iptables_ct_state_invalid_dropped_packets_total"
    assert value(metrics, name) is None
    packets["ct_state_invalid_dropped_pkts"] = 5
    packets["localhost_nps_accepted_pkts"] = 7
    assert value(metrics, name) == 5
    assert value(metrics, "iptables_localhost_nodeports_accepted_packets_total") == 7
    packets["ct_state_invalid_dropped_pkts"] = 6
    assert value(metrics, name) == 6


def test_failing_watches_are_reported(metrics: Metrics) -> None:
    """Seconds since a watch fails, by resource; 0 while it works."""
    away, well = ManifestWatch("-"), ManifestWatch("-")
    away.name, away.outage = "watch-services", Outage("services", 9.5, "refused")
    metrics.watching((away, well))
    page = metrics.page().body.decode()
    assert 'pykubeproxy_unwatched_seconds{resource="services"} 9.5\n' in page
    assert 'pykubeproxy_unwatched_seconds{resource="manifests"} 0.0\n' in page


def test_conntrack_and_latency(metrics: Metrics) -> None:
    """Deleted entries add up; latencies fall into their buckets."""
    metrics.reconciled(V6, 0.003, 2)
    metrics.reconciled(V6, 0.003, 0)
    metrics.notice(EventApplied(Updated(slice_at(1.0, address="fd00::1")), {}))
    tell(metrics, report(family=V6), 1.3)
    assert value(metrics, "conntrack_reconciler_deleted_entries_total", ip_family="IPv6") == 2
    assert value(metrics, "conntrack_reconciler_sync_duration_seconds_count", ip_family="IPv6") == 2
    text = metrics.page().body.decode()
    assert 'kubeproxy_network_programming_duration_seconds_bucket{ip_family="IPv6",le="0.25"} 0.0\n' in text
    assert 'kubeproxy_network_programming_duration_seconds_bucket{ip_family="IPv6",le="0.5"} 1.0\n' in text


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
        metrics.notice(EventApplied(event, cluster.apply(event)))
        now = total(metrics, "service"), total(metrics, "endpoint")
        added = now[0] - before[0], now[1] - before[1]
        assert (name, added) == (name, both if len(families) == 2 else ipv4)
        before = now


def test_the_first_lists_count() -> None:
    """Each object of them is one that was added."""
    cluster, metrics = Cluster(), Metrics()
    slices = A_SLICE, B_IPV4, B_IPV6, FQDN
    for event in (Listed(Kind.SERVICE, (A, B, EXTERNAL_NAME)), Listed(Kind.ENDPOINT_SLICE, slices)):
        metrics.notice(EventApplied(event, cluster.apply(event)))
    assert (total(metrics, "service"), total(metrics, "endpoint")) == (6, 3)
    assert metrics.pending() == (2, 2)


@pytest.mark.parametrize("event", [Updated(EXTERNAL_NAME), Updated(FQDN), Updated(HEADLESS), Updated(B_IPV6)])
def test_nothing_waits_for_a_sync_that_will_not_come(event: Event) -> None:
    """Objects without rules, or only with rules of a family that is not served."""
    cluster, metrics = Cluster(), Metrics(families=(Family.IPV4,))
    metrics.notice(EventApplied(event, cluster.apply(event)))
    assert metrics.pending() == (0, 0)


def test_changes_of_slices_wait_one_by_one() -> None:
    """Two slices of a Service, one of them changed twice."""
    cluster, metrics = Cluster(), Metrics()
    for slice_ in (B_IPV4, B_IPV6, slice_of("10.244.0.2", service="b")):
        metrics.notice(EventApplied(Updated(slice_), cluster.apply(Updated(slice_))))
    pending = "kubeproxy_sync_proxy_rules_endpoint_changes_pending"
    assert metrics.registry.get_sample_value(pending) == 3
    assert metrics.pending() == (0, 1)
    metrics.notice(SyncsEnded(True, None))
    assert metrics.registry.get_sample_value(pending) == 0


def total(metrics: Metrics, what: str) -> float:
    value = metrics.registry.get_sample_value(f"kubeproxy_sync_proxy_rules_{what}_changes_total")
    assert value is not None
    return value


STARTED = 1000.0


def slice_at(
    at: float | None, name: str = "web-1", address: str = "10.1.0.1", **fields: object
) -> EndpointSlice:
    """Return a slice with this trigger time."""
    return slice_of(address, name=name, trigger_time=at, **fields)  # type: ignore[arg-type]


@pytest.fixture
def latencies() -> Latencies:
    return Latencies(STARTED, Family)


def test_each_change_counts_once(latencies: Latencies) -> None:
    """Several changes of a slice before a sync are several samples."""
    for trigger in (1001.0, 1002.5, 1002.5):
        latencies.event_applied(Updated(slice_at(trigger)))
    assert latencies.sync_succeeded(V4, 1003.0) == [2.0, 0.5]
    assert latencies.sync_succeeded(V4, 1004.0) == []
    # The same time again, as after a relist or a change of something else.
    latencies.event_applied(Updated(slice_at(1002.5)))
    latencies.event_applied(Listed(Kind.ENDPOINT_SLICE, (slice_at(1002.5),)))
    assert latencies.sync_succeeded(V4, 1005.0) == []


def test_the_oldest_of_replaced_events_counts(latencies: Latencies) -> None:
    """If it is new; the last one counts as seen."""
    latencies.event_applied(Updated(slice_at(1003.0), replaced=1001.0))
    latencies.event_applied(Updated(slice_at(1003.0), replaced=1003.0))
    assert latencies.sync_succeeded(V4, 1005.0) == [4.0]
    latencies.event_applied(Updated(slice_at(1004.0), replaced=1003.0))
    latencies.event_applied(Updated(slice_at(None), replaced=1004.5))
    latencies.event_applied(Updated(slice_at(1004.75), replaced=STARTED - 1))
    assert latencies.sync_succeeded(V4, 1005.0) == [1.0, 0.5, 0.25]


def test_changes_before_the_start_do_not_count(latencies: Latencies) -> None:
    """The first list contains changes that another process may have applied."""
    slices = (slice_at(999.0), slice_at(1000.0, "web-2"), slice_at(None, "web-3"), slice_at(1001.0, "web-4"))
    latencies.event_applied(Listed(Kind.ENDPOINT_SLICE, slices))
    assert latencies.sync_succeeded(V4, 1002.0) == [1.0]


def test_families_are_measured_separately(latencies: Latencies) -> None:
    """A change counts when the family of its slice is synced."""
    latencies.event_applied(Updated(slice_at(1001.0)))
    latencies.event_applied(Updated(slice_at(1002.0, "web-6", "fd00::1")))
    assert latencies.sync_succeeded(V4, 1005.0) == [4.0]
    assert latencies.sync_succeeded(V6, 1006.0) == [4.0]


def test_unserved_families_use_no_memory() -> None:
    """On a node without IPv6 in a dual-stack cluster, they would add up."""
    latencies = Latencies(STARTED, [V4])
    kept = pickle.dumps(latencies)
    for second in range(10):
        latencies.event_applied(Updated(slice_at(1001.0 + second, "web-6", "fd00::1")))
    assert pickle.dumps(latencies) == kept
    latencies.event_applied(Updated(slice_at(1001.0)))
    assert latencies.sync_succeeded(V4, 1005.0) == [4.0]


def test_deleted_slices_do_not_count(latencies: Latencies) -> None:
    """Their trigger time is that of the last change; a slice missing from a list counts as deleted."""
    gone = slice_at(1001.0)
    latencies.event_applied(Updated(gone))
    latencies.event_applied(Deleted(Kind.ENDPOINT_SLICE, gone.key))
    assert latencies.sync_succeeded(V4, 1005.0) == []
    latencies.event_applied(Updated(gone))
    latencies.event_applied(Listed(Kind.ENDPOINT_SLICE, ()))
    assert latencies.sync_succeeded(V4, 1005.0) == []


def test_only_slices_that_lead_to_rules_count(latencies: Latencies) -> None:
    """A clock set back gives no negative latency."""
    latencies.event_applied(Updated(service()))
    latencies.event_applied(Listed(Kind.SERVICE, (service(),)))
    latencies.event_applied(Deleted(Kind.SERVICE, Key("ns", "web")))
    assert latencies.sync_succeeded(V4, 1005.0) == []
    latencies.event_applied(Updated(slice_at(1010.0)))
    assert latencies.sync_succeeded(V4, 1005.0) == [0.0]


@pytest.mark.parametrize("fields", [{"service": ""}, {"headless": True}])
def test_slices_that_cause_no_sync_do_not_count(latencies: Latencies, fields: dict[str, object]) -> None:
    """Otherwise a later sync would report how long nothing had to be done."""
    latencies.event_applied(Updated(slice_at(1001.0, **fields)))  # type: ignore[arg-type]
    assert latencies.sync_succeeded(V4, 5000.0) == []


def test_changes_of_a_deferred_service_count_once_they_are_applied(latencies: Latencies) -> None:
    """Those of others count at once; further changes until then are samples of their own."""
    web, other = Key("ns", "web"), slice_at(1001.0, "other-1", service="other")
    latencies.event_applied(Updated(slice_at(1001.0)))
    latencies.event_applied(Updated(other))
    assert latencies.sync_succeeded(V4, 1002.0, {web}) == [1.0]
    latencies.event_applied(Updated(slice_at(1003.0)))
    assert latencies.sync_succeeded(V4, 1004.0, {web}) == []
    assert latencies.sync_succeeded(V4, 1006.0) == [5.0, 3.0]
