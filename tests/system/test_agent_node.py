"""The agent follows its Node, and serves a node with one address family."""

import json
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pykubeproxy.kernel import system
from pykubeproxy.lab.apiserver import NODES, SERVICES, ApiServer
from tests.fakes.cluster import node, server, service, slice_of
from tests.fakes.follower import eventually
from tests.fakes.http_client import fetch
from tests.fakes.process import (
    HEALTH,
    METRICS,
    answers,
    inside_a_namespace,
    path_without_ip6tables,
    running,
    saved,
)

pytestmark = pytest.mark.root

CHECK = 32000
ADDRESSES = ("192.168.99.10", "192.168.99.20")
TAINT = {"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}


@pytest.fixture
def node_api() -> Iterator[ApiServer]:
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
def agent(node_api: ApiServer, tmp_path: Path, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    fixed = ("--hostname-override=node1", "--master", node_api.url)
    with running(tmp_path / "agent.log", *fixed, *flags) as process:
        yield process


def has(*words: str) -> bool:
    """Return whether one live rule has all these words."""
    return any(all(word in rule for word in words) for rule in saved())


def test_node_ports_follow_the_node_address(node_api: ApiServer, tmp_path: Path) -> None:
    """With nodePortAddresses set to primary."""
    node_api.store.create(slice_of("web", "10.244.0.1"))
    node_api.store.create(node("node1", ADDRESSES[0]))
    with agent(node_api, tmp_path, "--nodeport-addresses=primary"):
        eventually(lambda: has(f"-d {ADDRESSES[0]}/32", "-j KUBE-NODEPORTS"))
        node_api.store.merge_patch(NODES, "", "node1", {"status": node("node1", ADDRESSES[1])["status"]})
        eventually(lambda: has(f"-d {ADDRESSES[1]}/32", "-j KUBE-NODEPORTS"))
        assert not has(f"-d {ADDRESSES[0]}/32")


def test_source_ranges_follow_the_node_address(node_api: ApiServer, tmp_path: Path) -> None:
    """A range with an address of the node admits the load balancer's: the node's packets to it have that as source."""
    made = service("lb", type="LoadBalancer", loadBalancerSourceRanges=[f"{ADDRESSES[1]}/32"])
    node_api.store.create(made)
    node_api.store.merge_patch(
        SERVICES, "default", "lb", {"status": {"loadBalancer": {"ingress": [{"ip": "198.51.100.1"}]}}}
    )
    node_api.store.create(slice_of("lb", "10.244.0.1"))
    node_api.store.create(node("node1", ADDRESSES[0]))
    with agent(node_api, tmp_path):
        eventually(lambda: has("-A KUBE-FW-", f"-s {ADDRESSES[1]}/32"))
        assert not has("-A KUBE-FW-", "-s 198.51.100.1/32")
        for address, admitted in ((ADDRESSES[1], True), (ADDRESSES[0], False)):
            node_api.store.merge_patch(NODES, "", "node1", {"status": node("node1", address)["status"]})
            eventually(lambda: has("-A KUBE-FW-", "-s 198.51.100.1/32") is admitted)


def test_a_node_whose_address_changes_its_family_is_served_on(node_api: ApiServer, tmp_path: Path) -> None:
    """With nodePortAddresses set to primary: at all IPv4 addresses, as after a restart, health checks included."""
    check = service(
        "lb",
        type="LoadBalancer",
        externalTrafficPolicy="Local",
        healthCheckNodePort=CHECK,
        ports=[{"port": 81}],
    )
    for made in (check, slice_of("web", "10.244.0.1"), node("node1", ADDRESSES[0])):
        node_api.store.create(made)
    with agent(node_api, tmp_path, "--nodeport-addresses=primary") as process:
        eventually(lambda: answers(CHECK, "/", 503, ADDRESSES[0]))
        assert not answers(CHECK, "/", 503, ADDRESSES[1])
        node_api.store.merge_patch(NODES, "", "node1", {"status": node("node1", "fd00::1")["status"]})
        eventually(lambda: has("-A KUBE-SERVICES", "--dst-type LOCAL", "-j KUBE-NODEPORTS"))
        for address in ADDRESSES:
            eventually(lambda: answers(CHECK, "/", 503, address))
        assert has("--to-destination 10.244.0.1:8080")
        assert process.poll() is None


def test_pod_cidrs_are_awaited_and_followed(node_api: ApiServer, tmp_path: Path) -> None:
    """In NodeCIDR mode, no rules are written without pod CIDRs."""
    node_api.store.create(slice_of("web", "10.244.0.1"))
    node_api.store.create(node("node1", ADDRESSES[0]))
    with agent(node_api, tmp_path, "--detect-local-mode=NodeCIDR") as process:
        eventually(lambda: answers(HEALTH, "/livez", 200))
        assert not has("KUBE-SERVICES")
        assert answers(HEALTH, "/readyz", 503)
        for cidr in ("10.244.1.0/24", "10.244.7.0/24"):
            node_api.store.merge_patch(NODES, "", "node1", {"spec": {"podCIDRs": [cidr]}})
            eventually(lambda: has(f"! -s {cidr}", "KUBE-MARK-MASQ"))
        assert not has("10.244.1.0/24")
        assert process.poll() is None


def test_a_changed_zone_selects_other_endpoints(node_api: ApiServer, tmp_path: Path) -> None:
    node_api.store.create(endpoints("a", "b"))
    here = node("node1", ADDRESSES[0])
    here["metadata"]["labels"] = {"topology.kubernetes.io/zone": "a"}
    node_api.store.create(here)
    with agent(node_api, tmp_path):
        eventually(lambda: has("--to-destination 10.244.0.1:8080"))
        assert not has("--to-destination 10.244.0.2:8080")
        label = {"metadata": {"labels": {"topology.kubernetes.io/zone": "b"}}}
        node_api.store.merge_patch(NODES, "", "node1", label)
        eventually(lambda: has("--to-destination 10.244.0.2:8080"))
        assert not has("--to-destination 10.244.0.1:8080")


def test_a_tainted_node_keeps_its_rules(node_api: ApiServer, tmp_path: Path) -> None:
    """/healthz fails, so that load balancers use other nodes."""
    node_api.store.create(slice_of("web", "10.244.0.1"))
    node_api.store.create(node("node1", ADDRESSES[0]))
    with agent(node_api, tmp_path, "--nodeport-addresses=primary"):
        eventually(lambda: answers(HEALTH, "/healthz", 200))
        before = saved()
        node_api.store.merge_patch(NODES, "", "node1", {"spec": {"taints": [TAINT]}})
        eventually(lambda: answers(HEALTH, "/healthz", 503))
        assert '"nodeEligible":false,"healthy":true' in fetch(HEALTH, "/healthz").body
        assert answers(HEALTH, "/livez", 200)
        assert answers(HEALTH, "/readyz", 200)
        assert saved() == before
        node_api.store.merge_patch(NODES, "", "node1", {"spec": {"taints": []}})
        eventually(lambda: answers(HEALTH, "/healthz", 200))


def test_a_deleted_node_is_served_on_and_stays_healthy(node_api: ApiServer, tmp_path: Path) -> None:
    """As by kube-proxy. New services are served with its last state, and other rules are unchanged."""
    node_api.store.create(slice_of("web", "10.244.0.1"))
    node_api.store.create(node("node1", ADDRESSES[0]))
    log = tmp_path / "agent.log"
    with agent(node_api, tmp_path, "--nodeport-addresses=primary"):
        eventually(lambda: answers(HEALTH, "/healthz", 200))
        before = saved()
        node_api.store.delete(NODES, "", "node1")
        eventually(lambda: "node deleted, serving with its last state" in log.read_text())
        node_api.store.create(service("late", clusterIP="10.96.200.1"))
        eventually(lambda: has("-d 10.96.200.1/32"))
        assert [rule for rule in saved() if "late" not in rule] == before
        for page in ("/healthz", "/livez", "/readyz"):
            assert answers(HEALTH, page, 200)


def test_an_invalid_node_address_costs_only_itself(node_api: ApiServer, tmp_path: Path) -> None:
    """The node keeps its other address, its zone and its health; one line of the log names the value."""
    node_api.store.create(endpoints("a", "b"))
    here = node("node1", ADDRESSES[0])
    here["metadata"]["labels"] = {"topology.kubernetes.io/zone": "a"}
    here["status"]["addresses"][:0] = [
        {"type": "InternalIP", "address": text} for text in ("", "node1.example", "fe80::1%eth0")
    ]
    node_api.store.create(here)
    with agent(node_api, tmp_path, "--nodeport-addresses=primary"):
        eventually(lambda: answers(HEALTH, "/healthz", 200))
        assert has(f"-d {ADDRESSES[0]}/32", "-j KUBE-NODEPORTS")
        assert has("--to-destination 10.244.0.1:8080")
        assert not has("--to-destination 10.244.0.2:8080")
        lines = (tmp_path / "agent.log").read_text().splitlines()
    assert sum("invalid values skipped" in line for line in lines) == 1


def test_a_late_node_is_awaited(node_api: ApiServer, tmp_path: Path) -> None:
    """The first sync starts when the Node appears, before the timeout."""
    node_api.store.create(slice_of("web", "10.244.0.1"))
    started = time.monotonic()
    with agent(node_api, tmp_path, "--nodeport-addresses=primary"):
        eventually(lambda: answers(HEALTH, "/livez", 200))
        assert not has("KUBE-SERVICES")
        node_api.store.create(node("node1", ADDRESSES[0]))
        eventually(lambda: has(f"-d {ADDRESSES[0]}/32", "-j KUBE-NODEPORTS"))
        assert time.monotonic() - started < 25
        eventually(lambda: answers(HEALTH, "/healthz", 200))


# Commands are not looked up in the system's folders, as in a container that lacks some.
ONLY_PATH = """
from pykubeproxy.kernel import runner
runner._SYSTEM_FOLDERS = ()
from pykubeproxy.cli import main
main()
"""


def disable_ipv6(_: Path) -> Mapping[str, str]:
    system.write_setting("net/ipv6/conf/all/disable_ipv6", 1)
    return {}


def remove_ip6tables(folder: Path) -> Mapping[str, str]:
    return {"PATH": path_without_ip6tables(folder)}


def listens_on_ipv6(port: int) -> bool:
    """Return whether a socket of this namespace has an IPv6 address and this port."""
    lines = Path("/proc/thread-self/net/tcp6").read_text().splitlines()[1:]
    return any(line.split()[1].endswith(f":{port:04X}") for line in lines)


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (disable_ipv6, "IPv6 is disabled (net.ipv6.conf.all.disable_ipv6 = 1)"),
        (remove_ip6tables, "ip6tables-nft-restore not found on PATH"),
    ],
)
def test_only_ipv4_is_served(
    api: ApiServer, tmp_path: Path, prepare: Callable[[Path], Mapping[str, str]], reason: str
) -> None:
    """No IPv6 rules, health, metrics or health check port; the log says why."""
    api.store.create(
        service("lb", type="LoadBalancer", externalTrafficPolicy="Local", healthCheckNodePort=CHECK)
    )
    log = tmp_path / "agent.log"
    flags = ("--hostname-override=node1", "--master", api.url, "--iptables-backend=nft")
    environment = prepare(tmp_path)
    with running(log, *flags, environment=environment, program=ONLY_PATH):
        eventually(lambda: answers(HEALTH, "/healthz", 200))
        assert list(json.loads(fetch(HEALTH, "/healthz").body)["status"]) == ["IPv4"]
        eventually(lambda: answers(CHECK, "/", 503))
        assert not listens_on_ipv6(CHECK)
        assert "IPv6" not in fetch(METRICS, "/metrics").body
    assert any("-d 10.96.0.10/32" in rule for rule in saved())
    assert "KUBE-" not in "".join(saved("ip6tables-nft-save"))
    assert reason in log.read_text()


def failed_start(folder: Path, api: ApiServer, flag: str) -> str:
    """Return the last line of an agent that cannot start without IPv6."""
    log = folder / "agent.log"
    disable_ipv6(folder)
    with running(log, "--hostname-override=node1", "--master", api.url, flag) as process:
        assert process.wait(20) == 1
    return log.read_text().splitlines()[-1]


def test_an_ipv6_cluster_cidr_fails_the_start_without_ipv6(api: ApiServer, tmp_path: Path) -> None:
    """With one line that names both."""
    last = failed_start(tmp_path, api, "--cluster-cidr=fd00:10::/48")
    assert "clusterCIDR: fd00:10::/48 has no IPv4 network, which this node needs; IPv6 is disabled" in last
    assert not any("KUBE-SERVICES" in rule for rule in saved())


def test_a_node_with_ipv6_addresses_only_fails_the_start_without_ipv6(tmp_path: Path, api: ApiServer) -> None:
    """Its first family must be supported."""
    assert "IPv6 is disabled" in failed_start(tmp_path, api, "--bind-address=fd00::1")


def test_cleanup_removes_ipv6_rules_of_a_node_without_ipv6(api: ApiServer, tmp_path: Path) -> None:
    """They may be from before."""
    with running(tmp_path / "agent.log", "--hostname-override=node1", "--master", api.url):
        eventually(lambda: any("KUBE-SERVICES" in rule for rule in saved("ip6tables-nft-save")))
    disable_ipv6(tmp_path)
    with running(tmp_path / "cleanup.log", "--cleanup") as process:
        assert process.wait(20) == 0
    assert not any("KUBE-SERVICES" in rule for rule in saved("ip6tables-nft-save"))
