"""Write the figures into docs/performance.md: `python -m tests.bench.page build/bench/bench.json`.

Each table of the page stands between `<!-- figures: NAME -->` and `<!-- end of figures -->`.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tests.bench import figures as f
from tests.bench.figures import Figure, show
from tests.bench.targets import judge
from tests.bench.workload import Size

PAGE = Path(__file__).parents[2] / "docs/performance.md"
_PART = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
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


def as_markdown(figures: Sequence[Figure]) -> str:
    """Return all tables."""
    return "\n\n".join(f"{name}:\n\n" + "\n".join(lines) for name, lines in tables(figures).items()) + "\n"


def filled(page: str, figures: Sequence[Figure]) -> str:
    """Return the page with the tables between its markers replaced. Raise KeyError for an unknown name."""
    made = tables(figures)
    return _PART.sub(lambda match: "\n".join((match[1], *made[match[2]], "", match[3])), page)


def read(report: bytes) -> list[Figure]:
    """Return the figures of a bench.json."""
    found: list[dict[str, Any]] = msgspec.json.decode(report)["figures"]
    return [
        Figure(
            **{name: it[name] for name in Figure.__struct_fields__}
            | {"size": Size.read(it["size"]), "runs": tuple(it["runs"])}
        )
        for it in found
    ]


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
        if any(cells):
            yield _row(label, *cells)


def _starts(figures: Sequence[Figure]) -> Iterator[str]:
    names = (f.START, f.START_CPU, f.MEMORY, f.PEAK)
    headings = ("start", "CPU", "memory", "peak")
    yield _row("services", *(f"{backend}: {it}" for backend in _BACKENDS for it in headings))
    yield _row("---", *["---"] * 8)
    for size in (_NONE, *_SIZES):
        label = str(size) if size.services else "none"
        yield _row(label, *(_cell(figures, it, f.OURS, name, size, "") for it in _BACKENDS for name in names))


def _changes(figures: Sequence[Figure]) -> Iterator[str]:
    headings = ("one endpoint changed", "iptables alone", "CPU of 1000 changes", "CPU of an idle minute")
    columns = ((f.CHANGE, f.OURS), (f.CHANGE, f.ALONE), (f.CHURN, f.OURS), (f.IDLE, f.OURS))
    yield _row("backend and services", *headings)
    yield _row("---", *["---"] * 4)
    for size in sorted({it.size for it in figures if it.name == f.CHANGE}):
        for backend in _BACKENDS:
            cells = (_cell(figures, backend, program, name, size, "") for name, program in columns)
            yield _row(f"{backend}, {size}", *cells)


def _commands(figures: Sequence[Figure]) -> Iterator[str]:
    verdicts = judge(figures)
    yield _row("nft", "time", "alone", "target", "met")
    yield _row("---", *["---"] * 4)
    for label, name, size, variant in _COMMANDS:
        targets = [
            it
            for it in verdicts
            if (it.figure.backend, it.figure.name, it.figure.size, it.figure.variant)
            == ("nft", name, size, variant)
        ]
        target = targets[0].target.text("s") if targets else ""
        met = {True: "yes", False: "no", None: ""}[targets[0].reached if targets else None]
        yield _row(
            label, *(_cell(figures, "nft", it, name, size, variant) for it in (f.OURS, f.ALONE)), target, met
        )


def _first(figures: Sequence[Figure]) -> Iterator[str]:
    modes = [(backend, mode) for backend in _BACKENDS for mode in ("flat", "tree")]
    yield _row("services", *(f"{backend}, {mode}" for backend, mode in modes), "to a pod", "without rules")
    yield _row("---", *["---"] * 6)
    for size in sorted({it.size for it in figures if it.name == f.FIRST}):
        cells = [_cell(figures, backend, f.OURS, f.FIRST, size, mode) for backend, mode in modes]
        pods = [_cell(figures, "nft", f.OURS, name, size, "tree") for name in (f.PAST, f.POD)]
        yield _row(str(size.services), *cells, *pods)


def _cell(figures: Sequence[Figure], backend: str, program: str, name: str, size: Size, variant: str) -> str:
    """Return a figure as text; of kube-proxy the better mode; "" if it was not measured."""
    found = [
        it
        for it in figures
        if (it.backend, it.name, it.size, it.program) == (backend, name, size, program)
        and (it.variant == variant or program == f.PEER)
    ]
    return min((show(it.value, it.unit) for it in sorted(found, key=lambda it: it.value)[:1]), default="")


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    figures = read(Path(sys.argv[1]).read_bytes())
    PAGE.write_text(filled(PAGE.read_text(), figures))


if __name__ == "__main__":
    main()
