"""Start the programs to measure: pykubeproxy and, with --peer, kube-proxy."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from pykubeproxy.lab.api import Object
from pykubeproxy.lab.machine import SYSTEM_PATH
from pykubeproxy.lab.network import Namespace
from tests.bench import workload
from tests.bench.testbed import Cluster, end

OURS = (sys.executable, "-c", "from pykubeproxy.cli import main; main()", "run")
_FAMILIES = ("iptables", "ip6tables")
_COMMANDS = ("", "-save", "-restore")
_TICK = os.sysconf("SC_CLK_TCK")
# A process is idle below this share of a CPU; stop waiting after this many seconds.
_QUIET_SHARE, _QUIET_AT_LATEST = 0.02, 60.0


class Ended(RuntimeError):
    """A measured program exited; the text is the last line of its output."""


@dataclass(frozen=True)
class Program:
    """A program: its command without `--config FILE`, and its settings."""

    name: str
    command: tuple[str, ...]
    mode: str = "iptables"
    dispatch: str = ""

    def configuration(self, backend: str, kubeconfig: Path) -> Object:
        """Return a KubeProxyConfiguration, for kube-proxy without pykubeproxy's own settings."""
        common: Object = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "clientConnection": {"kubeconfig": str(kubeconfig), "contentType": "application/json"},
            "hostnameOverride": workload.NODE,
            "mode": self.mode,
            "clusterCIDR": ",".join(workload.POD_CIDRS),
            "conntrack": {"maxPerCore": 0, "min": 0},
            "healthzBindAddress": "127.0.0.1:10256",
            "metricsBindAddress": "127.0.0.1:10249",
            "oomScoreAdj": 0,
        }
        if self.name != "pykubeproxy":
            return common
        return {**common, "pykubeproxy": {"iptablesBackend": backend}}


class Running:
    """A running program and its resource usage."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.started = time.monotonic()
        self._process = process
        self._log = log

    def check(self) -> None:
        """Raise Ended if the process has exited."""
        if (code := self._process.poll()) is not None:
            last = (self._log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
            raise Ended(f"exited with status {code}: {last[:300]}")

    def cpu_seconds(self) -> float:
        """Return the CPU seconds so far, including child processes. Raise Ended."""
        self.check()
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / _TICK

    def memory(self) -> tuple[float, float]:
        """Return the current and the peak resident memory in MB (1,000,000 bytes). Raise Ended."""
        self.check()
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        values = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
        return tuple(int(values[name][0]) * 1024 / 1e6 for name in ("VmRSS", "VmHWM"))  # type: ignore[return-value]

    def wait_quiet(self, seconds: float) -> None:
        """Wait until the process was idle for `seconds`, at most a minute. Raise Ended."""
        deadline = time.monotonic() + _QUIET_AT_LATEST
        while time.monotonic() < deadline:
            before = self.cpu_seconds()
            time.sleep(seconds)
            if self.cpu_seconds() - before < _QUIET_SHARE * seconds + 1 / _TICK:
                return


@contextmanager
def running(program: Program, backend: str, node: Namespace, cluster: Cluster) -> Iterator[Running]:
    """Run a program on a node."""
    directory = cluster.directory
    configuration, log = directory / "config.yaml", directory / "program.log"
    configuration.write_text(yaml.safe_dump(program.configuration(backend, cluster.kubeconfig)))
    dispatch = ("--dispatch", program.dispatch) if program.dispatch else ()
    command = [*program.command, "--config", str(configuration), *dispatch]
    with log.open("wb") as output:
        process = node.spawn(command, output=output, environment=environment(backend, directory))
    try:
        yield Running(process, log)
    finally:
        end(process)


def environment(backend: str, directory: Path) -> dict[str, str]:
    """Return the environment of programs on a node: its own xtables lock, and `iptables` of this backend.

    Raise FileNotFoundError if the backend's commands are missing.
    """
    folder = directory / f"bin-{backend}"
    if not folder.exists():
        folder.mkdir()
        for family in _FAMILIES:
            for command in _COMMANDS:
                real = shutil.which(f"{family}-{backend}{command}", path=SYSTEM_PATH)
                if real is None:
                    raise FileNotFoundError(f"{family}-{backend}{command} is not installed")
                (folder / f"{family}{command}").symlink_to(real)
    path = f"{folder}:{SYSTEM_PATH}"
    return {**os.environ, "PATH": path, "XTABLES_LOCKFILE": str(directory / "xtables.lock")}


def dispatches() -> tuple[str, ...]:
    """Return pykubeproxy's dispatch modes; one empty name if it has no such option."""
    options = subprocess.run([*OURS, "--help"], capture_output=True, text=True, check=True).stdout
    return ("flat", "tree") if "--dispatch" in options else ("",)
