"""What all parts of the benchmark share: the testbed, the programs, the options and the report."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import click

from tests.bench import figures
from tests.bench.connects import Unreachable
from tests.bench.figures import Figure, Measured, Report
from tests.bench.program import Ended, Program
from tests.bench.served import TimedOut
from tests.bench.testbed import Testbed
from tests.bench.workload import Size


class CommandFailed(RuntimeError):
    """A command failed; the text has its exit code and the last line of its output."""


# What ends the measurement of a program at a size; the others go on.
_FAILURES = (Ended, TimedOut, Unreachable, CommandFailed)


class Options(NamedTuple):
    """Sizes, repetitions and durations.

    `seconds` are those of each series of changes, `limit` of a start; `idle` and `load` are seconds too. A removed pod
    accepts connections for `grace` seconds. `settle` and `quiet` are pauses between programs and after a start.
    """

    shapes: tuple[Size, ...] = (Size(10_000, 2), Size(30_000, 1), Size(44_125, 1), Size(5006, 50))
    rolling: tuple[Size, ...] = (Size(1, 1000), Size(1, 5000))
    launch: Size = Size(0, 1)
    lookups: Size = Size(5000, 10)
    inspect: Size = Size(10_000, 10)
    runs: int = 3
    seconds: float = 60.0
    limit: float = 1200.0
    idle: float = 600.0
    load: float = 600.0
    packets: int = 1000
    recorded: int = 4
    steps: int = 100
    grace: float = 5.0
    commands: int = 5
    settle: float = 1.0
    quiet: float = 1.5


QUICK = Options(
    shapes=(Size(40, 2),),
    rolling=(Size(1, 30),),
    lookups=Size(4, 2),
    inspect=Size(4, 2),
    runs=1,
    seconds=1.0,
    limit=30.0,
    idle=1.0,
    load=1.0,
    packets=40,
    recorded=1,
    steps=2,
    grace=2.0,
    commands=1,
    settle=0.0,
    quiet=0.2,
)


@dataclass(frozen=True)
class Bench:
    """A run of the benchmark. Its report is written to a folder whenever a program has ended."""

    testbed: Testbed
    options: Options
    programs: tuple[Program, ...]
    report: Report
    out: Path

    def proxies(self, backend: str) -> list[Program]:
        """Return the programs to run with a backend. kube-proxy in nftables mode runs once, without one."""
        return [
            program
            for program in self.programs
            if program.name != figures.ALONE and (program.mode == "iptables" or backend == "nft")
        ]

    def own(self) -> list[Program]:
        """Return the checkouts of pykubeproxy."""
        return [program for program in self.programs if program.checkout and program.name != figures.ALONE]

    def note(self, backend: str, size: Size, program: Program, rows: Iterable[Measured]) -> bool:
        """Add measured figures to the report. Return whether none failed."""
        where = f"{program.name} {program.variant}".strip() + f", {backend}, {size}"
        try:
            for name, unit, runs, over, alone in rows:
                if alone and program.name not in (figures.OURS, figures.ALONE):
                    continue
                who = figures.ALONE if alone else program.name
                figure = Figure(backend, name, size, who, program.variant, unit, runs, over)
                self.report.add(figure)
                click.echo(f"{where}{' alone' * alone}: {name} {figure.text}", err=True)
        except _FAILURES as reason:
            self.report.notes.append(f"{where}: {reason}")
            click.echo(self.report.notes[-1], err=True)
            return False
        finally:
            figures.write(self.report, self.out)
        return True
