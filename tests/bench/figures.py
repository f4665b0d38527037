"""Measured figures, and those that follow from them."""

import statistics
from collections.abc import Iterator, Sequence

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
RECEIVED = "received at a start"
IDLE, CHURN = "CPU of an idle minute", "CPU of 1000 changes"
DUMP, TRACE, EXPLAIN = "dump-rules of a service", "trace to a service", "explain of a service"
CHECK, DIFF, DIFF_AGENT = "check", "diff", "diff, objects of the agent"
CHECK_REQUESTS, DIFF_REQUESTS = "check, requests", "diff, requests"
REPAIR_HALF, REPAIR_ALL = "repair, half serve", "repair, all serve"
FIRST, FIRST_SLOW = "first packet, p50", "first packet, p99"
PAST, PAST_SLOW = "past the rules, p50", "past the rules, p99"
POD, POD_SLOW = "without rules, p50", "without rules, p99"
GROWTH = "time per rule"
#: Endpoints of each Service in first-packet measurements.
FIRST_ENDPOINTS = 2
#: Compare the time per rule with that of this size.
GROWTH_FROM = Size(5000, 10)
_NOTHING = Size(0, 1)


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


def growth(figures: Sequence[Figure]) -> Iterator[Figure]:
    """Yield the time per rule of the starts with more rules, as a ratio to that at 5000 x 10.

    The time of a start without Services is not counted. The tools alone have at least 1.
    """
    starts = [it for it in figures if it.name == START and not it.variant]
    for backend in dict.fromkeys(it.backend for it in starts):
        for program in PROGRAMS:
            seconds = {it.size: it.value for it in starts if (it.backend, it.program) == (backend, program)}
            yield from _growth(backend, program, seconds)


def _growth(backend: str, program: str, seconds: dict[Size, float]) -> Iterator[Figure]:
    idle = seconds.get(_NOTHING, 0.0)
    if GROWTH_FROM not in seconds:
        return
    least = (seconds[GROWTH_FROM] - idle) / GROWTH_FROM.rules
    for size, value in seconds.items():
        if size.rules > GROWTH_FROM.rules and least > 0:
            ratio = (value - idle) / size.rules / least
            ratio = max(ratio, 1.0) if program == ALONE else ratio
            yield Figure(backend, GROWTH, size, program, "", "x", (ratio,))


def show(value: float, unit: str) -> str:
    """Format a value with its unit, with about three digits."""
    if unit == "us":
        return f"{value:.1f} µs"
    if unit == "MB":
        return f"{value:.0f} MB" if value >= 20 else f"{value:.2f} MB"
    if unit == "x":
        return f"{value:.2f} x"
    if unit == "n":
        return f"{value:.0f}"
    return f"{value:.3f} s" if value < 1 else f"{value:.2f} s"
