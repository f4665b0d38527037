"""Measure a running program and yield figures in the units that `figures` names."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pykubeproxy.lab.network import Namespace
from tests.bench import changes, connects, workload
from tests.bench import figures as f
from tests.bench.plan import Effort
from tests.bench.program import Program, Running, environment, running
from tests.bench.testbed import Cluster, Testbed, pause_until
from tests.bench.workload import Size

# After a change, kube-proxy and pykubeproxy write nothing for minSyncPeriod.
_BETWEEN_CHANGES = 1.6
_CHANGES_A_SECOND = 100
_POLL_SECONDS = 0.005

#: The name, the unit and the values of a figure.
Measured = tuple[str, str, tuple[float, ...]]


class NotDone(RuntimeError):
    """The program did not write all rules in time."""


@dataclass(frozen=True)
class Run:
    """A running program and its environment."""

    testbed: Testbed
    cluster: Cluster
    node: Namespace
    process: Running
    environment: Mapping[str, str] = field(repr=False)
    backend: str
    effort: Effort

    @property
    def size(self) -> Size:
        return self.cluster.size


def measure(
    testbed: Testbed, cluster: Cluster, program: Program, backend: str, rows: frozenset[str], effort: Effort
) -> Iterator[Measured]:
    """Start a program on a new node, measure `rows`, and stop it.

    Raise NotDone, Ended, TimedOut or Unreachable after yielding the figures measured so far.
    """
    with testbed.node() as node:
        with running(program, backend, node, cluster) as process:
            run = Run(
                testbed, cluster, node, process, environment(backend, testbed.directory), backend, effort
            )
            yield f.START, "s", (_until_programmed(run),)
            yield f.START_CPU, "s", (process.cpu_seconds(),)
            yield f.RECEIVED, "MB", (_received(node),)
            yield from _running(run, rows)
        if "change" in rows and program.name == f.OURS:  # with the tables that the program left
            yield f.REWRITE, "s", tuple(_rewrites(run))
    time.sleep(effort.settle)  # the kernel frees the old tables in the background


def _running(run: Run, rows: frozenset[str]) -> Iterator[Measured]:
    if rows - {"start", "first"}:
        run.process.wait_quiet(run.effort.quiet)
    if "memory" in rows:
        now, peak = run.process.memory()
        yield f.MEMORY, "MB", (now,)
        yield f.PEAK, "MB", (peak,)
    if "first" in rows:
        yield from _first_packets(run)
    if "change" in rows:
        yield f.CHANGE, "s", tuple(_changes(run))
    if "idle" in rows:
        yield f.IDLE, "s", (_idle(run),)
    if "churn" in rows:
        yield f.CHURN, "s", (_churn(run),)


def _until_programmed(run: Run) -> float:
    """Return the seconds from the start of the process until Services are reachable in both families.

    A program may write Services in any order, so try the first, the last and seven in between.
    """
    last = run.size.services - 1
    some = {last * step // 8 for step in range(9)} if run.size.services else set()
    waiting = [*workload.KUBERNETES, *map(workload.vip, sorted(some))]
    with run.node.entered():
        while waiting:
            if connects.reaches(waiting[-1]):
                waiting.pop()
                continue
            run.process.check()
            if time.monotonic() - run.process.started > run.effort.limit:
                raise NotDone(f"rules incomplete after {run.effort.limit:.0f} s")
            time.sleep(_POLL_SECONDS)
        seconds = time.monotonic() - run.process.started
    run.testbed.pods.drain()
    return seconds


def _received(node: Namespace) -> float:
    """Return the megabytes of all packets that the node has received."""
    with node.entered():
        lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    (counts,) = (line.split() for line in lines if line.lstrip().startswith("eth0:"))
    return int(counts[1]) / 1e6


def _changes(run: Run) -> Iterator[float]:
    """Yield the seconds from writing an EndpointSlice, which removes or adds an endpoint, to the kernel's change."""
    watch = changes.watch(run.backend, run.node, run.environment)
    service, every = run.size.services // 2, run.size.endpoints
    try:
        for number in range(run.effort.changes):
            pause_until(time.monotonic() + _BETWEEN_CHANGES)
            gone = number % 2 == 0
            watch.arm()
            written = time.monotonic()
            run.cluster.set_unready(service, *([every // 2] if gone else []))
            yield watch.wait(workload.chain(service), every - gone, run.effort.limit) - written
    finally:
        watch.close()
        run.cluster.set_unready(service)


def _rewrites(run: Run) -> Iterator[float]:
    """Yield the seconds of one iptables-restore that writes one chain of the same tables."""
    for _ in range(run.effort.changes):
        yield changes.rewrite(run.node, workload.chain(run.size.services // 2), run.environment)


def _idle(run: Run) -> float:
    """Return the CPU seconds of a minute without changes."""
    run.process.wait_quiet(run.effort.quiet)
    started, before = time.monotonic(), run.process.cpu_seconds()
    time.sleep(run.effort.idle)
    return (run.process.cpu_seconds() - before) * 60 / (time.monotonic() - started)


def _churn(run: Run) -> float:
    """Return the CPU seconds of 1000 changes at 100 per second, including iptables-restore.

    Each change affects one endpoint of another Service.
    """
    run.process.wait_quiet(run.effort.quiet)
    started, before = time.monotonic(), run.process.cpu_seconds()
    try:
        for number in range(run.effort.churn):
            pause_until(started + number / _CHANGES_A_SECOND)
            round_, service = divmod(number, run.size.services)
            run.cluster.set_unready(service, round_ % run.size.endpoints)
        run.process.wait_quiet(run.effort.quiet)
        return (run.process.cpu_seconds() - before) * 1000 / run.effort.churn
    finally:
        for service in range(
            min(run.effort.churn, run.size.services)
        ):  # restore the objects for the next program
            run.cluster.set_unready(service)


def _first_packets(run: Run) -> Iterator[Measured]:
    """Yield the microseconds of a TCP connect, p50 and p99.

    Connect to Services, to pods from the same node (past the rules of all Services), and to pods from a node without
    rules.
    """
    run.process.wait_quiet(run.effort.quiet)
    services, pods = workload.draw(run.size, run.effort.connects)
    routes = ((run.node, services), (run.node, pods), (run.testbed.bare, pods))
    names = ((f.FIRST, f.FIRST_SLOW), (f.PAST, f.PAST_SLOW), (f.POD, f.POD_SLOW))
    figures: dict[str, list[float]] = {name: [] for pair in names for name in pair}
    for _ in range(run.effort.rounds):
        for taken, (typical, slow) in zip(connects.compare(run.testbed.pods, routes), names, strict=True):
            taken.sort()
            figures[typical].append(taken[len(taken) // 2] / 1000)
            figures[slow].append(taken[len(taken) * 99 // 100] / 1000)
    for name, values in figures.items():
        yield name, "us", tuple(values)
