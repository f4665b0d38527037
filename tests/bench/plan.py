"""Plan the measurements: workload sizes, rows and repetitions."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tests.bench.figures import FIRST_ENDPOINTS
from tests.bench.workload import Size

ROWS = ("start", "memory", "change", "idle", "churn", "first")
# These take long, so measure them only at the smallest and the largest number of Services.
_AT_THE_ENDS = frozenset({"change", "idle", "churn"})


class Effort(NamedTuple):
    """Repetitions and durations. `settle`, `quiet`, `idle` and `limit` (of a start) are seconds."""

    runs: int = 3
    changes: int = 6
    churn: int = 1000
    idle: float = 60.0
    rounds: int = 3
    connects: int = 4000
    settle: float = 1.0
    quiet: float = 1.5
    limit: float = 300.0


QUICK = Effort(
    runs=1, changes=2, churn=20, idle=1.0, rounds=1, connects=500, settle=0.0, quiet=0.2, limit=30.0
)


class Scale(NamedTuple):
    """Workload sizes, and the numbers of Services for first packets."""

    sizes: tuple[Size, ...]
    services: tuple[int, ...]


FULL_SCALE = Scale(
    tuple(map(Size.read, ("0x1", "500x10", "1000x10", "2000x10", "3500x10", "5000x10", "5000x20"))),
    (100, 1000, 5000, 10_000, 30_000),
)
QUICK_SCALE = Scale((Size(0, 1), Size(10, 3), Size(40, 3)), (10, 40))


class Step(NamedTuple):
    """One workload size, the rows to measure, and the number of starts of each program."""

    size: Size
    rows: frozenset[str]
    runs: int


def steps(scale: Scale, rows: Iterable[str], effort: Effort) -> list[Step]:
    """Return the steps in order."""
    selected = frozenset(rows)
    ends = growth(scale.sizes)
    found = []
    for size in scale.sizes:
        here = selected & (frozenset({"start", "memory"}) | (_AT_THE_ENDS if size in ends else frozenset()))
        if here:
            found.append(Step(size, here, effort.runs if here & {"start", "memory"} else 1))
    if "first" in selected:
        found += [Step(Size(n, FIRST_ENDPOINTS), frozenset({"first"}), 1) for n in scale.services]
    return found


def growth(sizes: Sequence[Size]) -> tuple[Size, ...]:
    """Return the smallest and the largest of the sizes that differ only in the number of Services."""
    some = [size for size in sizes if size.services]
    if not some:
        return ()
    endpoints = [size.endpoints for size in some]
    usual = max(endpoints, key=endpoints.count)
    alike = sorted(size for size in some if size.endpoints == usual)
    return (alike[0], alike[-1]) if len(alike) > 1 else (alike[0],)
