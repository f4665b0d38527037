"""Measure iptables-restore alone, with the text that pykubeproxy writes."""

import re
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from pykubeproxy.kernel import nfacct
from tests.bench import figures as f
from tests.bench.plan import Effort
from tests.bench.program import Place, Program, place, running
from tests.bench.rows import CommandFailed, Measured, Run, after_flush, until_programmed, until_served
from tests.bench.testbed import Cluster, Testbed

_LONGEST = 300.0
_COUNTER = re.compile(r"--nfacct-name (\S+)")


class _Input(NamedTuple):
    """What one iptables-restore read, and its command line."""

    file: Path
    command: tuple[str, ...]

    def create_counters(self) -> None:
        """Create the nfacct objects that the text names, without which iptables-restore refuses it."""
        for name in set(_COUNTER.findall(self.file.read_text())):
            if reason := nfacct.ensure(name):
                raise CommandFailed(f"no nfacct object {name}: {reason}")


class Recording(NamedTuple):
    """What a program wrote at a start, and after it to repair table nat."""

    start: list[_Input]
    repair: list[_Input]


@contextmanager
def recorded(
    testbed: Testbed, cluster: Cluster, program: Program, backend: str, rows: frozenset[str], effort: Effort
) -> Iterator[Recording]:
    """Start a program and record what it writes; a repair only if it is among the rows. Measures nothing.

    Raise as `rows.measure` does.
    """
    with TemporaryDirectory(dir=testbed.directory) as folder:
        record = Path(folder, "record")
        with testbed.node() as node:
            there = place(testbed, cluster, node, program, backend, record)
            with running(program, there) as process:
                until_programmed(Run(there, program, process, effort))
                process.wait_quiet(effort.quiet)
                start, repairs = _inputs(record), []
                if "repair" in rows:
                    after_flush(there, process.check, effort.limit)
                    process.wait_quiet(effort.quiet)
                    repairs = [item for item in _inputs(record) if item not in start]
        time.sleep(effort.settle)
        yield Recording(start, repairs)


def measure(
    testbed: Testbed,
    cluster: Cluster,
    program: Program,
    backend: str,
    recording: Recording,
    effort: Effort,
) -> Iterator[Measured]:
    """Yield the seconds in which iptables-restore writes the text on a new node, without the program."""
    with testbed.node() as node, node.entered():
        there = place(testbed, cluster, node, program, backend)
        for one in recording.start:
            one.create_counters()
        started = time.monotonic()
        _write(there, recording.start)
        yield Measured(f.START, "s", (time.monotonic() - started,), alone=True)
        if recording.repair:
            subprocess.run(["iptables", "-t", "nat", "-F"], check=True, env=dict(there.environment))
            started = time.monotonic()
            with _writing(there, recording.repair) as check:
                served = until_served(there, started, check, effort.limit)
            yield Measured(f.REPAIR_HALF, "s", (served.half,), alone=True)
            yield Measured(f.REPAIR_ALL, "s", (served.all,), alone=True)
    time.sleep(effort.settle)


def _inputs(record: Path) -> list[_Input]:
    """Return what was recorded, in the order of the commands' starts."""
    files = sorted(item for item in record.iterdir() if item.suffix != ".arguments")
    return [
        _Input(file, (f"{file.suffix[1:]}-restore", *Path(f"{file}.arguments").read_text().split()))
        for file in files
    ]


@contextmanager
def _writing(there: Place, inputs: Iterable[_Input]) -> Iterator[Callable[[], None]]:
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
    for one in inputs:
        with one.file.open("rb") as text:
            outcome = subprocess.run(
                one.command,
                stdin=text,
                capture_output=True,
                text=True,
                env=dict(there.environment),
                timeout=_LONGEST,
                check=False,
            )
        if outcome.returncode:
            raise CommandFailed(f"{one.command[0]}: {outcome.stderr.strip()[:300]}")
