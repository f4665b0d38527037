"""A real kubectl accepts the smoke test's commands."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pykubeproxy.lab.apiserver import ApiServer
from tests.fakes.cluster import node, server, service
from tests.fakes.kubectl import needs_kubectl
from vagrant.smoke.cluster import Cluster, Failed, kubectl

pytestmark = needs_kubectl

# All methods that run kubectl.
COMMANDS: dict[str, Callable[[Cluster], object]] = {
    "agents": Cluster.agents,
    "desired_and_ready": Cluster.desired_and_ready,
    "has_kube_proxy": Cluster.has_kube_proxy,
    "node_addresses": Cluster.node_addresses,
    "pods": Cluster.pods,
    "remove": Cluster.remove,
    "scale": lambda cluster: cluster.scale(3),
    "restart": Cluster.restart,
    "rolled_out": Cluster.rolled_out,
    "client_node": Cluster.client_node,
    "probe": Cluster.probe,
    "load": lambda cluster: cluster.load().stop(),
    "label": lambda cluster: cluster.label("n1"),
    "relabel": lambda cluster: cluster.relabel("n1", "kube-proxy"),
    "unlabel": lambda cluster: cluster.relabel("n1", ""),
    "has_ingress": Cluster.has_ingress,
    "policy": Cluster.policy,
    "set_policy": lambda cluster: cluster.set_policy("Local"),
    "ingress_nodes": Cluster.ingress_nodes,
}


@pytest.fixture
def reaching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Cluster]:
    """Return a cluster at a URL, without this machine's kubeconfig and caches."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))

    def cluster(url: str) -> Cluster:
        options = (f"--server={url}",)
        return Cluster(kubectl(*options), options, seconds=5.0)

    return cluster


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with server() as running:
        running.store.create(node("n1", "10.0.0.1"))
        yield running


@pytest.mark.parametrize("name", COMMANDS)
def test_kubectl_accepts_the_command(reaching: Callable[[str], Cluster], name: str) -> None:
    """Each command and flag exists: without a server, only the connection fails."""
    with pytest.raises(
        Failed, match=r"connection to the server 127\.0\.0\.1:1 was refused|connect: connection refused"
    ):
        COMMANDS[name](reaching("http://127.0.0.1:1"))


def test_sets_and_removes_the_label(reaching: Callable[[str], Cluster], api: ApiServer) -> None:
    """Removing a missing label is no error."""
    cluster = reaching(api.url)
    for value in ("kube-proxy", "pykubeproxy", "", ""):
        cluster.relabel("n1", value)
        assert cluster.label("n1") == value


def test_node_addresses_include_only_ready_nodes(reaching: Callable[[str], Cluster], api: ApiServer) -> None:
    """The address is the internal one."""
    ready = node("n2", "10.0.0.2")
    ready["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
    ready["status"]["addresses"] += [
        {"type": "Hostname", "address": "n2"},
        {"type": "ExternalIP", "address": "192.0.2.2"},
    ]
    api.store.create(ready)
    assert reaching(api.url).node_addresses() == {"n2": "10.0.0.2"}


def test_reads_and_sets_the_ingress_policy(reaching: Callable[[str], Cluster], api: ApiServer) -> None:
    """A cluster without the controller is recognized."""
    cluster = reaching(api.url)
    assert not cluster.has_ingress()
    controller = service("ingress-nginx-controller", type="NodePort", selector={"a": "b"})
    controller["metadata"]["namespace"] = "ingress-nginx"
    api.store.create(controller)
    assert cluster.has_ingress()
    for policy in ("Local", "Cluster"):
        cluster.set_policy(policy)
        assert cluster.policy() == policy


def test_refused_connection_is_no_response(reaching: Callable[[str], Cluster]) -> None:
    """The own address is known even if the node port refuses connections."""
    cluster = reaching("http://127.0.0.1:1")
    assert cluster.ask("127.0.0.1", 1) is None
    assert cluster.own_address("127.0.0.1") == "127.0.0.1"


def test_without_kubectl(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names kubectl."""
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(Failed, match="kubectl is not installed"):
        Cluster(kubectl()).remove()


def pods(*names: str) -> str:
    return json.dumps({"items": [{"metadata": {"name": name}} for name in names]})


def test_a_restart_ends_with_the_old_web_servers() -> None:
    """They serve for some seconds after the new ones are ready."""
    listed = [pods("old"), pods("old", "new"), pods("new")]

    def run(*arguments: str, text: str = "", seconds: float = 60.0) -> str:
        return listed.pop(0) if arguments[0] == "get" else ""

    Cluster(run, seconds=5.0).restart()
    assert not listed


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("exec sleep 60", "the probe made no request within 1 s"),
        ("echo sending; exec sleep 60", "the probe did not stop within 1 s"),
        ("echo sending; echo gone >&2; exit 1", "the probe exited with status 1: gone"),
    ],
)
def test_a_probe_that_hangs_or_fails_fails_the_scenario(
    script: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its requests are counted from the first one on."""
    (tmp_path / "kubectl").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(Failed, match=message):
        Cluster(kubectl(), seconds=1.0).load().stop()
