"""Measure the shapes: starts, restarts, single changes, repairs, memory and first packets of each program."""

import time
from collections.abc import Iterator
from functools import cache, partial

from tests.bench import alone, connects, workload
from tests.bench import figures as f
from tests.bench.bench import Bench
from tests.bench.changes import changed_endpoints, new_services, within
from tests.bench.figures import Measured
from tests.bench.program import Place, Program, Running, place, running
from tests.bench.served import TimedOut, after_flush, until_served, until_synced
from tests.bench.testbed import Cluster


def measure(bench: Bench, backend: str) -> None:
    """Measure all shapes with a backend. The programs take turns, so that a slow period affects all of them."""
    for size in bench.options.shapes:
        with bench.testbed.cluster(size) as cluster:
            remaining = bench.proxies(backend) + [item for item in bench.programs if item.name == f.ALONE]
            recording = cache(partial(alone.recorded, bench, cluster, backend))
            for run in range(bench.options.runs):
                for program in tuple(remaining):
                    if program.name == f.ALONE:
                        rows = alone.measure(bench, cluster, backend, program, recording, run == 0)
                    else:
                        rows = _rows(bench, cluster, backend, program, run == 0)
                    if not bench.note(backend, size, program, rows):
                        remaining.remove(program)


def _rows(bench: Bench, cluster: Cluster, backend: str, program: Program, first: bool) -> Iterator[Measured]:
    """Start a program on a new node and restart it. Measure changes and packets if this is its first run.

    Raise TimedOut, Ended and Unreachable after yielding the figures measured so far.
    """
    options = bench.options
    with bench.testbed.node() as node:
        there = place(bench.testbed, cluster, node, program, backend)
        with running(program, there) as process:
            try:
                served = until_served(there, process.started, process.check, options.limit)
            except TimedOut as error:
                yield Measured(f.START, "s", over=error.seconds)
                raise
            yield Measured(f.START, "s", (served,))
            process.wait_quiet(options.quiet)
            yield Measured(f.START_CPU, "s", (process.cpu_seconds(),))
            now, peak = process.memory()
            yield Measured(f.MEMORY, "MB", (now,))
            yield Measured(f.PEAK, "MB", (peak,))
            if first:
                yield from _changes(bench, there, process)
        with running(program, there) as process:
            try:
                synced = until_synced(there, process, options.limit)
            except TimedOut as error:
                yield Measured(f.RESTART, "s", over=error.seconds)
                raise
            yield Measured(f.RESTART, "s", (synced,))
            # kube-proxy notices a flushed table only if its chains are deleted too, and then after up to syncPeriod.
            if program.checkout:
                process.wait_quiet(options.quiet)
                yield Measured(f.REPAIR, "s", (after_flush(there, process.check, options.limit),))
    time.sleep(options.settle)  # the kernel frees the old tables in the background


def _changes(bench: Bench, there: Place, process: Running) -> Iterator[Measured]:
    options, pods = bench.options, there.testbed.pods
    services = workload.shuffled(there.cluster.size)[: options.packets]
    yield Measured(f.FIRST, "us", tuple(connects.first_packets(there.node, pods, services)))
    for name, changes in ((f.CHANGED, changed_endpoints), (f.NEW, new_services)):
        yield Measured(name, "s", within(options.seconds, partial(changes, there, limit=options.limit)))
        process.wait_quiet(options.quiet)
