"""Measure iptables-restore alone, with the input that pykubeproxy gives it."""

import re
import resource
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from pykubeproxy.kernel import nfacct
from pykubeproxy.kernel.runner import Runner
from tests.bench import figures as f
from tests.bench.bench import Bench, CommandFailed
from tests.bench.changes import changed_endpoints, new_services
from tests.bench.figures import Measured
from tests.bench.program import Place, Program, place, running
from tests.bench.served import after_flush, until_served
from tests.bench.testbed import Cluster

_LONGEST = 300.0
_COUNTER = re.compile(r"--nfacct-name (\S+)")
_BLOCK = re.compile(r".*?^COMMIT\n", re.MULTILINE | re.DOTALL)


class _Input(NamedTuple):
    """The blocks that one iptables-restore read, and its command line."""

    blocks: tuple[str, ...]
    command: tuple[str, ...]


_Inputs = Sequence[_Input]


@dataclass(frozen=True)
class Recording:
    """What a program wrote at a start, to repair table nat, and for each of some changes."""

    start: _Inputs
    repair: _Inputs
    changed: Sequence[_Inputs]
    new: Sequence[_Inputs]


def recorded(bench: Bench, cluster: Cluster, backend: str, program: Program) -> Recording:
    """Start a program and record what it writes. Measure nothing. Raise TimedOut and Ended."""
    options = bench.options
    with TemporaryDirectory(dir=bench.testbed.directory) as folder, bench.testbed.node() as node:
        record = Path(folder, "record")
        there = place(bench.testbed, cluster, node, program, backend, record)
        with running(program, there) as process:

            def written() -> _Inputs:
                process.wait_quiet(options.quiet)
                return [*_taken(record)]

            until_served(there, process.started, process.check, options.limit)
            start = written()
            after_flush(there, process.check, options.limit)
            repair = written()
            changed = [written() for _ in changed_endpoints(there, options.recorded, options.limit)]
            written()  # what restored the endpoints
            new = [written() for _ in new_services(there, options.recorded, options.limit)]
    return Recording(start, repair, changed, new)


def measure(
    bench: Bench,
    cluster: Cluster,
    backend: str,
    program: Program,
    recorded: Callable[[Program], Recording],
    first: bool,
) -> Iterator[Measured]:
    """Write a recording of a program on a new node, without the program; the changes only if this is the first run.

    Raise TimedOut, Ended and CommandFailed.
    """
    recording, limit = recorded(program), bench.options.limit
    with bench.testbed.node() as node:
        there = place(bench.testbed, cluster, node, program, backend)
        with node.entered():
            _create_counters(recording)
        before, started = _cpu_of_children(), time.monotonic()
        with _writing(there, recording.start) as check:
            served = until_served(there, started, check, limit)
        yield Measured(f.START, "s", (served,))
        yield Measured(f.START_CPU, "s", (_cpu_of_children() - before,))
        with node.entered():
            subprocess.run(["iptables", "-t", "nat", "-F"], check=True, env=dict(there.environment))
        started = time.monotonic()
        with _writing(there, recording.repair) as check:
            served = until_served(there, started, check, limit)
        yield Measured(f.REPAIR, "s", (served,))
        if first:
            yield Measured(f.CHANGED, "s", tuple(_seconds(there, inputs) for inputs in recording.changed))
            yield Measured(f.NEW, "s", tuple(_seconds(there, inputs) for inputs in recording.new))
    time.sleep(bench.options.settle)


def _taken(record: Path) -> Iterator[_Input]:
    """Yield what was recorded, in the order of the commands' starts, and delete it."""
    for file in sorted(item for item in record.iterdir() if item.suffix != ".arguments"):
        arguments = Path(f"{file}.arguments")
        blocks = tuple(_BLOCK.findall(file.read_text()))
        yield _Input(blocks, (f"{file.suffix[1:]}-restore", *arguments.read_text().split()))
        file.unlink()
        arguments.unlink()


def _create_counters(recording: Recording) -> None:
    """Create the nfacct objects that the text names, without which iptables-restore refuses it."""
    names = {name for item in recording.start for block in item.blocks for name in _COUNTER.findall(block)}
    for name in names:
        if reason := nfacct.ensure(name):
            raise CommandFailed(f"no nfacct object {name}: {reason}")


def _cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _seconds(there: Place, inputs: _Inputs) -> float:
    started = time.monotonic()
    with there.node.entered():
        _write(there, inputs)
    return time.monotonic() - started


@contextmanager
def _writing(there: Place, inputs: _Inputs) -> Iterator[Callable[[], None]]:
    """Write the text in the background; yield a check that raises if that failed."""

    def write() -> None:
        with there.node.entered():
            _write(there, inputs)

    with ThreadPoolExecutor(1) as background:
        writing = background.submit(write)

        def check() -> None:
            if writing.done():
                writing.result()

        yield check
        writing.result()


def _write(there: Place, inputs: Iterable[_Input]) -> None:
    """Run the commands one after the other, with pipes and blocks as in the agent."""
    runner = Runner(environment=there.environment)
    for item in inputs:
        with runner.start(item.command, _LONGEST, die_with_parent=True) as command:
            for block in item.blocks:
                command.write(block)
            outcome = command.finish()
        if outcome.exit_code:
            raise CommandFailed(f"{item.command[0]}: {outcome.stderr.strip()[:300]}")
