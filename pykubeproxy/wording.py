"""English in tables and messages: plurals, lists, units, lines of 80 columns, and URLs without passwords."""

import re
import textwrap
from collections.abc import Iterable

# Columns of a terminal.
WIDTH = 80
# A space at which no line is broken.
TIE = "\N{NO-BREAK SPACE}"
_USER = re.compile(r"//[^/\s]*@")
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def plural(number: int, noun: str) -> str:
    """Return the noun in the form for a number: "chain", "chains", "process", "processes"."""
    return noun if number == 1 else f"{noun}es" if noun.endswith("s") else f"{noun}s"


def counted(number: int, noun: str) -> str:
    """Such as "1 chain" or "12 chains"."""
    return f"{number} {plural(number, noun)}"


def listed(words: Iterable[str], limit: int | None = None) -> str:
    """Such as "a, b and c"; of more than `limit` words only the first: "a, b, c and 7 more"."""
    names = list(words)
    if limit is not None and len(names) > limit:
        return f"{', '.join(names[:limit])} and {len(names) - limit} more"
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def percent(share: float) -> str:
    """A share between 0 and 1 with three digits: 33.3%."""
    return f"{100 * share:.3g}%"


def period(seconds: int) -> str:
    """Seconds in the largest unit that needs no fraction: 3 h, 90 min."""
    return next(f"{seconds // size} {unit}" for size, unit in _UNITS if seconds % size == 0)


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
