"""Commands in the pods of a lab, with kubectl and with the Python client."""

import os
from collections.abc import Iterator

import kubernetes
import kubernetes.stream
import pytest

from pykubeproxy.lab.cluster import Lab
from tests.fakes.kubectl import kubectl, needs_kubectl

pytestmark = pytest.mark.root

PROXY = ("-n", "kube-system", "pykubeproxy-node1")
DEBUG = '{"spec":{"hostNetwork":true,"nodeName":"node2"}}'


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """A lab whose node1 has a chain of its own; the test runs where clients of its API server are."""
    with Lab(f"te{os.getpid()}", agents=False) as made, made.client.namespace.entered():
        made.start_pod("web-1", "web", "node1", ["sleep", "600"])
        yield made


@needs_kubectl
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


@needs_kubectl
def test_kubectl_sees_the_pods(lab: Lab) -> None:
    """Those of the lab and the proxies, and no others."""
    names = kubectl(lab, "get", "pods", "-A", "-o", "name").stdout.split()
    assert names == ["pod/web-1", "pod/pykubeproxy-node1", "pod/pykubeproxy-node2"]
    address = kubectl(lab, "exec", "web-1", "--", "hostname", "-I").stdout.split()
    assert lab.pods["web-1"].addresses[0] in address


@needs_kubectl
def test_kubectl_runs_and_deletes_a_debug_pod(lab: Lab) -> None:
    debug = ("-n", "kube-system", "debug")
    for grace in ("5", "0"):
        started = kubectl(lab, "run", *debug, "--image=any", "--restart=Never", f"--overrides={DEBUG}")
        assert started.returncode == 0, started.stderr
        ready = kubectl(lab, "wait", *debug[:2], "pod/debug", "--for=condition=Ready", "--timeout=10s")
        assert ready.returncode == 0, ready.stderr
        address = kubectl(lab, "exec", *debug, "--", "hostname", "-I").stdout.split()
        assert lab.nodes["node2"].addresses[0] in address
        forced = ("--force",) if grace == "0" else ()
        deleted = kubectl(lab, "delete", "pod", *debug, f"--grace-period={grace}", *forced)
        assert deleted.returncode == 0, deleted.stderr
    assert "not found" in kubectl(lab, "get", "pod", *debug).stderr


@needs_kubectl
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
    session.run_forever(timeout=10)
    assert lab.nodes["node2"].addresses[0] in session.read_stdout()
    assert session.returncode == 6
    loaded.close()


@needs_kubectl
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
