"""The agents: `pykubeproxy run` in each node's namespace, a process like on any node."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import yaml

from pykubeproxy.lab.api import Object
from pykubeproxy.lab.namespaces import Namespace
from pykubeproxy.lab.network import CLUSTER_CIDRS

COMMAND = [sys.executable, "-c", "from pykubeproxy.cli import main; main()"]
PATIENCE = 10.0
RESTORE_COMMANDS = tuple(
    f"{program}{backend}-restore"
    for program in ("iptables", "ip6tables")
    for backend in ("", "-nft", "-legacy")
)
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# Stands in front of the real command on an agent's PATH, so that the lab can count for itself.
NOTING = """#!/bin/sh
# Notes when the tables of {node} are written, then has them written.
case " $* " in
*" --test "* | *" --version "* | *" -V "*) ;;
*) echo "$(date +%s.%N) {name}" >>{notes} ;;
esac
exec {real} "$@"
"""


class AgentEnded(RuntimeError):
    """An agent's process has ended although nobody stopped it."""


class Agent:
    """The agent of one node; `settings` of `start` are fields of KubeProxyConfiguration."""

    def __init__(self, node: Namespace, directory: Path, kubeconfig: Path, settings: Object) -> None:
        self.node = node
        self._directory = directory
        self._settings = settings
        self._kubeconfig = kubeconfig
        self._configuration = directory / f"{node.role}.yaml"
        self._log = directory / f"{node.role}.log"
        self._restores = directory / f"{node.role}.restores"
        self._bin = directory / f"{node.role}.bin"
        self._process: subprocess.Popen[bytes] | None = None
        self._note_restores()

    def _note_restores(self) -> None:
        self._bin.mkdir()
        for name in RESTORE_COMMANDS:
            real = shutil.which(name, path=SYSTEM_PATH)
            if real is None:
                continue
            script = self._bin / name
            script.write_text(NOTING.format(node=self.node.role, name=name, notes=self._restores, real=real))
            script.chmod(0o755)

    @property
    def log_file(self) -> Path:
        """Where it logs to, over all its starts."""
        return self._log

    def start(self, settings: Object | None = None) -> None:
        """Start the process; `settings` go on top of the lab's own."""
        self.configure(settings or {})
        command = [*COMMAND, "run", "--config", str(self._configuration)]
        command += ["--hostname-override", self.node.role]
        environment = node_environment(self._directory, self.node.role)
        environment["PATH"] = f"{self._bin}:{environment['PATH']}"
        with self._log.open("ab") as log:
            self._process = self.node.spawn(command, output=log, environment=environment)

    def configure(self, settings: Object) -> None:
        """Write the configuration file anew, with `settings` on top; a running process takes it up by itself."""
        self._configuration.write_text(yaml.safe_dump(self._configured(settings), sort_keys=False))

    def _configured(self, settings: Object) -> Object:
        base: Object = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "clientConnection": {"kubeconfig": str(self._kubeconfig)},
            "clusterCIDR": ",".join(CLUSTER_CIDRS),
            # Connection tracking is sized for the whole machine, which is not the lab's to set.
            "conntrack": {"maxPerCore": 0, "min": 0},
            "oomScoreAdj": 0,
            "logging": {"verbosity": 4},
        }
        return merged(merged(base, self._settings), settings)

    def stop(self) -> int:
        """Ask it to end (SIGTERM) and wait; its rules stay. Returns the exit code."""
        assert self._process is not None, "never started"
        self._process.terminate()
        try:
            return self._process.wait(PATIENCE)
        finally:
            if self._process.returncode is None:
                self._process.kill()
            self._process = None

    def kill(self) -> None:
        """End it at once (SIGKILL), whatever it is doing; what it has written stays."""
        assert self._process is not None, "never started"
        self._process.kill()
        self._process.wait()
        self._process = None

    def restart(self, settings: Object | None = None) -> None:
        """Stop it and start it with other settings."""
        self.stop()
        self.start(settings)

    def reap(self) -> None:
        """Take note that the process was ended by somebody else."""
        if self._process is not None:
            self._process.wait()

    @property
    def pid(self) -> int:
        """The process id, 0 while it is stopped."""
        return self._process.pid if self._process else 0

    def check(self) -> None:
        """Raise AgentEnded if it should run and does not."""
        if self._process is not None and (code := self._process.poll()) is not None:
            last = (self.log().strip().splitlines() or ["it logged nothing"])[-1]
            raise AgentEnded(f"the agent on {self.node.role} ended with exit code {code}: {last}")

    def log(self) -> str:
        """All it has logged so far."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def restores(self, family: int = 4, since: float = 0.0) -> list[float]:
        """When the tables of one family were written (unix seconds), as the lab noted it."""
        if not self._restores.exists():
            return []
        program = "ip6tables" if family == 6 else "iptables"
        notes = [line.split() for line in self._restores.read_text().splitlines()]
        return [float(when) for when, name in notes if name.startswith(program) and float(when) > since]


def node_environment(logs: Path, node: str) -> dict[str, str]:
    """What programs on a node run with: our own commands, and a lock of its own for legacy tables."""
    path = os.environ.get("PATH", "")
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{path}:{SYSTEM_PATH}",
        "XTABLES_LOCKFILE": str(logs / f"{node}.lock"),
    }


def merged(base: Mapping[str, object], over: Mapping[str, object]) -> Object:
    """`over` on top of `base`, mappings merged at every depth."""
    result = dict(base)
    for key, value in over.items():
        present = result.get(key)
        both = isinstance(value, Mapping) and isinstance(present, Mapping)
        result[key] = merged(present, value) if both else value  # type: ignore[arg-type]
    return result
