"""The manifests agree with the program: flags, configuration, ports, rights, versions."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

import pykubeproxy
from pykubeproxy.agent.observe.health import Health, health_pages
from pykubeproxy.cli.flags import load_config
from pykubeproxy.cli.run import run
from pykubeproxy.config import Config, load
from pykubeproxy.config.table import HEALTH_PORT, METRICS_PORT
from pykubeproxy.http import Request
from pykubeproxy.kernel.instance_lock import FOLDER
from pykubeproxy.kernel.runner import DEFAULT_LOCK_FILE
from pykubeproxy.sources.access import EVENTS, NEEDED
from tests.unit.manifests.overlays import MANIFESTS, PROXIES, built, container, daemon_set, one, read

CONFIGS = sorted(MANIFESTS.rglob("config.conf"))
CONFIG_FOLDER = "/var/lib/kube-proxy"
# The kubelet's value for containers of node-critical pods.
OOM_SCORE = -997


def of_file(path: Path) -> Config:
    loaded = load(path.read_bytes(), {})
    assert loaded.warnings == ()
    return loaded.config


@pytest.mark.parametrize("name", ["set-up", "agent"])
def test_flags_exist(name: str) -> None:
    """Each container runs an existing command with existing flags and the mounted configuration."""
    command, *flags = container(name)["args"]
    assert command == "run"
    run.make_context("run", list(flags))
    assert f"--config={CONFIG_FOLDER}/config.conf" in flags
    mounts = {it["name"]: it["mountPath"] for it in container(name)["volumeMounts"]}
    assert mounts["config"] == CONFIG_FOLDER
    assert ("--init-only" in flags) == (name == "set-up")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.parent.name)
def test_configurations_load_without_warnings(path: Path) -> None:
    """Every field exists, oomScoreAdj is the kubelet's, and no kubeconfig is needed."""
    config = of_file(path)
    assert config.oom_score_adj == OOM_SCORE
    assert (config.client.kubeconfig, config.client.master) == ("", "")
    assert (
        load_config({"config": str(path), "hostname-override": "node1"}).config.hostname_override == "node1"
    )


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.parent.name)
def test_ports_and_probes_exist(path: Path) -> None:
    """The agent listens on the declared ports and serves the paths of the probes."""
    config, agent = of_file(path), container("agent")
    ports = {it["name"]: it["containerPort"] for it in agent["ports"]}
    assert ports == {"healthz": config.health_address.port, "metrics": config.metrics_address.port}
    assert ports == {"healthz": HEALTH_PORT, "metrics": METRICS_PORT}
    page = health_pages(Health([], 30.0), lambda *_: None)
    for probe in ("livenessProbe", "readinessProbe"):
        ask = agent[probe]["httpGet"]
        assert (ask["host"], ask["port"]) == ("127.0.0.1", "healthz")
        assert page(Request(ask["path"])).status != 404
    assert page(Request("/other")).status == 404


def test_cluster_role_grants_exactly_what_the_agent_uses() -> None:
    """The ClusterRole equals the permissions that `check` verifies."""
    role = one(read(MANIFESTS / "base/rbac.yaml"), "ClusterRole")
    granted = {
        (verb, resource, group)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert granted == {(right.verb, right.resource, right.group) for right in (*NEEDED, EVENTS)}


def test_agent_has_two_capabilities_and_a_read_only_root() -> None:
    """Only the locks are writable mounts: of iptables-legacy, and of agents."""
    agent, set_up = container("agent"), container("set-up")
    assert agent["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["NET_ADMIN", "NET_RAW"]}
    assert not agent["securityContext"]["privileged"]
    assert not agent["securityContext"]["allowPrivilegeEscalation"]
    assert set_up["securityContext"]["privileged"]
    writable = {"set-up": [DEFAULT_LOCK_FILE], "agent": [DEFAULT_LOCK_FILE, str(FOLDER)]}
    for it in (agent, set_up):
        assert it["securityContext"]["readOnlyRootFilesystem"]
        assert it["image"] == agent["image"]
        mounts = [mount["mountPath"] for mount in it["volumeMounts"] if not mount.get("readOnly")]
        assert mounts == writable[it["name"]]


def test_daemon_set_runs_on_every_node() -> None:
    """It uses the node's network, tolerates all taints, is node-critical and updates 10% of the nodes at a time."""
    spec = daemon_set()["spec"]
    pod = spec["template"]["spec"]
    assert pod["hostNetwork"]
    assert pod["dnsPolicy"] == "Default"
    assert pod["priorityClassName"] == "system-node-critical"
    assert pod["tolerations"] == [{"operator": "Exists"}]
    assert spec["updateStrategy"]["rollingUpdate"]["maxUnavailable"] == "10%"
    resources = container("agent")["resources"]
    assert resources["requests"].keys() == {"cpu", "memory"}
    # No CPU limit: a throttled proxy breaks all pods of the node. So does one that lacks memory, hence twice its peak.
    (peak,) = re.findall(r"at most (\d+) MB", (MANIFESTS.parent / "docs/performance.md").read_text())
    assert resources["limits"].keys() == {"memory"}
    assert int(resources["limits"]["memory"].removesuffix("Mi")) << 20 >= 2 * int(peak) * 10**6


def images(overlay: str) -> set[str]:
    pod = one(built(overlay), "DaemonSet")["spec"]["template"]["spec"]
    return {it["image"] for it in (*pod["initContainers"], *pod["containers"])}


@pytest.mark.parametrize("overlay", PROXIES)
def test_images_have_a_registry_and_the_tag_of_this_version(overlay: str) -> None:
    """No image comes from the default registry, where the name belongs to others. A placeholder cannot be pulled."""
    name = "localhost/pykubeproxy" if overlay == "kind" else "registry.example.com/OWNER/pykubeproxy"
    assert images(overlay) == {f"{name}:{pykubeproxy.__version__}"}
    assert version("pykubeproxy") == pykubeproxy.__version__


def nodes(template: dict) -> list[dict]:
    required = template["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (term,) = required["nodeSelectorTerms"]
    return term["matchExpressions"]


def matches(expressions: list[dict], label: str | None) -> bool:
    return all((label in it["values"]) == (it["operator"] == "In") for it in expressions)


@pytest.mark.parametrize("overlay", ["default", "canary"])
@pytest.mark.parametrize("label", [None, "kube-proxy", "pykubeproxy"])
def test_each_node_has_one_proxy(overlay: str, label: str | None) -> None:
    """With the overlay's patch applied to kube-proxy, every node has exactly one proxy."""
    ours = one(built(overlay), "DaemonSet")["spec"]["template"]
    patch = yaml.safe_load((MANIFESTS / "overlays" / overlay / "kube-proxy.patch.yaml").read_text())
    theirs = patch["spec"]["template"]
    assert matches(nodes(ours), label) != matches(nodes(theirs), label)
    # Nodes without the label run pykubeproxy only in the default overlay.
    assert matches(nodes(ours), None) == (overlay == "default")


def test_kind_cluster_and_configuration_agree() -> None:
    """The cluster has no kube-proxy, and its pod subnet is the configured clusterCIDR."""
    (cluster,) = read(MANIFESTS / "overlays/kind/cluster.yaml")
    assert cluster["networking"]["kubeProxyMode"] == "none"
    cidr = cluster["networking"]["podSubnet"]
    assert of_file(MANIFESTS / "overlays/kind/config.conf").detect_local.cluster_cidrs == (cidr,)
    assert len({it["image"] for it in cluster["nodes"]}) == 1
    assert [it["role"] for it in cluster["nodes"]].count("worker") >= 2
