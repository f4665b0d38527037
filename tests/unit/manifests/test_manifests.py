"""The manifests agree with the program and keep to the API's schemas: flags, ports, rights, versions."""

import re
from importlib.metadata import version
from pathlib import Path

import kubernetes_validate
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
from pykubeproxy.sources.queries import EVENTS, NEEDED
from tests.unit.manifests.overlays import (
    MANIFESTS,
    OVERLAYS,
    PROXIES,
    SOURCES,
    Object,
    built,
    container,
    daemon_set,
    one,
    read,
)

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
    mounts = {item["name"]: item["mountPath"] for item in container(name)["volumeMounts"]}
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
    ports = {item["name"]: item["containerPort"] for item in agent["ports"]}
    assert config.health_address
    assert config.metrics_address
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
    for item in (agent, set_up):
        assert item["securityContext"]["readOnlyRootFilesystem"]
        assert item["image"] == agent["image"]
        mounts = [mount["mountPath"] for mount in item["volumeMounts"] if not mount.get("readOnly")]
        assert mounts == writable[item["name"]]


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
    return {item["image"] for item in (*pod["initContainers"], *pod["containers"])}


@pytest.mark.parametrize("overlay", PROXIES)
def test_images_have_a_registry_and_the_tag_of_this_version(overlay: str) -> None:
    """No image comes from the default registry, where the name belongs to others. A placeholder cannot be pulled."""
    name = "localhost/pykubeproxy" if overlay == "kind" else "registry.example.com/OWNER/pykubeproxy"
    assert images(overlay) == {f"{name}:{pykubeproxy.__version__}"}
    assert version("pykubeproxy") == pykubeproxy.__version__


def nodes(template: Object) -> list[Object]:
    required = template["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (term,) = required["nodeSelectorTerms"]
    return term["matchExpressions"]


def matches(expressions: list[Object], label: str | None) -> bool:
    return all((label in item["values"]) == (item["operator"] == "In") for item in expressions)


@pytest.mark.parametrize("overlay", ["default", "canary"])
@pytest.mark.parametrize("label", [None, "kube-proxy", "pykubeproxy", "none"])
def test_each_node_has_one_proxy(overlay: str, label: str | None) -> None:
    """With the overlay's patch applied to kube-proxy, every node has exactly one proxy, or with the label "none", none."""
    ours = one(built(overlay), "DaemonSet")["spec"]["template"]
    patch = yaml.safe_load((MANIFESTS / "overlays" / overlay / "kube-proxy.patch.yaml").read_text())
    theirs = patch["spec"]["template"]
    assert matches(nodes(ours), label) + matches(nodes(theirs), label) == (label != "none")
    # Nodes without the label run pykubeproxy only in the default overlay.
    assert matches(nodes(ours), None) == (overlay == "default")


def test_kind_cluster_and_configuration_agree() -> None:
    """The cluster has no kube-proxy, and its pod subnet is the configured clusterCIDR."""
    (cluster,) = read(MANIFESTS / "overlays/kind/cluster.yaml")
    assert cluster["networking"]["kubeProxyMode"] == "none"
    cidr = cluster["networking"]["podSubnet"]
    assert of_file(MANIFESTS / "overlays/kind/config.conf").detect_local.cluster_cidrs == (cidr,)
    assert len({item["image"] for item in cluster["nodes"]}) == 1
    assert [item["role"] for item in cluster["nodes"]].count("worker") >= 2


# The oldest with all that is used, and the newest whose schema is known here.
VERSIONS = ("1.27", kubernetes_validate.latest_version())
OPERATOR = "monitoring.coreos.com/v1"
# What the Prometheus operator's definitions know, as far as it is used here.
RULE = {"alert", "expr", "for", "labels", "annotations"}
ENDPOINTS = {"PodMonitor": "podMetricsEndpoints", "ServiceMonitor": "endpoints"}
ENDPOINT = {"port", "path", "relabelings"}


def check(item: Object, version: str) -> None:
    if item["apiVersion"] != OPERATOR:
        kubernetes_validate.validate(item, version, strict=True)
    elif item["kind"] == "PrometheusRule":
        (group,) = item["spec"]["groups"]
        assert item["spec"].keys() == {"groups"}
        assert group.keys() == {"name", "rules"}
        assert all(rule.keys() <= RULE and isinstance(rule["expr"], str) for rule in group["rules"])
    else:
        endpoints = ENDPOINTS[item["kind"]]
        assert item["spec"].keys() == {"jobLabel", "selector", endpoints}
        assert all(of.keys() == ENDPOINT for of in item["spec"][endpoints])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlays_are_valid(overlay: str, version: str) -> None:
    """Each built overlay passes, in the oldest and the newest version of Kubernetes."""
    for item in built(overlay):
        check(item, version)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(MANIFESTS)))
def test_files_are_valid(path: Path) -> None:
    """So do the files themselves, kubectl or not; only kustomize's fields are missing there."""
    for item in read(path):
        if item["kind"] == "DaemonSet":
            item["spec"].setdefault("selector", {"matchLabels": {"a": "b"}})
        check(item, VERSIONS[-1])


@pytest.mark.parametrize("overlay", PROXIES)
def test_a_bare_cluster_is_enough(overlay: str) -> None:
    """No custom resource is needed, all that has a namespace is in kube-system, and references lead somewhere."""
    objects = built(overlay)
    kinds = [item["kind"] for item in objects]
    assert sorted(kinds) == [
        "ClusterRole",
        "ClusterRoleBinding",
        "ConfigMap",
        "ConfigMap",
        "DaemonSet",
        "ServiceAccount",
    ]
    names = {(item["kind"], item["metadata"]["name"]) for item in objects}
    for item in objects:
        assert item["metadata"].get("namespace", "") == ("" if "Cluster" in item["kind"] else "kube-system")
        if item["kind"] == "ClusterRoleBinding":
            assert ("ClusterRole", item["roleRef"]["name"]) in names
            assert [("ServiceAccount", of["name"]) in names for of in item["subjects"]] == [True]
        if item["kind"] == "DaemonSet":
            pod = item["spec"]["template"]["spec"]
            assert ("ServiceAccount", pod["serviceAccountName"]) in names
            maps = {volume["configMap"]["name"] for volume in pod["volumes"] if "configMap" in volume}
            maps |= {of["configMapRef"]["name"] for of in pod["containers"][0]["envFrom"]}
            assert {("ConfigMap", name) for name in maps} <= names
            assert (
                item["spec"]["selector"]["matchLabels"].items()
                <= item["spec"]["template"]["metadata"]["labels"].items()
            )


ROLES = read(MANIFESTS / "inspect/rbac.yaml")


def granted(role: Object) -> set[str]:
    return {
        f"{verb} {resource}"
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_exec_is_granted_in_kube_system_only() -> None:
    """Exec into a proxy's pod equals root, so it is no right in all namespaces."""
    with_exec = [role for role in ROLES if any("pods/exec" in item for item in granted(role))]
    assert {(item["kind"], item["metadata"]["namespace"]) for item in with_exec} == {("Role", "kube-system")}
    assert granted(with_exec[0]) == {"get pods/exec", "create pods/exec"}


def test_probing_needs_exec_and_debug_pods() -> None:
    (role,) = (item for item in ROLES if item["metadata"]["name"] == "pykubeproxy-probe")
    others = (item for item in ROLES if item["kind"] == "Role" and item is not role)
    assert granted(role) == set().union(*map(granted, others))


def test_reading_changes_nothing() -> None:
    (cluster,) = (item for item in ROLES if item["kind"] == "ClusterRole")
    assert {item.split()[0] for item in granted(cluster)} == {"get", "list"}
    assert {item.split()[1] for item in granted(cluster)} == {"nodes", "pods", "services", "endpointslices"}


def test_debug_pods_have_a_role_of_their_own() -> None:
    (debug,) = (item for item in ROLES if item["metadata"]["name"] == "pykubeproxy-debug")
    assert (debug["kind"], debug["metadata"]["namespace"]) == ("Role", "kube-system")
    assert granted(debug) == {"create pods", "delete pods"}
