"""Hand a node over again and again while clients open new connections; none may fail."""

import os
import random
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from pykubeproxy.kernel import Backend
from pykubeproxy.lab.cluster import Lab
from tests.handover import capture
from tests.handover.capture import Capture
from tests.handover.handovers import HandOver
from tests.handover.kube_proxy import KubeProxy
from tests.handover.node import Node
from tests.handover.storm import Failure, Storm

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
        print(capture.describe(self._capture, packets))
        print(f"packets in {path}; the agent's last lines:")
        print("\n".join(self._node.agent.log().splitlines()[-15:]), flush=True)

    def close(self) -> None:
        """End the capture."""
        self._capture.close()


def _summary(storm: Storm, opened: Sequence[tuple[str, int]], seconds: float) -> str:
    lines = [f"{storm.opened()} new connections in {seconds:.0f} s, {len(storm.failures)} failed"]
    times = Counter(name for name, _ in opened)
    for name, count in times.items():
        connections = sum(number for it, number in opened if it == name)
        lines.append(f"  {count:4} times {name:24} {connections:8} connections")
    lines += [f"  {count:8} {name}" for name, count in sorted(storm.counts.items()) if count]
    failed = Counter(f"{it.how}: {it.route}" for it in storm.failures)
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
