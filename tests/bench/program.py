"""Start the programs to measure: pykubeproxy, another revision of it, and kube-proxy."""

import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from pykubeproxy.lab.api import Object
from pykubeproxy.lab.network import Namespace
from tests.bench import workload
from tests.bench.checkout import Checkout
from tests.bench.environment import environment
from tests.bench.testbed import Cluster, Testbed, end

_TICK = os.sysconf("SC_CLK_TCK")
# A process is idle below this share of a CPU; stop waiting after this many seconds.
_QUIET_SHARE, _QUIET_AT_LATEST = 0.02, 60.0


class Ended(RuntimeError):
    """A measured program exited; the text is the last line of its output."""


@dataclass(frozen=True)
class Program:
    """A program and its settings. `checkout` is that of a pykubeproxy, `binary` that of a kube-proxy.

    It reaches the API server as in a pod, or with a kubeconfig.
    """

    name: str
    checkout: Checkout | None = None
    binary: str = ""
    mode: str = "iptables"
    dispatch: str = ""
    kubeconfig: bool = False

    @property
    def variant(self) -> str:
        """What distinguishes it from other programs of this name."""
        mode = self.mode.removeprefix("iptables")
        return " ".join(filter(None, (self.dispatch, mode, "kubeconfig" if self.kubeconfig else "")))

    def command(self, *arguments: str) -> list[str]:
        """Return a command line of this program: for pykubeproxy a command such as run with its options."""
        if self.checkout is None:
            return [self.binary, *arguments]
        return [*self.checkout.command, *arguments]

    def agent(self, configuration: Path) -> list[str]:
        """Return the command line of the proxy."""
        run = ["run"] if self.checkout else []
        dispatch = ["--dispatch", self.dispatch] if self.dispatch else []
        return self.command(*run, "--config", str(configuration), *dispatch)

    def configuration(self, backend: str, kubeconfig: Path) -> Object:
        """Return a KubeProxyConfiguration, for kube-proxy without pykubeproxy's own settings."""
        path = str(kubeconfig) if self.kubeconfig else ""
        common: Object = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "clientConnection": {"kubeconfig": path, "contentType": "application/json"},
            "hostnameOverride": workload.NODE,
            "mode": self.mode,
            "clusterCIDR": ",".join(workload.POD_CIDRS),
            "conntrack": {"maxPerCore": 0, "min": 0},
            "healthzBindAddress": "127.0.0.1:10256",
            "metricsBindAddress": "127.0.0.1:10249",
            "oomScoreAdj": 0,
        }
        if self.checkout is None:
            return common
        return {**common, "pykubeproxy": {"iptablesBackend": backend}}


@dataclass(frozen=True)
class Place:
    """Where a program runs: a node of the testbed, with an API server, and its environment."""

    testbed: Testbed
    cluster: Cluster
    node: Namespace
    backend: str
    environment: Mapping[str, str] = field(repr=False)

    @property
    def configuration(self) -> Path:
        """The configuration file of the program."""
        return self.testbed.directory / "config.yaml"

    def command(self, program: Program, command: list[str]) -> list[str]:
        """Return a command that runs this one in the pod, unless the program uses a kubeconfig."""
        return command if program.kubeconfig else self.testbed.pod.command(command)


def place(
    testbed: Testbed,
    cluster: Cluster,
    node: Namespace,
    program: Program,
    backend: str,
    record: Path | None = None,
) -> Place:
    """Return the place of a program. With `record`, copies of all input of iptables-restore go into that folder."""
    variables = environment(backend, testbed.directory, record)
    if program.checkout:
        variables |= program.checkout.environment
    if not program.kubeconfig:
        variables |= {
            "KUBERNETES_SERVICE_HOST": cluster.address,
            "KUBERNETES_SERVICE_PORT": str(cluster.port),
        }
    return Place(testbed, cluster, node, backend, variables)


class Running:
    """A running program and its resource usage."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, started: float) -> None:
        self.started = started
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
def running(program: Program, there: Place) -> Iterator[Running]:
    """Run a program on a node."""
    configuration, log = there.configuration, there.testbed.directory / "program.log"
    configuration.write_text(yaml.safe_dump(program.configuration(there.backend, there.cluster.kubeconfig)))
    command = there.command(program, program.agent(configuration))
    with log.open("wb") as output:
        started = time.monotonic()
        process = there.node.spawn(command, output=output, environment=there.environment)
    try:
        yield Running(process, log, started)
    finally:
        end(process)


def dispatches(checkout: Checkout) -> tuple[str, ...]:
    """Return a pykubeproxy's dispatch modes; one empty name if it has no such option."""
    command = [*checkout.command, "run", "--help"]
    variables = {**os.environ, **checkout.environment}
    options = subprocess.run(command, capture_output=True, text=True, check=True, env=variables).stdout
    return ("flat", "tree") if "--dispatch" in options else ("",)
