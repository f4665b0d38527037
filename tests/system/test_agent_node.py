"""The agent follows changes of its own Node object."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pykubeproxy.lab.apiserver import NODES, SERVICES, ApiServer
from tests.fakes.cluster import node, server, service, slice_of
from tests.fakes.follower import eventually
from tests.fakes.http_client import fetch
from tests.fakes.process import HEALTH, answers, inside_a_namespace, running, saved

pytestmark = pytest.mark.root

CHECK = 32000
ADDRESSES = ("192.168.99.10", "192.168.99.20")
TAINT = {"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}


@pytest.fixture
def api() -> Iterator[ApiServer]:
    """An API server with a NodePort service, in a namespace with both addresses of the node."""
    with inside_a_namespace(), server() as made:
        for address in ADDRESSES:
            subprocess.run(["ip", "address", "add", f"{address}/32", "dev", "lo"], check=True)
        made.store.create(service("web", type="NodePort", ports=[{"port": 80, "nodePort": 30080}]))
        yield made


def endpoints(*zones: str) -> dict[str, Any]:
    """Return an endpoint for each zone, from 10.244.0.1 on."""
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
    """Return whether one live rule has all these words."""
    return any(all(word in rule for word in words) for rule in saved())


def test_node_ports_follow_the_node_address(api: ApiServer, tmp_path: Path) -> None:
    """With nodePortAddresses set to primary."""
    api.store.create(slice_of("web", "10.244.0.1"))
    api.store.create(node("node1", ADDRESSES[0]))
    with agent(api, tmp_path, "--nodeport-addresses=primary"):
        eventually(lambda: has(f"-d {ADDRESSES[0]}/32", "-j KUBE-NODEPORTS"))
        api.store.merge_patch(NODES, "", "node1", {"status": node("node1", ADDRESSES[1])["status"]})
        eventually(lambda: has(f"-d {ADDRESSES[1]}/32", "-j KUBE-NODEPORTS"))
        assert not has(f"-d {ADDRESSES[0]}/32")


def test_source_ranges_follow_the_node_address(api: ApiServer, tmp_path: Path) -> None:
    """A range with an address of the node admits the load balancer's: the node's packets to it have that as source."""
    made = service("lb", type="LoadBalancer", loadBalancerSourceRanges=[f"{ADDRESSES[1]}/32"])
    api.store.create(made)
    api.store.merge_patch(
        SERVICES, "default", "lb", {"status": {"loadBalancer": {"ingress": [{"ip": "198.51.100.1"}]}}}
    )
    api.store.create(slice_of("lb", "10.244.0.1"))
    api.store.create(node("node1", ADDRESSES[0]))
    with agent(api, tmp_path):
        eventually(lambda: has("-A KUBE-FW-", f"-s {ADDRESSES[1]}/32"))
        assert not has("-A KUBE-FW-", "-s 198.51.100.1/32")
        for address, admitted in ((ADDRESSES[1], True), (ADDRESSES[0], False)):
            api.store.merge_patch(NODES, "", "node1", {"status": node("node1", address)["status"]})
            eventually(lambda admitted=admitted: has("-A KUBE-FW-", "-s 198.51.100.1/32") is admitted)  # type: ignore[misc]


def test_a_node_whose_address_changes_its_family_is_served_on(api: ApiServer, tmp_path: Path) -> None:
    """With nodePortAddresses set to primary: at all IPv4 addresses, as after a restart, health checks included."""
    check = service(
        "lb",
        type="LoadBalancer",
        externalTrafficPolicy="Local",
        healthCheckNodePort=CHECK,
        ports=[{"port": 81}],
    )
    for made in (check, slice_of("web", "10.244.0.1"), node("node1", ADDRESSES[0])):
        api.store.create(made)
    with agent(api, tmp_path, "--nodeport-addresses=primary") as process:
        eventually(lambda: answers(CHECK, "/", 503, ADDRESSES[0]))
        assert not answers(CHECK, "/", 503, ADDRESSES[1])
        api.store.merge_patch(NODES, "", "node1", {"status": node("node1", "fd00::1")["status"]})
        eventually(lambda: has("-A KUBE-SERVICES", "--dst-type LOCAL", "-j KUBE-NODEPORTS"))
        for address in ADDRESSES:
            eventually(lambda address=address: answers(CHECK, "/", 503, address))  # type: ignore[misc]
        assert has("--to-destination 10.244.0.1:8080")
        assert process.poll() is None


def test_pod_cidrs_are_awaited_and_followed(api: ApiServer, tmp_path: Path) -> None:
    """In NodeCIDR mode, no rules are written without pod CIDRs."""
    api.store.create(slice_of("web", "10.244.0.1"))
    api.store.create(node("node1", ADDRESSES[0]))
    with agent(api, tmp_path, "--detect-local-mode=NodeCIDR") as process:
        eventually(lambda: answers(HEALTH, "/livez", 200))
        assert not has("KUBE-SERVICES")
        assert answers(HEALTH, "/readyz", 503)
        for cidr in ("10.244.1.0/24", "10.244.7.0/24"):
            api.store.merge_patch(NODES, "", "node1", {"spec": {"podCIDRs": [cidr]}})
            eventually(lambda cidr=cidr: has(f"! -s {cidr}", "KUBE-MARK-MASQ"))  # type: ignore[misc]
        assert not has("10.244.1.0/24")
        assert process.poll() is None


def test_a_changed_zone_selects_other_endpoints(api: ApiServer, tmp_path: Path) -> None:
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


def test_a_tainted_node_keeps_its_rules(api: ApiServer, tmp_path: Path) -> None:
    """/healthz fails, so that load balancers use other nodes."""
    api.store.create(slice_of("web", "10.244.0.1"))
    api.store.create(node("node1", ADDRESSES[0]))
    with agent(api, tmp_path, "--nodeport-addresses=primary"):
        eventually(lambda: answers(HEALTH, "/healthz", 200))
        before = saved()
        api.store.merge_patch(NODES, "", "node1", {"spec": {"taints": [TAINT]}})
        eventually(lambda: answers(HEALTH, "/healthz", 503))
        assert '"nodeEligible":false,"healthy":true' in fetch(HEALTH, "/healthz").body
        assert answers(HEALTH, "/livez", 200)
        assert answers(HEALTH, "/readyz", 200)
        assert saved() == before
        api.store.merge_patch(NODES, "", "node1", {"spec": {"taints": []}})
        eventually(lambda: answers(HEALTH, "/healthz", 200))


def test_a_deleted_node_is_served_on_and_stays_healthy(api: ApiServer, tmp_path: Path) -> None:
    """As by kube-proxy. New services are served with its last state, and other rules are unchanged."""
    api.store.create(slice_of("web", "10.244.0.1"))
    api.store.create(node("node1", ADDRESSES[0]))
    log = tmp_path / "agent.log"
    with agent(api, tmp_path, "--nodeport-addresses=primary"):
        eventually(lambda: answers(HEALTH, "/healthz", 200))
        before = saved()
        api.store.delete(NODES, "", "node1")
        eventually(lambda: "node deleted, serving with its last state" in log.read_text())
        api.store.create(service("late", clusterIP="10.96.200.1"))
        eventually(lambda: has("-d 10.96.200.1/32"))
        assert [rule for rule in saved() if "late" not in rule] == before
        for page in ("/healthz", "/livez", "/readyz"):
            assert answers(HEALTH, page, 200)


def test_an_invalid_node_address_costs_only_itself(api: ApiServer, tmp_path: Path) -> None:
    """The node keeps its other address, its zone and its health; one line of the log names the value."""
    api.store.create(endpoints("a", "b"))
    here = node("node1", ADDRESSES[0])
    here["metadata"]["labels"] = {"topology.kubernetes.io/zone": "a"}
    here["status"]["addresses"][:0] = [
        {"type": "InternalIP", "address": text} for text in ("", "node1.example", "fe80::1%eth0")
    ]
    api.store.create(here)
    with agent(api, tmp_path, "--nodeport-addresses=primary"):
        eventually(lambda: answers(HEALTH, "/healthz", 200))
        assert has(f"-d {ADDRESSES[0]}/32", "-j KUBE-NODEPORTS")
        assert has("--to-destination 10.244.0.1:8080")
        assert not has("--to-destination 10.244.0.2:8080")
        lines = (tmp_path / "agent.log").read_text().splitlines()
    assert sum("invalid values skipped" in line for line in lines) == 1


def test_a_late_node_is_awaited(api: ApiServer, tmp_path: Path) -> None:
    """The first sync starts when the Node appears, before the timeout."""
    api.store.create(slice_of("web", "10.244.0.1"))
    started = time.monotonic()
    with agent(api, tmp_path, "--nodeport-addresses=primary"):
        eventually(lambda: answers(HEALTH, "/livez", 200))
        assert not has("KUBE-SERVICES")
        api.store.create(node("node1", ADDRESSES[0]))
        eventually(lambda: has(f"-d {ADDRESSES[0]}/32", "-j KUBE-NODEPORTS"))
        assert time.monotonic() - started < 25
        eventually(lambda: answers(HEALTH, "/healthz", 200))
