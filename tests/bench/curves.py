"""Draw start time and first-packet time over the number of Services, as PNG."""

from collections.abc import Sequence
from pathlib import Path

from tests.bench import figures as f
from tests.bench.figures import Figure
from tests.bench.plan import growth


def draw(figures: Sequence[Figure], folder: Path) -> list[Path]:
    """Draw the curves that have at least two points. Raise ImportError without matplotlib."""
    import matplotlib  # optional dependency of the curves

    matplotlib.use("Agg")
    starts = [figure for figure in figures if figure.name == f.START and figure.size.services]
    usual = {size.endpoints for size in growth([figure.size for figure in starts])}
    starts = [figure for figure in starts if figure.size.endpoints in usual]
    first = [figure for figure in figures if figure.name in (f.FIRST, f.POD)]
    drawn = [
        _draw(starts, "seconds from the start to all rules", folder / "start.png"),
        _draw(first, "microseconds of a TCP connection, median", folder / "first-packet.png"),
    ]
    return [path for path in drawn if path]


def _draw(figures: Sequence[Figure], axis: str, path: Path) -> Path | None:
    from matplotlib import pyplot

    lines: dict[str, dict[int, float]] = {}
    for figure in figures:
        own = ", ".join(filter(None, (figure.program, figure.backend, figure.variant)))
        # Without rules the programs do not differ, so draw one line.
        label = "to a pod, without rules" if figure.name == f.POD else own
        lines.setdefault(label, {})[figure.size.services] = figure.value
    if all(len(points) < 2 for points in lines.values()):
        return None
    canvas, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for label, points in sorted(lines.items()):
        dashed = label.startswith("to a pod")
        axes.plot(
            *zip(*sorted(points.items()), strict=True), marker="o", label=label, ls=":" if dashed else "-"
        )
    axes.set(xlabel="Services", ylabel=axis, ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    canvas.savefig(path, dpi=120)
    pyplot.close(canvas)
    return path
