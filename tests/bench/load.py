"""Measure an idle agent, and then one that follows 1000 changes a minute."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from tests.bench import connects, workload
from tests.bench import figures as f
from tests.bench.bench import Bench
from tests.bench.figures import Measured
from tests.bench.program import Place, Program, place, running
from tests.bench.served import TimedOut, until_served
from tests.bench.testbed import Cluster, pause_until

_BETWEEN_CHANGES = 0.06
_BETWEEN_LOOKS = 0.003
_HOUR = 3600.0
# Give up on a change after so many seconds.
_LONGEST = 60.0


def measure(bench: Bench, backend: str) -> None:
    """Measure the first shape with a backend."""
    size = bench.options.shapes[0]
    with bench.testbed.cluster(size) as cluster:
        for program in bench.proxies(backend):
            bench.note(backend, size, program, _rows(bench, cluster, backend, program))
            cluster.restore()


def _rows(bench: Bench, cluster: Cluster, backend: str, program: Program) -> Iterator[Measured]:
    options = bench.options
    with bench.testbed.node() as node:
        there = place(bench.testbed, cluster, node, program, backend)
        with running(program, there) as process:
            until_served(there, process.started, process.check, options.limit)
            process.wait_quiet(options.quiet)
            started, cpu, wake_ups = time.monotonic(), process.cpu_seconds(), process.wake_ups()
            time.sleep(options.idle)
            share = _HOUR / (time.monotonic() - started)
            yield Measured(f.IDLE_CPU, "s", ((process.cpu_seconds() - cpu) * share,))
            yield Measured(f.WAKE_UPS, "n", (round((process.wake_ups() - wake_ups) * share),))
            cpu, memory = process.cpu_seconds(), process.memory()[0]
            yield Measured(f.LATENCY, "s", tuple(_latencies(there, options.load)))
            process.wait_quiet(options.quiet)
            yield Measured(f.LOAD_CPU, "s", (process.cpu_seconds() - cpu,))
            yield Measured(f.GROWTH, "MB", (process.memory()[0] - memory,))
    time.sleep(options.settle)


def _latencies(there: Place, seconds: float) -> list[float]:
    """Give an endpoint of one Service after the other another address; return the seconds until a connection reaches it.

    Raise TimedOut.
    """
    waiting: dict[str, tuple[int, float]] = {}
    size, taken = there.cluster.size, []

    def change() -> None:
        started = time.monotonic()
        for number in range(int(seconds / _BETWEEN_CHANGES)):
            pause_until(started + number * _BETWEEN_CHANGES)
            round_, service = divmod(number, size.services)
            address, written = workload.new_pod(number), time.monotonic()
            replaced = there.cluster.replaced.get(service, {})
            there.cluster.replace(service, replaced | {round_ % size.endpoints: address})
            waiting[address] = service, written

    with ThreadPoolExecutor(1) as background, there.node.entered():
        changing = background.submit(change)
        while waiting or not changing.done():
            for address, (service, written) in [*waiting.items()]:
                if connects.reaches(workload.vip(service)) and address in there.testbed.pods.drain():
                    taken.append(time.monotonic() - written)
                    del waiting[address]
                elif time.monotonic() - written > _LONGEST:
                    raise TimedOut("a change is not in force", _LONGEST)
            time.sleep(_BETWEEN_LOOKS)
        changing.result()
    return taken
