"""Measure a rolling update of a Service with many endpoints, while a client connects to it all the time."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from tests.bench import connects, workload
from tests.bench import figures as f
from tests.bench.bench import Bench
from tests.bench.figures import Measured
from tests.bench.program import Place, Program, Running, place, running
from tests.bench.served import until_served
from tests.bench.testbed import Cluster, pause_until

# A configuration file cannot say 0: that is the default, 1 s.
_PERIODS = ("1s", "1ms")
_REPLACED, _BETWEEN_STEPS = 10, 0.3
_BETWEEN_CONNECTIONS = 0.002


class _Seen(NamedTuple):
    """The connections of the client, and those that failed or reached a pod after its grace period."""

    connected: int
    failed: int


def measure(bench: Bench, backend: str) -> None:
    """Measure rolling updates with a backend, of both minimum periods between syncs."""
    for size in bench.options.rolling:
        with bench.testbed.cluster(size) as cluster:
            for program in bench.proxies(backend):
                for period in _PERIODS:
                    variant = replace(program, min_sync=period, variant=f"minSyncPeriod {period}")
                    bench.note(backend, size, variant, _rows(bench, cluster, backend, variant))


def _rows(bench: Bench, cluster: Cluster, backend: str, program: Program) -> Iterator[Measured]:
    """Update twice: once without, and once with a recording of what the program writes, which takes CPU time."""
    options = bench.options
    with bench.testbed.node() as node:
        there = place(bench.testbed, cluster, node, program, backend)
        with running(program, there) as process:
            _start(there, process, bench)
            before = process.cpu_seconds()
            seen = _update(there, options.steps, options.grace)
            process.wait_quiet(options.quiet)
            yield Measured(f.ROLLING_CPU, "s", (process.cpu_seconds() - before,))
            yield Measured(f.CONNECTED, "n", (seen.connected,))
            yield Measured(f.FAILED, "n", (seen.failed,))
    cluster.restore()
    with TemporaryDirectory(dir=bench.testbed.directory) as folder, bench.testbed.node() as node:
        record = Path(folder, "record")
        there = place(bench.testbed, cluster, node, program, backend, record)
        with running(program, there) as process:
            _start(there, process, bench)
            before = _bytes(record)
            _update(there, options.steps, 0)
            process.wait_quiet(options.quiet)
            yield Measured(f.WRITTEN, "MB", ((_bytes(record) - before) / 1e6,))
    cluster.restore()


def _start(there: Place, process: Running, bench: Bench) -> None:
    until_served(there, process.started, process.check, bench.options.limit)
    process.wait_quiet(bench.options.quiet)


def _bytes(record: Path) -> int:
    return sum(file.stat().st_size for file in record.iterdir() if file.suffix != ".arguments")


def _update(there: Place, steps: int, grace: float) -> _Seen:
    """Replace endpoints in steps, the first ones first, and connect until the last grace period is over."""
    removed: dict[str, float] = {}

    def run() -> None:
        started, replaced = time.monotonic(), {}
        for step in range(steps):
            pause_until(started + step * _BETWEEN_STEPS)
            for number in range(step * _REPLACED, (step + 1) * _REPLACED):
                replaced[number] = workload.new_pod(number)
            there.cluster.replace(0, replaced)
            removed.update(dict.fromkeys(map(workload.pod, replaced), time.monotonic()) | removed)
        time.sleep(grace + 1)

    connected = failed = 0
    with ThreadPoolExecutor(1) as background, there.node.entered():
        updating = background.submit(run)
        while not updating.done():
            reached, pods = connects.reaches(workload.vip(0)), there.testbed.pods.drain()
            late = time.monotonic() - grace
            connected += 1
            failed += not reached or any(removed.get(pod, late) < late for pod in pods)
            time.sleep(_BETWEEN_CONNECTIONS)
        updating.result()
    return _Seen(connected, failed)
