"""The programs that are measured: pykubeproxy and, if there is one to compare with, kube-proxy."""

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

from pykubeproxy.lab.agents import SYSTEM_PATH
from pykubeproxy.lab.api import Object
from pykubeproxy.lab.namespaces import Namespace
from tests.bench import work
from tests.bench.site import Cluster, end

OURS = (sys.executable, "-c", "from pykubeproxy.cli import main; main()", "run")
_FAMILIES = ("iptables", "ip6tables")
_COMMANDS = ("", "-save", "-restore")
_TICK = os.sysconf("SC_CLK_TCK")
# A process that takes less than this share of a processor for some time has nothing to do.
_QUIET_SHARE, _QUIET_AT_LATEST = 0.02, 60.0


class Ended(RuntimeError):
    """A program that is measured has ended by itself; the text is its last line."""


@dataclass(frozen=True)
class Subject:
    """A program as it is started: its command less `--config FILE`, and what it is told besides."""

    name: str
    command: tuple[str, ...]
    mode: str = "iptables"
    dispatch: str = ""

    def configuration(self, backend: str, kubeconfig: Path) -> Object:
        """A KubeProxyConfiguration. What is ours alone is left out for others."""
        common: Object = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "clientConnection": {"kubeconfig": str(kubeconfig), "contentType": "application/json"},
            "hostnameOverride": work.NODE,
            "mode": self.mode,
            "clusterCIDR": ",".join(work.POD_CIDRS),
            "conntrack": {"maxPerCore": 0, "min": 0},
            "healthzBindAddress": "127.0.0.1:10256",
            "metricsBindAddress": "127.0.0.1:10249",
            "oomScoreAdj": 0,
        }
        if self.name != "pykubeproxy":
            return common
        return {**common, "pykubeproxy": {"iptablesBackend": backend}}


class Running:
    """A program at work on a node, and what it uses up."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.started = time.monotonic()
        self._process = process
        self._log = log

    def check(self) -> None:
        """Raises Ended if it has."""
        if (code := self._process.poll()) is not None:
            last = (self._log.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
            raise Ended(f"ended with exit code {code}: {last[:300]}")

    def cpu_seconds(self) -> float:
        """Processor time so far, with that of the commands it has run. Raises Ended."""
        self.check()
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / _TICK

    def memory(self) -> tuple[float, float]:
        """Resident memory now and at its peak, in MB of a million bytes. Raises Ended."""
        self.check()
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        values = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
        return tuple(int(values[name][0]) * 1024 / 1e6 for name in ("VmRSS", "VmHWM"))  # type: ignore[return-value]

    def wait_quiet(self, seconds: float) -> None:
        """Wait until it has had nothing to do for so long; a minute at most. Raises Ended."""
        deadline = time.monotonic() + _QUIET_AT_LATEST
        while time.monotonic() < deadline:
            before = self.cpu_seconds()
            time.sleep(seconds)
            if self.cpu_seconds() - before < _QUIET_SHARE * seconds + 1 / _TICK:
                return


@contextmanager
def running(subject: Subject, backend: str, node: Namespace, cluster: Cluster) -> Iterator[Running]:
    """Start it on a node, and end it."""
    directory = cluster.directory
    configuration, log = directory / "config.yaml", directory / "subject.log"
    configuration.write_text(yaml.safe_dump(subject.configuration(backend, cluster.kubeconfig)))
    dispatch = ("--dispatch", subject.dispatch) if subject.dispatch else ()
    command = [*subject.command, "--config", str(configuration), *dispatch]
    with log.open("wb") as output:
        process = node.spawn(command, output=output, environment=environment(backend, directory))
    try:
        yield Running(process, log)
    finally:
        end(process)


def environment(backend: str, directory: Path) -> dict[str, str]:
    """For programs on a node: its own lock of legacy tables, and `iptables` being the one of this backend.

    Raises FileNotFoundError without the commands of the backend.
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
    """The ways to dispatch that our program can be told to take; one empty name if it cannot be told."""
    options = subprocess.run([*OURS, "--help"], capture_output=True, text=True, check=True).stdout
    return ("flat", "tree") if "--dispatch" in options else ("",)
