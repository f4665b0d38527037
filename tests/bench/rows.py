"""Measure a running program: starts, changes, repairs and commands, in the units that `figures` names."""

import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pykubeproxy.kernel import nftables
from pykubeproxy.kernel.legacy import entries
from pykubeproxy.lab.network import Namespace
from pykubeproxy.objects import Family
from tests.bench import connects, workload
from tests.bench import figures as f
from tests.bench.plan import Effort
from tests.bench.program import Place, Program, Running, place, running
from tests.bench.testbed import Cluster, Testbed, pause_until
from tests.bench.workload import Size

_ENDPOINT = re.compile(rb"KUBE-SEP-\w+")
_POLL_SECONDS = 0.001


class TimedOut(RuntimeError):
    """The rules did not change in time."""


def _rules_of(backend: str, chain: str) -> int:
    """Return a number that an added or removed endpoint of the Service of this chain changes. Takes some 50 µs."""
    if backend == "legacy":
        return entries(Family.IPV4, "nat")
    return len(nftables.texts_below(Family.IPV4, "nat", chain, _ENDPOINT))


def rules(node: Namespace, chain: str, environment: Mapping[str, str]) -> list[str]:
    """Return the rules of a chain of the IPv4 table nat; none if the chain does not exist."""
    with node.entered():
        command = ["iptables", "-t", "nat", "-S", chain]
        shown = subprocess.run(command, capture_output=True, text=True, env=dict(environment), timeout=60)
    return [line for line in shown.stdout.splitlines() if line.startswith("-A")]


def rewrite(node: Namespace, chain: str, environment: Mapping[str, str]) -> float:
    """Return the seconds of one iptables-restore that rewrites this chain unchanged."""
    text = "\n".join(["*nat", f":{chain} - [0:0]", *rules(node, chain, environment), "COMMIT", ""])
    with node.entered():
        started = time.monotonic()
        command = ["iptables-restore", "--noflush"]
        subprocess.run(command, input=text, text=True, check=True, env=dict(environment), timeout=60)
        return time.monotonic() - started


# What a start cannot do without.
_IMPORTS = "import click, msgspec, urllib3, ssl, json"
_LONGEST = 300.0


class CommandFailed(RuntimeError):
    """A command failed; the text has its exit code and the last line of its output."""


def _seconds(there: Place, program: Program, *arguments: str, codes: Sequence[int] = (0,)) -> float:
    """Return the seconds of a command of pykubeproxy. Raise CommandFailed for other exit codes."""
    return _run(there, program, program.command(*arguments), codes)


def _save_seconds(there: Place) -> float:
    """Return the seconds of iptables-save and ip6tables-save, one after the other."""
    with there.node.entered():
        started = time.monotonic()
        for command in ("iptables-save", "ip6tables-save"):
            subprocess.run(
                [command, "-c"],
                stdout=subprocess.DEVNULL,
                check=True,
                env=there.environment,
                timeout=_LONGEST,
            )
        return time.monotonic() - started


def _run(there: Place, program: Program, command: Sequence[str], codes: Sequence[int] = (0,)) -> float:
    placed = there.command(program, list(command))
    with there.node.entered():
        started = time.monotonic()
        outcome = subprocess.run(
            placed, capture_output=True, text=True, env=there.environment, timeout=_LONGEST, check=False
        )
        taken = time.monotonic() - started
    if outcome.returncode not in codes:
        last = (outcome.stderr.strip() or outcome.stdout.strip() or "no output").splitlines()[-1]
        raise CommandFailed(f"{command[-1]} exited with status {outcome.returncode}: {last[:300]}")
    return taken


# Try this many Services, evenly spread, with a pause after each pass: the processors are for the repair.
_SAMPLE, _PAUSE = 100, 0.02
_LOOK_SECONDS = 0.001
# As many connections as the pods' backlog holds.
_DRAIN = 250


class Served(NamedTuple):
    """Seconds until half of the Services and until all of them accept connections."""

    half: float
    all: float


def after_flush(there: Place, check: Callable[[], None], limit: float) -> Served:
    """Flush table nat, and return when its Services serve again, counted from the moment they fail.

    `check` raises if the program ended. Raise TimedOut after `limit` seconds.
    """
    address = workload.vip(there.cluster.size.services // 2)
    with there.node.entered():
        command = ["iptables", "-t", "nat", "-F"]
        with subprocess.Popen(command, env=dict(there.environment)) as flush:
            while connects.reaches(address):
                if flush.poll():
                    raise RuntimeError(f"iptables -F failed with status {flush.returncode}")
                there.testbed.pods.drain()
                time.sleep(_LOOK_SECONDS)
            failed = time.monotonic()
            served = until_served(there, failed, check, limit)
    return served


def until_served(there: Place, since: float, check: Callable[[], None], limit: float) -> Served:
    """Return the seconds from `since` until Services are reachable. Call it in the node's namespace."""
    last = there.cluster.size.services - 1
    count = min(_SAMPLE, last + 1)
    waiting = sorted({last * step // max(count - 1, 1) for step in range(count)})
    some, half = len(waiting), 0.0
    while waiting:
        check()
        waiting = list(_unreachable(there, waiting))
        now = time.monotonic() - since
        if not half and len(waiting) <= some / 2:
            half = now
        if now > limit:
            raise TimedOut(f"Services do not serve after {limit:.0f} s")
        if waiting:
            time.sleep(_PAUSE)
    # The sample serves: usually all do.
    rest = list(range(last + 1))
    while rest := list(_unreachable(there, rest)):
        now = time.monotonic() - since
        if now > limit:
            raise TimedOut(f"{len(rest)} Services do not serve after {limit:.0f} s")
    return Served(half, now)


def _unreachable(there: Place, services: list[int]) -> Iterator[int]:
    for number, service in enumerate(services):
        if not connects.reaches(workload.vip(service)):
            yield service
        if number % _DRAIN == 0:
            there.testbed.pods.drain()
    there.testbed.pods.drain()


# After a change, kube-proxy and pykubeproxy write nothing for minSyncPeriod.
_BETWEEN_CHANGES = 1.6
_CHANGES_A_SECOND = 100
_CHECK_SECONDS = 0.005
# The resources that a proxy lists first, in any order.
_LISTS = ("/services?", "/endpointslices?", "/nodes?")


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
            yield Measured(f.FIRST_LIST, "s", (_first_list(run),))
            yield from _running(run, rows)
        if "change" in rows and program.name == f.OURS:  # with the tables that the program left
            yield Measured(f.CHANGE, "s", tuple(_rewrites(run)), alone=True)
    time.sleep(effort.settle)  # the kernel frees the old tables in the background


def _launches(there: Place, program: Program) -> Iterator[Measured]:
    """Yield the seconds of the imports that a start cannot do without, and of run --help."""
    assert program.checkout is not None
    imports = _run(there, program, [program.checkout.python, "-P", "-c", _IMPORTS])
    yield Measured(f.FIRST_LIST, "s", (imports,), alone=True)
    if not program.kubeconfig:
        yield Measured(f.HELP, "s", (imports,), alone=True)
        yield Measured(f.HELP, "s", (_seconds(there, program, "run", "--help"),))


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
    number = run.size.services // 2
    service, address = workload.service_name(number), f"{workload.vip(number)}:{workload.SERVICE_PORT}"
    if "lookup" in rows:
        lookups: dict[str, tuple[str, ...]] = {
            f.DUMP: ("dump-rules", service),
            f.TRACE: ("trace", workload.pod(0), address),
            f.EXPLAIN: ("explain", service),
        }
        for name, arguments in lookups.items():
            taken = (_seconds(run.place, run.program, *arguments) for _ in range(run.effort.lookups))
            yield Measured(name, "s", tuple(taken))
    if "inspect" in rows:
        saved = _save_seconds(run.place)
        config = ("--config", str(run.place.configuration))
        inspections: dict[str, tuple[str, ...]] = {
            f.CHECK: ("check", *config),
            f.DIFF: ("diff", *config),
            f.DIFF_AGENT: ("diff",),
        }
        for name, arguments in inspections.items():
            # check may have a finding about the machine, such as a kernel without a feature.
            codes = (0, 1) if name == f.CHECK else (0,)
            yield Measured(name, "s", (_seconds(run.place, run.program, *arguments, codes=codes),))
            yield Measured(name, "s", (saved,), alone=True)
    if "repair" in rows:
        run.process.wait_quiet(run.effort.quiet)
        half, everything = after_flush(run.place, run.process.check, run.effort.limit)
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
            time.sleep(_CHECK_SECONDS)
        seconds = time.monotonic() - run.process.started
    run.place.testbed.pods.drain()
    return seconds


def _first_list(run: Run) -> float:
    """Return the seconds from the start of the process until the API server got its first request for a list."""
    requests = run.place.cluster.requests(run.process.started)
    return min(at for at, path in requests if any(item in path for item in _LISTS)) - run.process.started


def _changes(run: Run) -> Iterator[float]:
    """Yield the seconds from writing an EndpointSlice, which removes or adds an endpoint, to the kernel's change."""
    backend, node, cluster = run.place.backend, run.place.node, run.place.cluster
    service = run.size.services // 2
    chain = workload.chain(service)
    try:
        for number in range(run.effort.changes):
            pause_until(time.monotonic() + _BETWEEN_CHANGES)
            with node.entered():
                before = _rules_of(backend, chain)
            written = time.monotonic()
            cluster.set_unready(service, *([run.size.endpoints // 2] if number % 2 == 0 else []))
            with node.entered():
                while _rules_of(backend, chain) == before:
                    if time.monotonic() - written > run.effort.limit:
                        raise TimedOut(f"{chain} did not change in {run.effort.limit:.0f} s")
                    time.sleep(_POLL_SECONDS)
            yield time.monotonic() - written
    finally:
        cluster.set_unready(service)


def _rewrites(run: Run) -> Iterator[float]:
    """Yield the seconds of one iptables-restore that writes one chain of the same tables."""
    for _ in range(run.effort.changes):
        yield rewrite(run.place.node, workload.chain(run.size.services // 2), run.place.environment)


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
    """Yield the median microseconds of a TCP connect, of some rounds.

    Connect to Services, to pods from the same node (past the rules of all Services), and to pods from a node without
    rules.
    """
    run.process.wait_quiet(run.effort.quiet)
    services, pods = workload.draw(run.size, run.effort.connects)
    routes = ((run.place.node, services), (run.place.node, pods), (run.place.testbed.bare, pods))
    rounds = [connects.compare(run.place.testbed.pods, routes) for _ in range(run.effort.rounds)]
    for name, taken in zip((f.FIRST, f.PAST, f.POD), zip(*rounds, strict=True), strict=True):
        yield Measured(name, "us", tuple(statistics.median(times) / 1000 for times in taken))
