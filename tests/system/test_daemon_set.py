"""The DaemonSet's containers, run without a kubelet.

Arguments, environment, mounts and capabilities come from the manifests; the root file system is read-only.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from pykubeproxy.lab.apiserver import ApiServer
from tests.fakes.certificates import write_certificate
from tests.fakes.cluster import node, server, service, slice_of
from tests.fakes.follower import eventually
from tests.fakes.process import HEALTH, METRICS, answers, inside_a_namespace, saved

pytestmark = pytest.mark.root

PROJECT = Path(__file__).parents[2]
BASE = PROJECT / "manifests/base"
ACCOUNT = "/run/secrets/kubernetes.io/serviceaccount"
_TIMEOUT = 60.0  # seconds
PROGRAM = [sys.executable, "-c", "from pykubeproxy.cli import main; main()"]
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


def command(container: dict[str, Any], environment: dict[str, str]) -> list[str]:
    """Return the container's command: arguments with variables expanded, after setpriv."""
    arguments = [it.replace("$(NODE_NAME)", environment["NODE_NAME"]) for it in container["args"]]
    context = container["securityContext"]
    if context.get("privileged"):
        return [*PROGRAM, *arguments]
    kept = ",".join(f"+{name.lower()}" for name in context["capabilities"]["add"])
    assert context["capabilities"]["drop"] == ["ALL"]
    return ["setpriv", "--no-new-privs", f"--bounding-set=-all,{kept}", *PROGRAM, *arguments]


@contextmanager
def started(
    container: dict[str, Any], environment: dict[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    entering = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", MOUNTS, "enter"]
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [*entering, *command(container, environment)], env={**os.environ, **environment}, stderr=errors
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


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


def requested(api: ApiServer) -> set[tuple[str, str]]:
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
                eventually(lambda path=path: answers(HEALTH, path, 200), _TIMEOUT)
            live = saved(f"iptables-{(pod_files / 'backend').read_text()}-save")
            assert any("10.96.0.10/32" in line for line in live)
            assert answers(METRICS, "/metrics", 200)
            eventually(lambda: requested(api) == granted(), _TIMEOUT)
            process.terminate()
            assert process.wait(_TIMEOUT) == 0
    log = (pod_files / "agent.log").read_text()
    assert "warning" not in log, log
    assert "error" not in log, log
