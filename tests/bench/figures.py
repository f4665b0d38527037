"""Measured figures, their targets, and the report of both as a table and as JSON."""

import os
import platform
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

import msgspec

from tests.bench.workload import Size

OURS, BEFORE, PEER = "pykubeproxy", "before", "kube-proxy"
#: The tools and imports that a program needs for the same, measured alone: iptables-restore of the same text, iptables-save
#: of both families, or `python -c import …`.
ALONE = "alone"
#: All programs, in the order of the report.
PROGRAMS = (OURS, BEFORE, PEER, ALONE)
START, START_CPU, CHANGE = "start", "CPU of a start", "one endpoint changed"
FIRST_LIST, HELP = "first list requested", "run --help"
MEMORY, PEAK = "memory", "memory, peak"
IDLE, CHURN = "CPU of an idle minute", "CPU of 1000 changes"
DUMP, TRACE, EXPLAIN = "dump-rules of a service", "trace to a service", "explain of a service"
CHECK, DIFF, DIFF_AGENT = "check", "diff", "diff, objects of the agent"
REPAIR_HALF, REPAIR_ALL = "repair, half serve", "repair, all serve"
FIRST, PAST, POD = "first packet", "past the rules", "without rules"
#: Endpoints of each Service in first-packet measurements.
FIRST_ENDPOINTS = 2


class Figure(msgspec.Struct, frozen=True):
    """A measured value with all its runs. Units: s (seconds), MB (a million bytes), us (microseconds), x (a ratio),
    n (a number).

    `variant` is the dispatch mode, kube-proxy's mode if it is not iptables, or kubeconfig if the program is not in a pod.
    """

    backend: str
    name: str
    size: Size
    program: str
    variant: str
    unit: str
    runs: tuple[float, ...]

    @property
    def value(self) -> float:
        """Return the median."""
        return statistics.median(self.runs)


def comparable(one: Figure, other: Figure) -> bool:
    """Return whether the figures differ at most in program and variant."""
    return (one.backend, one.name, one.size) == (other.backend, other.name, other.size)


def of_program(figure: Figure, program: str, figures: Sequence[Figure]) -> Iterator[Figure]:
    """Yield the program's figures for the same workload: in the same variant, for kube-proxy in all modes."""
    for other in figures:
        alike = program == PEER or other.variant == figure.variant
        if comparable(other, figure) and other.program == program and alike:
            yield other


def show(value: float, unit: str) -> str:
    """Format a value with its unit, with about three digits."""
    if unit == "us":
        return f"{value:.1f} µs"
    if unit == "MB":
        return f"{value:.0f} MB" if value >= 20 else f"{value:.2f} MB"
    return f"{value:.3f} s" if value < 1 else f"{value:.2f} s"


#: Compare first packets with those at the smallest number of Services.
FEWEST = "at the fewest services"
_SHORT = {POD: "without rules", FEWEST: "the fewest"}


class Target(msgspec.Struct, frozen=True):
    """A maximum for a figure: `limit`, or `limit` times another figure and `plus` seconds.

    The other figure is the same one of another program (PEER, ALONE), that at the fewest Services, or the one named.
    """

    backend: str
    name: str
    size: Size
    limit: float
    of: str = ""
    plus: float = 0.0
    variant: str = ""

    def text(self, unit: str) -> str:
        """Return the target as text."""
        if not self.of:
            return f"≤ {self.limit:g} {unit}"
        plus = f" + {self.plus:g} {unit}" if self.plus else ""
        return f"≤ {self.limit:g} x {_SHORT.get(self.of, self.of)}{plus}"


class Verdict(msgspec.Struct, frozen=True):
    """The result for a target: `ratio` to its limit, or None if the figure it depends on is missing."""

    figure: Figure
    target: Target
    ratio: float | None

    @property
    def reached(self) -> bool | None:
        """Return whether the target was met, or None if unknown."""
        return None if self.ratio is None else self.ratio <= 1


_NONE, _SMALL, _MIDDLE, _BIG = Size(0, 1), Size(1000, 10), Size(2000, 10), Size(5000, 10)
_HUGE, _MANY = Size(10_000, 10), Size(20_000, 5)
_PACKETS = Size(5000, FIRST_ENDPOINTS)
TARGETS = (
    *(Target("nft", START, size, 1.2, ALONE, 0.8) for size in (_SMALL, _MIDDLE, _BIG, _HUGE, _MANY)),
    *(Target("legacy", START, size, 1.0, PEER) for size in (_SMALL, _MIDDLE, _BIG, _HUGE, _MANY)),
    Target("nft", CHANGE, _BIG, 0.15),
    Target("legacy", CHANGE, _BIG, 1.1, ALONE),
    Target("nft", DUMP, _BIG, 0.3),
    Target("nft", TRACE, _BIG, 0.3),
    Target("nft", EXPLAIN, _BIG, 0.3),
    *(Target("nft", REPAIR_HALF, size, 1.0) for size in (_PACKETS, _BIG)),
    *(Target("nft", REPAIR_ALL, size, 1.2, ALONE) for size in (_PACKETS, _BIG)),
    *(
        target
        for backend, to_pod in (("nft", 2.0), ("legacy", 3.0))
        for target in (
            Target(backend, FIRST_LIST, _NONE, 2.5, ALONE),
            Target(backend, FIRST_LIST, _NONE, 2.5, ALONE, variant="kubeconfig"),
            Target(backend, HELP, _NONE, 1.8, ALONE),
            Target(backend, MEMORY, _NONE, 45),
            Target(backend, MEMORY, _BIG, 100),
            Target(backend, MEMORY, _HUGE, 140),
            Target(backend, CHECK, _HUGE, 1.5, ALONE, 1.0),
            Target(backend, DIFF, _HUGE, 2.0, ALONE, 2.0),
            Target(backend, DIFF_AGENT, _HUGE, 2.0, ALONE, 2.0),
            *(
                Target(backend, FIRST, size, limit, of, variant="tree")
                for size, limit, of in (
                    (_PACKETS, to_pod, POD),
                    (_PACKETS, 1.0, PEER),
                    (Size(30_000, FIRST_ENDPOINTS), 1.5, FEWEST),
                )
            ),
        )
    ),
)


def missing(target: Target) -> str:
    """Return what to measure so that the target can be judged."""
    if target.of == PEER:
        return "needs --peer"
    if target.of == ALONE and target.name in (FIRST_LIST, HELP):
        return "needs part launch"
    if target.of == FEWEST:
        return "needs --services"
    return f"{_SHORT.get(target.of, target.of)} missing"


def judge(figures: Sequence[Figure]) -> list[Verdict]:
    """Compare pykubeproxy's figures with their targets."""
    return [
        Verdict(figure, target, _ratio(figure, target, figures))
        for figure in figures
        for target in TARGETS
        if figure.program == OURS
        and (figure.backend, figure.name, figure.size, figure.variant)
        == (target.backend, target.name, target.size, target.variant)
    ]


def _ratio(figure: Figure, target: Target, figures: Sequence[Figure]) -> float | None:
    if not target.of:
        return figure.value / target.limit
    if target.of in (PEER, ALONE):
        others = list(of_program(figure, target.of, figures))
    elif target.of == FEWEST:
        others = [other for other in figures if _like(other, figure, figure.name)]
        others = sorted(others, key=lambda other: other.size.services)[:1]
        others = [other for other in others if other.size != figure.size]
    else:
        others = [other for other in figures if _like(other, figure, target.of) and other.size == figure.size]
    if not others:
        return None
    return figure.value / (target.limit * min(other.value for other in others) + target.plus)


def _like(other: Figure, figure: Figure, name: str) -> bool:
    """Return whether `other` has this name and the same backend, program and variant, at any size."""
    same = (other.backend, other.variant, other.name) == (figure.backend, figure.variant, name)
    return same and other.program == figure.program


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
    """Yield a line for each figure of pykubeproxy: those of the other programs, and its targets."""
    yield ", ".join(f"{name} {value}" for name, value in report.host.items())
    verdicts = judge(report.figures)
    for figure in sorted(report.figures, key=lambda figure: figure.backend):
        alike = [item for item in report.figures if comparable(item, figure)]
        if figure.program != OURS and any(item.program == OURS for item in alike):
            continue  # on the line of pykubeproxy's
        label = ", ".join(filter(None, (figure.backend, figure.name, str(figure.size), figure.variant)))
        texts = [f"{label}: {figure.program} {show(figure.value, figure.unit)}"]
        for program in PROGRAMS[1:]:
            for other in of_program(figure, program, alike):
                if figure.program == OURS:
                    texts.append(
                        f"{' '.join((program, other.variant)).strip()} {show(other.value, other.unit)}"
                    )
        texts += [
            f"target {verdict.target.text(figure.unit)}: {_outcome(verdict)}"
            for verdict in verdicts
            if verdict.figure is figure
        ]
        yield "; ".join(texts)
    yield from (f"! {note}" for note in report.notes)


def _outcome(verdict: Verdict) -> str:
    if verdict.ratio is None:
        return missing(verdict.target)
    return "met" if verdict.reached else f"missed {verdict.ratio:.2f}x"


def _key(figure: Figure) -> tuple[object, ...]:
    return figure.backend, figure.name, figure.size, figure.program, figure.variant
