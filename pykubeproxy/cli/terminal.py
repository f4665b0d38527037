"""What is printed cannot do more to a terminal than colour it, whatever foreign rules and objects have in them."""

import re
import sys
from typing import IO, Any, TextIO, cast

# click.style's bold, dim and colours, and its reset.
_STYLE = r"\x1b\[(?:[0124]|2[12]|[39][0-7]|[34]9)m"
# Control characters but tab and line feed, what turns the direction of writing, and bytes that were no UTF-8.
_UNSAFE = re.compile(
    rf"({_STYLE})|[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
_CLEAR = "\x1b[2J\x1b[1;1H"


def guard() -> None:
    """Have everything that is printed from now on pass `printable`."""
    sys.stdout, sys.stderr = _guarded(sys.stdout), _guarded(sys.stderr)


def clear() -> None:
    """Clear the screen, if there is one."""
    out = sys.stdout.file if isinstance(sys.stdout, _Guarded) else sys.stdout
    if out.isatty():
        out.write(_CLEAR)


def printable(text: str) -> str:
    r"""The text with escapes such as \x1b for what a terminal would obey; our own colours stay."""
    return _UNSAFE.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    return match[1] or match[0].encode("unicode_escape", "surrogatepass").decode()


def _guarded(file: TextIO) -> TextIO:
    return file if isinstance(file, _Guarded) else cast("TextIO", _Guarded(file))


class _Guarded:
    """A file that is written to through `printable`, and else is itself."""

    def __init__(self, file: IO[str]) -> None:
        self.file = file

    def write(self, text: str) -> int:
        return self.file.write(printable(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)
