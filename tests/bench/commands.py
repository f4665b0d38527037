"""Measure what only pykubeproxy has: the launch, and commands beside a running agent."""

import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from tests.bench import figures as f
from tests.bench import workload
from tests.bench.bench import Bench, CommandFailed
from tests.bench.figures import Measured
from tests.bench.program import Place, Program, Running, place, running
from tests.bench.served import until_served
from tests.bench.workload import Size

# What a start cannot do without.
_IMPORTS = "import click, msgspec, urllib3, ssl, json"
_LONGEST = 300.0
# The resources that a proxy lists first, in any order.
_LISTS = ("/services?", "/endpointslices?", "/nodes?")
_Rows = Callable[[Place, Program, Running], Iterator[Measured]]


def measure_launch(bench: Bench, backend: str) -> None:
    """Measure the launch in a pod and with a kubeconfig."""
    own = bench.own()
    configured = [replace(program, kubeconfig=True, variant="kubeconfig") for program in own]
    _measure(bench, backend, bench.options.launch, [*own, *configured], _launched)


def measure_lookups(bench: Bench, backend: str) -> None:
    """Measure the commands about one Service."""
    _measure(bench, backend, bench.options.lookups, bench.own(), _lookups)


def measure_inspect(bench: Bench, backend: str) -> None:
    """Measure the commands about the whole node."""
    _measure(bench, backend, bench.options.inspect, bench.own(), _inspections)


def _measure(bench: Bench, backend: str, size: Size, programs: Sequence[Program], rows: _Rows) -> None:
    """Start each program in turn, with the agent's rules in force, and measure these rows."""
    with bench.testbed.cluster(size) as cluster:

        def started(program: Program) -> Iterator[Measured]:
            with bench.testbed.node() as node:
                there = place(bench.testbed, cluster, node, program, backend)
                with running(program, there) as process:
                    until_served(there, process.started, process.check, bench.options.limit)
                    process.wait_quiet(bench.options.quiet)
                    yield from rows(there, program, process)
            time.sleep(bench.options.settle)

        for _ in range(bench.options.commands):
            for program in programs:
                bench.note(backend, size, program, started(program))


def _launched(there: Place, program: Program, process: Running) -> Iterator[Measured]:
    """Yield the seconds until the API server gets the first request for a list, and those of run --help."""
    assert program.checkout is not None
    requests = there.cluster.requests(process.started)
    first = min(at for at, path in requests if any(item in path for item in _LISTS))
    yield Measured(f.FIRST_LIST, "s", (first - process.started,))
    imports = _run(there, program, [program.checkout.python, "-P", "-c", _IMPORTS])
    yield Measured(f.FIRST_LIST, "s", (imports,), alone=True)
    if not program.kubeconfig:
        now, peak = process.memory()
        yield Measured(f.MEMORY, "MB", (now,))
        yield Measured(f.PEAK, "MB", (peak,))
        yield Measured(f.HELP, "s", (_seconds(there, program, "run", "--help"),))
        yield Measured(f.HELP, "s", (imports,), alone=True)


def _lookups(there: Place, program: Program, _process: Running) -> Iterator[Measured]:
    number = there.cluster.size.services // 2
    service, address = workload.service_name(number), f"{workload.vip(number)}:{workload.SERVICE_PORT}"
    yield Measured(f.DUMP, "s", (_seconds(there, program, "dump-rules", service),))
    yield Measured(f.TRACE, "s", (_seconds(there, program, "trace", workload.pod(0), address),))
    yield Measured(f.EXPLAIN, "s", (_seconds(there, program, "explain", service),))


def _inspections(there: Place, program: Program, _process: Running) -> Iterator[Measured]:
    saved = _save_seconds(there)
    config = ("--config", str(there.configuration))
    inspections: dict[str, tuple[str, ...]] = {
        f.CHECK: ("check", *config),
        f.DIFF: ("diff", *config),
        f.DIFF_AGENT: ("diff",),
    }
    for name, arguments in inspections.items():
        # check may have a finding about the machine, such as a kernel without a feature.
        codes = (0, 1) if name == f.CHECK else (0,)
        yield Measured(name, "s", (_seconds(there, program, *arguments, codes=codes),))
        yield Measured(name, "s", (saved,), alone=True)


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
