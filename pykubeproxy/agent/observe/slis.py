"""/healthz of the metrics address, which checks only that the server answers, and /metrics/slis, which counts that."""

import json
from urllib.parse import parse_qs

from prometheus_client import CollectorRegistry, Counter, Gauge

from pykubeproxy import http
from pykubeproxy.agent.observe.exposition import exposition

# The name of the only check.
_PING = "ping"


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
