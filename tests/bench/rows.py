"""The measurements: each takes a program at work and gives figures in the units that `figures` names."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from pykubeproxy.lab.namespaces import Namespace
from tests.bench import changes, connects, work
from tests.bench import figures as f
from tests.bench.plan import Effort
from tests.bench.site import Cluster, Site, pause_until
from tests.bench.subject import Running, Subject, environment, running
from tests.bench.work import Size

# After a change kube-proxy, and we as well, write nothing for minSyncPeriod.
_BETWEEN_CHANGES = 1.6
_CHANGES_A_SECOND = 100
_POLL_SECONDS = 0.005

#: The name, the unit and the values of a figure.
Measured = tuple[str, str, tuple[float, ...]]


class NotDone(RuntimeError):
    """Not all was programmed in time."""


@dataclass(frozen=True)
class At:
    """A program at work: everything that a measurement needs."""

    site: Site
    cluster: Cluster
    node: Namespace
    program: Running
    environment: Mapping[str, str] = field(repr=False)
    backend: str
    effort: Effort

    @property
    def size(self) -> Size:
        return self.cluster.size


def visit(
    site: Site, cluster: Cluster, subject: Subject, backend: str, rows: frozenset[str], effort: Effort
) -> Iterator[Measured]:
    """Start a program on a fresh node, measure `rows`, and end it.

    Raises NotDone, Ended, TimedOut, Unreachable; what was measured before that has been given.
    """
    with site.node() as node:
        with running(subject, backend, node, cluster) as program:
            at = At(site, cluster, node, program, environment(backend, site.directory), backend, effort)
            yield f.START, "s", (_until_programmed(at),)
            yield f.START_CPU, "s", (program.cpu_seconds(),)
            yield from _at_work(at, rows)
        if "change" in rows and subject.name == f.OURS:  # with the tables as it has left them
            yield f.REWRITE, "s", tuple(_rewrites(at))
    time.sleep(effort.settle)  # the kernel takes the old tables apart behind our back


def _at_work(at: At, rows: frozenset[str]) -> Iterator[Measured]:
    if rows - {"start", "first"}:
        at.program.wait_quiet(at.effort.quiet)
    if "memory" in rows:
        now, peak = at.program.memory()
        yield f.MEMORY, "MB", (now,)
        yield f.PEAK, "MB", (peak,)
    if "first" in rows:
        yield from _first_packets(at)
    if "change" in rows:
        yield f.CHANGE, "s", tuple(_changes(at))
    if "idle" in rows:
        yield f.IDLE, "s", (_idle(at),)
    if "churn" in rows:
        yield f.CHURN, "s", (_churn(at),)


def _until_programmed(at: At) -> float:
    """Seconds from the start of the process until the last Service can be reached, in both families.

    Every rule of a Service is there before it can be reached, and Services become so together or in an order that is
    the program's own: so the first, the last and some in between are tried, one after the other.
    """
    last = at.size.services - 1
    some = {last * step // 8 for step in range(9)} if at.size.services else set()
    waiting = [*work.KUBERNETES, *map(work.vip, sorted(some))]
    with at.node.entered():
        while waiting:
            if connects.reaches(waiting[-1]):
                waiting.pop()
                continue
            at.program.check()
            if time.monotonic() - at.program.started > at.effort.limit:
                raise NotDone(f"not done after {at.effort.limit:.0f} s")
            time.sleep(_POLL_SECONDS)
        seconds = time.monotonic() - at.program.started
    at.site.pods.drain()
    return seconds


def _changes(at: At) -> Iterator[float]:
    """Seconds from the write of an EndpointSlice until the kernel has it: an endpoint goes, or comes back."""
    watch = changes.watch(at.backend, at.node, at.environment)
    service, every = at.size.services // 2, at.size.endpoints
    try:
        for number in range(at.effort.changes):
            pause_until(time.monotonic() + _BETWEEN_CHANGES)
            gone = number % 2 == 0
            watch.arm()
            written = time.monotonic()
            at.cluster.set_unready(service, *([every // 2] if gone else []))
            yield watch.wait(work.chain(service), every - gone, at.effort.limit) - written
    finally:
        watch.close()
        at.cluster.set_unready(service)


def _rewrites(at: At) -> Iterator[float]:
    """Seconds of one iptables-restore that writes one chain on the same tables."""
    for _ in range(at.effort.changes):
        yield changes.rewrite(at.node, work.chain(at.size.services // 2), at.environment)


def _idle(at: At) -> float:
    """Seconds of processor time in a minute without any change."""
    at.program.wait_quiet(at.effort.quiet)
    started, before = time.monotonic(), at.program.cpu_seconds()
    time.sleep(at.effort.idle)
    return (at.program.cpu_seconds() - before) * 60 / (time.monotonic() - started)


def _churn(at: At) -> float:
    """Seconds of processor time for a thousand changes, one after the other at a hundred a second.

    Every change is one endpoint of another Service; iptables-restore counts, too.
    """
    at.program.wait_quiet(at.effort.quiet)
    started, before = time.monotonic(), at.program.cpu_seconds()
    try:
        for number in range(at.effort.churn):
            pause_until(started + number / _CHANGES_A_SECOND)
            round_, service = divmod(number, at.size.services)
            at.cluster.set_unready(service, round_ % at.size.endpoints)
        at.program.wait_quiet(at.effort.quiet)
        return (at.program.cpu_seconds() - before) * 1000 / at.effort.churn
    finally:
        for service in range(min(at.effort.churn, at.size.services)):  # the next program finds all as it was
            at.cluster.set_unready(service)


def _first_packets(at: At) -> Iterator[Measured]:
    """Microseconds that a TCP connection takes, typically and of the slowest in a hundred.

    To a Service; to a pod from the same node, for that passes by the rules of all Services, too; and to a pod from a
    node that has no rules at all.
    """
    at.program.wait_quiet(at.effort.quiet)
    services, pods = work.draw(at.size, at.effort.connects)
    ways = ((at.node, services), (at.node, pods), (at.site.bare, pods))
    names = ((f.FIRST, f.FIRST_SLOW), (f.PAST, f.PAST_SLOW), (f.POD, f.POD_SLOW))
    figures: dict[str, list[float]] = {name: [] for pair in names for name in pair}
    for _ in range(at.effort.rounds):
        for taken, (typical, slow) in zip(connects.compare(at.site.pods, ways), names, strict=True):
            taken.sort()
            figures[typical].append(taken[len(taken) // 2] / 1000)
            figures[slow].append(taken[len(taken) * 99 // 100] / 1000)
    for name, values in figures.items():
        yield name, "us", tuple(values)
