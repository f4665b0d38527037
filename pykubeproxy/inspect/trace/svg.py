"""The picture of `trace -o svg`: nodes as boxes, packets as bands as wide as their probability."""

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from pykubeproxy.inspect.trace.journey import TracedEnd, TracedWay, shown_node
from pykubeproxy.inspect.trace.report import TraceReport, ends_of_way, on_node
from pykubeproxy.report.text import Block, Heading, Sentence, lines
from pykubeproxy.wording import escape, parted, percent, printable

# The band of all packets.
FULL = 48.0
_MARGIN, _GAP, _PAD, _LINE, _ROW_GAP, _WAY_GAP = 20.0, 40.0, 9.0, 16.0, 10.0, 24.0
# The width of a character; how many of them a line of a node has, one with all steps, and one of an end; and of a title.
_CHARACTER, _NODE, _STEPS, _END, _TITLE = 7.3, 48, 80, 32, 78
# The rows of a way, the rules of a tooltip, and how long one is.
_ROWS, _DETAILS, _DETAIL = 12, 20, 300
_LEGEND = "A band is as wide as its share of new connections."
_STYLE = """
svg { background: #fbfbfd; max-width: 100%; height: auto }
text { font: 12px ui-monospace, monospace; fill: #1c2333 }
.bold { font-weight: 600 }
.cyan { fill: #00637a }
.green { fill: #1b5e20 }
.yellow { fill: #8a4b00 }
.red { fill: #b71c1c }
.dim { fill: #4a5268 }
.ground { fill: #fbfbfd; stroke: #c9ccd6 }
.box { fill: #fff; stroke: #3f51b5 }
.kept { fill: #e6f4ea; stroke: #2e7d32 }
.masqueraded { fill: #fff3dc; stroke: #b26a00 }
.failed { fill: #fdecea; stroke: #c62828 }
.mixed { fill: #eef0fa; stroke: #aab1d6 }
.band { stroke-width: .75; fill: #c5cae9; stroke: #c5cae9 }
.band.kept { fill: #a9d5b3; stroke: #a9d5b3 }
.band.masqueraded { fill: #f3cd8b; stroke: #f3cd8b }
.band.failed { fill: #f1b0ab; stroke: #f1b0ab }
@media (prefers-color-scheme: dark) {
svg { background: #1b1e26 }
text { fill: #e4e6ee }
.cyan { fill: #80deea }
.green { fill: #a5d6a7 }
.yellow { fill: #ffb74d }
.red { fill: #ef9a9a }
.dim { fill: #a8aec0 }
.ground { fill: #1b1e26; stroke: #3a3f4d }
.box { fill: #262a36; stroke: #8c9eff }
.kept { fill: #1d3526; stroke: #81c784 }
.masqueraded { fill: #3d2f16; stroke: #ffb74d }
.failed { fill: #42211f; stroke: #ef9a9a }
.mixed { fill: #2b3040; stroke: #5c6484 }
.band { fill: #3d4674; stroke: #3d4674 }
.band.kept { fill: #2f6b41; stroke: #2f6b41 }
.band.masqueraded { fill: #8a6220; stroke: #8a6220 }
.band.failed { fill: #8c3b37; stroke: #8c3b37 }
}
"""


class _Line(NamedTuple):
    """A line of text and the classes of its style."""

    text: str
    style: str = ""


class _Box(NamedTuple):
    """A box, the share of the packets that get there, and the boxes behind it. `kind` is its class.

    `column` is the number of nodes before it, None for an end.
    """

    kind: str
    lines: Sequence[_Line]
    share: float
    column: int | None = None
    details: Sequence[str] = ()
    behind: Sequence["_Box"] = ()

    @property
    def height(self) -> float:
        behind = sum(box.height + _ROW_GAP for box in self.behind) - _ROW_GAP
        return max(_height(self.lines), behind)

    def all(self) -> Iterator["_Box"]:
        """Yield this box and all behind it."""
        yield self
        for box in self.behind:
            yield from box.all()


class _Columns(NamedTuple):
    """How wide nodes and ends are, and where ends begin."""

    node: float
    end: float
    ends: float

    def sides(self, box: _Box) -> tuple[float, float]:
        """Return where a box begins, and its width."""
        if box.column is None:
            return self.ends, self.end
        return _MARGIN + _GAP + box.column * (self.node + _GAP), self.node


def svg(report: TraceReport, *, wide: bool) -> str:
    """Return a trace as an SVG document that needs nothing else; `wide` shows each rule that the packet meets."""
    starts = [_way(way, wide) for way in report.ways]
    columns = _columns([box for start in starts for box in start.all()])
    width = max(columns.ends + columns.end, _TITLE * _CHARACTER) + _MARGIN
    title = _lines([next(report.blocks(wide=False))], _TITLE)
    parts = list(_box("mixed", title, _MARGIN, _MARGIN, width - 2 * _MARGIN, _height(title)))
    y = _MARGIN + _height(title) + _WAY_GAP
    for way, start in zip(report.ways, starts, strict=True):
        parts += _drawn(start, columns, y)
        y += start.height
        if way.others and way.node is not None:
            also = _lines(list(ends_of_way(way))[-1:], _TITLE)
            parts += _texts(_MARGIN + _GAP, y, also)
            y += _LINE * len(also)
        y += _WAY_GAP
    parts += _texts(_MARGIN, y - _WAY_GAP, [_Line(_LEGEND, "dim")])
    height = y + _LINE
    size = f'viewBox="0 0 {_number(width)} {_number(height)}" width="{_number(width)}" height="{_number(height)}"'
    document = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xml:space="preserve" {size} role="img" aria-labelledby="t d">',
        f'<title id="t">{escape(report.packet)}</title>',
        f'<desc id="d">{escape(report.message)}</desc>',
        f"<style>{_STYLE}</style>",
        f'<rect class="ground" width="{_number(width)}" height="{_number(height)}"/>',
        *parts,
        "</svg>",
    )
    return "".join(f"{line}\n" for line in document)


def _way(way: TracedWay, wide: bool) -> _Box:
    """Return the first node of a way with all that comes behind it."""
    if way.node is None:
        return _Box("mixed", _lines(ends_of_way(way), _NODE), 1.0, 0)
    return _node(way, (way.node,), list(_ends(way.ends)), wide)


def _node(
    way: TracedWay, route: tuple[str, ...], ends: Sequence[tuple[tuple[str, ...], _Box]], wide: bool
) -> _Box:
    """Return a node to which packets get by a route, with the ends of these packets."""
    behind: list[_Box] = []
    onward: dict[str, list[tuple[tuple[str, ...], _Box]]] = {}
    for end_route, end in ends:
        if end_route == route:
            behind.append(end)
        else:
            onward.setdefault(end_route[len(route)], []).append((end_route, end))
    behind += [_node(way, (*route, name), some, wide) for name, some in onward.items()]
    visits = [visit for visit in way.visits if (*visit.route, visit.node) == route]
    title = Heading(f"{shown_node(route[-1])}, {visits[0].role}:")
    return _Box(
        "box",
        _lines([title, *on_node(visits, wide)], _STEPS if wide else _NODE),
        sum(visit.probability for visit in visits),
        len(route) - 1,
        [
            f"{step.table} {step.chain}: {step.rule}"
            for visit in visits
            for step in visit.steps
            if step.matched
        ],
        behind,
    )


def _ends(ends: Sequence[TracedEnd]) -> Iterator[tuple[tuple[str, ...], _Box]]:
    """Yield ends with their routes; of many that are alike the first ones, and a sum of the others."""
    groups: dict[tuple[tuple[str, ...], str], list[TracedEnd]] = {}
    for end in ends:
        groups.setdefault((end.route, _kind(end)), []).append(end)
    limit = max(2, _ROWS // max(len(groups), 1))
    shown = list(groups.items())[: _ROWS if len(groups) <= _ROWS else _ROWS - 1]
    for (route, kind), some in shown:
        single = some if len(some) <= limit else some[: limit - 1]
        for end in single:
            yield route, _end(kind, [end], end.text)
        if others := some[len(single) :]:
            yield route, _end(kind, others, f"{len(others)} more")
    if others := [end for _, some in list(groups.items())[len(shown) :] for end in some]:
        yield others[0].route[:1], _end("mixed", others, f"{len(others)} more, on other ways")


def _end(kind: str, ends: Iterable[TracedEnd], text: str) -> _Box:
    share = sum(end.probability for end in ends)
    return _Box(kind, _lines([Heading(percent(share)), Sentence(text)], _END), share)


def _kind(end: TracedEnd) -> str:
    if not end.good:
        return "failed"
    return "kept" if end.masqueraded_on is None else "masqueraded"


def _columns(boxes: Sequence[_Box]) -> _Columns:
    nodes = [box for box in boxes if box.column is not None]
    ends = [box for box in boxes if box.column is None]
    node = max(map(_width, nodes))
    first = _MARGIN + _GAP + (1 + max(box.column or 0 for box in nodes)) * (node + _GAP)
    return _Columns(node, max(map(_width, ends)), first) if ends else _Columns(node, -_GAP, first)


def _width(box: _Box) -> float:
    return max(_length(line.text) for line in box.lines) * _CHARACTER + 2 * _PAD


def _drawn(start: _Box, columns: _Columns, y: float) -> list[str]:
    """Draw a way: bands, then boxes."""
    bands: list[str] = []
    boxes: list[str] = []

    def draw(box: _Box, left: float, top: float, height: float) -> None:
        x, width = columns.sides(box)
        size = box.share * FULL
        kind = f"band {box.kind}" if box.column is None else "band"
        bands.append(_rect(kind, left, top + height / 2 - size / 2, x - left, size, 0))
        boxes.extend(_box(box.kind, box.lines, x, top, width, height, box.details))
        behind = sum(one.height + _ROW_GAP for one in box.behind) - _ROW_GAP
        top += (height - behind) / 2
        for one in box.behind:
            draw(one, x + width, top, one.height)
            top += one.height + _ROW_GAP

    draw(start, _MARGIN, y, start.height)
    return [*bands, *boxes]


def _rect(style: str, x: float, y: float, width: float, height: float, radius: float = 6) -> str:
    sizes = f'x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" height="{_number(height)}"'
    return f'<rect class="{style}" {sizes}' + (f' rx="{_number(radius)}"/>' if radius else "/>")


def _box(
    style: str,
    lines: Sequence[_Line],
    x: float,
    y: float,
    width: float,
    height: float,
    details: Sequence[str] = (),
) -> Iterator[str]:
    """Draw a box; the rules in full are its tooltip."""
    yield "<g>"
    if details:
        texts = [escape(text[:_DETAIL]) for text in details[:_DETAILS]]
        yield f"<title>{chr(10).join(texts)}</title>"
    yield _rect(style, x, y, width, height)
    yield from _texts(x + _PAD, y + (height - _height(lines)) / 2, lines)
    yield "</g>"


def _texts(x: float, y: float, lines: Iterable[_Line]) -> Iterator[str]:
    for number, (text, style) in enumerate(lines, 1):
        named = f' class="{style}"' if style else ""
        yield f'<text{named} x="{_number(x)}" y="{_number(y + 4 + number * _LINE)}">{escape(text)}</text>'


def _height(lines: Sequence[_Line]) -> float:
    return 2 * _PAD + len(lines) * _LINE - 2


def _lines(blocks: Iterable[Block], width: int) -> list[_Line]:
    """Return the lines of blocks; those with longer words are cut."""
    found = (parted(line) for line in lines(blocks, width))
    return [_Line(_cut(printable(text), width), style) for text, style in found]


def _cut(text: str, columns: int) -> str:
    if _length(text) <= columns:
        return text
    fitting = sum(1 for length in accumulate(map(_length, text)) if length < columns)
    return f"{text[:fitting].rstrip()}…"


def _length(text: str) -> int:
    """Return how many columns a text takes; East Asian characters take two."""
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)


def _number(value: float) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".")
