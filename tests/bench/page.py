"""Write figures into the tables of docs/performance.md: `python -m tests.bench.page BENCH.json [MORE.json]`.

`make docs` draws the charts from these tables.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tests.bench import figures as f
from tests.bench.charts import Lines, chart
from tests.bench.figures import Figure, Report, as_table, judge, show
from tests.bench.plan import FULL_SCALE
from tests.bench.workload import Size

PAGE = Path(__file__).parents[2] / "docs/performance.md"
_PART = re.compile(r"(<!-- figures: (\w+) -->\n)(.*?)(<!-- end of figures -->)", re.DOTALL)
_BACKENDS = ("nft", "legacy")
_COLUMNS = (f.OURS, f.PEER, f.ALONE)
_SIZES = (*(Size(number, 10) for number in (1000, 2000, 5000, 10_000)), Size(20_000, 5))
_BIG, _HUGE, _NONE = Size(5000, 10), Size(10_000, 10), Size(0, 1)
_PACKETS = Size(5000, f.FIRST_ENDPOINTS)
_PROGRAMS = ("pykubeproxy", "kube-proxy", "iptables alone")
_NUMBER = re.compile(r"[\d.]+")
# The rows of the summary: the words, the name of the figure, the size and the variant.
_SUMMARY: tuple[tuple[str, str, Size, str], ...] = (
    *((f"Start with {size}", f.START, size, "") for size in _SIZES),
    ("One endpoint changed at 5000x10", f.CHANGE, _BIG, ""),
    ("Memory with no services", f.MEMORY, _NONE, ""),
    *((f"Memory at {size}", f.MEMORY, size, "") for size in _SIZES if size.endpoints == _BIG.endpoints),
    ("CPU of 1000 changes at 5000x10", f.CHURN, _BIG, ""),
    ("First packet, 5000 services", f.FIRST, _PACKETS, "tree"),
)
_COMMANDS: tuple[tuple[str, str, Size, str], ...] = (
    ("First list requested, in a pod", f.FIRST_LIST, _NONE, ""),
    ("First list requested, with a kubeconfig", f.FIRST_LIST, _NONE, "kubeconfig"),
    ("`run --help`", f.HELP, _NONE, ""),
    ("`dump-rules` of a service at 5000x10", f.DUMP, _BIG, ""),
    ("`trace` to a service at 5000x10", f.TRACE, _BIG, ""),
    ("`explain` of a service at 5000x10", f.EXPLAIN, _BIG, ""),
    ("`check` at 10000x10", f.CHECK, _HUGE, ""),
    ("`diff` at 10000x10", f.DIFF, _HUGE, ""),
    ("`diff` at 10000x10, objects of the agent", f.DIFF_AGENT, _HUGE, ""),
    *(
        row
        for size in (_PACKETS, _BIG)
        for row in (
            (f"Flushed table nat at {size}: half the services serve", f.REPAIR_HALF, size, ""),
            (f"Flushed table nat at {size}: all services serve", f.REPAIR_ALL, size, ""),
        )
    ),
)


class Chart(NamedTuple):
    """The table of a chart, its rows with the number of Services, and the labels by heading; {} is the backend."""

    title: str
    unit: str
    table: str
    row: re.Pattern[str]
    columns: Mapping[str, str]


_BY_PROGRAM = {program: program for program in _PROGRAMS}
_BY_DISPATCH = {
    "{}, tree": "pykubeproxy, tree",
    "{}, flat": "pykubeproxy, flat",
    "without rules": "to a pod, without rules",
}
CHARTS = {
    "start": Chart(
        "Start, until all services are reachable",
        "s",
        "summary_{}",
        re.compile(r"Start with (\d+)x10"),
        _BY_PROGRAM,
    ),
    "memory": Chart(
        "Memory after a start", "MB", "summary_{}", re.compile(r"Memory at (\d+)x10"), _BY_PROGRAM
    ),
    "first-packet": Chart(
        "Time to open a TCP connection, median", "µs", "first", re.compile(r"(\d+)"), _BY_DISPATCH
    ),
}


def tables(figures: Sequence[Figure]) -> dict[str, list[str]]:
    """Return the lines of the page's tables by name."""
    return {
        **{f"summary_{backend}": list(_summary(figures, backend)) for backend in _BACKENDS},
        **{f"starts_{backend}": list(_starts(figures, backend)) for backend in _BACKENDS},
        "changes": list(_changes(figures)),
        "commands": list(_commands(figures)),
        "first": list(_first(figures)),
    }


def filled(page: str, figures: Sequence[Figure]) -> str:
    """Return the page with new figures in the tables between its markers. Raise KeyError for an unknown name."""
    made = tables(figures)
    return _PART.sub(
        lambda match: "\n".join((match[1], *_kept(made[match[2]], match[3].splitlines()), "", match[4])), page
    )


def _kept(table: Sequence[str], former: Iterable[str]) -> Iterator[str]:
    """Yield the lines of a table; empty cells have the text of the former table. Omit rows without any text."""
    headings = _cells(table[0])
    rows = [_cells(line) for line in former if line.startswith("|")]
    texts = {(row[0], heading): text for row in rows for heading, text in zip(rows[0], row, strict=True)}
    yield from table[:2]
    for label, *cells in map(_cells, table[2:]):
        merged = [
            cell or texts.get((label, item), "") for item, cell in zip(headings[1:], cells, strict=True)
        ]
        if any(merged):
            yield _row(label, *merged)


def read(reports: Iterable[bytes]) -> Report:
    """Return the content of several bench.json as one report. Runs of the same figure count together."""
    together = Report({}, [], [])
    for report in reports:
        content: dict[str, Any] = msgspec.json.decode(report)
        together.host = content["host"]
        together.notes += content["notes"]
        for item in content["figures"]:
            fields = {name: item[name] for name in Figure.__struct_fields__}
            together.add(Figure(**fields | {"size": Size.read(item["size"]), "runs": tuple(item["runs"])}))
    return together


def draw(name: str) -> str:
    """Return a chart of the page as SVG, with the figures in its tables; nft on the left, legacy on the right."""
    title, unit, table, row, columns = CHARTS[name]
    tables = {
        match[2]: [_cells(line) for line in match[3].splitlines() if "|" in line]
        for match in _PART.finditer(PAGE.read_text())
    }
    panels = {
        backend: _lines(
            tables[table.format(backend)],
            row,
            {heading.format(backend): label for heading, label in columns.items()},
        )
        for backend in _BACKENDS
    }
    return chart(title, unit, panels)


def _lines(rows: Sequence[Sequence[str]], services: re.Pattern[str], columns: Mapping[str, str]) -> Lines:
    """Return the points in the columns with these headings, by label; `services` finds their number in a first cell."""
    lines: dict[str, dict[int, float]] = {}
    for heading, label in columns.items():
        for row in rows:
            number, value = services.fullmatch(row[0]), _NUMBER.match(row[rows[0].index(heading)])
            if number and value:
                lines.setdefault(label, {})[int(number[1])] = float(value[0])
    return lines


def _summary(figures: Sequence[Figure], backend: str) -> Iterator[str]:
    """Yield each figure beside kube-proxy's and that of iptables alone."""
    yield _row(backend, *_PROGRAMS)
    yield _row("---", *["---"] * 3)
    for label, name, size, variant in _SUMMARY:
        yield _row(label, *(_cell(figures, backend, program, name, size, variant) for program in _COLUMNS))


def _starts(figures: Sequence[Figure], backend: str) -> Iterator[str]:
    yield _row(backend, "start", "CPU", "memory", "peak")
    yield _row("---", *["---"] * 4)
    for size in (_NONE, *_SIZES):
        label = str(size) if size.services else "none"
        names = (f.START, f.START_CPU, f.MEMORY, f.PEAK)
        yield _row(label, *(_cell(figures, backend, f.OURS, name, size, "") for name in names))


def _changes(figures: Sequence[Figure]) -> Iterator[str]:
    headings = ("one endpoint changed", "iptables alone", "CPU of 1000 changes", "CPU of an idle minute")
    columns = ((f.CHANGE, f.OURS), (f.CHANGE, f.ALONE), (f.CHURN, f.OURS), (f.IDLE, f.OURS))
    yield _row("backend and services", *headings)
    yield _row("---", *["---"] * 4)
    for size in FULL_SCALE.changes:
        for backend in _BACKENDS:
            cells = (_cell(figures, backend, program, name, size, "") for name, program in columns)
            yield _row(f"{backend}, {size}", *cells)


def _commands(figures: Sequence[Figure]) -> Iterator[str]:
    verdicts = judge(figures)
    yield _row("nft", "time", "alone", "target", "met")
    yield _row("---", *["---"] * 4)
    for label, name, size, variant in _COMMANDS:
        targets = [
            item
            for item in verdicts
            if (item.figure.backend, item.figure.name, item.figure.size, item.figure.variant)
            == ("nft", name, size, variant)
        ]
        times = [_cell(figures, "nft", item, name, size, variant) for item in (f.OURS, f.ALONE)]
        if not targets:
            yield _row(label, *times, "", "")
        elif targets[0].reached is None:  # without the figure of the target, the row stays as it is
            yield _row(label, "", "", "", "")
        else:
            yield _row(label, *times, targets[0].target.text("s"), "yes" if targets[0].reached else "no")


def _first(figures: Sequence[Figure]) -> Iterator[str]:
    modes = [(backend, mode) for backend in _BACKENDS for mode in ("flat", "tree")]
    yield _row("services", *(f"{backend}, {mode}" for backend, mode in modes), "to a pod", "without rules")
    yield _row("---", *["---"] * 6)
    for size in (Size(number, f.FIRST_ENDPOINTS) for number in FULL_SCALE.services):
        cells = [_cell(figures, backend, f.OURS, f.FIRST, size, mode) for backend, mode in modes]
        pods = [_cell(figures, "nft", f.OURS, name, size, "tree") for name in (f.PAST, f.POD)]
        yield _row(str(size.services), *(cell.removesuffix(" µs") for cell in (*cells, *pods)))


def _cell(figures: Sequence[Figure], backend: str, program: str, name: str, size: Size, variant: str) -> str:
    """Return a figure as text; of kube-proxy the better mode; "" if it was not measured."""
    found = [
        item
        for item in figures
        if (item.backend, item.name, item.size, item.program) == (backend, name, size, program)
        and (item.variant == variant or program == f.PEER)
    ]
    return min(
        (show(item.value, item.unit) for item in sorted(found, key=lambda item: item.value)[:1]), default=""
    )


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.removeprefix("|").removesuffix("|").split("|")]


def main() -> None:
    report = read(Path(path).read_bytes() for path in sys.argv[1:])
    PAGE.write_text(filled(PAGE.read_text(), report.figures))
    print("\n".join(as_table(report)))


if __name__ == "__main__":
    main()
