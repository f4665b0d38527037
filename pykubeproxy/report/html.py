"""Blocks as HTML, with the classes of `STYLE`. All text is escaped."""

from collections.abc import Iterable, Iterator

from pykubeproxy.report.text import Block, Cell, Gap, Heading, Row, Section, Sentence, Table, Tone, Verbatim
from pykubeproxy.wording import escape, untied

# What the blocks look like; the page defines the colors `--text`, `--soft`, `--line`, `--good`, `--warning` and `--bad`.
# On a phone, a row of a table becomes lines of text, in which cells have the titles of their columns.
STYLE = """
h2 { font-size: 1.05rem; font-weight: 600; margin: 2.25rem 0 .5rem; }
p { margin: .25rem 0; }
.aside, small, th { color: var(--soft); }
.good { color: var(--good); } .warning { color: var(--warning); } .bad { color: var(--bad); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th { font-weight: 400; text-align: left; white-space: nowrap; }
th, td { padding: .2rem 2.5rem .2rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
.number { text-align: right; white-space: nowrap; }
@media (max-width: 36rem) {
  .blocks, .blocks tbody { display: block; }
  .blocks tr { display: flex; flex-wrap: wrap; column-gap: .75rem; padding: .3rem 0;
    border-bottom: 1px solid var(--line); }
  .blocks tr.header { display: none; }
  .blocks td { border: 0; padding: 0; min-width: 0; }
  .blocks td[colspan] { flex-basis: 100%; }
  .blocks [data-of]::before { content: attr(data-of) " "; color: var(--soft); }
}
"""


def html(blocks: Iterable[Block]) -> Iterator[str]:
    """Yield the lines of blocks as HTML."""
    for block in blocks:
        match block:
            case Gap():
                pass
            case Heading(text, tone, rest):
                yield f"<h2{_class(tone)}>{_escaped(text)}</h2>"
                if rest.strip():
                    yield f"<p>{_escaped(rest.strip())}</p>"
            case Sentence(text, tone, start):
                yield f"<p{_class(tone)}>{_escaped(start + text)}</p>"
            case Verbatim(text, tone):
                yield f"<pre{_class(tone)}>{_escaped(text)}</pre>"
            case Section(heading, inner):
                yield f"<h2{_class(heading.tone)}>{_escaped(heading.text.removesuffix(':'))}</h2>"
                yield from html(inner)
            case Table():
                yield from _table(block)


def _table(table: Table) -> Iterator[str]:
    yield '<table class="blocks">'
    if table.header:
        titles = (
            f"<th{_class('', number in table.right)}>{_escaped(title.capitalize())}"
            for number, title in enumerate(table.header)
        )
        yield f'<tr class="header">{"".join(titles)}</tr>'
    for row in table.rows:
        cells = (_cell(table, row, number, cell) for number, cell in enumerate(row.cells))
        yield f"<tr{_class(row.tone)}>{''.join(cells)}</tr>"
        if row.below:
            yield f'<tr><td colspan="{len(row.cells)}">{"".join(html(row.below))}</tr>'
    yield "</table>"


def _cell(table: Table, row: Row, number: int, cell: str | Cell) -> str:
    text, tone, hint, _ = cell if isinstance(cell, Cell) else Cell(cell, row.tone)
    title = table.header[number].lower() if number < len(table.header) else ""
    unit = f' data-of="{_escaped(title)}"' if title and number and text else ""
    shown = f'<time title="{_escaped(hint)}">{_escaped(text)}</time>' if hint else _escaped(text)
    return f"<td{_class(tone, number in table.right)}{unit}>{shown}"


def _class(tone: Tone, number: bool = False) -> str:
    names = " ".join(filter(None, (tone, "number" * number)))
    return f' class="{names}"' if names else ""


def _escaped(text: str) -> str:
    return escape(untied(text))
