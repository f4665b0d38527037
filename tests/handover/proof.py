"""Hand a node over again and again while clients open new connections; none may fail."""

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, NamedTuple

from pykubeproxy.kernel import Backend
from pykubeproxy.lab.cluster import Lab
from pykubeproxy.lab.network import Namespace
from tests.handover import capture
from tests.handover.capture import Capture, Endpoint
from tests.handover.handovers import HandOver, KubeProxy
from tests.handover.node import Node, Route, Source

_CLIENT = Path(__file__).with_name("client.py")
_AT_ONCE = 24  # connections under way in each client
_READY_SECONDS = 30.0
# The part of the connections that each client opens; the one from outside has the most routes.
_SHARES = {Source.OUTSIDE: 0.45, Source.POD: 0.3, Source.ENDPOINT: 0.1, Source.HOST: 0.15}


class Failure(NamedTuple):
    """A failed connection: when it was reported, seconds since it began, its route, and both ends at the client."""

    noticed: float
    seconds: float
    how: str
    route: str
    source: Endpoint
    target: Endpoint

    def __str__(self) -> str:
        return f"{self.route}: {self.how} after {self.seconds:.3f} s, {self.source} > {self.target}"


class Storm:
    """Opens connections while the context lasts, `rate` a second at most.

    Calls `on_failure` from another thread for the first connection that fails or is late.
    """

    def __init__(
        self,
        namespaces: Mapping[Source, Namespace],
        routes: Sequence[Route],
        rate: float,
        directory: Path,
        on_failure: Callable[[Failure], None],
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.failures: list[Failure] = []
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._witness: threading.Thread | None = None
        self._ready = threading.Semaphore(0)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._readers: list[threading.Thread] = []
        self._clients = [
            (namespaces[source], self._write(directory, source, routes, rate * share))
            for source, share in _SHARES.items()
        ]

    def _write(self, directory: Path, source: Source, routes: Sequence[Route], rate: float) -> Path:
        own = [item._asdict() | {"source": source.value} for item in routes if item.source is source]
        path = directory / f"client-{source.value}.json"
        path.write_text(json.dumps({"routes": own, "at_once": _AT_ONCE, "rate": rate}))
        return path

    def __enter__(self) -> "Storm":
        for namespace, path in self._clients:
            command = [sys.executable, "-I", "-S", str(_CLIENT), str(path)]
            with path.with_suffix(".log").open("wb") as errors:
                process = namespace.spawn(command, output=subprocess.PIPE, errors=errors)
            assert process.stdout
            reader = threading.Thread(target=self._read, args=(process.stdout,), daemon=True)
            self._processes.append(process)
            self._readers.append(reader)
            reader.start()
        for _ in self._processes:
            if not self._ready.acquire(timeout=_READY_SECONDS):
                self.check()
                raise TimeoutError(f"a client does not start; see {self._clients[0][1].parent}")
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.terminate()
        for reader, process in zip(self._readers, self._processes, strict=True):
            reader.join()
            process.wait()
        if self._witness:
            self._witness.join()

    def check(self) -> None:
        """Raise RuntimeError if a client has ended."""
        for (_, path), process in zip(self._clients, self._processes, strict=True):
            if process.poll() is not None:
                raise RuntimeError(f"a client ended: {path.with_suffix('.log').read_text()}")

    def opened(self) -> int:
        """Return the number of new connections and datagrams that succeeded or failed."""
        with self._lock:
            succeeded = sum(
                count for name, count in self.counts.items() if not name.startswith(("held ", "slow "))
            )
            return succeeded + len(self.failures)

    def _read(self, output: IO[bytes]) -> None:
        with output:
            for line in output:
                self._note(json.loads(line))

    def _note(self, document: dict[str, Any]) -> None:
        if "ready" in document:
            self._ready.release()
        elif counts := document.get("counts"):
            with self._lock:
                self.counts.update(counts)
        elif "route" in document:
            failure = _failure(document)
            with self._lock:
                if "failure" in document:
                    self.failures.append(failure)
                if self._witness is None:
                    self._witness = threading.Thread(target=self._on_failure, args=(failure,))
                    self._witness.start()


def _failure(document: Mapping[str, Any]) -> Failure:
    source, target = (Endpoint(*document[end]) for end in ("source", "target"))
    how = document.get("failure", "late")
    return Failure(time.time(), document["seconds"], how, document["route"], source, target)


# Seconds after the report of a late connection until the capture is read: its SYN has been retransmitted by then.
_RETRANSMITTED = 0.4
_TIMEOUT = 120.0


class Plan(NamedTuple):
    """Which hand-overs to make, in rounds in random order, until so many connections were opened.

    `backend` is the first one, `rate` the most connections a second, `captures` the folder for captures. Without
    `changes`, Services and endpoints stay as they are.
    """

    backend: Backend
    seed: int
    connections: int
    rate: float
    handovers: Sequence[HandOver]
    kube_proxy: KubeProxy
    captures: Path
    changes: bool = True


def prove(plan: Plan) -> Storm:
    """Run the plan and print what happened. Return what was counted; the first failure ends the run with its hand-over."""
    print(f"{plan.backend.value}: seed {plan.seed}, {plan.connections} connections", flush=True)
    with ExitStack() as stack:
        name = f"hand{plan.backend.value}{os.getpid()}"
        settings = {"logging": {"verbosity": 2}}
        lab = stack.enter_context(Lab(name, backend=plan.backend.value, agents=False, settings=settings))
        lab.timeout = _TIMEOUT
        node = Node(lab, plan.backend, plan.seed)
        node.start()
        witness = Witness(node, plan.captures)
        stack.callback(witness.close)
        storm = Storm(node.namespaces(), node.routes(), plan.rate, lab.logs, witness.noticed)
        begun = time.monotonic()
        with storm, ExitStack() as changes:
            if plan.changes:
                changes.enter_context(node.changing())
            opened = list(_hand_over(plan, node, storm, witness))
        print(_summary(storm, opened, time.monotonic() - begun))
        print(_conntrack(node), flush=True)
    return storm


def _hand_over(plan: Plan, node: Node, storm: Storm, witness: "Witness") -> Iterator[tuple[str, int]]:
    """Make the hand-overs; yield the name of each and how many connections were opened during it."""
    chance = random.Random(plan.seed)
    rounds = 0
    while rounds == 0 or storm.opened() < plan.connections:
        rounds += 1
        for handover in chance.sample(plan.handovers, len(plan.handovers)):
            witness.during = handover.__name__
            before = storm.opened()
            handover(node, plan.kube_proxy, chance)
            time.sleep(chance.uniform(0.0, 0.5))
            storm.check()
            yield handover.__name__, storm.opened() - before
            if storm.failures:
                return
        print(f"  {rounds} rounds, {storm.opened()} connections", flush=True)


class Witness:
    """Captures the node's packets, and keeps those of the first connection that fails or is late."""

    def __init__(self, node: Node, folder: Path) -> None:
        self.during = ""
        self._node, self._folder = node, folder
        self._capture = Capture(node.namespace)

    def noticed(self, failure: Failure) -> None:
        """Take the packets of a connection from the capture, print them and write a file."""
        at, during = time.time(), self.during
        time.sleep(_RETRANSMITTED)
        packets = capture.connection(self._capture.packets(), failure.source, failure.target)
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"handover-{os.getpid()}-{self._node.backend.value}.pcap"
        capture.write(path, packets)
        print(f"first late or failed connection, at {at % 1000:.3f}, during {during}: {failure}")
        print(capture.describe(packets))
        print(f"packets in {path}; the agent's last lines:")
        print("\n".join(self._node.agent.log().splitlines()[-15:]), flush=True)

    def close(self) -> None:
        """End the capture."""
        self._capture.close()


def _summary(storm: Storm, opened: Sequence[tuple[str, int]], seconds: float) -> str:
    lines = [f"{storm.opened()} new connections in {seconds:.0f} s, {len(storm.failures)} failed"]
    times = Counter(name for name, _ in opened)
    for name, count in times.items():
        connections = sum(number for item, number in opened if item == name)
        lines.append(f"  {count:4} times {name:24} {connections:8} connections")
    lines += [f"  {count:8} {name}" for name, count in sorted(storm.counts.items()) if count]
    failed = Counter(f"{item.how}: {item.route}" for item in storm.failures)
    lines += [f"  failed {count}: {how}" for how, count in failed.most_common()]
    return "\n".join(lines)


def _conntrack(node: Node) -> str:
    """Return conntrack's counters of the node: `insert_failed` and `drop` are lost packets."""
    with node.namespace.entered():
        done = subprocess.run(["conntrack", "-S"], capture_output=True, text=True, check=True)
    sums: Counter[str] = Counter()
    for field in done.stdout.split():
        name, _, value = field.partition("=")
        if name != "cpu" and value.isdigit():
            sums[name] += int(value)
    return f"conntrack: {', '.join(f'{name} {count}' for name, count in sums.items() if count)}"
