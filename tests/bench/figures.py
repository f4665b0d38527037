"""Measured figures and their targets."""

import statistics
from collections.abc import Iterator, Sequence

import msgspec

from tests.bench.workload import Size

OURS, PEER, TOOL = "pykubeproxy", "kube-proxy", "iptables-restore"
START, START_CPU, CHANGE = "start", "CPU of a start", "one endpoint changed"
MEMORY, PEAK = "memory", "memory, peak"
RECEIVED = "data received at a start"
IDLE, CHURN = "CPU of an idle minute", "CPU of 1000 changes"
FIRST, FIRST_SLOW = "first packet, p50", "first packet, p99"
PAST, PAST_SLOW = "past the rules, p50", "past the rules, p99"
POD, POD_SLOW = "without rules, p50", "without rules, p99"
REWRITE = "one chain restored"
#: Endpoints of each Service in first-packet measurements.
FIRST_ENDPOINTS = 2
#: Compare first packets with those at the smallest number of Services.
FEWEST = "at the fewest services"
_SHORT = {POD: "without rules", REWRITE: "one restore", FEWEST: "the fewest"}


class Figure(msgspec.Struct, frozen=True):
    """A measured value with all its runs. Units: s (seconds), MB (a million bytes), us (microseconds).

    `variant` is the dispatch mode, or kube-proxy's mode if it is not iptables.
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


class Target(msgspec.Struct, frozen=True):
    """A maximum for a figure: `limit`, or `limit` times another figure: the peer program's (PEER) or the one named."""

    backend: str
    name: str
    size: Size
    limit: float
    of: str = ""

    def text(self, unit: str) -> str:
        """Return the target as text."""
        return f"≤ {self.limit:g} x {_SHORT.get(self.of, self.of)}" if self.of else f"≤ {self.limit:g} {unit}"


class Verdict(msgspec.Struct, frozen=True):
    """The result for a target: `ratio` to its limit, or None if the figure it depends on is missing."""

    figure: Figure
    target: Target
    ratio: float | None

    @property
    def reached(self) -> bool | None:
        """Return whether the target was met, or None if unknown."""
        return None if self.ratio is None else self.ratio <= 1


TARGETS = (
    Target("nft", START, Size(1000, 10), 1.5),
    Target("nft", START, Size(2000, 10), 2.0),
    Target("nft", START, Size(5000, 10), 4.5),
    Target("legacy", START, Size(5000, 10), 1.0, PEER),
    Target("nft", CHANGE, Size(5000, 10), 0.15),
    Target("legacy", CHANGE, Size(5000, 10), 1.1, REWRITE),
    *(
        target
        for backend, to_pod in (("nft", 2.0), ("legacy", 3.0))
        for target in (
            Target(backend, MEMORY, Size(0, 1), 75),
            Target(backend, MEMORY, Size(5000, 10), 150),
            Target(backend, MEMORY, Size(5000, 20), 250),
            Target(backend, FIRST, Size(5000, FIRST_ENDPOINTS), to_pod, POD),
            Target(backend, FIRST, Size(5000, FIRST_ENDPOINTS), 1.0, PEER),
            Target(backend, FIRST, Size(30_000, FIRST_ENDPOINTS), 1.5, FEWEST),
        )
    ),
)


def judge(figures: Sequence[Figure]) -> list[Verdict]:
    """Compare pykubeproxy's figures with their targets."""
    return [
        Verdict(figure, target, _ratio(figure, target, figures))
        for figure in figures
        for target in TARGETS
        if figure.program == OURS
        and (figure.backend, figure.name, figure.size) == (target.backend, target.name, target.size)
        and figure.variant != "flat"  # kube-proxy's rules, measured only for comparison
    ]


def peers(figure: Figure, figures: Sequence[Figure]) -> Iterator[Figure]:
    """Yield the peer program's figures for the same workload, in each of its modes."""
    for other in figures:
        same = (other.backend, other.name, other.size) == (figure.backend, figure.name, figure.size)
        if same and other.program == PEER:
            yield other


def show(value: float, unit: str) -> str:
    """Format a value with its unit, with about three digits."""
    if unit == "us":
        return f"{value:.1f} µs"
    if unit == "MB":
        return f"{value:.0f} MB" if value >= 20 else f"{value:.2f} MB"
    return f"{value:.3f} s" if value < 1 else f"{value:.2f} s"


def _ratio(figure: Figure, target: Target, figures: Sequence[Figure]) -> float | None:
    if not target.of:
        return figure.value / target.limit
    if target.of == PEER:
        others = list(peers(figure, figures))
    elif target.of == FEWEST:
        others = [other for other in figures if _like(other, figure, figure.name)]
        others = sorted(others, key=lambda other: other.size.services)[:1]
        others = [other for other in others if other.size != figure.size]
    else:
        others = [other for other in figures if _like(other, figure, target.of) and other.size == figure.size]
    if not others:
        return None
    return figure.value / (target.limit * min(other.value for other in others))


def _like(other: Figure, figure: Figure, name: str) -> bool:
    """Return whether `other` has this name and the same backend and variant, at any size."""
    same = (other.backend, other.variant, other.name) == (figure.backend, figure.variant, name)
    return same and other.program in (OURS, TOOL)
