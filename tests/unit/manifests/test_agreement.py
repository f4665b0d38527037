"""What the manifests say is what the program knows."""

from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

import pykubeproxy
from pykubeproxy.agent.http import Request
from pykubeproxy.agent.observe.health import Health, health_pages
from pykubeproxy.cli.flags import load_config
from pykubeproxy.cli.run import run
from pykubeproxy.config import Config, load
from pykubeproxy.config.table import HEALTH_PORT, METRICS_PORT
from pykubeproxy.kernel.runner import DEFAULT_LOCK_FILE
from pykubeproxy.sources.access import EVENTS, NEEDED
from tests.unit.manifests.overlays import MANIFESTS, PROXIES, built, container, daemon_set, one, read

CONFIGS = sorted(MANIFESTS.rglob("config.conf"))
CONFIG_FOLDER = "/var/lib/kube-proxy"
# What the kubelet gives to the containers of node-critical pods.
OOM_SCORE = -997


def of_file(path: Path) -> Config:
    loaded = load(path.read_bytes(), {})
    assert loaded.warnings == ()
    return loaded.config


@pytest.mark.parametrize("name", ["set-up", "agent"])
def test_flags_exist(name: str) -> None:
    """The arguments are a command of ours, with flags that it knows, and the file it names is the one mounted."""
    command, *flags = container(name)["args"]
    assert command == "run"
    run.make_context("run", list(flags))
    assert f"--config={CONFIG_FOLDER}/config.conf" in flags
    mounts = {it["name"]: it["mountPath"] for it in container(name)["volumeMounts"]}
    assert mounts["config"] == CONFIG_FOLDER
    assert ("--init-only" in flags) == (name == "set-up")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.parent.name)
def test_configurations_are_taken_without_a_warning(path: Path) -> None:
    """Every field exists; the agent can keep the score that the kubelet has given it; no kubeconfig is needed."""
    config = of_file(path)
    assert config.oom_score_adj == OOM_SCORE
    assert (config.client.kubeconfig, config.client.master) == ("", "")
    assert (
        load_config({"config": str(path), "hostname-override": "node1"}).config.hostname_override == "node1"
    )


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.parent.name)
def test_ports_and_probes_lead_to_pages(path: Path) -> None:
    """The ports are those that are listened on, and the probes ask for pages that there are."""
    config, agent = of_file(path), container("agent")
    ports = {it["name"]: it["containerPort"] for it in agent["ports"]}
    assert ports == {"healthz": config.health_address.port, "metrics": config.metrics_address.port}
    assert ports == {"healthz": HEALTH_PORT, "metrics": METRICS_PORT}
    assert config.health_address.host == "0.0.0.0"  # the kubelet asks at the node's address
    page = health_pages(Health([], 30.0), lambda *_: None)
    for probe in ("livenessProbe", "readinessProbe"):
        ask = agent[probe]["httpGet"]
        assert ask["port"] == "healthz"
        assert page(Request(ask["path"])).status != 404
    assert page(Request("/other")).status == 404


def test_rights_are_those_that_are_used() -> None:
    """The ClusterRole grants what `check` asks the API server for, which is what an agent needs, and no more."""
    role = one(read(MANIFESTS / "base/rbac.yaml"), "ClusterRole")
    granted = {
        (verb, resource, group)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert granted == {(right.verb, right.resource, right.group) for right in (*NEEDED, EVENTS)}


def test_the_agent_can_do_little() -> None:
    """Two capabilities, a read-only root file system, and only iptables' lock to write to."""
    agent, set_up = container("agent"), container("set-up")
    assert agent["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["NET_ADMIN", "NET_RAW"]}
    assert not agent["securityContext"]["privileged"]
    assert not agent["securityContext"]["allowPrivilegeEscalation"]
    assert set_up["securityContext"]["privileged"]
    for it in (agent, set_up):
        assert it["securityContext"]["readOnlyRootFilesystem"]
        assert it["image"] == agent["image"]
    writable = [it["mountPath"] for it in agent["volumeMounts"] if not it.get("readOnly")]
    assert writable == [DEFAULT_LOCK_FILE]


def test_it_runs_on_every_node_and_stays() -> None:
    """In the node's network, before other pods, whatever taints there are, and updated a few nodes at a time."""
    spec = daemon_set()["spec"]
    pod = spec["template"]["spec"]
    assert pod["hostNetwork"]
    assert pod["dnsPolicy"] == "Default"
    assert pod["priorityClassName"] == "system-node-critical"
    assert pod["tolerations"] == [{"operator": "Exists"}]
    assert spec["updateStrategy"]["rollingUpdate"]["maxUnavailable"] == "10%"
    requests = container("agent")["resources"]["requests"]
    assert requests.keys() == {"cpu", "memory"}
    # Without limits: a proxy that is killed for its memory, or held up, is of no use to the pods that kept to theirs.
    assert "limits" not in container("agent")["resources"]


@pytest.mark.parametrize("overlay", PROXIES)
def test_the_image_has_this_version(overlay: str) -> None:
    """The manifests of a release run that release."""
    pod = one(built(overlay), "DaemonSet")["spec"]["template"]["spec"]
    images = {it["image"] for it in (*pod["initContainers"], *pod["containers"])}
    assert images == {f"pykubeproxy:{pykubeproxy.__version__}"}
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
    """With the patch beside an overlay applied, every node has one of the two proxies, whatever its label."""
    ours = one(built(overlay), "DaemonSet")["spec"]["template"]
    patch = yaml.safe_load((MANIFESTS / "overlays" / overlay / "kube-proxy.patch.yaml").read_text())
    theirs = patch["spec"]["template"]
    assert matches(nodes(ours), label) != matches(nodes(theirs), label)
    # A canary is one node at a time; the default is all that have not been taken out.
    assert matches(nodes(ours), None) == (overlay == "default")


def test_kind_agrees_with_itself() -> None:
    """The cluster has no kube-proxy, and the pods' addresses that the configuration says."""
    (cluster,) = read(MANIFESTS / "overlays/kind/cluster.yaml")
    assert cluster["networking"]["kubeProxyMode"] == "none"
    cidr = cluster["networking"]["podSubnet"]
    assert of_file(MANIFESTS / "overlays/kind/config.conf").detect_local.cluster_cidrs == (cidr,)
    assert len({it["image"] for it in cluster["nodes"]}) == 1
    assert [it["role"] for it in cluster["nodes"]].count("worker") >= 2
