"""Measure a running program and yield figures in the units that `figures` names."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pykubeproxy.lab.network import Namespace
from tests.bench import changes, commands, connects, repair, workload
from tests.bench import figures as f
from tests.bench.plan import Effort
from tests.bench.program import Place, Program, Running, place, running
from tests.bench.testbed import Cluster, Testbed, pause_until
from tests.bench.workload import Size

# After a change, kube-proxy and pykubeproxy write nothing for minSyncPeriod.
_BETWEEN_CHANGES = 1.6
_CHANGES_A_SECOND = 100
_POLL_SECONDS = 0.005
# The resources that a proxy lists first, in any order.
_LISTS = ("/services?", "/endpointslices?", "/nodes?")

_REQUESTS = {f.CHECK: f.CHECK_REQUESTS, f.DIFF: f.DIFF_REQUESTS}


class Measured(NamedTuple):
    """The name, the unit and the values of a figure; `alone` if it is that of the tools alone."""

    name: str
    unit: str
    runs: tuple[float, ...]
    alone: bool = False


class NotDone(RuntimeError):
    """The program did not write all rules in time."""


@dataclass(frozen=True)
class Run:
    """A running program and its environment."""

    place: Place
    program: Program
    process: Running
    effort: Effort

    @property
    def size(self) -> Size:
        return self.place.cluster.size


def measure(
    testbed: Testbed, cluster: Cluster, program: Program, backend: str, rows: frozenset[str], effort: Effort
) -> Iterator[Measured]:
    """Start a program on a new node, measure `rows`, and stop it.

    Raise NotDone, Ended, TimedOut, Unreachable or CommandFailed after yielding the figures measured so far.
    """
    with testbed.node() as node:
        there = place(testbed, cluster, node, program, backend)
        if "launch" in rows and program.checkout:
            yield from _launches(there, program)
        with running(program, there) as process:
            run = Run(there, program, process, effort)
            yield Measured(f.START, "s", (until_programmed(run),))
            yield Measured(f.START_CPU, "s", (process.cpu_seconds(),))
            yield Measured(f.RECEIVED, "MB", (_received(node),))
            yield Measured(f.FIRST_LIST, "s", (_first_list(run),))
            yield from _running(run, rows)
        if "change" in rows and program.name == f.OURS:  # with the tables that the program left
            yield Measured(f.CHANGE, "s", tuple(_rewrites(run)), alone=True)
    time.sleep(effort.settle)  # the kernel frees the old tables in the background


def _launches(there: Place, program: Program) -> Iterator[Measured]:
    """Yield the seconds of the imports that a start cannot do without, and of run --help."""
    imports = commands.imports(there, program)
    yield Measured(f.FIRST_LIST, "s", (imports,), alone=True)
    if not program.kubeconfig:
        yield Measured(f.HELP, "s", (imports,), alone=True)
        yield Measured(f.HELP, "s", (commands.seconds(there, program, "run", "--help"),))


def _running(run: Run, rows: frozenset[str]) -> Iterator[Measured]:
    if rows - {"start", "first"}:
        run.process.wait_quiet(run.effort.quiet)
    if "memory" in rows:
        now, peak = run.process.memory()
        yield Measured(f.MEMORY, "MB", (now,))
        yield Measured(f.PEAK, "MB", (peak,))
    if "first" in rows:
        yield from _first_packets(run)
    if "change" in rows:
        yield Measured(f.CHANGE, "s", tuple(_changes(run)))
    if "idle" in rows:
        yield Measured(f.IDLE, "s", (_idle(run),))
    if "churn" in rows:
        yield Measured(f.CHURN, "s", (_churn(run),))
    if run.program.checkout:
        yield from _inspected(run, rows)


def _inspected(run: Run, rows: frozenset[str]) -> Iterator[Measured]:
    """Yield the figures that only pykubeproxy has."""
    if "lookup" in rows:
        for name, found in commands.lookups(run.place, run.program, run.effort.lookups):
            yield Measured(name, "s", found)
    if "inspect" in rows:
        saved = commands.save_seconds(run.place)
        started = time.monotonic()
        for name, seconds in commands.inspections(run.place, run.program):
            yield Measured(name, "s", (seconds,))
            yield Measured(name, "s", (saved,), alone=True)
            if name in _REQUESTS:
                yield Measured(_REQUESTS[name], "n", (float(len(run.place.cluster.requests(started))),))
            started = time.monotonic()
    if "repair" in rows:
        run.process.wait_quiet(run.effort.quiet)
        half, everything = repair.after_flush(run.place, run.process.check, run.effort.limit)
        yield Measured(f.REPAIR_HALF, "s", (half,))
        yield Measured(f.REPAIR_ALL, "s", (everything,))


def until_programmed(run: Run) -> float:
    """Return the seconds from the start of the process until Services are reachable in both families.

    A program may write Services in any order, so try the first, the last and seven in between.
    """
    last = run.size.services - 1
    some = {last * step // 8 for step in range(9)} if run.size.services else set()
    waiting = [*workload.KUBERNETES, *map(workload.vip, sorted(some))]
    with run.place.node.entered():
        while waiting:
            if connects.reaches(waiting[-1]):
                waiting.pop()
                continue
            run.process.check()
            if time.monotonic() - run.process.started > run.effort.limit:
                raise NotDone(f"rules incomplete after {run.effort.limit:.0f} s")
            time.sleep(_POLL_SECONDS)
        seconds = time.monotonic() - run.process.started
    run.place.testbed.pods.drain()
    return seconds


def _first_list(run: Run) -> float:
    """Return the seconds from the start of the process until the API server got its first request for a list."""
    requests = run.place.cluster.requests(run.process.started)
    return min(at for at, path in requests if any(it in path for it in _LISTS)) - run.process.started


def _received(node: Namespace) -> float:
    """Return the megabytes of all packets that the node has received."""
    with node.entered():
        lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    (counts,) = (line.split() for line in lines if line.lstrip().startswith("eth0:"))
    return int(counts[1]) / 1e6


def _changes(run: Run) -> Iterator[float]:
    """Yield the seconds from writing an EndpointSlice, which removes or adds an endpoint, to the kernel's change."""
    watch = changes.watch(run.place.backend, run.place.node, run.place.environment)
    service, every = run.size.services // 2, run.size.endpoints
    try:
        for number in range(run.effort.changes):
            pause_until(time.monotonic() + _BETWEEN_CHANGES)
            gone = number % 2 == 0
            watch.arm()
            written = time.monotonic()
            run.place.cluster.set_unready(service, *([every // 2] if gone else []))
            yield watch.wait(workload.chain(service), every - gone, run.effort.limit) - written
    finally:
        watch.close()
        run.place.cluster.set_unready(service)


def _rewrites(run: Run) -> Iterator[float]:
    """Yield the seconds of one iptables-restore that writes one chain of the same tables."""
    for _ in range(run.effort.changes):
        yield changes.rewrite(run.place.node, workload.chain(run.size.services // 2), run.place.environment)


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
            run.place.cluster.set_unready(service, round_ % run.size.endpoints)
        run.process.wait_quiet(run.effort.quiet)
        return (run.process.cpu_seconds() - before) * 1000 / run.effort.churn
    finally:
        for service in range(
            min(run.effort.churn, run.size.services)
        ):  # restore the objects for the next program
            run.place.cluster.set_unready(service)


def _first_packets(run: Run) -> Iterator[Measured]:
    """Yield the microseconds of a TCP connect, p50 and p99.

    Connect to Services, to pods from the same node (past the rules of all Services), and to pods from a node without
    rules.
    """
    run.process.wait_quiet(run.effort.quiet)
    services, pods = workload.draw(run.size, run.effort.connects)
    routes = ((run.place.node, services), (run.place.node, pods), (run.place.testbed.bare, pods))
    names = ((f.FIRST, f.FIRST_SLOW), (f.PAST, f.PAST_SLOW), (f.POD, f.POD_SLOW))
    figures: dict[str, list[float]] = {name: [] for pair in names for name in pair}
    for _ in range(run.effort.rounds):
        for taken, (typical, slow) in zip(
            connects.compare(run.place.testbed.pods, routes), names, strict=True
        ):
            taken.sort()
            figures[typical].append(taken[len(taken) // 2] / 1000)
            figures[slow].append(taken[len(taken) * 99 // 100] / 1000)
    for name, values in figures.items():
        yield Measured(name, "us", tuple(values))
