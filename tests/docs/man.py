"""Generate the man pages from the help of the commands: `python -m tests.docs.man FOLDER`."""

import itertools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

import pykubeproxy
from pykubeproxy.cli import main
from pykubeproxy.cli.help import Command, Group, option_rows
from pykubeproxy.cli.kubectl import plugin
from tests.docs.reference import walk


def pages() -> Iterator[tuple[str, str]]:
    """Yield the file name and the text of each page."""
    programs = (("pykubeproxy",), main), (("kubectl", "pykubeproxy"), plugin)
    for path, group in programs:
        for words, command in itertools.chain([(path, group)], walk(group, path)):
            assert isinstance(command, Command | Group)
            name = "-".join(words)
            yield f"{name}.1", "".join(f"{line}\n" for line in _page(name, " ".join(words), command))


def _page(name: str, words: str, command: Command | Group) -> Iterator[str]:
    context = click.Context(command, info_name=words, help_option_names=["-h", "--help"])
    yield f'.TH "{name.upper()}" 1 "" "pykubeproxy {pykubeproxy.__version__}"'
    yield from (".SH NAME", f"{name} \\- {_text(command.get_short_help_str(200).rstrip('.'))}")
    yield from (".SH SYNOPSIS", f".B {words}", _text(" ".join(command.collect_usage_pieces(context))))
    yield ".SH DESCRIPTION"
    yield from _paragraphs((command.help or "").split("\n\n"))
    if isinstance(command, Group):
        for sub in command.list_commands(context):
            found = command.get_command(context, sub)
            assert found is not None
            yield from (".TP", f".BR {name}-{sub} (1)", _text(found.get_short_help_str(200)))
    if command.examples:
        yield from (".SH EXAMPLES", ".nf", *map(_text, command.examples.splitlines()), ".fi")
    yield ".SH OPTIONS"
    for group, rows in option_rows(command.get_params(context), context).items():
        yield from (f'.SS "{group}"', *_entries(rows))
    if isinstance(command, Command):
        yield from (
            ".SH EXIT STATUS",
            *_entries((str(code), text) for code, text in command.exit_codes.items()),
        )


def _paragraphs(found: Iterable[str]) -> Iterator[str]:
    for paragraph in found:
        yield from (".PP", _text(" ".join(paragraph.split())))


def _entries(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    for title, text in rows:
        yield from (".TP", f"\\fB{_text(title)}\\fR", _text(text))


def _text(text: str) -> str:
    """Return text in which nothing is a request of roff."""
    return "\\&" + text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for file, page in pages():
        (folder / file).write_text(page)
