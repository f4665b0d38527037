"""What a check comes to."""

import enum
from collections.abc import Iterable

import msgspec

from pykubeproxy.objects import Family


class Level(enum.Enum):
    """How a check ended. SKIP: it was not made, and the finding says why."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


class Finding(msgspec.Struct, frozen=True):
    """One line of the report: of which check, how it ended, what was found, and what to do if that is not well."""

    check: str
    level: Level
    text: str
    advice: str = ""
    family: Family | None = None


def ok(check: str, text: str, family: Family | None = None) -> Finding:
    """All is well."""
    return Finding(check, Level.OK, text, "", family)


def warn(check: str, text: str, advice: str, family: Family | None = None) -> Finding:
    """Services work, but something may go wrong."""
    return Finding(check, Level.WARN, text, advice, family)


def fail(check: str, text: str, advice: str, family: Family | None = None) -> Finding:
    """Services do not work, or not all of them."""
    return Finding(check, Level.FAIL, text, advice, family)


def skip(check: str, text: str, advice: str = "", family: Family | None = None) -> Finding:
    """It could not be looked at."""
    return Finding(check, Level.SKIP, text, advice, family)


def fit(findings: Iterable[Finding]) -> bool:
    """Whether nothing fails; warnings and checks not made do not count."""
    return all(finding.level is not Level.FAIL for finding in findings)


def several(words: Iterable[str], most: int = 4) -> str:
    """Some names in a sentence: "a, b, c, d and 7 more"."""
    names = list(words)
    if len(names) <= 1:
        return "".join(names)
    if len(names) <= most:
        return f"{', '.join(names[:-1])} and {names[-1]}"
    return f"{', '.join(names[:most])} and {len(names) - most} more"


def number(count: int, noun: str) -> str:
    """Such as "1 chain" or "12 chains"."""
    return f"{count} {noun}{'s' * (count != 1)}"
