"""The agent's own Node object: whatever it says is taken up by a running agent."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pykubeproxy.lab.apiserver import NODES, ApiServer
from tests.fakes.asking import ask
from tests.fakes.cluster import node, server, service, slice_of
from tests.fakes.follower import eventually
from tests.fakes.process import HEALTH, answers, inside_a_namespace, running, saved

pytestmark = pytest.mark.root

ADDRESSES = ("192.168.99.10", "192.168.99.20")
TAINT = {"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}


@pytest.fixture
def api() -> Iterator[ApiServer]:
    """An API server with a NodePort service, in a namespace with both addresses that the node may have."""
    with inside_a_namespace(), server() as made:
        for address in ADDRESSES:
            subprocess.run(["ip", "address", "add", f"{address}/32", "dev", "lo"], check=True)
        made.store.create(service("web", type="NodePort", ports=[{"port": 80, "nodePort": 30080}]))
        yield made


def endpoints(*zones: str) -> dict[str, Any]:
    """An endpoint for each zone, 10.244.0.1 and on."""
    made = slice_of("web", *(f"10.244.0.{n}" for n, _ in enumerate(zones, 1)))
    for endpoint, zone in zip(made["endpoints"], zones, strict=True):
        endpoint["hints"] = {"forZones": [{"name": zone}]}
    return made


@contextmanager
def agent(api: ApiServer, tmp_path: Path, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    fixed = ("--hostname-override=node1", "--master", api.url)
    with running(tmp_path / "agent.log", *fixed, *flags) as process:
        yield process


def has(*words: str) -> bool:
    """Whether one live rule has all these words."""
    return any(all(word in rule for word in words) for rule in saved())


def test_addresses(api: ApiServer, tmp_path: Path) -> None:
    """Node ports move with the node's address, where they are served on the primary one."""
    api.store.create(slice_of("web", "10.244.0.1"))
    api.store.create(node("node1", ADDRESSES[0]))
    with agent(api, tmp_path, "--nodeport-addresses=primary"):
        eventually(lambda: has(f"-d {ADDRESSES[0]}/32", "-j KUBE-NODEPORTS"))
        api.store.merge_patch(NODES, "", "node1", {"status": node("node1", ADDRESSES[1])["status"]})
        eventually(lambda: has(f"-d {ADDRESSES[1]}/32", "-j KUBE-NODEPORTS"))
        assert not has(f"-d {ADDRESSES[0]}/32")


def test_pod_cidrs(api: ApiServer, tmp_path: Path) -> None:
    """In NodeCIDR mode nothing is written without them; they come, and they change, and the process goes on."""
    api.store.create(slice_of("web", "10.244.0.1"))
    api.store.create(node("node1", ADDRESSES[0]))
    with agent(api, tmp_path, "--detect-local-mode=NodeCIDR") as process:
        eventually(lambda: answers(HEALTH, "/livez", 200))
        assert not has("KUBE")
        assert answers(HEALTH, "/readyz", 503)
        for cidr in ("10.244.1.0/24", "10.244.7.0/24"):
            api.store.merge_patch(NODES, "", "node1", {"spec": {"podCIDRs": [cidr]}})
            eventually(lambda cidr=cidr: has(f"! -s {cidr}", "KUBE-MARK-MASQ"))  # type: ignore[misc]
        assert not has("10.244.1.0/24")
        assert process.poll() is None


def test_zone(api: ApiServer, tmp_path: Path) -> None:
    """Another zone label, another choice of endpoints."""
    api.store.create(endpoints("a", "b"))
    here = node("node1", ADDRESSES[0])
    here["metadata"]["labels"] = {"topology.kubernetes.io/zone": "a"}
    api.store.create(here)
    with agent(api, tmp_path):
        eventually(lambda: has("--to-destination 10.244.0.1:8080"))
        assert not has("--to-destination 10.244.0.2:8080")
        label = {"metadata": {"labels": {"topology.kubernetes.io/zone": "b"}}}
        api.store.merge_patch(NODES, "", "node1", label)
        eventually(lambda: has("--to-destination 10.244.0.2:8080"))
        assert not has("--to-destination 10.244.0.1:8080")


def test_taint_and_deletion(api: ApiServer, tmp_path: Path) -> None:
    """Balancers are sent away, and whoever still comes is served: not a rule changes."""
    api.store.create(slice_of("web", "10.244.0.1"))
    api.store.create(node("node1", ADDRESSES[0]))
    with agent(api, tmp_path, "--nodeport-addresses=primary"):
        eventually(lambda: answers(HEALTH, "/healthz", 200))
        before = saved()
        api.store.merge_patch(NODES, "", "node1", {"spec": {"taints": [TAINT]}})
        eventually(lambda: answers(HEALTH, "/healthz", 503))
        assert '"nodeEligible":false,"healthy":true' in ask(HEALTH, "/healthz").body
        api.store.merge_patch(NODES, "", "node1", {"spec": {"taints": []}})
        eventually(lambda: answers(HEALTH, "/healthz", 200))
        api.store.delete(NODES, "", "node1")
        eventually(lambda: answers(HEALTH, "/healthz", 503))
        assert answers(HEALTH, "/livez", 200)
        assert answers(HEALTH, "/readyz", 200)
        # A service that comes now is served, by what was known of the node, and nothing else has changed.
        api.store.create(service("late", clusterIP="10.96.200.1"))
        eventually(lambda: has("-d 10.96.200.1/32"))
        assert [rule for rule in saved() if "late" not in rule] == before


def test_a_node_that_is_not_known_at_once(api: ApiServer, tmp_path: Path) -> None:
    """It is waited for, and its object is taken up as soon as it comes, long before the wait is over."""
    api.store.create(slice_of("web", "10.244.0.1"))
    started = time.monotonic()
    with agent(api, tmp_path, "--nodeport-addresses=primary"):
        eventually(lambda: answers(HEALTH, "/livez", 200))
        assert not has("KUBE")
        api.store.create(node("node1", ADDRESSES[0]))
        eventually(lambda: has(f"-d {ADDRESSES[0]}/32", "-j KUBE-NODEPORTS"))
        assert time.monotonic() - started < 25
        eventually(lambda: answers(HEALTH, "/healthz", 200))
