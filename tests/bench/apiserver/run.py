"""Run agents against the API server in processes of their own, and measure what they send and receive."""

import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
import yaml

from pykubeproxy.lab.apiserver.server import kubeconfig
from pykubeproxy.lab.network import Namespace
from tests.bench.apiserver.server import Count
from tests.bench.figures import OURS
from tests.bench.program import Program, Running, environment, image_python, this_checkout
from tests.bench.workload import Size

_READ_BYTES = 1 << 18


class Traffic(NamedTuple):
    """What agents sent and received so far, TLS included and TCP headers not, and their connections, open and in all."""

    sent: int = 0
    received: int = 0
    connections: int = 0
    open: int = 0

    def since(self, before: "Traffic") -> "Traffic":
        """Return the difference; `open` is the present number."""
        return Traffic(
            self.sent - before.sent,
            self.received - before.received,
            self.connections - before.connections,
            self.open,
        )


class Meter:
    """Forward connections to a port of 127.0.0.1 on one thread. A context manager."""

    def __init__(self, port: int) -> None:
        self._server = ("127.0.0.1", port)
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._traffic = Traffic()
        self._wake, self._woken = socket.socketpair()
        self._resources = ExitStack()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="meter", daemon=True)

    def listen(self) -> int:
        """Listen on 127.0.0.1 in the network namespace of the calling thread. Return the port."""
        listener = self._resources.enter_context(socket.create_server(("127.0.0.1", 0), backlog=128))
        self._selector.register(listener, selectors.EVENT_READ, None)
        self._wake.send(b" ")
        return int(listener.getsockname()[1])

    def traffic(self) -> Traffic:
        """Return the traffic so far."""
        with self._lock:
            return self._traffic

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._wake.close()
        self._thread.join()
        self._resources.close()
        self._woken.close()
        self._selector.close()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._woken:
                    if not self._woken.recv(64):
                        return
                elif key.data is None:
                    self._accept(key.fileobj)  # type: ignore[arg-type]
                else:
                    self._forward(key.fileobj, *key.data)  # type: ignore[arg-type]

    def _accept(self, listener: socket.socket) -> None:
        client, _ = listener.accept()
        server = socket.create_connection(self._server)
        for connection in (client, server):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._resources.enter_context(connection)
        self._selector.register(client, selectors.EVENT_READ, (server, True))
        self._selector.register(server, selectors.EVENT_READ, (client, False))
        self._count(Traffic(connections=1, open=1))

    def _forward(self, source: socket.socket, sink: socket.socket, of_agent: bool) -> None:
        """Forward what can be read at once. Both sides always read, so a write does not wait for long."""
        try:
            data = source.recv(_READ_BYTES)
            sink.sendall(data)
        except OSError:
            data = b""
        self._count(Traffic(sent=len(data)) if of_agent else Traffic(received=len(data)))
        if data:
            return
        for connection in (source, sink):
            self._selector.unregister(connection)
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._count(Traffic(open=-1))

    def _count(self, more: Traffic) -> None:
        with self._lock:
            self._traffic = Traffic(*(a + b for a, b in zip(self._traffic, more, strict=True)))


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
            raise RuntimeError(f"{self._process.args!r} has ended")
        return line

    def ask(self, line: str) -> str:
        """Send a line and return the answer."""
        self.send(line)
        return self.read()

    def send(self, line: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def __enter__(self) -> Self:
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
        while (
            sum(item.requests for name, item in self.counts().items() if name.startswith("watch"))
            < 3 * agents
        ):
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
                f"bookmark {item}" in server.counts() for item in ("services", "endpointslices", "nodes")
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
