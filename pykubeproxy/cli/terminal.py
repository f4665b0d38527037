"""Print documents, styled text and errors; escape anything else that could control a terminal."""

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any, TextIO, cast

import click
import msgspec

# The styles, colours and reset of click.style.
_STYLE = r"\x1b\[(?:[0124]|2[12]|[39][0-7]|[34]9)m"
# Control characters except tab and line feed, bidirectional controls, and bytes that are not UTF-8.
_UNSAFE = re.compile(
    rf"({_STYLE})|[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
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
    click.echo(_UNSAFE.sub(lambda it: f"\\u{ord(it[0]):04x}", text))


def echo_styled(text: str) -> None:
    """Print styled text; without styles if NO_COLOR is set (https://no-color.org) or output is no terminal."""
    click.echo(text, nl=False, color=False if os.environ.get("NO_COLOR") else None)


def guard() -> None:
    """Replace standard output and error so that all text passes `printable`."""
    sys.stdout, sys.stderr = guarded(sys.stdout), guarded(sys.stderr)


@contextmanager
def progress(total: int, label: str) -> Iterator[Callable[[], None]]:
    """Show a progress bar on standard error if that is a terminal; the function advances it by one."""
    out = sys.stderr.file if isinstance(sys.stderr, _Guarded) else sys.stderr
    if not out.isatty():
        yield lambda: None
        return
    with click.progressbar(length=total, label=label, file=cast("TextIO", out), show_pos=True) as bar:
        yield lambda: bar.update(1)


def clear() -> None:
    """Clear the screen if standard output is a terminal."""
    out = sys.stdout.file if isinstance(sys.stdout, _Guarded) else sys.stdout
    if out.isatty():
        out.write(_CLEAR)


def printable(text: str) -> str:
    r"""Escape control characters, as in \x1b, but keep the styles of click.style."""
    return _UNSAFE.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    return match[1] or match[0].encode("unicode_escape", "surrogatepass").decode()


def guarded(file: TextIO) -> TextIO:
    """Return a file whose text passes `printable`."""
    # Python has None for a file that is closed at the start.
    return file if file is None or isinstance(file, _Guarded) else cast("TextIO", _Guarded(file))


class _Guarded:
    """A file that writes only printable text."""

    def __init__(self, file: IO[str]) -> None:
        self.file = file

    def write(self, text: str) -> int:
        return self.file.write(printable(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)
