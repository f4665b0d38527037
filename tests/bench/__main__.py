"""`python -m tests.bench`."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from pykubeproxy.lab.machine import LabError
from tests.bench import commands, figures, load, rolling, shapes
from tests.bench.bench import QUICK, Bench, Options
from tests.bench.figures import new_report
from tests.bench.program import (
    NoRevision,
    Program,
    current_python,
    environment,
    image_python,
    other_checkout,
    this_checkout,
)
from tests.bench.testbed import testbed
from tests.bench.workload import Size

_PARTS: dict[str, Callable[[Bench, str], None]] = {
    "shapes": shapes.measure,
    "rolling": rolling.measure,
    "load": load.measure,
    "launch": commands.measure_launch,
    "lookups": commands.measure_lookups,
    "inspect": commands.measure_inspect,
}
_PROGRAMS = ("ours", "alone", "peer", "nftables")


def _sizes(_context: click.Context, _option: click.Parameter, text: str) -> tuple[Size, ...]:
    try:
        return tuple(Size.read(word) for word in text.split(",") if word)
    except ValueError as error:
        raise click.BadParameter("use Services x endpoints of each, such as 1000x10,5000x10") from error


def _programs(_context: click.Context, _option: click.Parameter, text: str) -> tuple[str, ...]:
    if unknown := set(words := text.split(",")).difference(_PROGRAMS):
        raise click.BadParameter(f"no program {', '.join(sorted(unknown))}; use {','.join(_PROGRAMS)}")
    return tuple(words)


@click.command()
@click.option(
    "--quick",
    is_flag=True,
    help="Run a short form with the current interpreter, to test the benchmark itself.",
)
@click.option(
    "--only", type=click.Choice(list(_PARTS)), multiple=True, help="Measure only this part; repeatable."
)
@click.option("--backend", type=click.Choice(["nft", "legacy", "both"]), default="both", show_default=True)
@click.option(
    "--programs",
    default=",".join(_PROGRAMS),
    show_default=True,
    callback=_programs,
    help="What to run: pykubeproxy, iptables-restore with its input, kube-proxy, kube-proxy in nftables mode.",
)
@click.option(
    "--peer",
    type=click.Path(exists=True, dir_okay=False, resolve_path=True),
    help="The kube-proxy; without it, no peer and no nftables.",
)
@click.option(
    "--against",
    metavar="REVISION",
    help="Also measure another pykubeproxy, start by start: a git revision or the folder of a checkout.",
)
@click.option(
    "--shapes",
    "sizes",
    callback=_sizes,
    default="",
    help="Services x endpoints; part load uses the first.  [default: 10000x2,30000x1,44125x1,5006x50]",
)
@click.option("--runs", type=click.IntRange(1), help="Starts of each program.  [default: 3]")
@click.option("--seconds", type=click.FloatRange(1), help="Of each series of changes.  [default: 60]")
@click.option(
    "--limit", type=click.FloatRange(0, min_open=True), help="Seconds of the longest start.  [default: 1200]"
)
@click.option("--idle", type=click.FloatRange(0), help="Minutes without changes in part load.  [default: 10]")
@click.option("--minutes", type=click.FloatRange(0), help="Minutes of changes in part load.  [default: 10]")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("build/bench"),
    show_default=True,
    help="Folder for TIME.json and TIME.txt.",
)
def main(
    quick: bool,
    only: tuple[str, ...],
    backend: str,
    programs: tuple[str, ...],
    peer: str | None,
    against: str | None,
    sizes: tuple[Size, ...],
    runs: int | None,
    seconds: float | None,
    limit: float | None,
    idle: float | None,
    minutes: float | None,
    out: Path,
) -> None:
    """Measure the agent's speed, CPU and memory in network namespaces, beside other programs.

    Needs root and an otherwise idle machine. Takes three hours; with --peer, a day.
    """
    options = QUICK if quick else Options()
    given: dict[str, Any] = {"shapes": sizes, "runs": runs, "seconds": seconds, "limit": limit}
    given |= {"idle": idle and idle * 60, "load": minutes and minutes * 60}
    options = options._replace(**{name: value for name, value in given.items() if value})
    report = new_report()
    try:
        with ExitStack() as stack:
            interpreter = current_python if quick else image_python
            ours = Program(figures.OURS, this_checkout(interpreter))
            before = None
            if against:
                other = stack.enter_context(other_checkout(against, interpreter))
                before = Program(figures.BEFORE, other)
            run = tuple(_chosen(programs, ours, before, peer or ""))
            bench = Bench(stack.enter_context(testbed()), options, run, report, out)
            for name in ("nft", "legacy") if backend == "both" else (backend,):
                _measure(bench, name, only or tuple(_PARTS))
    except (LabError, NoRevision) as reason:
        raise click.ClickException(str(reason)) from reason
    finally:
        file = figures.write(report, out)
        click.echo(file.with_suffix(".txt").read_text())
        click.echo(file)


def _chosen(names: tuple[str, ...], ours: Program, before: Program | None, peer: str) -> Iterator[Program]:
    if "ours" in names:
        yield ours
    if before:
        yield before
    if "alone" in names:
        yield Program(figures.ALONE, ours.checkout)
    if "peer" in names and peer:
        yield Program(figures.PEER, binary=peer)
    if "nftables" in names and peer:
        yield Program(figures.NFTABLES, binary=peer, mode="nftables")


def _measure(bench: Bench, backend: str, parts: tuple[str, ...]) -> None:
    try:
        environment(backend, bench.testbed.directory)
    except FileNotFoundError as error:
        bench.report.notes.append(f"{backend}: {error}")
        return
    for part in parts:
        _PARTS[part](bench, backend)


if __name__ == "__main__":
    main(prog_name="python -m tests.bench")
