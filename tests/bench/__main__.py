"""`python -m tests.bench`."""

import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import click

from pykubeproxy.lab.requirements import Unmet
from tests.bench import curves, figures, plan
from tests.bench.changes import TimedOut
from tests.bench.connects import Unreachable
from tests.bench.figures import Figure
from tests.bench.plan import FULL_SCALE, QUICK, QUICK_SCALE, ROWS, Effort, Scale, Station
from tests.bench.report import Report, as_json, as_table, new_report
from tests.bench.rows import NotDone, visit
from tests.bench.site import Site, site
from tests.bench.subject import OURS, Ended, Subject, dispatches, environment
from tests.bench.work import Size


def _sizes(_context: click.Context, _option: click.Parameter, text: str) -> tuple[Size, ...]:
    try:
        return tuple(Size.read(word) for word in text.split(",") if word)
    except ValueError as error:
        raise click.BadParameter("sizes look like 1000x10,5000x10: services x endpoints of each") from error


def _numbers(_context: click.Context, _option: click.Parameter, text: str) -> tuple[int, ...]:
    numbers = [int(word) if word.isdigit() else 0 for word in text.split(",") if word]
    if not all(numbers):
        raise click.BadParameter("numbers of services look like 100,5000")
    return tuple(numbers)


def _rows(_context: click.Context, _option: click.Parameter, text: str) -> tuple[str, ...]:
    rows = tuple(text.split(","))
    if unknown := [row for row in rows if row not in ROWS]:
        raise click.BadParameter(f"there is no {', '.join(unknown)}; there are {', '.join(ROWS)}")
    return rows


@click.command()
@click.option("--quick", is_flag=True, help="A short form with little to do, to see that all of it works.")
@click.option("--rows", default=",".join(ROWS), show_default=True, callback=_rows, help="What to measure.")
@click.option("--backend", type=click.Choice(["nft", "legacy", "both"]), default="both", show_default=True)
@click.option("--sizes", default="", callback=_sizes, help="Services x endpoints, such as 0x1,5000x10.")
@click.option(
    "--services", default="", callback=_numbers, help="How many Services when first packets are timed."
)
@click.option("--runs", type=click.IntRange(1), help="How many starts of each size.")
@click.option("--limit", type=click.FloatRange(1), help="Seconds that one start may take.  [default: 300]")
@click.option(
    "--peer",
    type=click.Path(exists=True, dir_okay=False, resolve_path=True),
    help="A kube-proxy to compare with, on the same work in the same run.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("build/bench"),
    show_default=True,
    help="Where bench.json, bench.txt and the curves go.",
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
    """Measure what the agent costs and how fast it is, in network namespaces of its own.

    Needs root. The whole takes about a quarter of an hour, twice that with --peer; nothing else should be going on.
    """
    usual, effort = (QUICK_SCALE, QUICK) if quick else (FULL_SCALE, Effort())
    effort = effort._replace(runs=runs or effort.runs, limit=limit or effort.limit)
    scale = Scale(sizes or usual.sizes, services or usual.services)
    stations = plan.stations(scale, rows, effort)
    report = new_report()
    try:
        with site() as place:
            for name in ("nft", "legacy") if backend == "both" else (backend,):
                _measure(place, name, stations, effort, peer, report)
    except Unmet as reason:
        raise click.ClickException(str(reason)) from reason
    finally:
        _publish(report, out)


def _measure(
    place: Site, backend: str, stations: Iterable[Station], effort: Effort, peer: str | None, report: Report
) -> None:
    try:
        environment(backend, place.directory)
    except FileNotFoundError as error:
        report.notes.append(f"{backend}: {error}")
        return
    too_much: dict[Subject, int] = {}
    for station in stations:
        subjects = _subjects(station, backend, peer)
        with place.cluster(station.size) as cluster:
            for run in range(station.runs):
                rows = station.rows if run == 0 else station.rows & {"start", "memory"}
                # Of the programs in turn, so that a slow spell of the machine does not befall one alone.
                for subject in list(subjects):
                    note = _noting(report, backend, station, subject)
                    try:
                        if station.size.chains >= too_much.get(subject, math.inf):
                            raise NotDone("not tried, for less was too much")
                        for figure in visit(place, cluster, subject, backend, rows, effort):
                            note(*figure)
                    except (NotDone, Ended, TimedOut, Unreachable) as reason:
                        subjects.remove(subject)
                        report.notes.append(f"{_name(subject)}, {backend}, {station.size}: {reason}")
                        click.echo(report.notes[-1], err=True)
                        if isinstance(reason, NotDone):
                            too_much[subject] = min(station.size.chains, too_much.get(subject, sys.maxsize))


def _subjects(station: Station, backend: str, peer: str | None) -> list[Subject]:
    """Who is measured: all ways to dispatch where first packets are timed, else the usual one."""
    first = "first" in station.rows
    subjects = [Subject(figures.OURS, OURS, dispatch=way) for way in (dispatches() if first else ("",))]
    if peer:
        subjects.append(Subject(figures.PEER, (peer,)))
        if first and backend == "nft":
            subjects.append(Subject(figures.PEER, (peer,), mode="nftables"))
    return subjects


def _noting(
    report: Report, backend: str, station: Station, subject: Subject
) -> Callable[[str, str, tuple[float, ...]], None]:
    def note(name: str, unit: str, runs: tuple[float, ...]) -> None:
        who = figures.TOOL if name == figures.REWRITE else subject.name
        variant = subject.dispatch or subject.mode.removeprefix("iptables")
        if name in (figures.START, figures.START_CPU) and "start" not in station.rows:
            return
        figure = Figure(backend, name, station.size, who, variant, unit, runs)
        report.add(figure)
        value = figures.show(figure.value, unit)
        click.echo(f"{_name(subject)}, {backend}, {station.size}: {name} {value}", err=True)

    return note


def _name(subject: Subject) -> str:
    return " ".join(filter(None, (subject.name, subject.dispatch, subject.mode.removeprefix("iptables"))))


def _publish(report: Report, out: Path) -> None:
    """Print the table and write the files, with all that there is, even if not everything was measured."""
    out.mkdir(parents=True, exist_ok=True)
    table = "\n".join(as_table(report)) + "\n"
    (out / "bench.txt").write_text(table)
    (out / "bench.json").write_bytes(as_json(report))
    click.echo(table)
    try:
        drawn = curves.draw(report.figures, out)
    except ImportError:
        click.echo("no curves without matplotlib: pip install --group bench", err=True)
        drawn = []
    click.echo(" ".join(map(str, (out / "bench.json", *drawn))))


if __name__ == "__main__":
    main(prog_name="python -m tests.bench")
