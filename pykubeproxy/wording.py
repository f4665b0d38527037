"""Text for people: plurals, lists, units, lines of 80 columns, styles, and foreign text made safe.

Foreign text is everything that others wrote: objects, rules, files, messages of servers and nodes.
"""

import re
import textwrap
from collections.abc import Iterable
from typing import NewType

# Text whose line breaks and styles are ours. Only `text_of` makes it, and only such text reaches a terminal unescaped.
SafeText = NewType("SafeText", str)

# Columns of a terminal.
WIDTH = 80
# A space at which no line is broken.
TIE = "\N{NO-BREAK SPACE}"
# The longest foreign text in a message, in characters.
_MOST_FOREIGN = 300
# The codes of styles, as a terminal knows them. Until `text_of`, a half surrogate pair stands for each: no decoder makes
# one, so foreign text cannot hold a style.
_CODES = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33, "cyan": 36}
_FIRST = 0xD800
_RESET = chr(_FIRST)
_STYLE = re.compile("[\ud800-\ud87f]")
_USER = re.compile(r"//[^/\s]*@")
_MOST_SUGGESTED = 3
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def plural(number: int, noun: str) -> str:
    """Return the noun in the form for a number: "chain", "chains", "process", "processes"."""
    return noun if number == 1 else f"{noun}es" if noun.endswith("s") else f"{noun}s"


def counted(number: int, noun: str) -> str:
    """Return text such as "1 chain" or "12 chains"."""
    return f"{number} {plural(number, noun)}"


def listed(words: Iterable[str], limit: int | None = None, last: str = "and") -> str:
    """Return text such as "a, b and c"; of more than `limit` words only the first: "a, b, c and 7 more"."""
    names = list(words)
    if limit is not None and len(names) > limit:
        return f"{', '.join(names[:limit])} and {len(names) - limit} more"
    return f" {last} ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return "did you mean a or b?" for the known names most like one, "" without any.

    Only the last part of a name counts, such as "web" of "svc/default/web"; those with the same first part come first.
    """
    from difflib import SequenceMatcher, get_close_matches  # few runs need it

    by_name: dict[str, list[str]] = {}
    for text in known:
        by_name.setdefault(text.rpartition("/")[2], []).append(text)
    first, slash, last = name.rpartition("/")
    close = get_close_matches(last, by_name, _MOST_SUGGESTED)
    close.sort(key=lambda word: (-SequenceMatcher(None, word, last).ratio(), natural(word)))
    found = [text for word in close for text in by_name[word]]
    found.sort(key=lambda text: not text.startswith(first + slash))
    return f"did you mean {listed(found[:_MOST_SUGGESTED], last='or')}?" if found else ""


def percent(share: float) -> str:
    """A share between 0 and 1 with three digits: 33.3%."""
    return f"{100 * share:.3g}%"


def period(seconds: int) -> str:
    """Seconds in the largest unit that needs no fraction: 3 h, 90 min."""
    return next(f"{seconds // size} {unit}" for size, unit in _UNITS if seconds % size == 0)


def duration(seconds: float) -> str:
    """Format a duration: 4 ms, 1.25 s, 3 min 20 s, 2 h 5 min, 12 d 3 h."""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    rest, parts = int(seconds), list[str]()
    for size, unit in _UNITS:
        number, rest = divmod(rest, size)
        if number or parts:
            parts.append(f"{number} {unit}")
    return " ".join(parts[:2])


def without_password(text: str) -> str:
    """Return text without the user and password of the URLs in it."""
    return _USER.sub("//", text)


def tied(text: str) -> str:
    """Return text that `wrapped` keeps on one line."""
    return text.replace(" ", TIE)


def untied(text: str) -> str:
    """Return tied text with ordinary spaces."""
    return text.replace(TIE, " ")


def wrapped(text: str, first: str = "", others: str | None = None, width: int = WIDTH) -> list[str]:
    """Break text into lines, the first and the others with their indents; words are never broken."""
    lines = textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=first if others is None else others,
        break_on_hyphens=False,
        break_long_words=False,
    )
    return [untied(line) for line in lines]


def printable(text: str) -> str:
    r"""Escape line breaks and invisible characters, as in \x1b: they could control a terminal or forge a line."""
    return (
        text
        if text.isprintable()
        else "".join(character if character.isprintable() else _escaped(character) for character in text)
    )


def one_line(text: str) -> str:
    """Return foreign text as one printable line of limited length, with spaces for other characters."""
    line = " ".join("".join(character if character.isprintable() else " " for character in text).split())
    return line if len(line) <= _MOST_FOREIGN else line[:_MOST_FOREIGN] + "…"


def escape(text: str) -> str:
    """Return text for HTML or XML, with invisible characters escaped as `printable` does."""
    from html import escape as escaped  # the agent starts without this module

    return escaped(printable(text))


def styled(text: str, color: str = "", *, bold: bool = False, dim: bool = False) -> str:
    """Return text with a style that `text_of` turns into codes for a terminal."""
    names = filter(None, (color, "bold" * bold, "dim" * dim))
    return f"{''.join(chr(_FIRST + _CODES[name]) for name in names)}{text}{_RESET}"


def parted(line: str) -> tuple[str, str]:
    """Return a line without the styles of `styled`, and the names of these styles with spaces between them."""
    names = [name for name, code in _CODES.items() if chr(_FIRST + code) in line]
    return _STYLE.sub("", line), " ".join(names)


def text_of(*paragraphs: Iterable[str]) -> SafeText:
    """Join lines, with an empty line between paragraphs; escape all but the styles of `styled`."""
    texts = ("".join(f"{_safe_line(line)}\n" for line in lines) for lines in paragraphs)
    return SafeText("\n".join(texts))


def _safe_line(line: str) -> str:
    if line.isprintable():
        return line
    return "".join(
        character
        if character.isprintable()
        else f"\x1b[{ord(character) - _FIRST}m"
        if _STYLE.match(character)
        else _escaped(character)
        for character in line
    )


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode()


def natural(name: str) -> tuple[tuple[int, str], ...]:
    """Return a key that orders node2 before node10."""
    return tuple((int(digits or 0), other) for other, digits in re.findall(r"(\D+|^)(\d{0,18})", name))
