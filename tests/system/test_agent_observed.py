"""The whole agent as balancers, kubelets, Prometheus and the API server see it, in a network namespace of its own."""

import json
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyroute2 import netns

from pykubeproxy.lab.apiserver import ENDPOINT_SLICES, NODES, SERVICES, ApiServer
from tests.fakes.asking import ask
from tests.fakes.cluster import node, server, service, slice_of
from tests.fakes.follower import eventually

pytestmark = pytest.mark.root

HEALTH, METRICS, CHECK = 10256, 10249, 32000
PROGRAM = [
    sys.executable,
    "-c",
    "from pykubeproxy.cli import main; main()",
    "run",
    "--hostname-override=node1",
]
TAINT = {"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}


@pytest.fixture
def api() -> Iterator[ApiServer]:
    """An API server in a fresh network namespace, in which the test and what it starts are too."""
    name = f"ao-{uuid.uuid4().hex[:10]}"
    netns.create(name)
    netns.pushns(name)
    try:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        with server() as running:
            yield running
    finally:
        netns.popns()
        netns.remove(name)


@contextmanager
def agent(api: ApiServer, tmp_path: Path, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """A running agent; on exit it is gone."""
    with (tmp_path / "agent.log").open("wb") as log:
        process = subprocess.Popen([*PROGRAM, "--master", api.url, *flags], stderr=log)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def answers(port: int, path: str, status: int) -> bool:
    try:
        return ask(port, path).status == status
    except ConnectionRefusedError:
        return False


def balanced(node_name: str) -> dict[str, Any]:
    """The endpoints of service web, on this node."""
    slice_ = slice_of("web", "10.244.0.5", "10.244.0.6")
    for endpoint in slice_["endpoints"]:
        endpoint["nodeName"] = node_name
    return slice_


def reasons(api: ApiServer) -> list[str]:
    listed = ask(int(api.url.rpartition(":")[2]), "/apis/events.k8s.io/v1/namespaces/default/events").body
    return sorted(it["reason"] for it in json.loads(listed)["items"])


def test_a_node_in_service(api: ApiServer, tmp_path: Path) -> None:
    """Balancers find the node and the Service's endpoints on it, until they go; metrics and events tell of it."""
    api.store.create(node("node1", "192.168.99.10"))
    api.store.create(
        service("web", type="LoadBalancer", externalTrafficPolicy="Local", healthCheckNodePort=CHECK)
    )
    api.store.create(balanced("node1"))
    with agent(api, tmp_path) as process:
        eventually(lambda: answers(HEALTH, "/healthz", 200))
        assert answers(HEALTH, "/livez", 200)
        assert answers(HEALTH, "/readyz", 200)
        eventually(lambda: answers(CHECK, "/", 200))
        assert ask(CHECK).headers["X-Load-Balancing-Endpoint-Weight"] == "2"
        assert ask(CHECK, host="::1").status == 200

        api.store.merge_patch(
            ENDPOINT_SLICES, "default", "web", {"endpoints": balanced("node2")["endpoints"]}
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
                return not ask(CHECK)
            except ConnectionRefusedError:
                return True

        eventually(closed)
        metrics = ask(METRICS, "/metrics").body
        for line in (
            'kubeproxy_sync_full_proxy_rules_duration_seconds_count{ip_family="IPv4"} 1.0',
            'kubeproxy_sync_proxy_rules_iptables_total{ip_family="IPv6",table="filter"} 3.0',
            "kubeproxy_sync_proxy_rules_service_changes_pending 0.0",
        ):
            assert f"\n{line}\n" in metrics
        assert ask(METRICS, "/proxyMode").body == "iptables"
        assert reasons(api) == ["Starting"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 0


def test_a_node_without_rules_is_not_ready(api: ApiServer, tmp_path: Path) -> None:
    """As long as objects cannot be listed nothing is programmed: alive, but no place to send clients to."""
    api.store.create(node("node1", "192.168.99.10"))
    api.faults.fail(500, times=1000, path="/api/v1/services")
    with agent(api, tmp_path):
        eventually(lambda: answers(HEALTH, "/livez", 200))
        assert answers(HEALTH, "/healthz", 503)
        assert answers(HEALTH, "/readyz", 503)
        api.faults.clear()
        eventually(lambda: answers(HEALTH, "/readyz", 200))


def test_a_taken_check_port_is_told_on_the_service(api: ApiServer, tmp_path: Path) -> None:
    """A health check port that somebody else has: an event says so, and everything else goes on."""
    api.store.create(node("node1", "192.168.99.10"))
    with agent(api, tmp_path, "--metrics-bind-address", f"0.0.0.0:{CHECK}", "--iptables-sync-period", "1s"):
        eventually(lambda: answers(HEALTH, "/healthz", 200))
        api.store.create(
            service("web", type="LoadBalancer", externalTrafficPolicy="Local", healthCheckNodePort=CHECK)
        )
        eventually(lambda: reasons(api) == ["FailedToStartServiceHealthcheck", "Starting"])
        assert answers(CHECK, "/healthz", 200)
        assert answers(HEALTH, "/healthz", 200)


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("--healthz-bind-address", "FailedToStartProxierHealthcheck"),
        ("--metrics-bind-address", "FailedToStartMetricServer"),
    ],
)
def test_an_address_that_cannot_be_had_ends_it_if_wanted(
    api: ApiServer, tmp_path: Path, flag: str, reason: str
) -> None:
    """Exit status 1, one line that says why, and an event on the Node."""
    with agent(api, tmp_path, flag, api.url.removeprefix("http://"), "--bind-address-hard-fail") as process:
        assert process.wait(20) == 1
    assert reasons(api) == [reason]
    assert "Address already in use" in (tmp_path / "agent.log").read_text().splitlines()[-1]
