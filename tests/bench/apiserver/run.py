"""Run agents against the API server in processes of their own, and measure a start and changes."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import yaml

from pykubeproxy.lab.apiserver.server import kubeconfig
from pykubeproxy.lab.network import Namespace
from tests.bench.apiserver.meter import Meter, Traffic
from tests.bench.apiserver.server import Count
from tests.bench.checkout import image_python, this_checkout
from tests.bench.environment import environment
from tests.bench.figures import OURS
from tests.bench.program import Program, Running
from tests.bench.workload import Size

_MODULE = "tests.bench.apiserver"
_PER_PROCESS = 50
# Seconds without traffic after which all has arrived, and until a start must be complete.
_QUIET, _PATIENCE = 0.5, 600.0

Counts = dict[str, Count]


class Measured(NamedTuple):
    """The traffic of all agents at their sockets, and what the server counted."""

    agents: int
    start: Traffic
    changes: Traffic
    counts: Counts


class Child:
    """A process that prints a line when it is ready, and one for each line of input. A context manager."""

    def __init__(self, *command: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def read(self) -> str:
        """Return the next line. Raises RuntimeError if the process has ended."""
        assert self._process.stdout
        line = self._process.stdout.readline().strip()
        if not line:
            raise RuntimeError(f"{self._process.args} has ended")
        return line

    def ask(self, line: str) -> str:
        """Send a line and return the answer."""
        self.send(line)
        return self.read()

    def send(self, line: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        with self._process:
            pass


class Server(Child):
    """The API server; `folder` holds its certificate."""

    def __init__(self, size: Size, folder: Path, bookmark_seconds: float = 60.0) -> None:
        super().__init__(f"{_MODULE}.server", str(size), str(folder), str(bookmark_seconds))
        self.port = int(self.read())

    def counts(self) -> Counts:
        """Return the counts so far."""
        return self.change(0, 0)

    def change(self, number: int, watches: int) -> Counts:
        """Change endpoints, each once `watches` carry the one before; return the counts."""
        return msgspec.json.decode(self.ask(f"{number} {watches}"), type=Counts)

    def wait_watched(self, agents: int, check: Callable[[], None] = lambda: None) -> None:
        """Wait until each agent has its three watches, while `check` raises nothing. Raises TimeoutError."""
        deadline = time.monotonic() + _PATIENCE
        while sum(it.requests for name, it in self.counts().items() if name.startswith("watch")) < 3 * agents:
            check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"not all of {agents} agents watch: {self.counts()}")
            time.sleep(0.05)


def measure_watches(size: Size, agents: int, changes: int, folder: Path) -> Measured:
    """Measure agents without rules, many in one process."""
    with Server(size, folder) as server, Meter(server.port) as meter, ExitStack() as children:
        path = write_kubeconfig(meter.listen(), folder, "agents")
        numbers = [min(_PER_PROCESS, agents - first) for first in range(0, agents, _PER_PROCESS)]
        processes = [
            children.enter_context(Child(f"{_MODULE}.agents", str(path), str(number))) for number in numbers
        ]
        for process in processes:
            process.read()
        return _measured(server, meter, agents, changes, processes)


def measure_processes(size: Size, agents: int, changes: int, folder: Path, lab: str) -> Measured:
    """Measure agents as they run on a node, each in a network namespace with nft tables. Needs root."""
    program = Program(OURS, this_checkout(image_python), kubeconfig=True)
    with Server(size, folder) as server, Meter(server.port) as meter, ExitStack() as running:
        for number in range(agents):
            agent = running.enter_context(_agent(program, meter, folder, lab, number))
            server.wait_watched(number + 1, agent.check)
        return _measured(server, meter, agents, changes, ())


def measure_bookmarks(size: Size, folder: Path) -> Traffic:
    """Measure a bookmark on each of the three watches of one agent."""
    with Server(size, folder, bookmark_seconds=2.0) as server, Meter(server.port) as meter:
        path = write_kubeconfig(meter.listen(), folder, "agents")
        with Child(f"{_MODULE}.agents", str(path), "1") as process:
            process.read()
            server.wait_watched(1)
            server.change(1, 1)  # no bookmark repeats the version with which a watch began
            before = meter.traffic()
            while not all(
                f"bookmark {it}" in server.counts() for it in ("services", "endpointslices", "nodes")
            ):
                time.sleep(0.2)
            return meter.traffic().since(before)


def _measured(
    server: Server, meter: Meter, agents: int, changes: int, processes: Sequence[Child]
) -> Measured:
    server.wait_watched(agents)
    start = _quiet(meter)
    counts = server.change(changes, agents)
    for process in processes:
        process.ask(str(changes))
    return Measured(agents, start, _quiet(meter).since(start), counts)


def _quiet(meter: Meter) -> Traffic:
    """Return the traffic once there is no more."""
    before = meter.traffic()
    while True:
        time.sleep(_QUIET)
        if (now := meter.traffic()) == before:
            return now
        before = now


@contextmanager
def _agent(program: Program, meter: Meter, folder: Path, lab: str, number: int) -> Iterator[Running]:
    """Run one agent in a namespace, whose loopback interface leads to the API server."""
    node = Namespace(lab, f"node{number}")
    with node.entered():
        path = write_kubeconfig(meter.listen(), folder, node.role)
    own = folder / node.role
    own.mkdir()
    configuration, log = own / "config.yaml", own / "log"
    assert program.checkout is not None
    configuration.write_text(yaml.safe_dump(program.configuration("nft", path)))
    variables = {**environment("nft", own), **program.checkout.environment}
    with log.open("wb") as output:
        started = time.monotonic()
        process = node.spawn(program.agent(configuration), output=output, environment=variables)
    running = Running(process, log, started)
    try:
        yield running
        running.check()
    finally:
        process.kill()
        process.wait()
        node.remove()


def write_kubeconfig(port: int, folder: Path, name: str) -> Path:
    """Write a kubeconfig for this port of 127.0.0.1; `folder` has the server's certificate."""
    path = folder / f"{name}.kubeconfig"
    path.write_text(kubeconfig(f"https://127.0.0.1:{port}", None, folder / "certificate.pem"))
    return path
