"""Print text and notes. What others wrote is escaped, so that it cannot control a terminal or forge a line.

`wording.text_of` makes the text of reports, `emit` documents, `echo_line` a line; the guard escapes what is printed in any
other way, which includes errors of click and tracebacks.
"""

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any, TextIO, cast

import click

from pykubeproxy.wording import SafeText, listed, natural, printable, wrapped

# What click prints before the message of an error.
_ERROR = "Error: "
_NARROWEST, _WIDEST = 80, 120
_CLEAR = "\x1b[2J\x1b[1;1H"
# How many nodes a note names.
_MOST_NODES = 8


@contextmanager
def click_errors(*errors: type[Exception]) -> Iterator[None]:
    """Raise these errors as ClickException with the same message. Works as a decorator too."""
    try:
        yield
    except errors as error:
        raise click.ClickException(str(error)) from None


def echo_styled(text: SafeText) -> None:
    """Print styled text; with styles as `color_option` says."""
    click.echo(text, unguarded(sys.stdout), nl=False)


def set_color(context: click.Context, _option: click.Parameter, value: str) -> None:
    """Decide whether output has styles: if it is a terminal, unless NO_COLOR or CLICOLOR_FORCE is set."""
    forced = {"always": True, "never": False}
    if value == "auto":
        value = "never" if os.environ.get("NO_COLOR") else value
        value = "always" if value == "auto" and os.environ.get("CLICOLOR_FORCE", "0") != "0" else value
    context.color = forced.get(value)


def columns(file: TextIO) -> int:
    """Return how many columns text may use: those of the terminal from 80 to 120, or 80 without one."""
    out = unguarded(file)  # None if it was closed at the start
    if out is None or not out.isatty():
        return _NARROWEST
    return min(max(shutil.get_terminal_size().columns, _NARROWEST), _WIDEST)


def fitted_error(message: str, before: str = _ERROR) -> str:
    """Return the message of an error in one printable line; on a terminal, in lines broken between words.

    `before` is printed in front of it.
    """
    text = printable(message)
    out = unguarded(sys.stderr)
    if out is None or not out.isatty():
        return text
    return "\n".join(wrapped(before + text, "", "  ", columns(sys.stderr))).removeprefix(before)


def echo_line(text: str, err: bool = False) -> None:
    """Print one line to standard output, or a message to standard error, which a terminal breaks between words."""
    click.echo(fitted_error(text, "") if err else printable(text), err=err)


def echo_notes(notes: Mapping[str, Sequence[str]]) -> None:
    """Print notes about nodes, by name, to standard error; one that many nodes have, only once."""
    nodes: dict[str, list[str]] = {}
    for name in sorted(notes, key=natural):
        for note in notes[name]:
            nodes.setdefault(note, []).append(name)
    for note, names in nodes.items():
        echo_line(f"{listed(filter(None, names), _MOST_NODES) or 'Note'}: {note}", err=True)


def guard() -> None:
    """Replace standard output and error by files that escape all but line breaks and tabs."""
    sys.stdout, sys.stderr = guarded(sys.stdout), guarded(sys.stderr)


@contextmanager
def progress(total: int, label: str) -> Iterator[Callable[[], None]]:
    """Show a progress bar on standard error if that is a terminal; the function advances it by one."""
    out = unguarded(sys.stderr)
    if not out.isatty():
        yield lambda: None
        return
    with click.progressbar(length=total, label=label, file=out, show_pos=True) as bar:
        yield lambda: bar.update(1)


def clear() -> None:
    """Clear the screen if standard output is a terminal."""
    out = unguarded(sys.stdout)
    if out.isatty():
        out.write(_CLEAR)


def guarded(file: TextIO) -> TextIO:
    """Return a file that escapes all but line breaks and tabs."""
    # Python has None for a file that is closed at the start.
    return file if file is None or isinstance(file, _Guarded) else cast("TextIO", _Guarded(file))


def unguarded(file: TextIO) -> TextIO:
    """Return the file below a guarded one."""
    return cast("TextIO", file.file) if isinstance(file, _Guarded) else file


class _Guarded:
    """A file that writes only printable text, line breaks and tabs."""

    def __init__(self, file: IO[str]) -> None:
        self.file = file

    def write(self, text: str) -> int:
        kept = ("\t".join(map(printable, line.split("\t"))) for line in text.split("\n"))
        return self.file.write("\n".join(kept))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)
