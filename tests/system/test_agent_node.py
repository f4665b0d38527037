"""The agent follows its Node, and serves a node with one address family."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from pykubeproxy.kernel import system
from pykubeproxy.lab.apiserver import NODES, SERVICES, ApiServer
from tests.fakes.cluster import node, server, service, slice_of
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
from tests.fakes.waiting import eventually

pytestmark = pytest.mark.root

CHECK = 32000
ADDRESSES = ("192.168.99.10", "192.168.99.20")
ZONE = "topology.kubernetes.io/zone"
TAINT = {"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}


@pytest.fixture
def node_api() -> Iterator[ApiServer]:
    """An API server with a NodePort service, in a namespace with both addresses of the node."""
    with inside_a_namespace(*ADDRESSES), server() as made:
        made.store.create(service("web", type="NodePort", ports=[{"port": 80, "nodePort": 30080}]))
        yield made


def has(*words: str) -> bool:
    """Return whether one live rule has all these words."""
    return any(all(word in rule for word in words) for rule in saved())


def test_the_agent_follows_its_node(node_api: ApiServer, tmp_path: Path) -> None:
    """It waits for its Node, follows addresses, zone and taints, and serves on with the last state when it is deleted."""
    store, log = node_api.store, tmp_path / "agent.log"
    zones = slice_of("web", "10.244.0.1", "10.244.0.2")
    for endpoint, zone in zip(zones["endpoints"], "ab", strict=True):
        endpoint["hints"] = {"forZones": [{"name": zone}]}
    store.create(zones)
    # A source range with an address of the node admits the load balancer's: the node's packets have that as source.
    store.create(service("lb", type="LoadBalancer", loadBalancerSourceRanges=[f"{ADDRESSES[1]}/32"]))
    balancer = {"status": {"loadBalancer": {"ingress": [{"ip": "198.51.100.1"}]}}}
    store.merge_patch(SERVICES, "default", "lb", balancer)
    store.create(slice_of("lb", "10.244.0.3"))
    local = {"externalTrafficPolicy": "Local", "healthCheckNodePort": CHECK, "ports": [{"port": 81}]}
    store.create(service("check", type="LoadBalancer", **local))

    def change(**fields: Any) -> None:
        store.merge_patch(NODES, "", "node1", fields)

    flags = ("--hostname-override=node1", "--master", node_api.url, "--nodeport-addresses=primary")
    with running(log, *flags) as process:
        eventually(lambda: answers(HEALTH, "/livez", 200))
        assert not has("KUBE-SERVICES")
        here = node("node1", ADDRESSES[0])
        here["metadata"]["labels"] = {ZONE: "a"}
        invalid = ("", "node1.example", "fe80::1%eth0")
        here["status"]["addresses"][:0] = [{"type": "InternalIP", "address": text} for text in invalid]
        store.create(here)
        eventually(lambda: has(f"-d {ADDRESSES[0]}/32", "-j KUBE-NODEPORTS"))
        eventually(lambda: answers(HEALTH, "/healthz", 200))
        assert has("--to-destination 10.244.0.1:8080")
        assert not has("--to-destination 10.244.0.2:8080")
        assert has("-A KUBE-FW-", f"-s {ADDRESSES[1]}/32")
        assert not has("-A KUBE-FW-", "-s 198.51.100.1/32")
        assert log.read_text().count("invalid values skipped") == 1
        eventually(lambda: answers(CHECK, "/", 503, ADDRESSES[0]))
        assert not answers(CHECK, "/", 503, ADDRESSES[1])

        change(metadata={"labels": {ZONE: "b"}})
        eventually(lambda: has("--to-destination 10.244.0.2:8080"))
        assert not has("--to-destination 10.244.0.1:8080")

        change(status=node("node1", ADDRESSES[1])["status"])
        eventually(lambda: has(f"-d {ADDRESSES[1]}/32", "-j KUBE-NODEPORTS"))
        assert not has(f"-d {ADDRESSES[0]}/32")
        assert has("-A KUBE-FW-", "-s 198.51.100.1/32")

        # An address of the other family: node ports at all addresses, as after a restart.
        change(status=node("node1", "fd00::1")["status"])
        eventually(lambda: has("-A KUBE-SERVICES", "--dst-type LOCAL", "-j KUBE-NODEPORTS"))
        assert not has("-A KUBE-FW-", "-s 198.51.100.1/32")
        for address in ADDRESSES:
            eventually(lambda: answers(CHECK, "/", 503, address))

        # Load balancers shall use other nodes, but the rules stay.
        before = saved()
        change(spec={"taints": [TAINT]})
        eventually(lambda: answers(HEALTH, "/healthz", 503))
        assert '"nodeEligible":false,"healthy":true' in fetch(HEALTH, "/healthz").body
        assert answers(HEALTH, "/livez", 200)
        assert answers(HEALTH, "/readyz", 200)
        assert saved() == before
        change(spec={"taints": []})
        eventually(lambda: answers(HEALTH, "/healthz", 200))

        store.delete(NODES, "", "node1")
        eventually(lambda: "node deleted, serving with its last state" in log.read_text())
        store.create(service("late", clusterIP="10.96.200.1"))
        eventually(lambda: has("-d 10.96.200.1/32"))
        assert [rule for rule in saved() if "late" not in rule] == before
        assert all(answers(HEALTH, page, 200) for page in ("/healthz", "/livez", "/readyz"))
        assert process.poll() is None


def test_pod_cidrs_are_awaited_and_followed(node_api: ApiServer, tmp_path: Path) -> None:
    """In NodeCIDR mode, no rules are written without pod CIDRs."""
    node_api.store.create(slice_of("web", "10.244.0.1"))
    node_api.store.create(node("node1", ADDRESSES[0]))
    flags = ("--hostname-override=node1", "--master", node_api.url, "--detect-local-mode=NodeCIDR")
    with running(tmp_path / "agent.log", *flags) as process:
        eventually(lambda: answers(HEALTH, "/livez", 200))
        assert not has("KUBE-SERVICES")
        assert answers(HEALTH, "/readyz", 503)
        for cidr in ("10.244.1.0/24", "10.244.7.0/24"):
            node_api.store.merge_patch(NODES, "", "node1", {"spec": {"podCIDRs": [cidr]}})
            eventually(lambda: has(f"! -s {cidr}", "KUBE-MARK-MASQ"))
        assert not has("10.244.1.0/24")
        assert process.poll() is None


# Commands are not looked up in the system's folders, as in a container that lacks some.
ONLY_PATH = "from pykubeproxy.kernel import runner; runner._SYSTEM_FOLDERS = ()"


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
    with running(log, *flags, environment=environment, before=ONLY_PATH):
        eventually(lambda: answers(HEALTH, "/healthz", 200))
        assert list(json.loads(fetch(HEALTH, "/healthz").body)["status"]) == ["IPv4"]
        eventually(lambda: answers(CHECK, "/", 503))
        assert not listens_on_ipv6(CHECK)
        assert "IPv6" not in fetch(METRICS, "/metrics").body
    assert any("-d 10.96.0.10/32" in rule for rule in saved())
    assert "KUBE-" not in "".join(saved("ip6tables-nft-save"))
    assert reason in log.read_text()


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        (
            "--cluster-cidr=fd00:10::/48",
            "clusterCIDR: fd00:10::/48 has no IPv4 network, which this node needs; ",
        ),
        ("--bind-address=fd00::1", ""),  # the node's first family must be supported
    ],
)
def test_settings_for_ipv6_fail_the_start_without_ipv6(
    api: ApiServer, tmp_path: Path, flag: str, words: str
) -> None:
    """With one line that names both."""
    log = tmp_path / "agent.log"
    disable_ipv6(tmp_path)
    with running(log, "--hostname-override=node1", "--master", api.url, flag) as process:
        assert process.wait(20) == 1
    assert f"{words}IPv6 is disabled" in log.read_text().splitlines()[-1]
    assert not has("KUBE-SERVICES")


def test_cleanup_removes_ipv6_rules_of_a_node_without_ipv6(api: ApiServer, tmp_path: Path) -> None:
    """They may be from before."""
    with running(tmp_path / "agent.log", "--hostname-override=node1", "--master", api.url):
        eventually(lambda: any("KUBE-SERVICES" in rule for rule in saved("ip6tables-nft-save")))
    disable_ipv6(tmp_path)
    with running(tmp_path / "cleanup.log", "--cleanup") as process:
        assert process.wait(20) == 0
    assert not any("KUBE-SERVICES" in rule for rule in saved("ip6tables-nft-save"))
