"""Write the figures into docs/performance.md and draw the charts: `python -m tests.bench.page BENCH.json [MORE.json]`."""

import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tests.bench import figures as f
from tests.bench.figures import Figure, Report, as_table, judge, show
from tests.bench.plan import FULL_SCALE
from tests.bench.workload import Size

#: The points of each line, by its label.
Lines = dict[str, dict[int, float]]


def draw(figures: Sequence[Figure], folder: Path) -> list[Path]:
    """Draw the curves that have at least two points. Without matplotlib, print how to install it."""
    if not importlib.util.find_spec("matplotlib"):
        print("no curves: matplotlib is not installed; run pip install --group bench", file=sys.stderr)
        return []
    starts = [item for item in figures if item.size.endpoints == _BIG.endpoints and not item.variant]
    curves = {
        folder / "start.png": ("seconds from the start to all rules", _lines(starts, f.START)),
        folder / "memory.png": ("MB after a start", _lines(starts, f.MEMORY)),
        folder / "first-packet.png": (
            "microseconds of a TCP connection, median",
            _lines(figures, f.FIRST, f.POD),
        ),
    }
    drawn = [path for path, (_, lines) in curves.items() if any(len(item) > 1 for item in lines.values())]
    for path in drawn:
        _draw(*curves[path], path)
    return drawn


def _lines(figures: Sequence[Figure], *names: str) -> Lines:
    lines: Lines = {}
    for figure in figures:
        if figure.name in names:
            lines.setdefault(_label(figure), {})[figure.size.services] = figure.value
    return lines


def _label(figure: Figure) -> str:
    # Without rules the programs do not differ, so draw one line.
    if figure.name == f.POD:
        return "to a pod, without rules"
    program = "iptables alone" if figure.program == f.ALONE else figure.program
    return ", ".join(filter(None, (program, figure.backend, figure.variant)))


def _draw(axis: str, lines: Lines, path: Path) -> None:
    import matplotlib  # optional dependency of the curves

    matplotlib.use("Agg")
    from matplotlib import pyplot

    canvas, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for label, points in sorted(lines.items()):
        dotted = label.startswith(("to a pod", "iptables"))
        axes.plot(
            *zip(*sorted(points.items()), strict=True), marker="o", label=label, ls=":" if dotted else "-"
        )
    axes.set(xlabel="Services", ylabel=axis, ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    canvas.savefig(path, dpi=120)
    pyplot.close(canvas)


PAGE = Path(__file__).parents[2] / "docs/performance.md"
CURVES = Path("build/bench")
_PART = re.compile(r"(<!-- figures: (\w+) -->\n)(.*?)(<!-- end of figures -->)", re.DOTALL)
_BACKENDS = ("nft", "legacy")
_COLUMNS = (f.OURS, f.PEER, f.ALONE)
_SIZES = (*(Size(number, 10) for number in (1000, 2000, 5000, 10_000)), Size(20_000, 5))
_BIG, _HUGE, _NONE = Size(5000, 10), Size(10_000, 10), Size(0, 1)
_PACKETS = Size(5000, f.FIRST_ENDPOINTS)
# The rows of the summary: the words, the name of the figure, the size and the variant.
_SUMMARY: tuple[tuple[str, str, Size, str], ...] = (
    *((f"Start with {size}", f.START, size, "") for size in _SIZES),
    ("One endpoint changed at 5000x10", f.CHANGE, _BIG, ""),
    ("Memory with no services", f.MEMORY, _NONE, ""),
    ("Memory at 5000x10", f.MEMORY, _BIG, ""),
    ("Memory at 10000x10", f.MEMORY, _HUGE, ""),
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


def tables(figures: Sequence[Figure]) -> dict[str, list[str]]:
    """Return the lines of the page's tables by name."""
    return {
        "summary": list(_summary(figures)),
        "starts": list(_starts(figures)),
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


def _summary(figures: Sequence[Figure]) -> Iterator[str]:
    """Yield each figure beside kube-proxy's and that of iptables alone, for both backends."""
    programs = ("pykubeproxy", "kube-proxy", "iptables alone")
    yield _row("", *(f"{backend}: {program}" for backend in _BACKENDS for program in programs))
    yield _row("---", *["---"] * 6)
    for label, name, size, variant in _SUMMARY:
        cells = [
            _cell(figures, backend, program, name, size, variant)
            for backend in _BACKENDS
            for program in _COLUMNS
        ]
        yield _row(label, *cells)


def _starts(figures: Sequence[Figure]) -> Iterator[str]:
    names = (f.START, f.START_CPU, f.MEMORY, f.PEAK)
    headings = ("start", "CPU", "memory", "peak")
    yield _row("services", *(f"{backend}: {item}" for backend in _BACKENDS for item in headings))
    yield _row("---", *["---"] * 8)
    for size in (_NONE, *_SIZES):
        label = str(size) if size.services else "none"
        yield _row(
            label, *(_cell(figures, item, f.OURS, name, size, "") for item in _BACKENDS for name in names)
        )


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
        yield _row(str(size.services), *cells, *pods)


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
    CURVES.mkdir(parents=True, exist_ok=True)
    draw(report.figures, CURVES)


if __name__ == "__main__":
    main()
