"""kubectl, its plugin and the Python client, against the API server and the nodes of a lab."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes
import kubernetes.stream
import pytest

from pykubeproxy.lab.cluster import Lab
from tests.fakes.kubectl import kubectl, needs_kubectl
from tests.fakes.waiting import PATIENCE

pytestmark = [pytest.mark.root, needs_kubectl]

PROXY = ("-n", "kube-system", "pykubeproxy-node1")
SHOP = """
apiVersion: v1
kind: Service
metadata: {name: shop}
spec: {selector: {app: own}, ports: [{port: %d, targetPort: 8080}]}
"""
DEBUG = '{"spec":{"hostNetwork":true,"nodeName":"node2"}}'


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """A lab with a Service and a pod of another; the test runs where clients of its API server are."""
    with Lab(f"tk{os.getpid()}") as made, made.outside.namespace.entered():
        made.start_pod("own-1", "own", "node1", ["sleep", "600"])
        made.service("web")
        made.until(lambda: "web" in plugin(made, "dump-rules").stdout, "rules for web")
        yield made


def plugin(lab: Lab, *arguments: str) -> subprocess.CompletedProcess[str]:
    return kubectl(lab, "pykubeproxy", *arguments)


def services(text: str) -> list[dict[str, Any]]:
    """Return the services of a document, without the counters of their endpoints."""
    found: list[dict[str, Any]] = json.loads(text)["nodes"][0]["services"]
    for endpoint in (endpoint for it in found for endpoint in it["endpoints"]):
        del endpoint["packets"], endpoint["bytes"]
    return found


def test_kubectl_runs_commands_on_the_node(lab: Lab) -> None:
    """In the node's network and tables; with outputs apart, input and exit code."""
    script = "iptables -N ON-NODE1; cat; echo problem >&2; exit 5"
    done = kubectl(lab, "exec", "-i", *PROXY, "--", "sh", "-c", script, given="input")
    assert (done.stdout, done.returncode) == ("input", 5)
    assert done.stderr == "problem\ncommand terminated with exit code 5\n"
    saved = kubectl(lab, "exec", *PROXY, "--", "iptables-save", "-t", "filter")
    assert ":ON-NODE1 " in saved.stdout
    other = kubectl(lab, "exec", *PROXY[:2], "pykubeproxy-node2", "--", "iptables-save", "-t", "filter")
    assert (other.returncode, "ON-NODE1" in other.stdout) == (0, False)


def test_kubectl_sees_the_pods(lab: Lab) -> None:
    """Those of the lab and the proxies, and no others."""
    names = kubectl(lab, "get", "pods", "-A", "-o", "name").stdout.split()
    assert names == ["pod/own-1", "pod/pykubeproxy-node1", "pod/pykubeproxy-node2"]
    address = kubectl(lab, "exec", "own-1", "--", "hostname", "-I").stdout.split()
    assert lab.pods["own-1"].addresses[0] in address


def test_kubectl_deletes_pods_and_applies_objects(lab: Lab, tmp_path: Path) -> None:
    """A deleted pod ends, that of a proxy starts again; a manifest is applied, changed and applied again."""
    lab.deploy("gone", 1)
    agent = lab.agents["node2"].pid
    assert kubectl(lab, "delete", "pod", "gone-1").stdout.startswith('pod "gone-1" deleted')
    assert "gone-1" not in lab.pods
    kubectl(lab, "delete", "pod", *PROXY[:2], "pykubeproxy-node2")
    lab.until(lambda: lab.agents["node2"].pid not in (0, agent), "the agent of node2 has started again")
    manifest = tmp_path / "shop.yaml"
    for port, result in ((80, "created"), (80, "unchanged"), (81, "configured")):
        manifest.write_text(SHOP % port)
        assert kubectl(lab, "apply", "-f", str(manifest)).stdout.split()[-1] == result
    assert "81/TCP" in kubectl(lab, "get", "service", "shop", "--no-headers").stdout
    kubectl(lab, "delete", "service", "shop")


def test_kubectl_runs_and_deletes_a_debug_pod(lab: Lab) -> None:
    debug = ("-n", "kube-system", "debug")
    for grace in ("5", "0"):
        started = kubectl(lab, "run", *debug, "--image=any", "--restart=Never", f"--overrides={DEBUG}")
        assert started.returncode == 0, started.stderr
        ready = kubectl(lab, "wait", *debug[:2], "pod/debug", "--for=condition=Ready", "--timeout=180s")
        assert ready.returncode == 0, ready.stderr
        address = kubectl(lab, "exec", *debug, "--", "hostname", "-I").stdout.split()
        assert lab.nodes["node2"].addresses[0] in address
        forced = ("--force",) if grace == "0" else ()
        deleted = kubectl(lab, "delete", "pod", *debug, f"--grace-period={grace}", *forced)
        assert deleted.returncode == 0, deleted.stderr
    assert "not found" in kubectl(lab, "get", "pod", *debug).stderr


def test_kubectl_names_what_is_missing(lab: Lab) -> None:
    missing = kubectl(lab, "exec", *PROXY[:2], "other", "--", "id")
    assert missing.stderr == 'Error from server (NotFound): pods "other" not found\n'
    program = kubectl(lab, "exec", *PROXY, "--", "nothere")
    assert (program.returncode, '"nothere": executable file not found' in program.stderr) == (1, True)


def test_python_client_runs_commands_on_the_node(lab: Lab) -> None:
    loaded = kubernetes.config.new_client_from_config(str(lab.directory.kubeconfig))
    session = kubernetes.stream.stream(
        kubernetes.client.CoreV1Api(loaded).connect_get_namespaced_pod_exec,
        "pykubeproxy-node2",
        "kube-system",
        command=["sh", "-c", "hostname -I; exit 6"],
        stdout=True,
        _preload_content=False,
    )
    session.run_forever(timeout=PATIENCE)
    assert lab.nodes["node2"].addresses[0] in session.read_stdout()
    assert session.returncode == 6
    loaded.close()


def test_no_command_leaves_the_lab(lab: Lab) -> None:
    """A pod that claims a node outside of the lab's namespaces cannot run commands."""
    meta = {"name": "outside", "namespace": "kube-system"}
    spec = {"nodeName": "../../proc/1", "hostNetwork": True, "containers": [{"name": "c", "image": "any"}]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}
    created = lab.api.call("POST", "/api/v1/namespaces/kube-system/pods", pod)
    lab.api.call(
        "PUT",
        "/api/v1/namespaces/kube-system/pods/outside/status",
        created | {"status": {"phase": "Running"}},
    )
    done = kubectl(lab, "exec", *PROXY[:2], "outside", "--", "id")
    assert done.returncode == 1
    assert "has no network namespace for pod outside" in done.stderr


def test_both_agents_are_healthy(lab: Lab) -> None:
    done = plugin(lab, "status", "-o", "json")
    assert done.returncode == 0, done
    assert [(it["node"], it["agent"]["node"]) for it in json.loads(done.stdout)["nodes"]] == [
        ("node1", "node1"),
        ("node2", "node2"),
    ]


def test_rules_are_those_that_the_node_shows(lab: Lab) -> None:
    """The outer command reads through iptables-save, the inner one the live tables."""
    outer = plugin(lab, "dump-rules", "--node", "node1", "-o", "json").stdout
    inner = kubectl(
        lab,
        *("exec", "-n", "kube-system", "pykubeproxy-node1", "--", "pykubeproxy", "dump-rules", "-o", "json"),
    )
    assert services(outer) == services(inner.stdout) != []


def test_debug_pods_come_and_go(lab: Lab) -> None:
    command = ("dump-rules", "web", "--pod-selector", "app=none", "--debug-image", "any")
    done = plugin(lab, *command)
    assert done.returncode == 0, done
    assert " ".join(done.stdout.split()).count("pod kube-system/pykubeproxy-debug-") == 2
    assert done.stdout.count("default/web") == 4  # two families on two nodes
    assert "debug" not in kubectl(lab, "get", "pods", "-A").stdout


def diff(lab: Lab, *arguments: str) -> subprocess.CompletedProcess[str]:
    return kubectl(lab, "pykubeproxy", "diff", *arguments)


def test_a_node_whose_proxy_stopped_is_named_with_its_services(lab: Lab) -> None:
    lab.agents["node2"].stop()
    lab.deploy("web", 2)
    lab.until(lambda: "should reach 2" in diff(lab, "--sync-period", "1").stdout, "a stale node")
    done = diff(lab, "--sync-period", "2", "-o", "json")
    assert done.returncode == 1, done
    first, second = json.loads(done.stdout)["nodes"]
    assert (first["node"], first["verdict"], first["wrong"]) == ("node1", "follows", [])
    assert (second["node"], second["verdict"]) == ("node2", "differs")
    assert second["objectsChanged"]
    [service] = second["wrong"]
    assert (service["namespace"], service["name"]) == ("default", "web")
    assert service["differences"][0]["text"] == "rejected, should reach 2 endpoints"
    text = diff(lab, "--sync-period", "1").stdout
    assert "\nnode2: 1 wrong Service\n" in text


def test_a_node_that_follows_again_is_not_named(lab: Lab) -> None:
    lab.agents["node2"].start()
    lab.until(lambda: diff(lab, "--sync-period", "1").returncode == 0, "both nodes follow")
