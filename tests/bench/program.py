"""The programs to measure: revisions of pykubeproxy and kube-proxy, and their environment."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from pykubeproxy.lab.api import Object
from pykubeproxy.lab.machine import SYSTEM_PATH
from pykubeproxy.lab.network import Namespace
from tests.bench import workload
from tests.bench.testbed import Cluster, Testbed, end

_HERE = Path(__file__).parents[2]
_MAIN = "from pykubeproxy.cli import main; main()"
#: Return the interpreter for the folder of a checkout.
Interpreter = Callable[[Path], str]


class NoRevision(RuntimeError):
    """The revision cannot be measured; the text says why."""


@dataclass(frozen=True)
class Checkout:
    """A folder with pykubeproxy, and the interpreter that has its dependencies."""

    folder: Path
    python: str

    @property
    def command(self) -> tuple[str, ...]:
        """The command line of pykubeproxy, without a command. Never imports from the current folder."""
        return (self.python, "-P", "-c", _MAIN)

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables that make the interpreter use this folder."""
        return {"PYTHONPATH": str(self.folder)}


def current_python(_folder: Path) -> str:
    """Return the interpreter that runs this program, with all development tools."""
    return sys.executable


def image_python(folder: Path, venvs: Path = _HERE / "build/bench") -> str:
    """Return an interpreter that has only the packages of the checkout's image.

    The first use installs them, in some 20 s; later ones reuse them while the lock is unchanged. Raise NoRevision.
    """
    requirements = folder / "requirements/node.txt"
    if not requirements.is_file():
        raise NoRevision(f"{folder} has no requirements/node.txt, which names the packages of the image")
    key = hashlib.sha256(sys.version.encode() + requirements.read_bytes()).hexdigest()[:12]
    venv = venvs / f"venv-{key}"
    python, complete = venv / "bin/python", venv / ".complete"
    if not complete.exists():
        print(f"installing the packages of {requirements} in {venv}", file=sys.stderr)
        _run(sys.executable, "-m", "venv", "--clear", "--without-pip", str(venv))
        install = ("install", "--quiet", "--require-hashes", "-r", str(requirements))
        _run(sys.executable, "-m", "pip", "--python", str(python), *install)
        complete.touch()
    return str(python)


def this_checkout(interpreter: Interpreter) -> Checkout:
    """Return the checkout that this program runs from. Raise NoRevision."""
    return _compiled(Checkout(_HERE, interpreter(_HERE)))


@contextmanager
def other_checkout(revision: str, interpreter: Interpreter) -> Iterator[Checkout]:
    """Check out a git revision, or use the folder of a checkout. Raise NoRevision."""
    folder = Path(revision).absolute()
    if folder.is_dir():
        if not (folder / "pykubeproxy/__init__.py").is_file():
            raise NoRevision(f"{folder} is no checkout of pykubeproxy")
        yield _compiled(Checkout(folder, interpreter(folder)))
        return
    with tempfile.TemporaryDirectory(prefix="pykubeproxy-bench-") as temporary:
        folder = Path(temporary, "checkout")
        _git("worktree", "add", "--detach", str(folder), revision)
        try:
            yield _compiled(Checkout(folder, interpreter(folder)))
        finally:
            _git("worktree", "remove", "--force", str(folder))


def _compiled(checkout: Checkout) -> Checkout:
    """Write the bytecode, so that the first start is like the others."""
    package = str(checkout.folder / "pykubeproxy")
    subprocess.run([checkout.python, "-m", "compileall", "-q", package], check=True)
    return checkout


def _git(*arguments: str) -> None:
    # Root may run this in the checkout of another user.
    _run("git", "-c", f"safe.directory={_HERE}", "-C", str(_HERE), *arguments)


def _run(*command: str) -> None:
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    if outcome.returncode:
        raise NoRevision(outcome.stderr.strip() or f"{command[0]} failed")


_FAMILIES = ("iptables", "ip6tables")
_COMMANDS = ("", "-save", "-restore")
# Copy the input of each iptables-restore and nft to a file, in the order of the starts.
_RECORDER = """#!/bin/sh
file={folder}/$(date +%s%N).{family}
printf '%s\\n' "$*" > "$file.arguments"
tee "$file" | {real} "$@"
"""


def environment(backend: str, directory: Path, record: Path | None = None) -> dict[str, str]:
    """Return the environment of programs on a node: its own xtables lock, and `iptables` of this backend.

    With `record`, copies of all input of iptables-restore go into that folder. Raise FileNotFoundError if the backend's
    commands are missing.
    """
    commands = directory / f"bin-{backend}"
    if not commands.exists():
        commands.mkdir()
        for family in _FAMILIES:
            for command in _COMMANDS:
                (commands / f"{family}{command}").symlink_to(_real(family, backend, command))
    folders = [str(commands), SYSTEM_PATH]
    if record:
        folders.insert(0, str(_recorders(backend, record)))
    return {**os.environ, "PATH": ":".join(folders), "XTABLES_LOCKFILE": str(directory / "xtables.lock")}


def _real(family: str, backend: str, command: str) -> str:
    real = shutil.which(f"{family}-{backend}{command}", path=SYSTEM_PATH)
    if real is None:
        raise FileNotFoundError(f"{family}-{backend}{command} is not installed")
    return real


def _recorders(backend: str, record: Path) -> Path:
    """Return a folder with recording forms of iptables-restore; it lies beside the records."""
    folder = record.with_name(f"{record.name}-bin-{backend}")
    folder.mkdir(exist_ok=True)
    record.mkdir(exist_ok=True)
    for family in _FAMILIES:
        script = _RECORDER.format(folder=record, family=family, real=_real(family, backend, "-restore"))
        for name in (f"{family}-restore", f"{family}-{backend}-restore"):
            _write_script(folder / name, script)
    if nft := shutil.which("nft", path=SYSTEM_PATH):
        _write_script(folder / "nft", _RECORDER.format(folder=record, family="nft", real=nft))
    return folder


def _write_script(file: Path, script: str) -> None:
    file.write_text(script)
    file.chmod(0o755)


_TICK = os.sysconf("SC_CLK_TCK")
_VOLUNTARY = re.compile(r"^voluntary_ctxt_switches:\s+(\d+)", re.MULTILINE)
# A process is idle below this share of a CPU; stop waiting after this many seconds.
_QUIET_SHARE, _QUIET_AT_LATEST = 0.02, 60.0


class Ended(RuntimeError):
    """A measured program exited; the text is the last line of its output."""


@dataclass(frozen=True)
class Program:
    """A program and its settings. `checkout` is that of a pykubeproxy, `binary` that of a kube-proxy.

    It reaches the API server as in a pod, or with a kubeconfig. `min_sync` is its minSyncPeriod, `variant` a name for
    settings that differ from the usual ones.
    """

    name: str
    checkout: Checkout | None = None
    binary: str = ""
    mode: str = "iptables"
    min_sync: str = "1s"
    variant: str = ""
    kubeconfig: bool = False

    def command(self, *arguments: str) -> list[str]:
        """Return a command line of this program: for pykubeproxy a command such as run with its options."""
        if self.checkout is None:
            return [self.binary, *arguments]
        return [*self.checkout.command, *arguments]

    def agent(self, configuration: Path) -> list[str]:
        """Return the command line of the proxy."""
        run = ["run"] if self.checkout else []
        return self.command(*run, "--config", str(configuration))

    def configuration(self, backend: str, kubeconfig: Path) -> Object:
        """Return a KubeProxyConfiguration, for kube-proxy without pykubeproxy's own settings."""
        path = str(kubeconfig) if self.kubeconfig else ""
        common: Object = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "clientConnection": {"kubeconfig": path, "contentType": "application/json"},
            "hostnameOverride": workload.NODE,
            "mode": self.mode,
            "iptables": {"minSyncPeriod": self.min_sync},
            "nftables": {"minSyncPeriod": self.min_sync},
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

    def wake_ups(self) -> int:
        """Return how often the threads that now run were woken so far. Raise Ended."""
        self.check()
        tasks = Path(f"/proc/{self._process.pid}/task").glob("*/status")
        counts = (_VOLUNTARY.search(task.read_text()) for task in tasks)
        return sum(int(count[1]) for count in counts if count)

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
