"""The building blocks of text for people: headings, sentences, tables and nested sections.

A report says what its text is made of; `lines` wraps, aligns, truncates and colors it.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Literal, NamedTuple

from pykubeproxy.wording import TIE, WIDTH, SafeText, one_line, styled, text_of, untied, wrapped

# What a text stands for; `_STYLES` has its colors.
Tone = Literal["", "title", "part", "good", "warning", "bad", "aside"]

_INDENT = 2
_GAP = "  "
# A cell of a table keeps at least as many columns, however narrow the terminal is.
_LEAST_CELL = 12


class _Style(NamedTuple):
    color: str = ""
    bold: bool = False
    dim: bool = False


_STYLES: dict[Tone, _Style] = {
    "": _Style(),
    "title": _Style(bold=True),
    "part": _Style("cyan"),
    "good": _Style("green"),
    "warning": _Style("yellow"),
    "bad": _Style("red"),
    "aside": _Style(dim=True),
}


class Heading(NamedTuple):
    """A line above others; it is wrapped like a sentence. `rest` follows on the same line without its style."""

    text: str
    tone: Tone = "title"
    rest: str = ""


class Sentence(NamedTuple):
    """A sentence or a phrase, wrapped between words. `start` precedes its first line, such as "Note: "."""

    text: str
    tone: Tone = ""
    start: str = ""


class Verbatim(NamedTuple):
    """Text that is not wrapped, such as a rule of iptables or a command to copy."""

    text: str
    tone: Tone = ""


class Cell(NamedTuple):
    """A cell of a table with a tone of its own.

    `hint` is shown in HTML to a reader who points at the cell. `then` is a second paragraph, in the last column only.
    """

    text: str
    tone: Tone = ""
    hint: str = ""
    then: str = ""


class Row(NamedTuple):
    """A row of a table, with blocks below it."""

    cells: Sequence[str | Cell]
    tone: Tone = ""
    below: Sequence["Block"] = ()


class Table(NamedTuple):
    """Rows of cells in columns as wide as needed. The last column is wrapped; others are never broken.

    - `header`: the titles of the columns, in capitals; none without a line for them
    - `right`: the numbers of the columns that are aligned right, from 0
    """

    rows: Sequence[Row]
    header: Sequence[str] = ()
    right: frozenset[int] = frozenset()


class Section(NamedTuple):
    """Blocks indented below a heading: sections in sections are a tree."""

    heading: Heading | Sentence | Verbatim
    blocks: Sequence["Block"] = ()


class Gap(NamedTuple):
    """An empty line. Several in a row, and those at either end of a report, count as one or none."""


Block = Heading | Sentence | Verbatim | Table | Section | Gap
GAP = Gap()


def text(blocks: Iterable[Block], width: int = WIDTH) -> SafeText:
    """Return blocks as text that is safe to print, in lines of at most `width` columns but for longer words."""
    return text_of(lines(blocks, width))


def lines(blocks: Iterable[Block], width: int = WIDTH) -> Iterator[str]:
    """Yield the lines of blocks, with styles as `wording.text_of` knows them."""
    empty, begun = False, False
    for line in _lines(blocks, width, 0):
        if line:
            if empty and begun:
                yield ""
            yield line
            begun = True
        empty = not line


def _lines(blocks: Iterable[Block], width: int, indent: int) -> Iterator[str]:
    margin = " " * indent
    for block in blocks:
        match block:
            case Gap():
                yield ""
            case Heading(text, tone, rest):
                yield from _heading(f"{text}", tone, rest, width, margin)
            case Sentence(text, tone, start):
                further = margin + " " * (len(start) or _INDENT)
                for line in wrapped(text, margin + start, further, width):
                    yield _toned(line, tone)
            case Verbatim(text, tone):
                yield margin + _toned(text, tone)
            case Section(heading, inner):
                yield from _lines([heading], width, indent)
                yield from _lines(inner, width, indent + _INDENT)
            case Table():
                yield from _table(block, width, indent)


def _heading(text: str, tone: Tone, rest: str, width: int, margin: str) -> Iterator[str]:
    found = wrapped(text + rest, margin, margin + " " * _INDENT, width)
    left = len(text)
    for line in found:
        bare = line.lstrip()
        start = line[: len(line) - len(bare)]
        own = bare[: max(left, 0)]
        yield start + _toned(own, tone) + bare[len(own) :]
        left -= len(bare) + 1


def _table(table: Table, width: int, indent: int) -> Iterator[str]:
    margin = " " * indent
    header = [Row(table.header)] if table.header else []
    rows = [*header, *table.rows]
    texts = [[_clean(cell) for cell in row.cells] for row in rows]
    widths = [max(map(len, column)) for column in zip_longest(*texts, fillvalue="")]
    before = indent + sum(column + len(_GAP) for column in widths[:-1])
    last = max(width - before, _LEAST_CELL)
    for row, cells in zip(rows, texts, strict=True):
        yield from _row(row, cells, widths, last, table.right, margin)
        yield from _lines(row.below, width, indent + _INDENT)


def _row(
    row: Row, cells: Sequence[str], widths: Sequence[int], last: int, right: frozenset[int], margin: str
) -> Iterator[str]:
    parts: list[str] = []
    more: list[str] = []
    for number, (cell, columns) in enumerate(zip(cells, widths, strict=False)):
        is_last = number == len(widths) - 1
        shown = untied(cell)
        if is_last and number not in right:
            shown, *more = [*wrapped(cell, width=last), *wrapped(_then(row, number), width=last)] or [""]
        padded = f"{shown:>{columns}}" if number in right else shown if is_last else f"{shown:<{columns}}"
        parts.append(_toned(padded, _tone(row, number)))
    yield (margin + _GAP.join(parts)).rstrip()
    before = margin + " " * sum(column + len(_GAP) for column in widths[:-1])
    for line in more:
        yield before + _toned(line, _tone(row, len(widths) - 1))


def _then(row: Row, number: int) -> str:
    cell = row.cells[number]
    return cell.then if isinstance(cell, Cell) else ""


def _tone(row: Row, number: int) -> Tone:
    cell = row.cells[number] if number < len(row.cells) else ""
    return (cell.tone if isinstance(cell, Cell) else "") or row.tone


def _clean(cell: str | Cell) -> str:
    text = cell.text if isinstance(cell, Cell) else cell
    return one_line(text) if not text.replace(TIE, " ").isprintable() else text


def _toned(text: str, tone: Tone) -> str:
    style = _STYLES[tone]
    if not tone or not text.strip():
        return text
    bare = text.lstrip()
    return text[: len(text) - len(bare)] + styled(bare, style.color, bold=style.bold, dim=style.dim)
