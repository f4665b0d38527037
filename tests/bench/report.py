"""Format the figures as a table of at most 100 columns and as JSON."""

import os
import platform
import subprocess
import textwrap
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

import msgspec

from tests.bench import figures as f
from tests.bench.figures import Figure, Verdict, judge, peers, show
from tests.bench.plan import growth

_COLUMNS = 100
_GROWING = (f.START, f.START_CPU, f.MEMORY, f.CHANGE, f.IDLE, f.CHURN)


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
    """Yield the lines of the table."""
    yield ", ".join(f"{name} {value}" for name, value in report.host.items())
    verdicts = judge(report.figures)
    for backend in dict.fromkeys(figure.backend for figure in report.figures):
        mine = [figure for figure in report.figures if figure.backend == backend]
        yield ""
        yield _line(backend, f.OURS, f.PEER, "ratio", "target", "")
        yield "─" * _COLUMNS
        for figure in mine:
            yield from _rows(figure, mine, [v for v in verdicts if v.figure is figure])
        yield from _growth(mine)
    if report.notes:
        yield ""
        for note in report.notes:
            yield from _wrapped(f"! {note}")


def _rows(figure: Figure, figures: Sequence[Figure], verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Yield a row with pykubeproxy's and kube-proxy's figure; kube-proxy's alone if pykubeproxy has none."""
    label = f"{figure.name}, {figure.size.services} x {figure.size.endpoints}"
    label += f", {figure.variant}" if figure.variant else ""
    value = show(figure.value, figure.unit)
    if figure.program == f.PEER:
        if figure.variant or not any(o.program == f.OURS and _comparable(o, figure) for o in figures):
            yield _line(label, "", value, "", "", "")
        return
    other = next((peer for peer in peers(figure, figures) if not peer.variant), None)
    theirs = show(other.value, other.unit) if other else "-"
    ratio = f"{figure.value / other.value:.2f}" if other and other.value else "-"
    texts = [(v.target.text(figure.unit), _outcome(v)) for v in verdicts] or [("", "")]
    yield _line(label, value, theirs, ratio, *texts[0])
    yield from (_line("", "", "", "", *text) for text in texts[1:])


def _growth(figures: Sequence[Figure]) -> Iterator[str]:
    """Yield the growth of the figures with the number of Services."""
    sizes = list(dict.fromkeys(figure.size for figure in figures if figure.name in _GROWING))
    ends = growth(sizes)
    if len(ends) < 2:
        return
    least, most = ends
    found = []
    for program in (f.OURS, f.PEER):
        of = {(g.name, g.size): g.value for g in figures if g.program == program}
        pairs = [(name, of.get((name, least)), of.get((name, most))) for name in _GROWING]
        grown = [f"{name} x {high / low:.1f}" for name, low, high in pairs if low and high]
        if grown:
            found += _wrapped(f"  {program}: {', '.join(grown)}")
    if found:
        yield f"from {least.services} to {most.services} services, {most.endpoints} endpoints each:"
        yield from found


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _COLUMNS, subsequent_indent="    ")


def _outcome(verdict: Verdict) -> str:
    if verdict.ratio is None:
        return "not measured"
    return "reached" if verdict.reached else f"{verdict.ratio:.2f} times"


def _line(label: str, ours: str, theirs: str, ratio: str, target: str, outcome: str) -> str:
    return f"{label:<37}{ours:>11} {theirs:>10} {ratio:>6}  {target:<19} {outcome}".rstrip()


def _comparable(one: Figure, other: Figure) -> bool:
    return (one.backend, one.name, one.size) == (other.backend, other.name, other.size)


def _key(figure: Figure) -> tuple[object, ...]:
    return figure.backend, figure.name, figure.size, figure.program, figure.variant
