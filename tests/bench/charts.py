"""A bar chart as SVG with a background of its own, legible in both colour schemes of the site and on a phone."""

import math
from collections.abc import Iterator, Mapping
from html import escape
from typing import NamedTuple

_WIDTH, _LEFT, _RIGHT, _TOP, _BAR, _HEADING = 640, 186, 548, 62, 18, 30
_STYLE = (
    "text{font:15px system-ui,sans-serif;fill:#1c2333}.small{font-size:13px;fill:#4a5268}.title{font-weight:600}"
    ".grid{stroke:#dcdfe6}"
)


class Bar(NamedTuple):
    """A value with its text and colour; `over` if it is a limit that the value is above."""

    value: float
    text: str
    colour: str
    over: bool = False


def chart(title: str, unit: str, groups: Mapping[str, Mapping[str, Bar]]) -> str:
    """Return a chart with a logarithmic axis: bars by label, in groups."""
    values = [bar.value for bars in groups.values() for bar in bars.values()]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    shapes, y = [], _TOP
    for name, bars in groups.items():
        shapes.append(f'<text class="small title" x="16" y="{y + 14}">{escape(name)}</text>')
        y += _HEADING - 8
        for label, bar in bars.items():
            end = _LEFT + (_RIGHT - _LEFT) * (math.log10(bar.value) - low) / max(high - low, 1)
            shapes += _bar(label, bar, y, end)
            y += _BAR
        y += 8
    grid = "".join(_grid(range(low, max(high, low + 1) + 1), unit, y))
    frame = (
        f'<rect x="1" y="1" width="{_WIDTH - 2}" height="{y + 6}" rx="10" fill="#fbfbfd" stroke="#c9ccd6"/>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y + 8}" role="img">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style>\n{frame}\n"
        f'<text class="title" x="16" y="26">{escape(title)}</text>\n{grid}' + "\n".join(shapes) + "\n</svg>\n"
    )


def _grid(powers: range, unit: str, bottom: int) -> Iterator[str]:
    for power in powers:
        x = _LEFT + (_RIGHT - _LEFT) * (power - powers[0]) / (len(powers) - 1)
        yield f'<path class="grid" d="M{x:.1f} {_TOP}V{bottom - 6}"/>'
        yield f'<text class="small" text-anchor="middle" x="{x:.1f}" y="{_TOP - 9}">{10.0**power:g} {unit}</text>\n'


def _bar(label: str, bar: Bar, y: int, end: float) -> Iterator[str]:
    yield f'<text class="small" text-anchor="end" x="{_LEFT - 6}" y="{y + 12}">{escape(label)}</text>'
    dashed = f' stroke="{bar.colour}" stroke-dasharray="4 3" fill-opacity="0.25"' if bar.over else ""
    width = max(end - _LEFT, 2)
    yield f'<rect x="{_LEFT}" y="{y + 2}" width="{width:.1f}" height="{_BAR - 5}" fill="{bar.colour}"{dashed}/>'
    yield f'<text class="small" x="{_LEFT + width + 6:.1f}" y="{y + 12}">{escape(bar.text)}</text>'
