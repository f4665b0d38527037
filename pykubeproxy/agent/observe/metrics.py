"""The metrics of kube-proxy, under its names: what dashboards and alerts on it are made for."""

from collections.abc import Callable, Iterable, Iterator, Mapping

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from pykubeproxy.agent import http
from pykubeproxy.agent.sync.report import Report
from pykubeproxy.kernel import nfacct
from pykubeproxy.objects import Family, Key, Kind
from pykubeproxy.rules import skeleton
from pykubeproxy.services.ports import PortName
from pykubeproxy.sources import Watch

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FAMILY = ("ip_family",)
_SYNC_SECONDS = tuple(0.001 * 2**power for power in range(15))
_PROGRAMMING_SECONDS = (
    *(0.0, 0.25, 0.5),
    *map(float, (*range(1, 60), *range(60, 120, 5), *range(120, 301, 30))),
)
_NFACCT = {
    skeleton.INVALID_DROPPED: (
        "kubeproxy_iptables_ct_state_invalid_dropped_packets",
        "Packets dropped because connection tracking calls them invalid",
    ),
    skeleton.LOCALHOST_ACCEPTED: (
        "kubeproxy_iptables_localhost_nodeports_accepted_packets",
        "Packets to node ports on 127.0.0.0/8",
    ),
}


class Metrics:
    """Counts and measures what it is told. Any thread may tell and ask; only `synced` is for one thread.

    All times are seconds, points in time seconds since 1970. `read_counter` gives the packets of an nfacct counter, or
    None; it is called at each scrape.
    """

    def __init__(self, read_counter: Callable[[str], int | None] | None = None) -> None:
        # Without the series NAME_created, which kube-proxy has not.
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._lacking: dict[Family, dict[PortName, tuple[bool, bool]]] = {}
        make = _Maker(self.registry)
        self._sync = make.histogram("sync_proxy_rules_duration_seconds", "How long syncs took")
        self._full = make.histogram("sync_full_proxy_rules_duration_seconds", "How long full syncs took")
        self._partial = make.histogram(
            "sync_partial_proxy_rules_duration_seconds", "How long partial syncs took"
        )
        self._programming = make.histogram(
            "network_programming_duration_seconds",
            "From the change of a Service or Pod to the rules that follow from it",
            _PROGRAMMING_SECONDS,
        )
        self._synced_at = make.gauge(
            "sync_proxy_rules_last_timestamp_seconds", "When rules were last synced with success", _FAMILY
        )
        self._queued_at = make.gauge(
            "sync_proxy_rules_last_queued_timestamp_seconds", "When a sync was last asked for", _FAMILY
        )
        self._pending = {
            Kind.ENDPOINT_SLICE: make.gauge(
                "sync_proxy_rules_endpoint_changes_pending",
                "Services whose changed endpoints are not yet synced",
            ),
            Kind.SERVICE: make.gauge(
                "sync_proxy_rules_service_changes_pending", "Changed Services that are not yet synced"
            ),
        }
        self._changes = {
            Kind.ENDPOINT_SLICE: make.counter(
                "sync_proxy_rules_endpoint_changes_total", "Changes of Services' endpoints"
            ),
            Kind.SERVICE: make.counter("sync_proxy_rules_service_changes_total", "Changes of Services"),
        }
        self._rules_last = make.gauge(
            "sync_proxy_rules_iptables_last", "Rules written by the last sync", ("table", *_FAMILY)
        )
        self._rules = make.gauge("sync_proxy_rules_iptables_total", "Rules in force", ("table", *_FAMILY))
        self._no_local = make.gauge(
            "sync_proxy_rules_no_local_endpoints_total",
            "Service ports with a Local traffic policy, and endpoints on other nodes only",
            ("traffic_policy", *_FAMILY),
        )
        self._failures = make.counter(
            "sync_proxy_rules_iptables_restore_failures_total", "Failures of iptables-restore", _FAMILY
        )
        self._partial_failures = make.counter(
            "sync_proxy_rules_iptables_partial_restore_failures_total", "Failures of partial syncs", _FAMILY
        )
        self._aside = Gauge(
            "pykubeproxy_services_set_aside",
            "Services with ports that are not served, for iptables refuses their rules",
            _FAMILY,
            registry=self.registry,
        )
        self._unwatched = Gauge(
            "pykubeproxy_unwatched_seconds",
            "For how long the API server could not be asked about these objects",
            ("resource",),
            registry=self.registry,
        )
        self._repairs = Counter(
            "pykubeproxy_drift_repairs",
            "Times that tables were repaired for others had changed our rules",
            (*_FAMILY, "table"),
            registry=self.registry,
        )
        self._repair_seconds = Histogram(
            "pykubeproxy_drift_repair_duration_seconds",
            "From the notice of a change by others to the end of its repair",
            _FAMILY,
            buckets=_SYNC_SECONDS,
            registry=self.registry,
        )
        self._contested = Gauge(
            "pykubeproxy_drift_contested",
            "1 while somebody undoes our rules again and again",
            _FAMILY,
            registry=self.registry,
        )
        self._flows = make.counter(
            "conntrack_reconciler_deleted_entries_total",
            "Stale flows deleted from connection tracking",
            _FAMILY,
        )
        self._reconciled = make.histogram(
            "conntrack_reconciler_sync_duration_seconds", "How long it took to look for stale flows"
        )
        self._asked = {
            page: make.counter(f"proxy_{page}_total", f"Answers of /{page} by HTTP status", ("code",))
            for page in ("healthz", "livez")
        }
        self.registry.register(_PacketCounters(read_counter or _packets))
        ProcessCollector(registry=self.registry)

    def watching(self, watches: Iterable[Watch]) -> None:
        """From now on tell at each scrape whether these work."""
        for watch in watches:
            gauge = self._unwatched.labels(watch.name.removeprefix("watch-"))
            gauge.set_function(lambda watch=watch: it.seconds if (it := watch.trouble) else 0.0)  # type: ignore[misc]

    def changed(self, kind: Kind, concerned: Iterable[Key], pending: int) -> None:
        """An event changed these Services, or their endpoints; now there are `pending` such that wait for a sync."""
        if kind in self._changes:
            self._changes[kind].inc(len(set(concerned)))
            self._pending[kind].set(pending)

    def settled(self) -> None:
        """All families are in line with all changes."""
        for gauge in self._pending.values():
            gauge.set(0)

    def queued(self, family: Family, now: float) -> None:
        """A sync was asked for."""
        self._queued_at.labels(family.value).set(now)

    def synced(self, report: Report, rules: Mapping[str, int], now: float) -> None:
        """A sync succeeded; `rules` are those of ours now in each table."""
        family = report.family
        seconds = sum(report.seconds.values())
        self._took(family, report.full, seconds)
        self._synced_at.labels(family.value).set(now)
        for table in ("filter", "nat"):
            self._rules_last.labels(table, family.value).set(report.rules_written.get(table, 0))
            self._rules.labels(table, family.value).set(rules.get(table, 0))
        self._aside.labels(family.value).set(len({aside.name.service_key for aside in report.aside}))
        self._count_lacking(report)

    def refused(self, family: Family) -> None:
        """iptables-restore refused what it was given for some services, and has written the rest since."""
        self._failures.labels(family.value).inc()

    def repaired(self, family: Family, tables: Iterable[str], seconds: float, contested: bool) -> None:
        """These tables were put right, `seconds` after it was noticed; `contested`: not for the first time."""
        for table in tables:
            self._repairs.labels(family.value, table).inc()
        self._repair_seconds.labels(family.value).observe(seconds)
        self._contested.labels(family.value).set(contested)

    def left_alone(self, family: Family) -> None:
        """Nobody undoes our rules any more."""
        self._contested.labels(family.value).set(0)

    def failed(self, family: Family, full: bool, seconds: float, writing: bool) -> None:
        """A sync failed after `seconds`; `writing` says that it was iptables-restore that failed."""
        self._took(family, full, seconds)
        if writing:
            self._failures.labels(family.value).inc()
        if not full:
            self._partial_failures.labels(family.value).inc()

    def programmed(self, family: Family, latency: float) -> None:
        """A change of endpoints is in force, that long after its cause."""
        self._programming.labels(family.value).observe(latency)

    def reconciled(self, family: Family, seconds: float, deleted: int) -> None:
        """Connection tracking was searched for stale flows."""
        self._reconciled.labels(family.value).observe(seconds)
        self._flows.labels(family.value).inc(deleted)

    def asked(self, page: str, status: int) -> None:
        """A page of health was answered; of some pages nobody counts them."""
        if page in self._asked:
            self._asked[page].labels(str(status)).inc()

    def page(self) -> http.Answer:
        """/metrics."""
        return http.Answer(prometheus_client.generate_latest(_AsKubeProxy(self.registry)), CONTENT_TYPE)

    def _took(self, family: Family, full: bool, seconds: float) -> None:
        self._sync.labels(family.value).observe(seconds)
        (self._full if full else self._partial).labels(family.value).observe(seconds)

    def _count_lacking(self, report: Report) -> None:
        lacking = self._lacking.setdefault(report.family, {})
        for name in report.gone:
            lacking.pop(name, None)
        for item in report.served:
            elsewhere = item.selection.any_usable and not item.selection.local
            internal, external = item.port.internal_local, item.port.external_local
            lacking.pop(item.port.name, None)
            if elsewhere and (internal or external):
                lacking[item.port.name] = internal, external
        for policy, index in (("internal", 0), ("external", 1)):
            count = sum(flags[index] for flags in lacking.values())
            self._no_local.labels(policy, report.family.value).set(count)


class _Maker:
    """Makes metrics with kube-proxy's prefix."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def counter(self, name: str, about: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"kubeproxy_{name}", about, labels, registry=self._registry)

    def gauge(self, name: str, about: str, labels: tuple[str, ...] = ()) -> Gauge:
        return Gauge(f"kubeproxy_{name}", about, labels, registry=self._registry)

    def histogram(self, name: str, about: str, buckets: tuple[float, ...] = _SYNC_SECONDS) -> Histogram:
        return Histogram(f"kubeproxy_{name}", about, _FAMILY, buckets=buckets, registry=self._registry)


class _PacketCounters(Collector):
    """The counters that the kernel keeps; one that is not there has no metric."""

    def __init__(self, read: Callable[[str], int | None]) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        return [CounterMetricFamily(name, about) for name, about in _NFACCT.values()]

    def collect(self) -> Iterator[Metric]:
        for counter, (name, about) in _NFACCT.items():
            packets = self._read(counter)
            if packets is not None:
                yield CounterMetricFamily(name, about, value=packets)


class _AsKubeProxy(Collector):
    """A registry as kube-proxy's looks: without metrics that have no sample yet, and whole bounds written as such."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            if metric.type == "histogram":
                metric.samples = [_whole_bound(sample) for sample in metric.samples]
            if metric.samples:
                yield metric


def _whole_bound(sample: Sample) -> Sample:
    """Bounds are labels, hence text: 1.0 and 1 would be two buckets where both proxies are about."""
    bound = sample.labels.get("le", "")
    return sample._replace(labels={**sample.labels, "le": bound[:-2]}) if bound.endswith(".0") else sample


def _packets(name: str) -> int | None:
    counter = nfacct.read(name)
    return None if counter is None else counter.packets
