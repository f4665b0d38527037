"""An agent with only its required capabilities works; a missing one is named."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from pykubeproxy.kernel import Runner
from pykubeproxy.lab.apiserver import ENDPOINT_SLICES, ApiServer
from pykubeproxy.objects import Family
from tests.fakes.cluster import node as node_object
from tests.fakes.cluster import server, service, slice_of
from tests.fakes.confined import capabilities_of, confined
from tests.fakes.follower import eventually
from tests.fakes.http_client import fetch
from tests.fakes.process import HEALTH, PROGRAM, answers, saved
from tests.kernel.udp_node import NODE_PORT, PORT, VIP, UdpNode, udp_node

pytestmark = pytest.mark.root

# linux/capability.h
NET_ADMIN, NET_RAW = 1 << 12, 1 << 13
NEEDED = {"nft": ("net_admin",), "legacy": ("net_admin", "net_raw")}
BITS = {"nft": NET_ADMIN, "legacy": NET_ADMIN | NET_RAW}


class ConfinedAgent(NamedTuple):
    """An agent on a node with its API server, log and configuration."""

    node: UdpNode
    api: ApiServer
    process: subprocess.Popen[bytes]
    log: Path
    config: Path
    save: str


def configuration(backend: str, **fields: object) -> str:
    return yaml.safe_dump(
        {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "clusterCIDR": "10.244.0.0/16",
            # The conntrack table size and the OOM score concern the whole machine.
            "conntrack": {"maxPerCore": 0, "min": 0, "tcpCloseWaitTimeout": "50m"},
            "oomScoreAdj": int(Path("/proc/self/oom_score_adj").read_text()),
            "pykubeproxy": {"iptablesBackend": backend},
            **fields,
        }
    )


@pytest.fixture(params=["nft", "legacy"])
def agent(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ConfinedAgent]:
    """After a privileged `--init-only`, an agent with only the required capabilities."""
    backend, config, log = request.param, tmp_path / "config.yaml", tmp_path / "agent.log"
    config.write_text(configuration(backend))
    with udp_node(Family.IPV4, Runner((), {}), "one", "two") as node, node.node.entered(), server() as api:
        api.store.create(node_object("node1", node.node_address()))
        ports = [{"port": PORT, "protocol": "UDP", "nodePort": NODE_PORT}]
        api.store.create(service("dns", type="NodePort", clusterIP=VIP[Family.IPV4], ports=ports))
        api.store.create(dns(node, "one"))
        flags = ("--config", str(config), "--master", api.url, "--hostname-override=node1")
        subprocess.run([*PROGRAM, *flags, "--init-only"], check=True, capture_output=True)
        with confined(log, tmp_path / "lock", NEEDED[backend], *flags) as process:
            eventually(lambda: answers(HEALTH, "/readyz", 200) or process.poll() is not None)
            assert process.poll() is None, log.read_text()
            assert capabilities_of(process) == (BITS[backend], True)
            yield ConfinedAgent(node, api, process, log, config, f"iptables-{backend}-save")


def dns(node: UdpNode, *pods: str) -> dict[str, object]:
    made = slice_of("dns", *(node.address(pod) for pod in pods))
    return {**made, "ports": [{"port": PORT, "protocol": "UDP"}]}


def test_an_agent_with_least_privilege_works(agent: ConfinedAgent) -> None:
    """Packets, stale flows, drift, events and a configuration change, without a permission error."""
    node, api = agent.node, agent.api
    clients = node.client(VIP[Family.IPV4]), node.client(node.node_address(), NODE_PORT)
    assert all(client.reaches("one") for client in clients)

    # These clients keep their source port, so they reach the new pod only if their flows are deleted.
    endpoints = dns(node, "two")["endpoints"]
    api.store.merge_patch(ENDPOINT_SLICES, "default", "dns", {"endpoints": endpoints})
    assert all(client.reaches("two") for client in clients)

    main = agent.save.removesuffix("-save")
    for argument in ("-F", "-X"):
        environment = {
            "XTABLES_LOCKFILE": str(agent.log.with_name("lock")),
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        }
        subprocess.run([main, "-t", "nat", argument], check=True, env=environment)
    # Far below the 30 s of the periodic check.
    eventually(lambda: any("--to-destination" in rule for rule in saved(agent.save)), seconds=20)
    assert node.client(VIP[Family.IPV4]).reaches("two")

    port = int(api.url.rpartition(":")[2])
    eventually(lambda: "Starting" in fetch(port, "/apis/events.k8s.io/v1/namespaces/default/events").body)
    log = agent.log.read_text()
    for word in ("ermission", "ermitted", "kernel setting failed", "Traceback", "CAP_"):
        assert word not in log
    assert agent.process.poll() is None

    backend = agent.save.split("-")[1]
    agent.config.write_text(configuration(backend, iptables={"masqueradeAll": True}))
    assert agent.process.wait(20) == 1
    assert any("--to-destination" in rule for rule in saved(agent.save))


@pytest.mark.parametrize(
    ("backend", "given", "missing"),
    [
        ("nft", (), "CAP_NET_ADMIN"),
        ("legacy", ("net_admin",), "CAP_NET_RAW"),
        ("legacy", ("net_raw",), "CAP_NET_ADMIN"),
    ],
)
def test_a_missing_capability_is_named(
    tmp_path: Path, backend: str, given: tuple[str, ...], missing: str
) -> None:
    """In one line."""
    config, log = tmp_path / "config.yaml", tmp_path / "agent.log"
    config.write_text(configuration(backend))
    manifests = tmp_path / "none.yaml"
    manifests.write_text("")
    flags = ("--config", str(config), "--manifests", str(manifests), "--hostname-override=node1", "--once")
    with (
        udp_node(Family.IPV4, Runner((), {})) as node,
        node.node.entered(),
        confined(log, tmp_path / "lock", given, *flags) as process,
    ):
        assert process.wait(30) == 1
    assert missing in log.read_text()
    assert "Traceback" not in log.read_text()
