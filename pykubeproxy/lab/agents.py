"""The service proxies: an agent or a kube-proxy in each node's namespace; and where commands on nodes and in pods run."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from pykubeproxy.config import yaml
from pykubeproxy.lab.api import Object
from pykubeproxy.lab.apiserver import ApiError, Sandbox
from pykubeproxy.lab.apiserver.patches import merged
from pykubeproxy.lab.apiserver.resources import JsonObject
from pykubeproxy.lab.machine import SYSTEM_PATH, LabError, RunDirectory
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


class KubeProxyBinary(NamedTuple):
    """A genuine kube-proxy, its version such as "v1.36.2", and the mode to run it in: "iptables" or "nftables"."""

    path: Path
    version: str
    mode: str


def kube_proxy_binary(path: Path, mode: str) -> KubeProxyBinary:
    """Ask a kube-proxy for its version. Raises LabError if it does not tell."""
    try:
        done = subprocess.run(
            [path.resolve(), "--version"], capture_output=True, text=True, check=False, timeout=STOP_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LabError(f"cannot run {path}: {error}; name a kube-proxy for this machine") from None
    product, _, version = done.stdout.strip().rpartition(" ")
    if product != "Kubernetes":
        raise LabError(f"{path} --version does not print a version of Kubernetes; name a kube-proxy")
    return KubeProxyBinary(path.resolve(), version, mode)


class AgentEnded(RuntimeError):
    """The process of a service proxy ended unexpectedly."""


class ProxyProcess:
    """The service proxy of one node, which `agent` and `kube_proxy` make. Messages call it by its `title`.

    `settings` are fields of KubeProxyConfiguration. The files in `commands` come before the system's on PATH.
    """

    def __init__(
        self,
        node: Namespace,
        directory: Path,
        title: str,
        command: Sequence[str],
        settings: Object,
    ) -> None:
        self.node = node
        self.title = title
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
        self._command = [*command, "--config", str(self._configuration)]
        self.commands = directory / f"{node.role}.bin"
        self.log_file = directory / f"{node.role}.log"
        self.records = directory / f"{node.role}.restores"
        self._process: subprocess.Popen[bytes] | None = None
        self.log_file.touch()
        self.records.touch()
        self.commands.mkdir()
        self._environment["PATH"] = f"{self.commands}:{self._environment['PATH']}"

    def start(self, settings: Object | None = None) -> None:
        """Start the process with `settings` merged over the lab's."""
        self._configuration.write_text(yaml.dump(merged(self._settings, settings or {})))
        with self.log_file.open("ab") as log:
            self._process = self.node.spawn(self._command, output=log, environment=self._environment)

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
            raise AgentEnded(f"the {self.title} on {self.node.role} ended with exit code {code}: {last}")

    def log(self) -> str:
        """Return the log of all starts."""
        return self.log_file.read_text(errors="replace")

    def restores(self, since: float) -> list[float]:
        """Return when the IPv4 tables of iptables were written after `since`, in unix seconds."""
        return [moment for moment in map(float, self.records.read_text().split()) if moment > since]


def agent(node: Namespace, directory: Path, server: str, settings: Object) -> ProxyProcess:
    """Return the agent of one node, `pykubeproxy run`; `server` is the URL of the API server."""
    process = ProxyProcess(node, directory, "agent", [*COMMAND, "run", "--master", server], settings)
    for name in ("iptables-restore", "iptables-nft-restore", "iptables-legacy-restore"):
        if real := shutil.which(name, path=SYSTEM_PATH):
            script = process.commands / name
            script.write_text(_WRAPPER.format(node=node.role, records=process.records, real=real))
            script.chmod(0o755)
    return process


def kube_proxy(
    node: Namespace,
    directory: Path,
    kubeconfig: Path,
    settings: Object,
    binary: KubeProxyBinary,
    backend: str,
) -> ProxyProcess:
    """Return a genuine kube-proxy on one node; `backend` is that of its iptables commands: "auto", "nft" or "legacy"."""
    connection = {"kubeconfig": str(kubeconfig), "contentType": "application/json"}
    own = {"mode": binary.mode, "clientConnection": connection}
    process = ProxyProcess(node, directory, "kube-proxy", [str(binary.path)], merged(own, settings))
    # kube-proxy runs the commands without a backend in their names.
    for command in ("iptables", "ip6tables") if backend != "auto" else ():
        for action in ("", "-save", "-restore"):
            if real := shutil.which(f"{command}-{backend}{action}", path=SYSTEM_PATH):
                (process.commands / f"{command}{action}").symlink_to(real)
    return process


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
