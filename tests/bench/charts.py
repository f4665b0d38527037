"""Line charts as SVG with a background of their own, legible in both colour schemes of the site and on a phone."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

_WIDTH, _HEIGHT, _TOP, _BOTTOM, _LEFT, _PANEL, _BETWEEN = 640, 340, 84, 290, 48, 254, 54
# A program has the same colour in all charts.
_COLOURS = {"pykubeproxy": "#3f51b5", "kube-proxy": "#c2410c"}
_OTHER = "#6b7280"
_STYLE = (
    "text{font:15px system-ui,sans-serif;fill:#1c2333}.small{font-size:13px;fill:#4a5268}.title{font-weight:600}"
    ".grid{stroke:#dcdfe6}.axis{stroke:#8a90a0}.line{fill:none;stroke-width:2.5;stroke-linejoin:round}"
)
# A value above this multiple of the highest one of pykubeproxy is not to scale: the line ends with its number.
_HIGHEST = 2.5

#: The points of each line by its label: the program, then a variant.
Lines = Mapping[str, Mapping[int, float]]


class Scale(NamedTuple):
    """The values at both ends of an axis, and where they are in the picture."""

    highest: float
    start: float
    end: float

    def at(self, value: float) -> float:
        return self.start + (self.end - self.start) * value / self.highest

    def ticks(self) -> Iterator[float]:
        """Yield zero and up to four round numbers."""
        power = 10 ** math.floor(math.log10(self.highest / 2))
        step = next(power * factor for factor in (1, 2, 5, 10) if self.highest / (power * factor) <= 4)
        yield from (step * number for number in range(math.floor(self.highest / step) + 1))


def chart(title: str, unit: str, panels: Mapping[str, Lines]) -> str:
    """Return a chart of two panels with common axes: values by number of Services."""
    labels = list(dict.fromkeys(label for lines in panels.values() for label in lines))
    points = [
        (label, *point) for lines in panels.values() for label in lines for point in lines[label].items()
    ]
    highest = max(value for *_, value in points)
    ours = max(value for label, _, value in points if label.startswith("pykubeproxy"))
    top = 1.1 * (highest if highest <= _HIGHEST * ours else ours)
    most = max(services for _, services, _ in points)
    shapes = [
        f'<rect x="1" y="1" width="{_WIDTH - 2}" height="{_HEIGHT - 2}" rx="10" fill="#fbfbfd" stroke="#c9ccd6"/>',
        f'<text class="title" x="16" y="26">{escape(title)}</text>',
        *_legend(labels),
    ]
    for number, (name, lines) in enumerate(panels.items()):
        left = _LEFT + number * (_PANEL + _BETWEEN)
        across, up = Scale(most, left, left + _PANEL), Scale(top, _BOTTOM, _TOP)
        shapes += _axes(name, unit, across, up)
        for label, line in lines.items():
            shapes += _line(label, unit, [*line.items()], across, up)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style>\n" + "\n".join(shapes) + "\n</svg>\n"
    )


def _legend(labels: Iterable[str]) -> Iterator[str]:
    left = 16.0
    for label in labels:
        yield f'<path class="line" {_stroke(label)} d="M{left:g} 46h24"/>'
        yield f'<text class="small" x="{left + 30:g}" y="50.5">{escape(label)}</text>'
        left += 52 + 7 * len(label)


def _axes(name: str, unit: str, across: Scale, up: Scale) -> Iterator[str]:
    for value in up.ticks():
        y = up.at(value)
        yield f'<path class="grid" d="M{across.start:g} {y:.1f}H{across.end:g}"/>'
        yield f'<text class="small" text-anchor="end" x="{across.start - 6:g}" y="{y + 4.5:.1f}">{value:g}</text>'
    for value in across.ticks():
        x = across.at(value)
        yield f'<text class="small" text-anchor="middle" x="{x:.1f}" y="{_BOTTOM + 19}">{value:,g}</text>'
    yield f'<path class="axis" d="M{across.start:g} {_BOTTOM}H{across.end:g}"/>'
    yield f'<text class="small" x="{across.start:g}" y="{_TOP - 9}"><tspan class="title">{name}</tspan>, {unit}</text>'
    yield f'<text class="small" text-anchor="end" x="{across.end:g}" y="{_BOTTOM + 38}">Services</text>'


def _line(
    label: str, unit: str, points: Sequence[tuple[int, float]], across: Scale, up: Scale
) -> Iterator[str]:
    """Yield a line; where a value is too high, up to the top, and the number."""
    drawn: list[str] = []
    for number, (services, value) in enumerate(points):
        x, y = across.at(services), up.at(value)
        if value > up.highest:
            before, lower = points[number - 1] if number else (services, value)
            share = (up.highest - lower) / (value - lower) if number else 1
            x = across.at(before + (services - before) * share)
            drawn.append(f"{x:.1f} {up.end:.1f}")
            note = f"{value:g} {unit} at {services:,}"
            yield f'<text class="small" x="{x + 6:.1f}" y="{up.end + 22:.1f}">{note}</text>'
            break
        drawn.append(f"{x:.1f} {y:.1f}")
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{_colour(label)}"/>'
    yield f'<path class="line" {_stroke(label)} d="M{"L".join(drawn)}"/>'


def _colour(label: str) -> str:
    return _COLOURS.get(label.partition(",")[0], _OTHER)


def _stroke(label: str) -> str:
    dashed = ' stroke-dasharray="6 4"' if label.endswith(", flat") else ""
    return f'stroke="{_colour(label)}"{dashed}'
