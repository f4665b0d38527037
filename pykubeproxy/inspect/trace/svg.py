"""The picture of `pykubeproxy trace -o svg`: chains as boxes, packets as bands as wide as their probability."""

import unicodedata
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple

from pykubeproxy.inspect.packets.walk import NodeTrace
from pykubeproxy.inspect.trace.picture import Box, EndKind, Picture, PictureGroup, picture
from pykubeproxy.wording import escape, printable

# The band of all packets; its left edge; the radius of its bends.
FULL, _BAND, _RADIUS = 48.0, 40.0, 8.0
_MARGIN, _GAP, _PAD, _LINE = 20, 24, 9, 16
_CHOICE_WIDTH, _DECISION_WIDTH, _WIDE_DECISION, _END_WIDTH, _LEAST_WIDTH = 210, 184, 300, 200, 720
_ROW_HEIGHT, _ROW_GAP, _GROUP_GAP = 64, 10, 16
# Estimated widths of characters: monospace; narrow, other, and broad ones of the usual proportional fonts; East Asian.
_MONO, _NARROW, _OTHER, _BROAD, _EAST = 7.3, 4.2, 7.4, 9, 12.5
_TITLE = 1.35  # a title's size relative to other text
# The lines of a phrase, and how many rules a tooltip has, and how long.
_PHRASE, _DETAILS, _DETAIL = 3, 8, 300
_LEGEND = "A band is as wide as its share of new connections."
_STYLE = """
svg { background: #fbfbfd; max-width: 100%; height: auto }
text { font: 12px system-ui, sans-serif; fill: #1c2333 }
.title { font-size: 15px; font-weight: 600 }
.chain { font-family: ui-monospace, monospace }
.strong { font-weight: 600 }
.soft { fill: #4a5268 }
.mark { fill: #8a4b00 }
.ground { fill: #fbfbfd; stroke: #c9ccd6 }
.box { fill: #fff; stroke: #3f51b5 }
.kept { fill: #e6f4ea; stroke: #2e7d32 }
.masqueraded { fill: #fff3dc; stroke: #b26a00 }
.rejected { fill: #fdecea; stroke: #c62828 }
.mixed { fill: #eef0fa; stroke: #aab1d6 }
.band { stroke-width: .75; fill: #c5cae9; stroke: #c5cae9 }
.band.kept { fill: #a9d5b3; stroke: #a9d5b3 }
.band.masqueraded { fill: #f3cd8b; stroke: #f3cd8b }
.band.rejected { fill: #f1b0ab; stroke: #f1b0ab }
@media (prefers-color-scheme: dark) {
svg { background: #1b1e26 }
text { fill: #e4e6ee }
.soft { fill: #a8aec0 }
.mark { fill: #ffb74d }
.ground { fill: #1b1e26; stroke: #3a3f4d }
.box { fill: #262a36; stroke: #8c9eff }
.kept { fill: #1d3526; stroke: #81c784 }
.masqueraded { fill: #3d2f16; stroke: #ffb74d }
.rejected { fill: #42211f; stroke: #ef9a9a }
.mixed { fill: #2b3040; stroke: #5c6484 }
.band { fill: #3d4674; stroke: #3d4674 }
.band.kept { fill: #2f6b41; stroke: #2f6b41 }
.band.masqueraded { fill: #8a6220; stroke: #8a6220 }
.band.rejected { fill: #8c3b37; stroke: #8c3b37 }
}
"""


class _Columns(NamedTuple):
    """Where the boxes of the rows begin, and how wide decisions and the picture are."""

    choice: float
    decisions: float
    decision_width: float
    end: float
    width: float

    def decision(self, number: int) -> float:
        return self.decisions + number * (self.decision_width + _GAP)


def svg(trace: NodeTrace) -> str:
    """Return a trace as an SVG document that needs nothing else; equal traces give equal text."""
    drawn = picture(trace)
    columns = _columns(drawn.groups)
    trunk, bottom = _trunk(drawn, columns.width)
    rows, end = _rows(drawn.groups, columns, bottom)
    width, height = _number(columns.width), _number(end + _MARGIN)
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    lines = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="t d">',
        f'<title id="t">{escape(drawn.title)}</title>',
        f'<desc id="d">{escape(_description(drawn))}</desc>',
        f"<style>{_STYLE}</style>",
        f'<rect class="ground" width="{width}" height="{height}"/>',
        *trunk,
        *rows,
        "</svg>",
    )
    return "".join(f"{line}\n" for line in lines)


def _description(drawn: Picture) -> str:
    boxes = (
        box for group in drawn.groups for row in group.rows for box in (*group.decisions, row.end) if box
    )
    ends = dict.fromkeys(", ".join(line.text for line in box.lines)[:_DETAIL] for box in boxes)
    return f"The packet {drawn.result}. The last boxes: {'; '.join(ends)}."


def _columns(groups: Iterable[PictureGroup]) -> _Columns:
    groups = list(groups)
    rows = [row for group in groups for row in group.rows]
    choice = _BAND + FULL + _RADIUS + _GAP
    decisions = choice + (_CHOICE_WIDTH + _GAP if any(row.choice for row in rows) else 0)
    # A group whose packets arrive nowhere needs no column for an end.
    ends = [group for group in groups if any(row.end for row in group.rows)]
    number = max(len(group.decisions) for group in groups)
    tail = (_END_WIDTH if ends else -_GAP) + _MARGIN
    free = _LEAST_WIDTH - decisions - tail - number * _GAP
    decision_width = max(_DECISION_WIDTH, min(free / max(number, 1), _WIDE_DECISION))
    end = decisions + number * (decision_width + _GAP)
    return _Columns(choice, decisions, decision_width, end, max(end + tail, _LEAST_WIDTH))


def _trunk(drawn: Picture, width: float) -> tuple[list[str], float]:
    """Draw the packet and the chains that all packets pass; return where the last box ends."""
    inner = width - 2 * _MARGIN
    y: float = _MARGIN
    room = inner - 2 * _PAD
    head = [
        *_texts(_MARGIN + _PAD, y, [("title", _cut(drawn.title, room / _TITLE))]),
        *_texts(_MARGIN + _PAD, y + 20, [("", _cut(drawn.result, room))]),
    ]
    parts = [_rect("mixed", _MARGIN, y, inner, 50), *head]
    y += 50
    for box in drawn.trunk:
        height = _height(len(box.lines))
        parts.append(_straight("", _BAND, y, FULL, _GAP))
        y += _GAP
        parts += _box("box", box, _MARGIN, y, inner, height)
        y += height
    return parts, y


def _rows(groups: Iterable[PictureGroup], columns: _Columns, top: float) -> tuple[list[str], float]:
    """Draw bands that bend off to the right, the first row outermost; return where the last box ends."""
    bands: list[str] = []
    boxes: list[str] = []
    right, y = _BAND + FULL, top + _GAP
    for group in groups:
        decisions = [_wrapped(decision, columns.decision_width) for decision in group.decisions]
        rows_height = len(group.rows) * (_ROW_HEIGHT + _ROW_GAP) - _ROW_GAP
        height = max(rows_height, *(_height(len(decision.lines)) for decision in decisions), 0)
        kind = group.kind.value
        row_y = y + (height - rows_height) / 2
        for row in group.rows:
            size = row.probability * FULL
            center = row_y + _ROW_HEIGHT / 2
            end = columns.end if row.end else columns.decision(len(decisions) - 1)
            bands.append(_bend(kind, right, top, size, center))
            bands.append(_straight(kind, right + _RADIUS, center - size / 2, end - right - _RADIUS, size))
            right -= size
            if row.choice:
                boxes += _centered("box", row.choice, columns.choice, center, _CHOICE_WIDTH)
            if row.end:
                boxes += _centered(kind, row.end, columns.end, center, _END_WIDTH)
            row_y += _ROW_HEIGHT + _ROW_GAP
        for number, decision in enumerate(decisions):
            last = group.kind is EndKind.REJECTED and number == len(decisions) - 1
            x = columns.decision(number)
            boxes += _box(kind if last else "box", decision, x, y, columns.decision_width, height)
        y += height + _GROUP_GAP
    legend = _texts(columns.choice, y - _LINE / 2, [("soft", _LEGEND)]) if len(bands) > 2 else ()
    return [*bands, *boxes, *legend], y + (_LINE if len(bands) > 2 else -_GROUP_GAP)


def _bend(kind: str, right: float, top: float, size: float, center: float) -> str:
    """Draw a band from above to the right, of the same width all the way."""
    left, upper, lower = right - size, center - size / 2, center + size / 2
    inner, outer, end = _RADIUS, _RADIUS + size, right + _RADIUS
    path = " ".join(
        (
            f"M{_number(left)} {_number(top)}V{_number(lower - outer)}",
            f"A{_number(outer)} {_number(outer)} 0 0 0 {_number(end)} {_number(lower)}",
            f"V{_number(upper)}A{_number(inner)} {_number(inner)} 0 0 1 {_number(right)} {_number(upper - inner)}",
            f"V{_number(top)}Z",
        )
    )
    return f'<path class="band {kind}" d="{path}"/>'


def _straight(kind: str, x: float, y: float, width: float, height: float) -> str:
    return _rect(f"band {kind}".strip(), x, y, width, height, 0)


def _rect(style: str, x: float, y: float, width: float, height: float, radius: float = 6) -> str:
    sizes = f'x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" height="{_number(height)}"'
    return f'<rect class="{style}" {sizes}' + (f' rx="{_number(radius)}"/>' if radius else "/>")


def _centered(style: str, box: Box, x: float, center: float, width: float) -> Iterator[str]:
    height = _height(len(box.lines))
    return _box(style, box, x, center - height / 2, width, height)


def _box(style: str, box: Box, x: float, y: float, width: float, height: float) -> Iterator[str]:
    """Draw a box; the rules in full are its tooltip."""
    yield "<g>"
    if box.details:
        details = [text[:_DETAIL] for text in box.details[:_DETAILS]]
        yield f"<title>{chr(10).join(map(escape, details))}</title>"
    yield _rect(style, x, y, width, height)
    top = y + (height - _height(len(box.lines))) / 2
    room = width - 2 * _PAD
    cut = ((line.style, _cut(line.text, room, line.style == "chain")) for line in box.lines)
    yield from _texts(x + _PAD, top, cut)
    yield "</g>"


def _texts(x: float, y: float, lines: Iterable[tuple[str, str]]) -> Iterator[str]:
    for number, (style, text) in enumerate(lines, 1):
        named = f' class="{style}"' if style else ""
        yield f'<text{named} x="{_number(x)}" y="{_number(y + 4 + number * _LINE)}">{escape(text)}</text>'


def _height(lines: int) -> float:
    return 2.0 * _PAD + lines * _LINE - 2


def _wrapped(box: Box, width: float) -> Box:
    """Break the last line, which may be a phrase, into at most three."""
    *known, last = box.lines
    lines: list[str] = []
    for word in last.text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and _width(longer) <= width - 2 * _PAD:
            lines[-1] = longer
        else:
            lines.append(word)
    if len(lines) > _PHRASE:
        lines[_PHRASE - 1 :] = [" ".join(lines[_PHRASE - 1 :])]
    return box._replace(lines=(*known, *(last._replace(text=text) for text in lines)))


def _cut(text: str, room: float, monospace: bool = False) -> str:
    """Shorten a text to a width."""
    text = printable(text)
    if _width(text, monospace) <= room:
        return text
    widths = accumulate((_width(letter, monospace) for letter in text), initial=_OTHER)
    return f"{text[: sum(1 for width in widths if width <= room) - 1].rstrip()}…"


def _width(text: str, monospace: bool = False) -> float:
    return sum(_letter(letter, monospace) for letter in text)


def _letter(letter: str, monospace: bool) -> float:
    if unicodedata.east_asian_width(letter) in "WF":
        return _EAST
    if monospace:
        return _MONO
    if letter in " .,:;'|!()[]/fijlrtI-":
        return _NARROW
    return _BROAD if letter.isupper() or letter in "mw%@" else _OTHER


def _number(value: float) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".")
