"""Blocks become lines: wrapped, aligned, indented and safe."""

import pytest

from pykubeproxy.report.text import (
    GAP,
    Block,
    Cell,
    Heading,
    Row,
    Section,
    Sentence,
    Table,
    Verbatim,
    lines,
    text,
)

LONG = "a sentence of many words that do not fit in one line of forty columns"


def plain(*blocks: Block, width: int = 40) -> list[str]:
    import click

    return click.unstyle(text(blocks, width)).splitlines()


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ([Sentence("short")], ["short"]),
        (
            [Sentence(LONG, start="Note: ")],
            ["Note: a sentence of many words that do", "      not fit in one line of forty", "      columns"],
        ),
        ([Section(Heading("A"), [Section(Sentence("b"), [Verbatim("c " * 3)])])], ["A", "  b", "    c c c "]),
        ([GAP, Sentence("a"), GAP, GAP, Sentence("b"), GAP], ["a", "", "b"]),
        ([Heading("title", rest=", and the rest")], ["title, and the rest"]),
    ],
)
def test_blocks_become_lines(blocks: list[Block], expected: list[str]) -> None:
    assert plain(*blocks) == expected


def test_columns_are_aligned_and_the_last_one_is_wrapped() -> None:
    rows = [
        Row(("node1", "5", "follows")),
        Row(("a-node", "1200", Cell("cannot be read because its pod has gone", "bad"))),
    ]
    assert plain(Table(rows, ("NODE", "WRONG", "STATE"), frozenset([1]))) == [
        "NODE    WRONG  STATE",
        "node1       5  follows",
        "a-node   1200  cannot be read because",
        "               its pod has gone",
    ]


def test_blocks_below_a_row_are_indented() -> None:
    assert plain(Table([Row(("a", "b"), below=[Sentence("why")])])) == ["a  b", "  why"]


def test_only_our_styles_reach_a_terminal() -> None:
    hostile = "\x1b[31mred\nforged"
    for block in (Sentence(hostile), Heading(hostile), Verbatim(hostile), Table([Row((hostile,))])):
        printed = text([block])
        assert "\x1b[31m" not in printed
        assert printed.count("\n") == 1


def test_a_toned_line_is_styled_after_its_indent() -> None:
    (_, line) = lines([Section(Sentence("a"), [Sentence("b", "good")])])
    assert line.startswith("  ")
    assert line.strip() != "b"
