"""Plan the measurements: workload sizes, rows and repetitions."""

from collections.abc import Iterable
from typing import NamedTuple

from tests.bench.figures import FIRST_ENDPOINTS
from tests.bench.workload import Size

#: What --only selects, and the rows of each: what is measured with one started program.
PARTS = {
    "starts": frozenset({"start", "memory"}),
    "launch": frozenset({"start", "memory", "launch"}),
    "changes": frozenset({"change", "idle", "churn"}),
    "lookups": frozenset({"lookup"}),
    "inspect": frozenset({"inspect"}),
    "repair": frozenset({"repair"}),
    "first": frozenset({"first"}),
}
#: Rows that every start measures; the others are measured after the first start of a size only.
EVERY_START = frozenset({"start", "memory", "launch", "lookup", "inspect", "repair"})
#: Rows that kube-proxy does not have.
ONLY_OURS = frozenset({"launch", "lookup", "inspect", "repair"})


class Effort(NamedTuple):
    """Repetitions and durations. `settle`, `quiet`, `idle` and `limit` (of a start) are seconds.

    `runs` are the starts of each size, 0 for a number that depends on the size.
    """

    runs: int = 0
    changes: int = 6
    churn: int = 1000
    idle: float = 60.0
    rounds: int = 3
    connects: int = 4000
    lookups: int = 3
    settle: float = 1.0
    quiet: float = 1.5
    limit: float = 300.0


QUICK = Effort(
    runs=1,
    changes=2,
    churn=20,
    idle=1.0,
    rounds=1,
    connects=100,
    lookups=1,
    settle=0.0,
    quiet=0.2,
    limit=30.0,
)


class Scale(NamedTuple):
    """The workload sizes of each part. `services` are the numbers of Services for first packets."""

    launch: Size
    starts: tuple[Size, ...]
    changes: tuple[Size, ...]
    lookups: Size
    inspect: Size
    repair: tuple[Size, ...]
    services: tuple[int, ...]

    def with_sizes(self, sizes: tuple[Size, ...]) -> "Scale":
        """Return a scale with other sizes: starts at all, launches at the first, the other parts at the last one."""
        first, last = sizes[0], sizes[-1]
        return self._replace(
            launch=first, starts=sizes, changes=(last,), lookups=last, inspect=last, repair=(last,)
        )


_NONE, _BIG, _HUGE = Size(0, 1), Size(5000, 10), Size(10_000, 10)
FULL_SCALE = Scale(
    launch=_NONE,
    starts=(_NONE, *(Size(number, 10) for number in (1000, 2000, 5000, 10_000)), Size(20_000, 5)),
    changes=(Size(500, 10), _BIG),
    lookups=_BIG,
    inspect=_HUGE,
    repair=(Size(5000, FIRST_ENDPOINTS), _BIG),
    services=(100, 1000, 5000, 10_000, 30_000),
)
QUICK_SCALE = FULL_SCALE.with_sizes((_NONE, Size(10, 3), Size(40, 3)))._replace(services=(10, 40))


class Step(NamedTuple):
    """One workload size, the rows to measure, and the number of starts of each program."""

    size: Size
    rows: frozenset[str]
    runs: int


def steps(scale: Scale, parts: Iterable[str], effort: Effort) -> list[Step]:
    """Return the steps in order: each size once, and first packets last."""
    rows: dict[Size, frozenset[str]] = {}
    for part in parts:
        for size in _sizes(scale, part):
            rows[size] = rows.get(size, frozenset()) | _rows(scale, part, size)
    found = [Step(size, here, _runs(size, here, effort)) for size, here in sorted(rows.items())]
    if "first" in parts:
        found += [Step(Size(n, FIRST_ENDPOINTS), PARTS["first"], 1) for n in scale.services]
    return found


def _rows(scale: Scale, part: str, size: Size) -> frozenset[str]:
    """Return the rows of a part; a minute without changes only at the last of its sizes."""
    last = part != "changes" or size == scale.changes[-1]
    return PARTS[part] if last else PARTS[part] - {"idle"}


def _sizes(scale: Scale, part: str) -> tuple[Size, ...]:
    return {
        "starts": scale.starts,
        "launch": (scale.launch,),
        "changes": scale.changes,
        "lookups": (scale.lookups,),
        "inspect": (scale.inspect,),
        "repair": scale.repair,
    }.get(part, ())


def _runs(size: Size, rows: frozenset[str], effort: Effort) -> int:
    """Return more starts for smaller sizes, whose figures vary more."""
    if not rows & EVERY_START:
        return 1
    if effort.runs:
        return effort.runs
    if size.chains > 60_000:
        return 2
    return 3 if size.chains > 30_000 else 5
