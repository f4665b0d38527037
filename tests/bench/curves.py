"""Draw start time, memory and first-packet time over the number of Services, as PNG."""

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.bench import figures as f
from tests.bench.figures import Figure

#: The points of each line, by its label.
Lines = dict[str, dict[int, float]]


def draw(figures: Sequence[Figure], folder: Path) -> list[Path]:
    """Draw the curves that have at least two points. Without matplotlib, print how to install it."""
    if not importlib.util.find_spec("matplotlib"):
        print("no curves: matplotlib is not installed; run pip install --group bench", file=sys.stderr)
        return []
    starts = [it for it in figures if it.size.endpoints == f.GROWTH_FROM.endpoints and not it.variant]
    curves = {
        folder / "start.png": ("seconds from the start to all rules", _lines(starts, f.START)),
        folder / "memory.png": ("MB after a start", _lines(starts, f.MEMORY)),
        folder / "first-packet.png": (
            "microseconds of a TCP connection, median",
            _lines(figures, f.FIRST, f.POD),
        ),
    }
    drawn = [path for path, (_, lines) in curves.items() if any(len(it) > 1 for it in lines.values())]
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
