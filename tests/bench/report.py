"""Format the figures as a table and as JSON."""

import os
import platform
import subprocess
import textwrap
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

import msgspec

from tests.bench import figures as f
from tests.bench.figures import Figure, comparable, of_program, show
from tests.bench.targets import Verdict, judge, missing

_LABEL = 37
_NOTES = 110
_GROWING = (f.START, f.START_CPU, f.MEMORY, f.CHANGE, f.CHURN)


class Report(msgspec.Struct):
    """All figures of a run; `notes` lists what could not be measured, and why."""

    host: dict[str, str]
    figures: list[Figure]
    notes: list[str]

    def add(self, figure: Figure) -> None:
        """Add a figure, or its runs to an existing figure with the same key."""
        for at, known in enumerate(self.figures):
            if _key(known) == _key(figure):
                self.figures[at] = msgspec.structs.replace(known, runs=known.runs + figure.runs)
                return
        self.figures.append(figure)


def new_report() -> Report:
    """Return an empty report for this machine and time."""
    version = subprocess.run(["iptables", "--version"], capture_output=True, text=True, check=False)
    host = {
        "time": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "kernel": platform.release(),
        "iptables": version.stdout.partition("v")[2].split(" ")[0].strip(),
        "python": platform.python_version(),
        "processors": str(os.cpu_count()),
        "load": f"{os.getloadavg()[0]:.1f}",
    }
    return Report(host, [], [])


def as_json(report: Report) -> bytes:
    """Return the figures with all runs, and the targets with their ratios to the limits, as JSON."""
    verdicts = [
        {
            "backend": verdict.figure.backend,
            "name": verdict.figure.name,
            "size": str(verdict.figure.size),
            "variant": verdict.figure.variant,
            "target": verdict.target.text(verdict.figure.unit),
            "ratio": verdict.ratio,
            "reached": verdict.reached,
        }
        for verdict in judge(report.figures)
    ]
    figures = [
        {**msgspec.to_builtins(figure), "size": str(figure.size), "value": figure.value}
        for figure in report.figures
    ]
    content = {"host": report.host, "figures": figures, "targets": verdicts, "notes": report.notes}
    return msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"


def as_table(report: Report) -> Iterator[str]:
    """Yield the lines of the table: pykubeproxy's figures, each other program's with the ratio to it, and the targets."""
    yield ", ".join(f"{name} {value}" for name, value in report.host.items())
    verdicts = judge(report.figures)
    for backend in dict.fromkeys(figure.backend for figure in report.figures):
        mine = [figure for figure in report.figures if figure.backend == backend]
        others = [it for it in f.PROGRAMS[1:] if any(figure.program == it for figure in mine)]
        yield ""
        heading = f"{backend:<{_LABEL}}{f.OURS:>11}" + "".join(f"{it:>11} ratio" for it in others)
        yield f"{heading}  target"
        yield "─" * (len(heading) + 35)
        for figure in _leading(mine):
            yield from _rows(figure, mine, others, [v for v in verdicts if v.figure is figure])
        yield from _growth(mine)
    if report.notes:
        yield ""
        for note in report.notes:
            yield from _wrapped(f"! {note}")


def _leading(figures: Sequence[Figure]) -> Iterator[Figure]:
    """Yield the figures that have a row of their own: pykubeproxy's, and others that it lacks."""
    for figure in figures:
        if figure.program == f.OURS or not any(
            it.program == f.OURS and comparable(it, figure) for it in figures
        ):
            yield figure


def _rows(
    figure: Figure, figures: Sequence[Figure], others: Sequence[str], verdicts: Sequence[Verdict]
) -> Iterator[str]:
    """Yield a row for a figure, and one more for each further target."""
    label = f"{figure.name}, {figure.size}" + (f", {figure.variant}" if figure.variant else "")
    ours = show(figure.value, figure.unit) if figure.program == f.OURS else ""
    cells = f"{label:<{_LABEL}}{ours:>11}"
    for program in others:
        other = next(of_program(figure, program, figures), None)
        if figure.program == program:
            cells += f"{show(figure.value, figure.unit):>11}      "
        elif figure.program == f.OURS and other:
            ratio = f"{figure.value / other.value:.3g}" if other.value else "-"
            cells += f"{show(other.value, other.unit):>11} {ratio:>5}"
        else:
            cells += f"{'-':>11}      "
    texts = [f"{v.target.text(figure.unit):<21} {_outcome(v)}" for v in verdicts] or [""]
    yield f"{cells}  {texts[0]}".rstrip()
    yield from (f"{'':<{len(cells)}}  {text}" for text in texts[1:])


def _growth(figures: Sequence[Figure]) -> Iterator[str]:
    """Yield the growth of the figures with the number of Services that have 10 endpoints."""
    for name in _GROWING:
        sizes = sorted(it.size for it in figures if it.name == name and it.program == f.OURS)
        alike = [it for it in dict.fromkeys(sizes) if it.services and it.endpoints == f.GROWTH_FROM.endpoints]
        if len(alike) < 2:
            continue
        least, most = alike[0], alike[-1]
        grown = []
        for program in f.PROGRAMS:
            of = {it.size: it.value for it in figures if (it.name, it.program) == (name, program)}
            if of.get(least) and of.get(most):
                grown.append(f"{program} x {of[most] / of[least]:.1f}")
        yield from _wrapped(f"{name}, from {least} to {most}: {', '.join(grown)}")


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _NOTES, subsequent_indent="    ")


def _outcome(verdict: Verdict) -> str:
    if verdict.ratio is None:
        return missing(verdict.target)
    return "met" if verdict.reached else f"missed {verdict.ratio:.2f}x"


def _key(figure: Figure) -> tuple[object, ...]:
    return figure.backend, figure.name, figure.size, figure.program, figure.variant
