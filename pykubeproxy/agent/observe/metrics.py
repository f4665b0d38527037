"""The metrics of the agent: kube-proxy's under their own names, and pykubeproxy's."""

import gzip
import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from functools import partial
from urllib.parse import parse_qs

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from pykubeproxy import http
from pykubeproxy.agent.notices import (
    DriftCalm,
    DriftRepaired,
    EventApplied,
    Notice,
    SyncFailure,
    SyncQueued,
    SyncReport,
    SyncsEnded,
)
from pykubeproxy.kernel import TABLES, nfacct
from pykubeproxy.objects import Deleted, EndpointSlice, Event, Family, Key, Kind, Listed, Service, Updated
from pykubeproxy.rules import skeleton
from pykubeproxy.services.cluster import ChangedServices, families_of
from pykubeproxy.services.ports import PortName
from pykubeproxy.sources import Watch

_FAMILY = ("ip_family",)
_SYNC_SECONDS = tuple(0.001 * 2**power for power in range(15))
_PROGRAMMING_SECONDS = (
    *(0.0, 0.25, 0.5),
    *map(float, (*range(1, 60), *range(60, 120, 5), *range(120, 301, 30))),
)
_NFACCT = {
    skeleton.INVALID_DROPPED: (
        "kubeproxy_iptables_ct_state_invalid_dropped_packets",
        "Packets dropped because connection tracking classifies them as invalid",
    ),
    skeleton.LOCALHOST_ACCEPTED: (
        "kubeproxy_iptables_localhost_nodeports_accepted_packets",
        "Packets to node ports on 127.0.0.0/8",
    ),
}
_DROPPED = (
    "pykubeproxy_log_lines_dropped",
    "Log lines dropped because nobody read them or they could not be written",
)
# The name of the only check.
_PING = "ping"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8; escaping=underscores"
# As fast as possible: a scrape must not delay the reconcile loop.
_GZIP_LEVEL = 1


def count_event(event: Event, changes: ChangedServices, families: Collection[Family]) -> tuple[Kind, int]:
    """Return the kind of an event and how often it counts.

    An event about a Service counts in all served `families`, even if it changes nothing. One about an EndpointSlice
    counts in the family of its addresses, if it names a Service. Of a list, only objects that it changes count.
    """
    match event:
        case Updated(Service()) | Deleted(Kind.SERVICE):
            return Kind.SERVICE, len(families)
        case Listed(Kind.SERVICE):
            return Kind.SERVICE, len(families) * len(changes)
        case Updated(EndpointSlice() as slice_):
            return Kind.ENDPOINT_SLICE, len(families_of(slice_).intersection(families))
        case Listed(Kind.ENDPOINT_SLICE) | Deleted(Kind.ENDPOINT_SLICE):
            return Kind.ENDPOINT_SLICE, sum(change.objects(families) for change in changes.values())
    return Kind.NODE, 0


class Latencies:
    """Remember the trigger times of EndpointSlices until a sync applies them. Call from the loop thread only.

    All times are seconds since 1970. Ignore changes before `started`, which waited for this process, and slices that
    cause no sync: without a Service, headless, or of families that are not served.
    """

    def __init__(self, started: float, families: Iterable[Family]) -> None:
        self._started = started
        self._seen: dict[Key, float] = {}
        # The times of each slice, with the Service of the slice.
        self._pending: dict[Family, dict[Key, tuple[Key, list[float]]]] = {family: {} for family in families}

    def event_applied(self, event: Event) -> None:
        """Remember the trigger times of an event, before or after it is applied."""
        match event:
            case Updated(EndpointSlice() as slice_):
                self._record(slice_, event.trigger_times())
            case Listed(Kind.ENDPOINT_SLICE, objects):
                present = {object_.key for object_ in objects}
                for key in self._seen.keys() - present:
                    self._forget(key)
                for object_ in objects:
                    if isinstance(object_, EndpointSlice):
                        self._record(object_, Updated(object_).trigger_times())
            case Deleted(Kind.ENDPOINT_SLICE, key):
                self._forget(key)

    def sync_succeeded(self, family: Family, now: float, deferred: Collection[Key] = ()) -> list[float]:
        """Return the latency in seconds of each change in one family that a sync applied.

        The changes of `deferred` Services are not applied yet.
        """
        pending = self._pending[family]
        self._pending[family] = {key: waiting for key, waiting in pending.items() if waiting[0] in deferred}
        applied = (triggers for service, triggers in pending.values() if service not in deferred)
        return [max(0.0, now - trigger) for triggers in applied for trigger in triggers]

    def _record(self, slice_: EndpointSlice, triggers: tuple[float, ...]) -> None:
        seen = self._seen.get(slice_.key)
        new = [trigger for trigger in triggers if trigger > self._started and trigger != seen]
        for family in families_of(slice_).intersection(self._pending) if new else ():
            self._seen[slice_.key] = new[-1]
            _, earlier = self._pending[family].get(slice_.key, (None, []))
            self._pending[family][slice_.key] = (slice_.service_key, [*earlier, min(new)])

    def _forget(self, key: Key) -> None:
        # The trigger time of a deleted slice is that of its last change, not of the deletion.
        self._seen.pop(key, None)
        for pending in self._pending.values():
            pending.pop(key, None)


class Metrics:
    """All metrics of the agent; methods are named after the events of Observers. Points in time are seconds since 1970.

    Call from the loop thread only; any thread may call `health_served`, `reconciled`, `pending` and `page`.
    Two functions are called at each scrape: `read_counter` returns the packets of an nfacct counter, or None;
    `busy_seconds` returns how long the loop has made no progress. `families` are those that are served. Latencies count for
    changes after `started`, by default now.
    """

    def __init__(
        self,
        read_counter: Callable[[str], int | None] | None = None,
        busy_seconds: Callable[[], float] = lambda: 0.0,
        families: Iterable[Family] = Family,
        started: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        # kube-proxy has no series NAME_created.
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        # What iptables rejects as of the last sync of each family: service ports, and the tree.
        self._rejected: dict[Family, Set[object]] = {}
        self._without_local: dict[Family, dict[PortName, tuple[bool, bool]]] = {}
        counter = partial(Counter, namespace="kubeproxy", labelnames=_FAMILY, registry=self.registry)
        gauge = partial(Gauge, namespace="kubeproxy", labelnames=_FAMILY, registry=self.registry)
        histogram = partial(
            Histogram,
            namespace="kubeproxy",
            labelnames=_FAMILY,
            buckets=_SYNC_SECONDS,
            registry=self.registry,
        )
        self._sync = histogram("sync_proxy_rules_duration_seconds", "Duration of syncs")
        self._full = histogram("sync_full_proxy_rules_duration_seconds", "Duration of full syncs")
        self._partial = histogram("sync_partial_proxy_rules_duration_seconds", "Duration of partial syncs")
        self._programming = histogram(
            "network_programming_duration_seconds",
            "Time from the change of a Service or Pod until its rules are applied",
            buckets=_PROGRAMMING_SECONDS,
        )
        self._synced_at = gauge("sync_proxy_rules_last_timestamp_seconds", "Time of the last successful sync")
        self._queued_at = gauge(
            "sync_proxy_rules_last_queued_timestamp_seconds", "Time a sync was last queued"
        )
        self._families = frozenset(families)
        self._latencies = Latencies(time.time() if started is None else started, self._families)
        self._pending: dict[Kind, set[Key]] = {Kind.SERVICE: set(), Kind.ENDPOINT_SLICE: set()}
        self._service_changes_pending = gauge(
            "sync_proxy_rules_service_changes_pending", "Changed Services that wait for a sync", labelnames=()
        )
        self._endpoint_changes_pending = gauge(
            "sync_proxy_rules_endpoint_changes_pending",
            "Changes of EndpointSlices that wait for a sync",
            labelnames=(),
        )
        self._changes = {
            Kind.SERVICE: counter(
                "sync_proxy_rules_service_changes_total",
                "Events about Services, counted once for each address family",
                labelnames=(),
            ),
            Kind.ENDPOINT_SLICE: counter(
                "sync_proxy_rules_endpoint_changes_total", "Events about EndpointSlices", labelnames=()
            ),
        }
        by_table = partial(gauge, labelnames=("table", *_FAMILY))
        self._rules_last = by_table("sync_proxy_rules_iptables_last", "Rules written by the last sync")
        self._rules = by_table("sync_proxy_rules_iptables_total", "Rules in place")
        self._no_local = gauge(
            "sync_proxy_rules_no_local_endpoints_total",
            "Service ports with traffic policy Local whose endpoints are all on other nodes",
            labelnames=("traffic_policy", *_FAMILY),
        )
        self._failures = counter(
            "sync_proxy_rules_iptables_restore_failures_total", "Failed runs of iptables-restore"
        )
        self._partial_failures = counter(
            "sync_proxy_rules_iptables_partial_restore_failures_total", "Failed partial syncs"
        )
        self._flows = counter("conntrack_reconciler_deleted_entries_total", "Stale conntrack entries deleted")
        self._reconciled = histogram(
            "conntrack_reconciler_sync_duration_seconds", "Duration of the search for stale conntrack entries"
        )
        self._health_served = {
            page: counter(f"proxy_{page}_total", f"Responses of /{page} by HTTP status", labelnames=("code",))
            for page in ("healthz", "livez")
        }
        counter, gauge = partial(counter, namespace="pykubeproxy"), partial(gauge, namespace="pykubeproxy")
        self._quarantined = gauge(
            "services_quarantined", "Services in quarantine, with ports that are not served"
        )
        gauge(
            "loop_busy_seconds",
            "How long the reconcile loop has been busy without progress; 0 while it waits for changes",
            labelnames=(),
        ).set_function(busy_seconds)
        self._flows_waiting = gauge(
            "stale_flows_waiting_seconds",
            "How long stale UDP flows have waited for their deletion; 0 if there are none",
            labelnames=(),
        )
        self._unwatched = gauge(
            "unwatched_seconds",
            "Time since the API server's last data while the watch of these objects fails, else 0",
            labelnames=("resource",),
        )
        self._repairs = counter(
            "drift_repairs", "Repairs of tables that other programs changed", labelnames=(*_FAMILY, "table")
        )
        self._repair_seconds = histogram(
            "drift_repair_duration_seconds",
            "Time from the detection of drift until it is repaired",
            namespace="pykubeproxy",
        )
        self._contested = gauge(
            "drift_contested", "1 while another program keeps undoing drift repairs, else 0"
        )
        self._rejected_tree = gauge(
            "dispatch_tree_rejected",
            "1 while a flat chain replaces a dispatch tree that iptables rejects, else 0",
        )
        # Without the 0 before it, a rate misses the first increase.
        for family in self._families:
            for counted in (self._failures, self._partial_failures, self._flows):
                counted.labels(family.value)
            for table in TABLES:
                self._repairs.labels(family.value, table)
        for served in self._health_served.values():
            served.labels("200")
            served.labels("503")
        self._dropped_lines: Callable[[], int] = lambda: 0
        read = read_counter or _packets
        counters = {named: partial(read, name) for name, named in _NFACCT.items()}
        self.registry.register(_ReadCounters(counters | {_DROPPED: lambda: self._dropped_lines()}))
        ProcessCollector(registry=self.registry)

    def watching(self, watches: Iterable[Watch]) -> None:
        """Report at each scrape for how long each of these watches has failed."""
        for watch in watches:
            gauge = self._unwatched.labels(watch.name.removeprefix("watch-"))
            gauge.set_function(lambda watch=watch: outage.seconds if (outage := watch.outage) else 0.0)  # type: ignore[misc]

    def cleaning_flows(self, waiting_seconds: Callable[[], float]) -> None:
        """Call this function at each scrape; it returns for how long stale UDP flows have waited for their deletion."""
        self._flows_waiting.set_function(waiting_seconds)

    def read_dropped_lines(self, dropped_lines: Callable[[], int]) -> None:
        """Call this function at each scrape; it returns how many log lines were dropped."""
        self._dropped_lines = dropped_lines

    def notice(self, notice: Notice) -> None:
        """Follow what the loop does."""
        match notice:
            case EventApplied(event, changes):
                self._applied(event, changes)
            case SyncQueued(family):
                self._queued_at.labels(family.value).set(self._clock())
            case SyncReport():
                self._synced(notice)
            case SyncFailure(family, full, seconds, restore_failed):
                self._observe_sync(family, full, seconds)
                self._failures.labels(family.value).inc(restore_failed)
                self._partial_failures.labels(family.value).inc(not full)
            case DriftRepaired(family, drift, _, seconds, contested):
                for table in drift:
                    self._repairs.labels(family.value, table.table).inc()
                self._repair_seconds.labels(family.value).observe(seconds)
                self._contested.labels(family.value).set(contested)
            case DriftCalm(family):
                self._contested.labels(family.value).set(False)
            case SyncsEnded(in_sync=True):
                self._service_changes_pending.set(0)
                self._endpoint_changes_pending.set(0)
                for services in self._pending.values():
                    services.clear()

    def _applied(self, event: Event, changes: ChangedServices) -> None:
        """Count an event as kube-proxy does, and what waits for a sync because of it."""
        self._latencies.event_applied(event)
        kind, count = count_event(event, changes, self._families)
        if kind not in self._changes:
            return
        self._changes[kind].inc(count)
        waiting = {key: change.objects(self._families) for key, change in changes.items()}
        self._pending[kind].update(key for key, changed in waiting.items() if changed)
        self._service_changes_pending.set(len(self._pending[Kind.SERVICE]))
        if kind is Kind.ENDPOINT_SLICE:
            self._endpoint_changes_pending.inc(sum(waiting.values()))

    def pending(self) -> tuple[int, int]:
        """Return how many changed Services, and how many Services with changed endpoints, wait for a sync."""
        return len(self._pending[Kind.SERVICE]), len(self._pending[Kind.ENDPOINT_SLICE])

    def _synced(self, report: SyncReport) -> None:
        family, now = report.family.value, self._clock()
        self._observe_sync(report.family, report.full, sum(report.seconds.values()))
        for seconds in self._latencies.sync_succeeded(report.family, now, report.deferred):
            self._programming.labels(family).observe(seconds)
        self._synced_at.labels(family).set(now)
        for table in ("filter", "nat"):
            self._rules_last.labels(table, family).set(report.rules_written.get(table, 0))
            self._rules.labels(table, family).set(report.rules.get(table, 0))
        self._quarantined.labels(family).set(len({port.port_name.service_key for port in report.quarantined}))
        self._rejected_tree.labels(family).set(bool(report.rejected_tree))
        rejected: set[object] = {port.port_name for port in report.quarantined}
        if report.rejected_tree:
            rejected.add("dispatch tree")
        before, self._rejected[report.family] = self._rejected.get(report.family, frozenset()), rejected
        self._failures.labels(family).inc(bool(rejected - before))
        self._count_without_local(report)

    def reconciled(self, family: Family, seconds: float, deleted: int) -> None:
        """Observe a search for stale conntrack entries, and count the deleted ones."""
        self._reconciled.labels(family.value).observe(seconds)
        self._flows.labels(family.value).inc(deleted)

    def health_served(self, page: str, status: int) -> None:
        """Count a response of a health page, except /readyz, as in kube-proxy."""
        if page in self._health_served:
            self._health_served[page].labels(str(status)).inc()

    def page(self) -> http.Response:
        """Return the page /metrics."""
        return exposition(self.registry)

    def _observe_sync(self, family: Family, full: bool, seconds: float) -> None:
        self._sync.labels(family.value).observe(seconds)
        (self._full if full else self._partial).labels(family.value).observe(seconds)

    def _count_without_local(self, report: SyncReport) -> None:
        ports = self._without_local.setdefault(report.family, {})
        for name in report.gone:
            ports.pop(name, None)
        for item in report.resolved:
            elsewhere = item.selection.any_usable and not item.selection.local
            internal, external = item.port.internal_local, item.port.external_local
            ports.pop(item.port.name, None)
            if elsewhere and (internal or external):
                ports[item.port.name] = internal, external
        for index, policy in enumerate(("internal", "external")):
            count = sum(flags[index] for flags in ports.values())
            self._no_local.labels(policy, report.family.value).set(count)


class _ReadCounters(Collector):
    """Collect counters, by name and help, that are read at each scrape; one that cannot be read has no metric."""

    def __init__(self, counters: Mapping[tuple[str, str], Callable[[], int | None]]) -> None:
        self._counters = counters

    def describe(self) -> Iterable[Metric]:
        return [CounterMetricFamily(name, about) for name, about in self._counters]

    def collect(self) -> Iterator[Metric]:
        for (name, about), read in self._counters.items():
            if (value := read()) is not None:
                yield CounterMetricFamily(name, about, value=value)


def _packets(name: str) -> int | None:
    counter = nfacct.read(name)
    return None if counter is None else counter.packets


class Slis:
    """The service level indicators of kube-proxy. Any thread may call the pages. `started`: seconds since 1970."""

    def __init__(self, started: float) -> None:
        self._registry = CollectorRegistry()
        self._result = Gauge(
            "kubernetes_healthcheck",
            "[STABLE] Result of the latest health check: 1 if it passed",
            ("name", "type"),
            registry=self._registry,
        )
        self._results = Counter(
            "kubernetes_healthchecks",
            "[STABLE] Health checks by result",
            ("name", "status", "type"),
            registry=self._registry,
        )
        about = "[ALPHA] Start of the process in seconds since 1970"
        start = Gauge("process_start_time_seconds", about, registry=self._registry)
        start.set(started)

    def healthz(self, request: http.Request) -> http.Response:
        """Return "ok", or a line for each check if the query has `verbose`; `exclude` omits checks."""
        query = parse_qs(request.query, keep_blank_values=True)
        excluded = set(query.get("exclude", ()))
        if _PING not in excluded:
            self._result.labels(_PING, "healthz").set(1)
            self._results.labels(_PING, "success", "healthz").inc()
        if "verbose" not in query:
            return http.text("ok")
        lines = [f"[+]{_PING} excluded: ok" if _PING in excluded else f"[+]{_PING} ok"]
        if unknown := ",".join(json.dumps(name, ensure_ascii=False) for name in sorted(excluded - {_PING})):
            lines.append(f"warn: some health checks cannot be excluded: no matches for {unknown}")
        return http.text("\n".join([*lines, "healthz check passed", ""]))

    def metrics(self, request: http.Request) -> http.Response:
        """Return the page /metrics/slis. DELETE resets the counts instead, as in kube-proxy."""
        if request.method != "DELETE":
            return exposition(self._registry)
        self._result.clear()
        self._results.clear()
        return http.text("metrics reset\n")


def exposition(registry: CollectorRegistry) -> http.Response:
    """Return a page with the metrics of a registry."""
    return http.Response(prometheus_client.generate_latest(_AsKubeProxy(registry)), CONTENT_TYPE)


def scraped(page: http.Response, request: http.Request, started: float) -> http.Response:
    """Complete a page of metrics, compressed if the client accepts gzip; `started` is when the process started."""
    headers: tuple[tuple[str, str], ...] = (("Process-Start-Time-Unix", str(int(started))),)
    body = page.body
    if http.accepts(request.headers.get("accept-encoding", ""), "gzip"):
        headers += (("Content-Encoding", "gzip"),)
        body = gzip.compress(body, _GZIP_LEVEL)
    return http.Response(body, page.content_type, headers=headers)


class _AsKubeProxy(Collector):
    """Collect the registry in kube-proxy's form.

    It leaves out metrics without samples, writes whole bucket bounds without ".0", and adds kube-proxy's stability level.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            if metric.name.startswith("kubeproxy_"):
                metric.documentation = f"[ALPHA] {metric.documentation}"
            if metric.type == "histogram":
                metric.samples = [_whole_bound(sample) for sample in metric.samples]
            if metric.samples:
                yield metric


def _whole_bound(sample: Sample) -> Sample:
    """Return a sample with bound "1" instead of "1.0": beside kube-proxy, these would be two buckets."""
    bound = sample.labels.get("le", "")
    return sample._replace(labels={**sample.labels, "le": bound[:-2]}) if bound.endswith(".0") else sample
