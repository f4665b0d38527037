"""Health, metrics, events and status of a running agent."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from pykubeproxy.lab.apiserver import ENDPOINT_SLICES, EVENTS, NODES, SERVICES
from pykubeproxy.pages.statusz import decode
from tests.fakes.cluster import node, server, service, slice_of
from tests.fakes.faulty_apiserver import FaultyApiServer
from tests.fakes.http_client import fetch, recorded_response
from tests.fakes.process import (
    HEALTH,
    METRICS,
    PROGRAM,
    answers,
    inside_a_namespace,
    metric,
    pykubeproxy,
    running,
)
from tests.fakes.waiting import eventually

pytestmark = pytest.mark.root

CHECK = 32000
# kube-proxy's metrics in a response of /metrics, with their types.
_TYPES = re.compile(r"^# TYPE (kubeproxy_\S+ \S+)", re.MULTILINE)
TAINT = {"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}


@pytest.fixture
def api() -> Iterator[FaultyApiServer]:
    """An API server in a new network namespace, which the test joins."""
    with inside_a_namespace(), server() as made:
        yield made


def agent(
    api: FaultyApiServer, tmp_path: Path, *flags: str
) -> AbstractContextManager[subprocess.Popen[bytes]]:
    """Run an agent; kill it on exit."""
    return running(tmp_path / "agent.log", "--hostname-override=node1", "--master", api.url, *flags)


def slice_metadata(name: str, port: int, protocol: str) -> dict[str, Any]:
    """Return the fields of an EndpointSlice of another service."""
    of = {"name": name, "namespace": "default", "labels": {"kubernetes.io/service-name": name}}
    return {"metadata": of, "ports": [{"port": port, "protocol": protocol}]}


def slice_on(node_name: str) -> dict[str, Any]:
    """Return the endpoints of service web on a node."""
    slice_ = slice_of("web", "10.244.0.5", "10.244.0.6")
    for endpoint in slice_["endpoints"]:
        endpoint["nodeName"] = node_name
    return slice_


def reasons(api: FaultyApiServer) -> list[str]:
    return sorted(event["reason"] for event in api.store.list(EVENTS))


def test_health_and_metrics_of_a_node_in_service(api: FaultyApiServer, tmp_path: Path) -> None:
    """Health checks follow endpoints and taints; metrics and events are correct."""
    api.store.create(node("node1", "192.168.99.10"))
    api.store.create(
        service("web", type="LoadBalancer", externalTrafficPolicy="Local", healthCheckNodePort=CHECK)
    )
    api.store.create(slice_on("node1"))
    with agent(api, tmp_path) as process:
        eventually(lambda: answers(HEALTH, "/healthz", 200))
        assert answers(HEALTH, "/livez", 200)
        assert answers(HEALTH, "/readyz", 200)
        eventually(lambda: answers(CHECK, "/", 200))
        assert fetch(CHECK).headers["X-Load-Balancing-Endpoint-Weight"] == "2"
        assert fetch(CHECK, host="::1").status == 200

        api.store.merge_patch(
            ENDPOINT_SLICES, "default", "web", {"endpoints": slice_on("node2")["endpoints"]}
        )
        eventually(lambda: answers(CHECK, "/", 503))
        api.store.merge_patch(NODES, "", "node1", {"spec": {"taints": [TAINT]}})
        eventually(lambda: answers(HEALTH, "/healthz", 503))
        assert answers(HEALTH, "/livez", 200)
        api.store.merge_patch(NODES, "", "node1", {"spec": {"taints": []}})
        eventually(lambda: answers(HEALTH, "/healthz", 200))
        api.store.delete(SERVICES, "default", "web")

        def closed() -> bool:
            try:
                return not fetch(CHECK)
            except ConnectionError:
                return True

        eventually(closed)
        metrics = fetch(METRICS, "/metrics").body
        for line in (
            'kubeproxy_sync_full_proxy_rules_duration_seconds_count{ip_family="IPv4"} 1.0',
            'kubeproxy_sync_proxy_rules_iptables_total{ip_family="IPv6",table="filter"} 3.0',
            "kubeproxy_sync_proxy_rules_service_changes_pending 0.0",
        ):
            assert f"\n{line}\n" in metrics
        assert fetch(METRICS, "/proxyMode").body == "iptables"
        assert reasons(api) == ["Starting"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 0


def test_sigterm_ends_the_first_process_of_a_container(api: FaultyApiServer, tmp_path: Path) -> None:
    """With status 0, as elsewhere; kube-proxy's is 2 there."""
    api.store.create(node("node1", "192.168.99.10"))
    own = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    command = (*own, *PROGRAM, "--hostname-override=node1", "--master", api.url)
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            eventually(lambda: answers(HEALTH, "/readyz", 200))
            first = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
            os.kill(int(first), signal.SIGTERM)
            assert process.wait(10) == 0
        finally:
            process.kill()


def test_a_running_agent_has_all_recorded_metrics(api: FaultyApiServer, tmp_path: Path) -> None:
    """Histograms and counters have values."""
    api.store.create(node("node1", "192.168.99.10"))
    api.store.create(
        service("web", type="LoadBalancer", externalTrafficPolicy="Local", healthCheckNodePort=CHECK)
    )
    api.store.create(service("dns", internalTrafficPolicy="Local", ports=[{"port": 53, "protocol": "UDP"}]))
    with agent(api, tmp_path):
        eventually(lambda: answers(HEALTH, "/readyz", 200))
        assert answers(HEALTH, "/livez", 200)
        eventually(lambda: answers(HEALTH, "/healthz", 200))
        trigger = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        for made in (slice_on("node2"), {**slice_on("node2"), **slice_metadata("dns", 53, "UDP")}):
            made["metadata"]["annotations"] = {"endpoints.kubernetes.io/last-change-trigger-time": trigger}
            api.store.create(made)

        def sample(name: str, labels: str = '{ip_family="IPv4"}') -> float:
            return metric(f"kubeproxy_{name}{labels} ")

        metric_name = "sync_proxy_rules_no_local_endpoints_total"
        for policy in ("external", "internal"):
            labels = f'{{ip_family="IPv4",traffic_policy="{policy}"}}'
            eventually(lambda: sample(metric_name, labels) == 1)
        recorded_types = set(_TYPES.findall(recorded_response("GET :10249/metrics").body))
        # The metrics of the conntrack reconciler appear after its first run.
        eventually(lambda: recorded_types <= set(_TYPES.findall(fetch(METRICS, "/metrics").body)))
        for part in ("sync_proxy", "sync_full_proxy", "sync_partial_proxy"):
            assert sample(f"{part}_rules_duration_seconds_count") >= 1
        assert sample("network_programming_duration_seconds_count") == 2
        assert sample("network_programming_duration_seconds_sum") > 0
        assert sample("sync_proxy_rules_endpoint_changes_total", "") == 2
        assert sample("sync_proxy_rules_service_changes_total", "") == 4
        queued = sample("sync_proxy_rules_last_queued_timestamp_seconds")
        assert time.time() - 20 < queued <= sample("sync_proxy_rules_last_timestamp_seconds") <= time.time()
        assert sample("sync_proxy_rules_iptables_last", '{ip_family="IPv4",table="nat"}') >= 1


def test_an_address_in_use_ends_the_process_with_hard_fail(api: FaultyApiServer, tmp_path: Path) -> None:
    """With status 1, one log line and an event on the Node."""
    taken = "--metrics-bind-address"
    with agent(api, tmp_path, taken, api.url.removeprefix("http://"), "--bind-address-hard-fail") as process:
        assert process.wait(20) == 1
    assert reasons(api) == ["FailedToStartMetricServer"]
    assert "Address already in use" in (tmp_path / "agent.log").read_text().splitlines()[-1]


MANIFESTS = Path(__file__).parents[1] / "data" / "manifests" / "explain.yaml"


def test_page_json_and_command_agree(tmp_path: Path) -> None:
    """An agent on manifests shows services, shares and syncs; the command reports a missing agent."""
    flags = ("--manifests", str(MANIFESTS), "--hostname-override", "node1", "--cluster-cidr", "10.244.0.0/16")
    with inside_a_namespace():
        with running(tmp_path / "log", *flags):
            eventually(lambda: b"rules in place" in (tmp_path / "log").read_bytes())
            answer = fetch(METRICS, "/statusz?service=ns/web", accept="application/json")
            status = decode(answer.body.encode())
            assert (status.healthy, status.node, status.matching) == (True, "node1", 1)
            assert {sync.family for sync in status.syncs} == {"IPv4", "IPv6"}
            assert [(port.policy, [it.share for it in port.endpoints]) for port in status.services] == [
                ("Cluster", [1.0, 0.0, 0.0]),
                ("Local", [1.0, 0.0, 0.0]),
            ]
            page = fetch(METRICS, "/statusz", accept="text/html")
            assert "kube-system/dns:dns-tcp" in page.body
            assert page.headers["Cache-Control"] == "no-store"
            assert "kube-proxy statusz" in fetch(METRICS, "/statusz").body
            result = pykubeproxy("status")
            assert (result.returncode, result.stderr) == (0, "")
            assert result.stdout.startswith("node1  ")
        gone = pykubeproxy("status")
        assert (gone.returncode, gone.stdout) == (2, "")
        assert "cannot reach an agent at http://127.0.0.1:10249: Connection refused" in gone.stderr
