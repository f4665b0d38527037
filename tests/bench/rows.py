"""Measure a running program: starts, changes, repairs and commands, in the units that `figures` names."""

import ctypes
import os
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from pykubeproxy.lab.network import Namespace
from tests.bench import connects, workload
from tests.bench import figures as f
from tests.bench.plan import Effort
from tests.bench.program import Place, Program, Running, place, running
from tests.bench.testbed import Cluster, Testbed, pause_until
from tests.bench.workload import Size

_NETLINK_NETFILTER, _NETLINK_ADD_MEMBERSHIP, _SOL_NETLINK = 12, 1, 270
_GROUP_NFTABLES = 7
_SO_RCVBUFFORCE = 33
# NFT_MSG_NEWGEN ends the notifications of each transaction.
_NEW_GENERATION = 10 << 8 | 15
_IPT_SO_GET_INFO = 64
_POLL_SECONDS = 0.001


class TimedOut(RuntimeError):
    """The rules did not change in time."""


class ChangeWatch(Protocol):
    """Waits until a chain of the IPv4 table nat has a given number of endpoints."""

    def arm(self) -> None: ...
    def wait(self, chain: str, endpoints: int, seconds: float) -> float: ...
    def close(self) -> None: ...


class NftWatch:
    """Uses nftables notifications, and lists the chain after each transaction."""

    def __init__(self, node: Namespace, environment: Mapping[str, str]) -> None:
        self._node, self._environment = node, environment
        with node.entered():
            self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER)
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 64 << 20)
        self._socket.bind((0, 0))
        self._socket.setsockopt(_SOL_NETLINK, _NETLINK_ADD_MEMBERSHIP, _GROUP_NFTABLES)

    def arm(self) -> None:
        """Discard the notifications so far."""
        self._socket.setblocking(False)
        try:
            while True:
                self._socket.recv(1 << 18)
        except BlockingIOError:
            pass

    def wait(self, chain: str, endpoints: int, seconds: float) -> float:
        """Return the time.monotonic() of the transaction that made the change. Raise TimedOut."""
        deadline = time.monotonic() + seconds
        while True:
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                message = self._socket.recv(1 << 18)
            except TimeoutError:
                raise TimedOut(f"{chain} did not change in {seconds:.0f} s") from None
            moment = time.monotonic()
            if _NEW_GENERATION in _types(message) and self._endpoints(chain) == endpoints:
                return moment

    def _endpoints(self, chain: str) -> int:
        return sum(" -j KUBE-SEP-" in rule for rule in rules(self._node, chain, self._environment))

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


class LegacyWatch:
    """Polls the size of the table, which each added or removed endpoint changes."""

    def __init__(self, node: Namespace) -> None:
        with node.entered():
            self._socket = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._before = 0

    def arm(self) -> None:
        """Store the current size."""
        self._before = self._rules()

    def wait(self, chain: str, endpoints: int, seconds: float) -> float:
        """Return the time.monotonic() of the change. Raise TimedOut."""
        deadline = time.monotonic() + seconds
        while self._rules() == self._before:
            if time.monotonic() > deadline:
                raise TimedOut(f"table nat did not change in {seconds:.0f} s")
            time.sleep(_POLL_SECONDS)
        return time.monotonic()

    def _rules(self) -> int:
        """Return the number of entries of table nat, in 50 µs at any size."""
        info = ctypes.create_string_buffer(b"nat", 84)
        length = ctypes.c_uint32(84)
        number = self._socket.fileno()
        if self._libc.getsockopt(number, socket.SOL_IP, _IPT_SO_GET_INFO, info, ctypes.byref(length)):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        # After the name (32 bytes): a mask of hooks, their entries and underflows (5 each), then the number.
        return int(struct.unpack_from("I", info.raw, 32 + 4 * 11)[0])

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def watch_tables(backend: str, node: Namespace, environment: Mapping[str, str]) -> ChangeWatch:
    """Return the watch for a backend."""
    return NftWatch(node, environment) if backend == "nft" else LegacyWatch(node)


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


def _types(message: bytes) -> set[int]:
    """Return the types of the netlink messages in a datagram."""
    types, at = set(), 0
    while at + 16 <= len(message):
        length, kind = struct.unpack_from("IH", message, at)
        types.add(kind)
        at += max(length + 3 & ~3, 16)
    return types


# What a start cannot do without.
_IMPORTS = "import click, msgspec, urllib3, ssl, json"
_LONGEST = 300.0


class CommandFailed(RuntimeError):
    """A command failed; the text has its exit code and the last line of its output."""


def measure_imports(there: Place, program: Program) -> float:
    """Return the seconds of a Python process that only does the imports that a start needs at least."""
    assert program.checkout is not None
    return _run(there, program, [program.checkout.python, "-P", "-c", _IMPORTS])


def seconds(there: Place, program: Program, *arguments: str, codes: Sequence[int] = (0,)) -> float:
    """Return the seconds of a command of pykubeproxy. Raise CommandFailed for other exit codes."""
    return _run(there, program, program.command(*arguments), codes)


def lookups(there: Place, program: Program, repeat: int) -> Iterator[tuple[str, tuple[float, ...]]]:
    """Yield the seconds of the commands that look at one Service."""
    number = there.cluster.size.services // 2
    service = workload.service_name(number)
    for name, arguments in (
        (f.DUMP, ("dump-rules", service)),
        (f.TRACE, ("trace", workload.pod(0), f"{workload.vip(number)}:{workload.SERVICE_PORT}")),
        (f.EXPLAIN, ("explain", service)),
    ):
        yield name, tuple(seconds(there, program, *arguments) for _ in range(repeat))


def inspections(there: Place, program: Program) -> Iterator[tuple[str, float]]:
    """Yield the seconds of check and diff, with the objects of the API server and of the agent."""
    config = ("--config", str(there.configuration))
    # check may have a finding about the machine, such as a kernel without a feature.
    yield f.CHECK, seconds(there, program, "check", *config, codes=(0, 1))
    yield f.DIFF, seconds(there, program, "diff", *config)
    yield f.DIFF_AGENT, seconds(there, program, "diff")


def save_seconds(there: Place) -> float:
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
    imports = measure_imports(there, program)
    yield Measured(f.FIRST_LIST, "s", (imports,), alone=True)
    if not program.kubeconfig:
        yield Measured(f.HELP, "s", (imports,), alone=True)
        yield Measured(f.HELP, "s", (seconds(there, program, "run", "--help"),))


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
        for name, found in lookups(run.place, run.program, run.effort.lookups):
            yield Measured(name, "s", found)
    if "inspect" in rows:
        saved = save_seconds(run.place)
        started = time.monotonic()
        for name, seconds in inspections(run.place, run.program):
            yield Measured(name, "s", (seconds,))
            yield Measured(name, "s", (saved,), alone=True)
            if name in _REQUESTS:
                yield Measured(_REQUESTS[name], "n", (float(len(run.place.cluster.requests(started))),))
            started = time.monotonic()
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


def _received(node: Namespace) -> float:
    """Return the megabytes of all packets that the node has received."""
    with node.entered():
        lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    (counts,) = (line.split() for line in lines if line.lstrip().startswith("eth0:"))
    return int(counts[1]) / 1e6


def _changes(run: Run) -> Iterator[float]:
    """Yield the seconds from writing an EndpointSlice, which removes or adds an endpoint, to the kernel's change."""
    watch = watch_tables(run.place.backend, run.place.node, run.place.environment)
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
