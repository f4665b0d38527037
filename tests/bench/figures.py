"""Measured figures, and the report of a run as text and as JSON."""

import math
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tests.bench.workload import Size

OURS, BEFORE, PEER, NFTABLES = "pykubeproxy", "before", "kube-proxy", "kube-proxy nftables"
#: The tools and imports that a program needs for the same, measured alone: iptables-restore with the same input,
#: iptables-save of both families, or `python -c import …`.
ALONE = "alone"
#: All programs, in the order of the report.
PROGRAMS = (OURS, BEFORE, ALONE, PEER, NFTABLES)
START, START_CPU, MEMORY, PEAK = "start", "CPU of a start", "memory", "memory, peak"
RESTART, REPAIR = "restart", "flushed table"
NEW, CHANGED, FIRST = "new service", "changed endpoint", "first packet"
ROLLING_CPU, WRITTEN = "rolling update, CPU", "rolling update, written"
FAILED, CONNECTED = "rolling update, failed connections", "rolling update, connections"
IDLE_CPU, WAKE_UPS = "idle hour, CPU", "idle hour, wake-ups"
LOAD_CPU, GROWTH, LATENCY = "load, CPU", "load, memory growth", "load, latency"
FIRST_LIST, HELP = "first list requested", "run --help"
DUMP, TRACE, EXPLAIN = "dump-rules of a service", "trace to a service", "explain of a service"
CHECK, DIFF, DIFF_AGENT = "check", "diff", "diff, objects of the agent"
#: Figures whose runs are samples of a distribution; all others are medians of runs.
DISTRIBUTIONS = frozenset({NEW, CHANGED, FIRST, LATENCY})


class Measured(NamedTuple):
    """The name, the unit and the values of a figure. It has no values if it took longer than `over` seconds.

    `alone` if it is that of the tools alone.
    """

    name: str
    unit: str
    runs: tuple[float, ...] = ()
    over: float = 0.0
    alone: bool = False


class Figure(msgspec.Struct, frozen=True):
    """A measured value with all its runs, as in `Measured`.

    Units: s (seconds), us (microseconds), MB (a million bytes), n (a number).

    `variant` is a setting of the program: minSyncPeriod, or kubeconfig if it is not in a pod.
    """

    backend: str
    name: str
    size: Size
    program: str
    variant: str
    unit: str
    runs: tuple[float, ...]
    over: float = 0.0

    @property
    def key(self) -> tuple[object, ...]:
        """Return what distinguishes it from all other figures."""
        return *self.row, self.program

    @property
    def row(self) -> tuple[object, ...]:
        """Return what it has in common with the same figure of other programs."""
        return self.backend, self.name, self.size, self.variant

    @property
    def value(self) -> float | None:
        """Return the median, None if it took too long."""
        return statistics.median(self.runs) if self.runs else None

    @property
    def text(self) -> str:
        """Return the median and the spread, or p50 and p99, with their number."""
        if not self.runs:
            return limit_text(self.over)
        if self.name in DISTRIBUTIONS:
            p50, p99 = (show(percentile(self.runs, share), self.unit) for share in (0.5, 0.99))
            return f"p50 {p50}, p99 {p99} (of {len(self.runs)})"
        middle = show(statistics.median(self.runs), self.unit)
        if len(self.runs) == 1:
            return middle
        return f"{middle} ({show(min(self.runs), self.unit)} to {show(max(self.runs), self.unit)})"


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that is not below this share of all."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def limit_text(seconds: float) -> str:
    """Return the text for a figure above a limit of so many seconds."""
    return f"> {seconds / 60:g} min" if seconds >= 60 else f"> {seconds:g} s"


def show(value: float, unit: str) -> str:
    """Format a value with its unit, with about three digits."""
    return f"{digits(value)} {'µs' if unit == 'us' else unit}".removesuffix(" n")


def digits(value: float) -> str:
    """Format a value with about three digits."""
    if value >= 100 or value == int(value):
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


class Report(msgspec.Struct):
    """All figures of a run; `notes` lists what could not be measured, and why."""

    host: dict[str, str]
    figures: list[Figure]
    notes: list[str]

    def add(self, figure: Figure) -> None:
        """Add a figure, or its runs to an existing figure with the same key."""
        for at, known in enumerate(self.figures):
            if known.key == figure.key:
                runs = known.runs + figure.runs
                self.figures[at] = msgspec.structs.replace(known, runs=runs, over=known.over or figure.over)
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


def write(report: Report, folder: Path) -> Path:
    """Write the report to TIME.json and TIME.txt in a folder. Return the path of the first."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{report.host['time'].replace(':', '')}.json"
    file.write_bytes(as_json(report))
    file.with_suffix(".txt").write_text("\n".join((*as_table(report), "")))
    return file


def as_json(report: Report) -> bytes:
    """Return the figures with all runs as JSON."""
    figures = [
        {**msgspec.to_builtins(figure), "size": str(figure.size), "text": figure.text}
        for figure in report.figures
    ]
    content = {"host": report.host, "figures": figures, "notes": report.notes}
    return msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"


def merged(reports: Iterable[bytes]) -> Report:
    """Return several reports as one. A figure in several of them is that of the last one."""
    host: dict[str, str] = {}
    figures: dict[tuple[object, ...], Figure] = {}
    notes: list[str] = []
    for report in reports:
        content: dict[str, Any] = msgspec.json.decode(report)
        host = content["host"]
        notes += content["notes"]
        for item in content["figures"]:
            fields = {name: item[name] for name in Figure.__struct_fields__}
            figure = Figure(**fields | {"size": Size.read(item["size"]), "runs": tuple(item["runs"])})
            figures[figure.key] = figure
    return Report(host, [*figures.values()], notes)


def as_table(report: Report) -> Iterator[str]:
    """Yield a line for each figure, with those of all programs."""
    yield ", ".join(f"{name} {value}" for name, value in report.host.items())
    rows: dict[tuple[object, ...], list[Figure]] = {}
    for figure in report.figures:
        rows.setdefault(figure.row, []).append(figure)
    for row, figures in rows.items():
        ordered = sorted(figures, key=lambda figure: PROGRAMS.index(figure.program))
        texts = (f"{figure.program} {figure.text}" for figure in ordered)
        yield f"{', '.join(filter(None, map(str, row)))}: {'; '.join(texts)}"
    yield from (f"! {note}" for note in report.notes)
