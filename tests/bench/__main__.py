"""`python -m tests.bench`."""

import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import click

from pykubeproxy.lab.machine import LabError
from tests.bench import curves, figures, plan
from tests.bench.changes import TimedOut
from tests.bench.connects import Unreachable
from tests.bench.figures import Figure
from tests.bench.plan import FULL_SCALE, QUICK, QUICK_SCALE, ROWS, Effort, Scale, Step
from tests.bench.program import OURS, Ended, Program, dispatches, environment
from tests.bench.report import Report, as_json, as_table, new_report
from tests.bench.rows import NotDone, measure
from tests.bench.testbed import Testbed, testbed
from tests.bench.workload import Size


def _sizes(_context: click.Context, _option: click.Parameter, text: str) -> tuple[Size, ...]:
    try:
        return tuple(Size.read(word) for word in text.split(",") if word)
    except ValueError as error:
        raise click.BadParameter("use Services x endpoints of each, such as 1000x10,5000x10") from error


def _numbers(_context: click.Context, _option: click.Parameter, text: str) -> tuple[int, ...]:
    numbers = [int(word) if word.isdigit() else 0 for word in text.split(",") if word]
    if not all(numbers):
        raise click.BadParameter("use numbers of Services, such as 100,5000")
    return tuple(numbers)


def _rows(_context: click.Context, _option: click.Parameter, text: str) -> tuple[str, ...]:
    rows = tuple(text.split(","))
    if unknown := [row for row in rows if row not in ROWS]:
        raise click.BadParameter(f"unknown row {', '.join(unknown)}; use {', '.join(ROWS)}")
    return rows


@click.command()
@click.option("--quick", is_flag=True, help="Run a short form, to test the benchmark itself.")
@click.option(
    "--rows", default=",".join(ROWS), show_default=True, callback=_rows, help="Measure only these rows."
)
@click.option("--backend", type=click.Choice(["nft", "legacy", "both"]), default="both", show_default=True)
@click.option("--sizes", default="", callback=_sizes, help="Services x endpoints, such as 0x1,5000x10.")
@click.option("--services", default="", callback=_numbers, help="Numbers of Services for first packets.")
@click.option("--runs", type=click.IntRange(1), help="Starts of each size.")
@click.option("--limit", type=click.FloatRange(1), help="Maximum seconds of one start.  [default: 300]")
@click.option(
    "--peer",
    type=click.Path(exists=True, dir_okay=False, resolve_path=True),
    help="Also measure this kube-proxy with the same workload.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("build/bench"),
    show_default=True,
    help="Folder for bench.json, bench.txt and the curves.",
)
def main(
    quick: bool,
    rows: tuple[str, ...],
    backend: str,
    sizes: tuple[Size, ...],
    services: tuple[int, ...],
    runs: int | None,
    limit: float | None,
    peer: str | None,
    out: Path,
) -> None:
    """Measure the agent's speed, CPU and memory in network namespaces.

    Needs root and an otherwise idle machine. Takes 15 minutes, twice that with --peer.
    """
    usual, effort = (QUICK_SCALE, QUICK) if quick else (FULL_SCALE, Effort())
    effort = effort._replace(runs=runs or effort.runs, limit=limit or effort.limit)
    scale = Scale(sizes or usual.sizes, services or usual.services)
    steps = plan.steps(scale, rows, effort)
    report = new_report()
    try:
        with testbed() as bed:
            for name in ("nft", "legacy") if backend == "both" else (backend,):
                _measure(bed, name, steps, effort, peer, report)
    except LabError as reason:
        raise click.ClickException(str(reason)) from reason
    finally:
        _publish(report, out)


def _measure(
    bed: Testbed, backend: str, steps: Iterable[Step], effort: Effort, peer: str | None, report: Report
) -> None:
    try:
        environment(backend, bed.directory)
    except FileNotFoundError as error:
        report.notes.append(f"{backend}: {error}")
        return
    too_much: dict[Program, int] = {}
    for step in steps:
        programs = _programs(step, backend, peer)
        with bed.cluster(step.size) as cluster:
            for run in range(step.runs):
                rows = step.rows if run == 0 else step.rows & {"start", "memory"}
                # Alternate the programs, so that a slow period of the machine affects all of them.
                for program in list(programs):
                    note = _noting(report, backend, step, program)
                    try:
                        if step.size.chains >= too_much.get(program, math.inf):
                            raise NotDone("skipped, because a smaller size failed")
                        for figure in measure(bed, cluster, program, backend, rows, effort):
                            note(*figure)
                    except (NotDone, Ended, TimedOut, Unreachable) as reason:
                        programs.remove(program)
                        report.notes.append(f"{_name(program)}, {backend}, {step.size}: {reason}")
                        click.echo(report.notes[-1], err=True)
                        if isinstance(reason, NotDone):
                            too_much[program] = min(step.size.chains, too_much.get(program, sys.maxsize))


def _programs(step: Step, backend: str, peer: str | None) -> list[Program]:
    """Return the programs to measure; for first packets, one for each dispatch mode."""
    first = "first" in step.rows
    programs = [Program(figures.OURS, OURS, dispatch=way) for way in (dispatches() if first else ("",))]
    if peer:
        programs.append(Program(figures.PEER, (peer,)))
        if first and backend == "nft":
            programs.append(Program(figures.PEER, (peer,), mode="nftables"))
    return programs


def _noting(
    report: Report, backend: str, step: Step, program: Program
) -> Callable[[str, str, tuple[float, ...]], None]:
    def note(name: str, unit: str, runs: tuple[float, ...]) -> None:
        who = figures.TOOL if name == figures.REWRITE else program.name
        variant = program.dispatch or program.mode.removeprefix("iptables")
        if name in (figures.START, figures.START_CPU, figures.RECEIVED) and "start" not in step.rows:
            return
        figure = Figure(backend, name, step.size, who, variant, unit, runs)
        report.add(figure)
        value = figures.show(figure.value, unit)
        click.echo(f"{_name(program)}, {backend}, {step.size}: {name} {value}", err=True)

    return note


def _name(program: Program) -> str:
    return " ".join(filter(None, (program.name, program.dispatch, program.mode.removeprefix("iptables"))))


def _publish(report: Report, out: Path) -> None:
    """Print the table and write the files, even if the measurements are incomplete."""
    out.mkdir(parents=True, exist_ok=True)
    table = "\n".join(as_table(report)) + "\n"
    (out / "bench.txt").write_text(table)
    (out / "bench.json").write_bytes(as_json(report))
    click.echo(table)
    try:
        drawn = curves.draw(report.figures, out)
    except ImportError:
        click.echo("no curves: matplotlib is not installed; run pip install --group bench", err=True)
        drawn = []
    click.echo(" ".join(map(str, (out / "bench.json", *drawn))))


if __name__ == "__main__":
    main(prog_name="python -m tests.bench")
