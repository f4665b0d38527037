"""The DaemonSet's containers, run without a kubelet, with their permissions and capabilities."""

import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from pykubeproxy.kernel import Runner
from pykubeproxy.lab.apiserver import ENDPOINT_SLICES, ApiServer
from pykubeproxy.objects import Family
from tests.fakes.cluster import node, server, service, slice_of, write_certificate
from tests.fakes.cluster import node as node_object
from tests.fakes.faulty_apiserver import FaultyApiServer
from tests.fakes.http_client import fetch
from tests.fakes.process import (
    HEALTH,
    METRICS,
    PROGRAM,
    answers,
    capabilities_of,
    confined,
    inside_a_namespace,
    running,
    saved,
)
from tests.fakes.waiting import eventually
from tests.kernel.udp_node import NODE_PORT, PORT, VIP, UdpNode, udp_node

pytestmark = pytest.mark.root

PROJECT = Path(__file__).parents[2]
BASE = PROJECT / "manifests/base"
ACCOUNT = "/run/secrets/kubernetes.io/serviceaccount"
_TIMEOUT = 60.0  # seconds
# A mount namespace with a service account, a configuration and the files of locks; all else is read-only.
MOUNTS = f"""
mount -t tmpfs tmpfs /run; mkdir -p {ACCOUNT}; cp "$GIVEN"/token "$GIVEN"/ca.crt {ACCOUNT}/
touch /run/xtables.lock; mount --bind /run/xtables.lock /run/xtables.lock
mkdir /run/pykubeproxy; mount --bind /run/pykubeproxy /run/pykubeproxy
mkdir /run/given; cp "$GIVEN"/config.conf /run/given/
mount -t tmpfs tmpfs /var/lib; mkdir /var/lib/kube-proxy; mount --bind /run/given /var/lib/kube-proxy
mount -o remount,bind,ro /run; mount -o remount,bind,ro /
if touch /var/tried /run/tried 2>/dev/null; then exit 9; fi
exec "$@"
"""


def containers() -> dict[str, dict[str, Any]]:
    pod = yaml.safe_load((BASE / "daemonset.yaml").read_text())["spec"]["template"]["spec"]
    return {it["name"]: it for it in (*pod["initContainers"], *pod["containers"])}


def started(
    container: dict[str, Any], environment: dict[str, str], log: Path
) -> AbstractContextManager[subprocess.Popen[bytes]]:
    """Run a container's command: arguments with variables expanded, with its capabilities."""
    entering = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", MOUNTS, "enter"]
    context = container["securityContext"]
    if not context.get("privileged"):
        assert context["capabilities"]["drop"] == ["ALL"]
        kept = ",".join(f"+{name.lower()}" for name in context["capabilities"]["add"])
        entering += ["setpriv", "--no-new-privs", f"--bounding-set=-all,{kept}"]
    command, *flags = (it.replace("$(NODE_NAME)", environment["NODE_NAME"]) for it in container["args"])
    assert command == "run"
    return running(log, *flags, environment=environment, inside=entering)


@pytest.fixture(params=["nft", "legacy"])
def pod_files(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return the pod's files: a token, the cluster's certificate and the ConfigMap's configuration."""
    write_certificate(tmp_path / "ca.crt", tmp_path / "key")
    (tmp_path / "token").write_text("of-the-account")
    config = yaml.safe_load((BASE / "config.conf").read_text())
    # The kubelet sets this for node-critical pods; the test keeps the current value.
    config["oomScoreAdj"] = int(Path("/proc/self/oom_score_adj").read_text())
    config["pykubeproxy"] = {"iptablesBackend": request.param}
    (tmp_path / "backend").write_text(request.param)
    (tmp_path / "config.conf").write_text(yaml.safe_dump(config))
    return tmp_path


def granted() -> set[tuple[str, str]]:
    """Return verbs and resources of the ClusterRole."""
    role = next(
        it for it in yaml.safe_load_all((BASE / "rbac.yaml").read_text()) if it["kind"] == "ClusterRole"
    )
    return {
        (verb, f"{resource}.{group}".rstrip("."))
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def requested(api: FaultyApiServer) -> set[tuple[str, str]]:
    return {(it.verb, it.resource) for it in api.requests.entries()}


def test_the_containers_work_with_their_granted_permissions(pod_files: Path) -> None:
    """They use all permissions of the ClusterRole and no others."""
    container = containers()
    with (
        inside_a_namespace(),
        server(tls=(pod_files / "ca.crt", pod_files / "key"), token="of-the-account") as api,
    ):
        port = str(api.port)
        environment = {
            "GIVEN": str(pod_files),
            "NODE_NAME": "node1",
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": port,
        }
        api.store.create(node("node1", "192.168.99.10"))
        api.store.create(service("web", clusterIP="10.96.0.10"))
        api.store.create(slice_of("web", "10.244.0.5"))
        with started(container["set-up"], environment, pod_files / "set-up.log") as process:
            assert process.wait(_TIMEOUT) == 0, (pod_files / "set-up.log").read_text()
        with started(container["agent"], environment, pod_files / "agent.log") as process:
            for probe in ("livenessProbe", "readinessProbe"):
                path = container["agent"][probe]["httpGet"]["path"]
                eventually(lambda: answers(HEALTH, path, 200))
            live = saved(f"iptables-{(pod_files / 'backend').read_text()}-save")
            assert any("10.96.0.10/32" in line for line in live)
            assert answers(METRICS, "/metrics", 200)
            eventually(lambda: requested(api) == granted())
            process.terminate()
            assert process.wait(_TIMEOUT) == 0
    log = (pod_files / "agent.log").read_text()
    assert "warning" not in log, log
    assert "error" not in log, log


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
    with udp_node(Family.IPV4, Runner((), {})) as node, node.node.entered(), server() as api:
        api.store.create(node_object("node1", node.node_address()))
        ports = [{"port": PORT, "protocol": "UDP", "nodePort": NODE_PORT}]
        api.store.create(service("dns", type="NodePort", clusterIP=VIP[Family.IPV4], ports=ports))
        api.store.create(dns(node, "pod1"))
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
    assert all(client.reaches("pod1") for client in clients)

    # These clients keep their source port, so they reach the new pod only if their flows are deleted.
    endpoints = dns(node, "pod2")["endpoints"]
    api.store.merge_patch(ENDPOINT_SLICES, "default", "dns", {"endpoints": endpoints})
    assert all(client.reaches("pod2") for client in clients)

    main = agent.save.removesuffix("-save")
    for argument in ("-F", "-X"):
        environment = {
            "XTABLES_LOCKFILE": str(agent.log.with_name("lock")),
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        }
        subprocess.run([main, "-t", "nat", argument], check=True, env=environment)
    # Far below the 30 s of the periodic check.
    eventually(lambda: any("--to-destination" in rule for rule in saved(agent.save)))
    assert node.client(VIP[Family.IPV4]).reaches("pod2")

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
