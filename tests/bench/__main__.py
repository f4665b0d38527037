"""`python -m tests.bench`."""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import click

from pykubeproxy.lab.machine import LabError
from tests.bench import alone, figures, plan
from tests.bench.connects import Unreachable
from tests.bench.figures import Figure, Report, as_json, as_table, new_report
from tests.bench.plan import EVERY_START, FULL_SCALE, ONLY_OURS, PARTS, QUICK, QUICK_SCALE, Effort, Step
from tests.bench.program import (
    Ended,
    NoRevision,
    Program,
    current_python,
    environment,
    image_python,
    other_checkout,
    this_checkout,
)
from tests.bench.rows import CommandFailed, Measured, NotDone, TimedOut, measure
from tests.bench.testbed import Testbed, testbed
from tests.bench.workload import Size

# What ends the measurement of a program at a size; the others go on.
_FAILURES = (NotDone, Ended, TimedOut, Unreachable, CommandFailed)


def _sizes(_context: click.Context, _option: click.Parameter, text: str) -> tuple[Size, ...]:
    try:
        return tuple(Size.read(word) for word in text.split(",") if word)
    except ValueError as error:
        raise click.BadParameter("use Services x endpoints of each, such as 1000x10,5000x10") from error


@click.command()
@click.option(
    "--quick",
    is_flag=True,
    help="Run a short form with the current interpreter, to test the benchmark itself.",
)
@click.option(
    "--only", type=click.Choice(list(PARTS)), multiple=True, help="Measure only this part; repeatable."
)
@click.option("--backend", type=click.Choice(["nft", "legacy", "both"]), default="both", show_default=True)
@click.option("--sizes", default="", callback=_sizes, help="Services x endpoints, such as 0x1,5000x10.")
@click.option(
    "--services", type=click.IntRange(1), multiple=True, help="Services for first packets; repeatable."
)
@click.option("--runs", type=click.IntRange(1), help="Starts of each size.  [default: 2 to 5]")
@click.option(
    "--against",
    metavar="REVISION",
    help="Also measure another pykubeproxy, start by start: a git revision or the folder of a checkout.",
)
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
    help="Folder for bench.json and bench.txt.",
)
def main(
    quick: bool,
    only: tuple[str, ...],
    backend: str,
    sizes: tuple[Size, ...],
    services: tuple[int, ...],
    runs: int | None,
    against: str | None,
    peer: str | None,
    out: Path,
) -> None:
    """Measure the agent's speed, CPU and memory in network namespaces.

    Needs root and an otherwise idle machine. Takes 25 minutes, twice that with --against or --peer.
    """
    scale, effort = (QUICK_SCALE, QUICK) if quick else (FULL_SCALE, Effort())
    effort = effort._replace(runs=runs or effort.runs)
    scale = scale.with_sizes(sizes) if sizes else scale
    steps = plan.steps(scale._replace(services=services or scale.services), only or PARTS, effort)
    report = new_report()
    try:
        with ExitStack() as stack:
            interpreter = current_python if quick else image_python
            programs = [Program(figures.OURS, this_checkout(interpreter))]
            if against:
                other = stack.enter_context(other_checkout(against, interpreter))
                programs.append(Program(figures.BEFORE, other))
            if peer:
                programs.append(Program(figures.PEER, binary=peer))
            bed = stack.enter_context(testbed())
            for name in ("nft", "legacy") if backend == "both" else (backend,):
                _measure(bed, name, steps, effort, programs, report)
    except (LabError, NoRevision) as reason:
        raise click.ClickException(str(reason)) from reason
    finally:
        _publish(report, out)


def _measure(
    bed: Testbed,
    backend: str,
    steps: Iterable[Step],
    effort: Effort,
    programs: Sequence[Program],
    report: Report,
) -> None:
    try:
        environment(backend, bed.directory)
    except FileNotFoundError as error:
        report.notes.append(f"{backend}: {error}")
        return
    too_much: dict[Program, int] = {}
    for step in steps:
        remaining = [item for program in programs for item in _variants(step, backend, program)]
        with bed.cluster(step.size) as cluster, ExitStack() as recordings:
            recording = None
            for run in range(step.runs):
                now = step.rows if run == 0 else step.rows & EVERY_START
                # Alternate the programs, so that a slow period of the machine affects all of them.
                for program in list(remaining):
                    note = _noting(report, backend, step, program)
                    rows = now & PARTS["launch"] if program.kubeconfig else now
                    try:
                        if step.size.chains >= too_much.get(program, math.inf):
                            raise NotDone("skipped, because a smaller size failed")
                        for figure in measure(bed, cluster, program, backend, rows, effort):
                            note(figure)
                        if program == programs[0] and rows & {"start", "repair"}:
                            recording = recording or recordings.enter_context(
                                alone.recorded(bed, cluster, program, backend, rows, effort)
                            )
                            for figure in alone.measure(bed, cluster, program, backend, recording, effort):
                                note(figure)
                    except _FAILURES as reason:
                        remaining.remove(program)
                        report.notes.append(f"{_name(program)}, {backend}, {step.size}: {reason}")
                        click.echo(report.notes[-1], err=True)
                        if isinstance(reason, NotDone):
                            too_much[program] = min(step.size.chains, too_much.get(program, sys.maxsize))


def _variants(step: Step, backend: str, program: Program) -> Iterator[Program]:
    """Yield the forms of a program: for first packets one for each dispatch mode, for launches one with a kubeconfig."""
    if program.binary and step.rows <= ONLY_OURS:
        return
    if "first" in step.rows:
        if program.checkout:
            yield from (replace(program, dispatch=mode) for mode in ("flat", "tree"))
            return
        if backend == "nft":
            yield replace(program, mode="nftables")
    yield program
    if "launch" in step.rows and program.checkout:
        yield replace(program, kubeconfig=True)


def _noting(report: Report, backend: str, step: Step, program: Program) -> Callable[[Measured], None]:
    starts = (figures.START, figures.START_CPU, figures.FIRST_LIST)

    def note(measured: Measured) -> None:
        name, unit, runs, of_tools = measured
        # The tools alone are compared with this checkout.
        if (name in starts and "start" not in step.rows) or (of_tools and program.name != figures.OURS):
            return
        who = figures.ALONE if of_tools else program.name
        figure = Figure(backend, name, step.size, who, program.variant, unit, runs)
        report.add(figure)
        shown = figures.show(figure.value, unit)
        label = " ".join(filter(None, (who, program.variant)))
        click.echo(f"{label}, {backend}, {step.size}: {name} {shown}", err=True)

    return note


def _name(program: Program) -> str:
    return " ".join(filter(None, (program.name, program.variant)))


def _publish(report: Report, out: Path) -> None:
    """Print the table and write the files, even if the measurements are incomplete."""
    out.mkdir(parents=True, exist_ok=True)
    table = "\n".join(as_table(report)) + "\n"
    (out / "bench.txt").write_text(table)
    (out / "bench.json").write_bytes(as_json(report))
    click.echo(table)
    click.echo(out / "bench.json")


if __name__ == "__main__":
    main(prog_name="python -m tests.bench")
