"""Print documents, text and notes. What others wrote is escaped, so that it cannot control a terminal or forge a line.

`wording.text_of` makes the text of reports, `echo_line` a line, `echo_json` a document; the guard escapes what is printed
in any other way, which includes errors of click and tracebacks.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any, TextIO, cast

import click
import msgspec

from pykubeproxy.wording import SafeText, printable

_CLEAR = "\x1b[2J\x1b[1;1H"


@contextmanager
def click_errors(*errors: type[Exception]) -> Iterator[None]:
    """Raise these errors as ClickException with the same message. Works as a decorator too."""
    try:
        yield
    except errors as error:
        raise click.ClickException(str(error)) from None


def echo_json(document: object) -> None:
    """Print a document as indented JSON, with the escapes of JSON for anything that could control a terminal."""
    try:
        text = msgspec.json.format(msgspec.json.encode(document)).decode()
    except UnicodeEncodeError:  # a byte that is not UTF-8
        text = json.dumps(msgspec.to_builtins(document), indent=2, ensure_ascii=False)
    lines = (
        "".join(it if it.isprintable() else json.dumps(it)[1:-1] for it in line) for line in text.split("\n")
    )
    click.echo("\n".join(lines))


def echo_styled(text: SafeText) -> None:
    """Print styled text; without styles if NO_COLOR is set (https://no-color.org) or output is no terminal."""
    click.echo(text, unguarded(sys.stdout), nl=False, color=False if os.environ.get("NO_COLOR") else None)


def echo_line(text: str, err: bool = False) -> None:
    """Print one line to standard output or error."""
    click.echo(printable(text), err=err)


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
