"""The targets of the figures, and whether they are met."""

from collections.abc import Sequence

import msgspec

from tests.bench import figures as f
from tests.bench.figures import Figure
from tests.bench.workload import Size

#: Compare first packets with those at the smallest number of Services.
FEWEST = "at the fewest services"
_SHORT = {f.POD: "without rules", FEWEST: "the fewest"}
_PROGRAMS = (f.PEER, f.ALONE)


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
_PACKETS = Size(5000, f.FIRST_ENDPOINTS)
TARGETS = (
    *(Target("nft", f.START, size, 1.2, f.ALONE, 0.8) for size in (_SMALL, _MIDDLE, _BIG, _HUGE, _MANY)),
    *(Target("legacy", f.START, size, 1.0, f.PEER) for size in (_SMALL, _MIDDLE, _BIG, _HUGE, _MANY)),
    Target("nft", f.CHANGE, _BIG, 0.15),
    Target("legacy", f.CHANGE, _BIG, 1.1, f.ALONE),
    Target("nft", f.DUMP, _BIG, 0.3),
    Target("nft", f.TRACE, _BIG, 0.3),
    Target("nft", f.EXPLAIN, _BIG, 0.3),
    *(Target("nft", f.REPAIR_HALF, size, 1.0) for size in (_PACKETS, _BIG)),
    *(Target("nft", f.REPAIR_ALL, size, 1.2, f.ALONE) for size in (_PACKETS, _BIG)),
    *(
        target
        for backend, to_pod in (("nft", 2.0), ("legacy", 3.0))
        for target in (
            Target(backend, f.FIRST_LIST, _NONE, 2.5, f.ALONE),
            Target(backend, f.FIRST_LIST, _NONE, 1.5, f.ALONE, variant="kubeconfig"),
            Target(backend, f.HELP, _NONE, 1.8, f.ALONE),
            Target(backend, f.MEMORY, _NONE, 45),
            Target(backend, f.MEMORY, _BIG, 100),
            Target(backend, f.MEMORY, _HUGE, 140),
            Target(backend, f.GROWTH, _HUGE, 1.3, f.ALONE),
            Target(backend, f.GROWTH, _MANY, 1.3, f.ALONE),
            Target(backend, f.CHECK, _HUGE, 1.5, f.ALONE, 1.0),
            Target(backend, f.DIFF, _HUGE, 2.0, f.ALONE, 2.0),
            Target(backend, f.DIFF_AGENT, _HUGE, 2.0, f.ALONE, 2.0),
            *(
                Target(backend, f.FIRST, size, limit, of, variant="tree")
                for size, limit, of in (
                    (_PACKETS, to_pod, f.POD),
                    (_PACKETS, 1.0, f.PEER),
                    (Size(30_000, f.FIRST_ENDPOINTS), 1.5, FEWEST),
                )
            ),
        )
    ),
)


def missing(target: Target) -> str:
    """Return what to measure so that the target can be judged."""
    if target.of == f.PEER:
        return "needs --peer"
    if target.of == f.ALONE and target.name in (f.FIRST_LIST, f.HELP):
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
        if figure.program == f.OURS
        and (figure.backend, figure.name, figure.size, figure.variant)
        == (target.backend, target.name, target.size, target.variant)
    ]


def _ratio(figure: Figure, target: Target, figures: Sequence[Figure]) -> float | None:
    if not target.of:
        return figure.value / target.limit
    if target.of in _PROGRAMS:
        others = list(f.of_program(figure, target.of, figures))
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
