"""The agents: one `pykubeproxy run` process in each node's namespace, and where commands on nodes and in pods run."""

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

from pykubeproxy.config import yaml
from pykubeproxy.lab.api import Object
from pykubeproxy.lab.apiserver import ApiError, Sandbox
from pykubeproxy.lab.apiserver.patches import merged
from pykubeproxy.lab.apiserver.resources import JsonObject
from pykubeproxy.lab.machine import SYSTEM_PATH, RunDirectory
from pykubeproxy.lab.network import CLUSTER_CIDRS, Namespace, entered, lab_namespaces, namespace_prefix

COMMAND = [sys.executable, "-c", "from pykubeproxy.cli import main; main()"]
STOP_SECONDS = 10.0

# A wrapper in front of each IPv4 restore command on an agent's PATH, so that the lab counts restores itself.
_WRAPPER = """#!/bin/sh
# Record when {node} writes its IPv4 tables.
case " $* " in
*" --test "* | *" --version "* | *" -V "*) ;;
*) date +%s.%N >>{records} ;;
esac
exec {real} "$@"
"""


class AgentEnded(RuntimeError):
    """An agent's process ended unexpectedly."""


class AgentProcess:
    """The agent of one node; `server` is the URL of the API server, `settings` are fields of KubeProxyConfiguration."""

    def __init__(self, node: Namespace, directory: Path, server: str, settings: Object) -> None:
        self.node = node
        self._server = server
        self._environment = node_environment(directory, node.role)
        base: Object = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "hostnameOverride": node.role,
            "clusterCIDR": ",".join(CLUSTER_CIDRS),
            # The size of the conntrack table belongs to the whole machine.
            "conntrack": {"maxPerCore": 0, "min": 0},
            "oomScoreAdj": 0,
            "logging": {"verbosity": 4},
        }
        self._settings: Object = merged(base, settings)
        self._configuration = directory / f"{node.role}.yaml"
        self.log_file = directory / f"{node.role}.log"
        self._restores = directory / f"{node.role}.restores"
        self._process: subprocess.Popen[bytes] | None = None
        self.log_file.touch()
        self._restores.touch()
        self._wrap_restore_commands(directory / f"{node.role}.bin")

    def _wrap_restore_commands(self, directory: Path) -> None:
        directory.mkdir()
        self._environment["PATH"] = f"{directory}:{self._environment['PATH']}"
        for name in ("iptables-restore", "iptables-nft-restore", "iptables-legacy-restore"):
            if real := shutil.which(name, path=SYSTEM_PATH):
                script = directory / name
                script.write_text(_WRAPPER.format(node=self.node.role, records=self._restores, real=real))
                script.chmod(0o755)

    def start(self, settings: Object | None = None) -> None:
        """Start the process with `settings` merged over the lab's."""
        self._configuration.write_text(yaml.dump(merged(self._settings, settings or {})))
        command = [*COMMAND, "run", "--config", str(self._configuration), "--master", self._server]
        with self.log_file.open("ab") as log:
            self._process = self.node.spawn(command, output=log, environment=self._environment)

    def stop(self) -> int:
        """Send SIGTERM, wait, and return the exit code; the rules stay."""
        assert self._process is not None, "never started"
        process, self._process = self._process, None
        process.terminate()
        try:
            return process.wait(STOP_SECONDS)
        finally:
            if process.returncode is None:
                process.kill()

    def kill(self) -> None:
        """Kill the process; the rules stay."""
        assert self._process is not None, "never started"
        self._process.kill()
        self.reap()
        self._process = None

    def reap(self) -> None:
        if self._process is not None:
            self._process.wait()

    @property
    def pid(self) -> int:
        """The process id, 0 while stopped."""
        return self._process.pid if self._process else 0

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def check(self) -> None:
        """Raise AgentEnded if the process has ended and `stop` was not called."""
        if self._process is not None and (code := self._process.poll()) is not None:
            last = (self.log().strip().splitlines() or ["no log"])[-1]
            raise AgentEnded(f"the agent on {self.node.role} ended with exit code {code}: {last}")

    def log(self) -> str:
        """Return the log of all starts."""
        return self.log_file.read_text(errors="replace")

    def restores(self, since: float) -> list[float]:
        """Return when the IPv4 tables were written after `since`, in unix seconds."""
        return [moment for moment in map(float, self._restores.read_text().split()) if moment > since]


def node_environment(logs: Path, node: str) -> dict[str, str]:
    """Return the environment of programs on a node: our commands on PATH, and the node's own lock for legacy tables."""
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}:{SYSTEM_PATH}",
        "XTABLES_LOCKFILE": str(logs / f"{node}.lock"),
    }


def sandbox(lab: str, pod: JsonObject) -> Sandbox:
    """Return where the commands of a pod run: its node with hostNetwork, else the lab's pod of this name.

    Raises ApiError (500) if this lab has no such node or pod.
    """
    meta, spec = pod["metadata"], pod["spec"]
    host = spec["nodeName"] if spec.get("hostNetwork") else meta["name"]
    namespace = f"{namespace_prefix(lab)}{host}"
    is_ours = spec.get("hostNetwork") or meta["namespace"] == "default"
    if not is_ours or namespace not in lab_namespaces(lab):
        raise ApiError(
            500, f"error dialing backend: lab {lab} has no network namespace for pod {meta['name']}"
        )
    return Sandbox(node_environment(RunDirectory(lab).logs, host), partial(entered, namespace))
