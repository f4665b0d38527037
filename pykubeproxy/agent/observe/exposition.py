"""The text of metrics in kube-proxy's form."""

import gzip
from collections.abc import Iterator

import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from pykubeproxy import http
from pykubeproxy.http import accept

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8; escaping=underscores"
# As fast as possible: a scrape must not delay the reconcile loop.
_GZIP_LEVEL = 1


def exposition(registry: CollectorRegistry) -> http.Response:
    """Return a page with the metrics of a registry."""
    return http.Response(prometheus_client.generate_latest(_AsKubeProxy(registry)), CONTENT_TYPE)


def scraped(page: http.Response, request: http.Request, started: float) -> http.Response:
    """Complete a page of metrics, compressed if the client accepts gzip; `started` is when the process started."""
    headers: tuple[tuple[str, str], ...] = (("Process-Start-Time-Unix", str(int(started))),)
    body = page.body
    if accept.accepts_gzip(request.headers.get("accept-encoding", "")):
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
