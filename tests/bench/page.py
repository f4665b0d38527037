"""Write figures into docs/performance.md and its picture: `python -m tests.bench.page FILE.json [MORE.json]`.

A figure in several files is that of the last one. Tables of which the files have no figure stay as they are.
"""

import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from tests.bench import figures as f
from tests.bench.charts import Bar, chart
from tests.bench.figures import Figure, as_table, digits, limit_text, merged, percentile
from tests.bench.workload import Size

PAGE = Path(__file__).parents[2] / "docs/performance.md"
PICTURE = PAGE.with_name("assets") / "start.svg"
_PART = re.compile(r"(<!-- figures: (\w+) -->\n)(.*?)(<!-- end of figures -->)", re.DOTALL)
_BACKENDS = ("nft", "legacy")
_NAMES = {
    f.OURS: "pykubeproxy",
    f.ALONE: "iptables alone",
    f.PEER: "kube-proxy",
    f.NFTABLES: "kube-proxy nftables",
}
_COLOURS = {f.OURS: "#3f51b5", f.ALONE: "#6b7280", f.PEER: "#c2410c", f.NFTABLES: "#0f766e"}
# The columns of the summary: heading, backend, program.
_COLUMNS = (
    ("nft", "nft", f.OURS),
    ("nft alone", "nft", f.ALONE),
    ("nft kube-proxy", "nft", f.PEER),
    ("legacy", "legacy", f.OURS),
    ("legacy alone", "legacy", f.ALONE),
    ("legacy kube-proxy", "legacy", f.PEER),
    ("nftables kube-proxy", "nft", f.NFTABLES),
)
_Form = Callable[[Figure], str]


def _median(figure: Figure) -> str:
    return digits(statistics.median(figure.runs))


def _at(share: float) -> _Form:
    return lambda figure: digits(percentile(figure.runs, share))


def _both(figure: Figure) -> str:
    return f"{_at(0.5)(figure)} / {_at(0.99)(figure)}"


# The rows of the summary, for each shape.
_SUMMARY: tuple[tuple[str, str, _Form], ...] = (
    ("start, s", f.START, _median),
    ("restart, s", f.RESTART, _median),
    ("new service, s, p50 / p99", f.NEW, _both),
    ("changed endpoint, s, p50 / p99", f.CHANGED, _both),
    ("flushed table, s", f.REPAIR, _median),
    ("memory, MB", f.MEMORY, _median),
    ("CPU of a start, s", f.START_CPU, _median),
    ("first packet, µs, p50 / p99", f.FIRST, _both),
)
# The columns of each further table, which has a row for each program.
_TABLES: Mapping[str, tuple[tuple[str, str, _Form], ...]] = MappingProxyType(
    {
        "starts": (
            ("start, s", f.START, _median),
            ("fastest", f.START, lambda figure: digits(min(figure.runs))),
            ("slowest", f.START, lambda figure: digits(max(figure.runs))),
            ("restart, s", f.RESTART, _median),
            ("peak of memory, MB", f.PEAK, _median),
        ),
        "changes": tuple(
            column
            for label, name in (("new service", f.NEW), ("changed endpoint", f.CHANGED))
            for column in (
                (f"{label}, s, p50", name, _at(0.5)),
                ("p99", name, _at(0.99)),
                ("of", name, lambda figure: str(len(figure.runs))),
            )
        ),
        "rolling": (
            ("CPU, s", f.ROLLING_CPU, _median),
            ("written, MB", f.WRITTEN, _median),
            ("connections", f.CONNECTED, _median),
            ("failed", f.FAILED, _median),
        ),
        "load": (
            ("idle hour: CPU, s", f.IDLE_CPU, _median),
            ("wake-ups", f.WAKE_UPS, _median),
            ("load: CPU, s", f.LOAD_CPU, _median),
            ("memory growth, MB", f.GROWTH, _median),
            ("latency, s, p50 / p99", f.LATENCY, _both),
        ),
    }
)
_COMMANDS = {
    f.FIRST_LIST: "First list requested, in a pod",
    f.HELP: "`run --help`",
    f.DUMP: "`dump-rules` of a service",
    f.TRACE: "`trace` to a service",
    f.EXPLAIN: "`explain` of a service",
    f.CHECK: "`check`",
    f.DIFF: "`diff`",
    f.DIFF_AGENT: "`diff`, objects of the agent",
}


def filled(page: str, figures: Sequence[Figure]) -> str:
    """Return the page with these figures in the tables between its markers. Raise KeyError for an unknown name."""
    made = {"summary": [*_summary(figures)], "commands": [*_commands(figures)]}
    made |= {name: [*_by_program(figures, columns)] for name, columns in _TABLES.items()}

    def fill(match: re.Match[str]) -> str:
        lines = made[match[2]]
        return "\n".join((match[1], *lines, "", match[4])) if len(lines) > 2 else match[0]

    return _PART.sub(fill, page)


def draw(figures: Sequence[Figure]) -> str:
    """Return a chart of the starts of all shapes as SVG; "" without any."""
    groups = {
        f"{size.services:,} services, {size.endpoints} endpoint{'s' * (size.endpoints > 1)} each": {
            f"{_NAMES[program]}{f', {backend}' * (program != f.NFTABLES)}": _bar(found)
            for _, backend, program in _COLUMNS
            if (found := _find(figures, backend, f.START, size, program))
        }
        for size in _sizes(figures)
    }
    return chart("Start until every service answers (logarithmic)", "s", groups) if groups else ""


def _bar(figure: Figure) -> Bar:
    over = not figure.runs
    value = figure.over if over else statistics.median(figure.runs)
    text = limit_text(figure.over) if over else f"{digits(value)} s"
    return Bar(value, text, _COLOURS[figure.program], over)


def _sizes(figures: Iterable[Figure]) -> list[Size]:
    """Return the shapes, in the order of the benchmark."""
    return [*dict.fromkeys(figure.size for figure in figures if figure.name == f.START)]


def _summary(figures: Sequence[Figure]) -> Iterator[str]:
    yield from _head("shape", *(heading for heading, *_ in _COLUMNS))
    for size in _sizes(figures):
        for label, name, form in _SUMMARY:
            found = [_find(figures, backend, name, size, program) for _, backend, program in _COLUMNS]
            if any(found):
                yield _row(f"{size}: {label}", *(_text(figure, form) for figure in found))
    if _sizes(figures):
        yield f"\n![Start until every service answers](assets/{PICTURE.name})"


def _by_program(figures: Sequence[Figure], columns: Sequence[tuple[str, str, _Form]]) -> Iterator[str]:
    yield from _head("shape and program", *(heading for heading, *_ in columns))
    first = columns[0][1]
    shapes = dict.fromkeys((figure.size, figure.variant) for figure in figures if figure.name == first)
    for size, variant in shapes:
        for backend in _BACKENDS:
            for program, label in _NAMES.items():
                found = [_find(figures, backend, name, size, program, variant) for _, name, _ in columns]
                if any(found):
                    texts = [_text(figure, form) for figure, (*_, form) in zip(found, columns, strict=True)]
                    place = label if program == f.NFTABLES else f"{backend}, {label}"
                    yield _row(", ".join(filter(None, (str(size), variant, place))), *texts)


def _commands(figures: Sequence[Figure]) -> Iterator[str]:
    yield from _head("nft", "time, s", "alone, s")
    for name, label in _COMMANDS.items():
        for size in dict.fromkeys(figure.size for figure in figures if figure.name == name):
            for variant in ("", "kubeconfig"):
                found = [_find(figures, "nft", name, size, program, variant) for program in (f.OURS, f.ALONE)]
                if any(found):
                    words = label.replace("in a pod", "with a kubeconfig") if variant else label
                    place = f" at {size}" if size.services else ""
                    yield _row(f"{words}{place}", *(_text(figure, _median) for figure in found))


def _find(
    figures: Iterable[Figure], backend: str, name: str, size: Size, program: str, variant: str = ""
) -> Figure | None:
    wanted = (backend, name, size, variant, program)
    return next((figure for figure in figures if figure.key == wanted), None)


def _text(figure: Figure | None, form: _Form) -> str:
    if figure is None:
        return ""
    return form(figure) if figure.runs else limit_text(figure.over)


def _head(*headings: str) -> Iterator[str]:
    yield _row(*headings)
    yield _row(*["---"] * len(headings))


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Write the page and the picture."""
    report = merged(Path(path).read_bytes() for path in sys.argv[1:])
    PAGE.write_text(filled(PAGE.read_text(), report.figures))
    if picture := draw(report.figures):
        PICTURE.write_text(picture)
    print("\n".join(as_table(report)))


if __name__ == "__main__":
    main()
