"""The result of a check."""

import enum
from collections.abc import Iterable

import msgspec

from pykubeproxy.objects import Family


class Level(enum.Enum):
    """How a check ended; SKIP if it could not run."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


class Finding(msgspec.Struct, frozen=True):
    """The result of one check: its name, the level, what it found, and what to do about it."""

    check: str
    level: Level
    message: str
    advice: str = ""
    family: Family | None = None


def ok(check: str, message: str, family: Family | None = None) -> Finding:
    """The check passes."""
    return Finding(check, Level.OK, message, "", family)


def warn(check: str, message: str, advice: str, family: Family | None = None) -> Finding:
    """Services work, but there is a risk."""
    return Finding(check, Level.WARN, message, advice, family)


def fail(check: str, message: str, advice: str, family: Family | None = None) -> Finding:
    """Some or all services do not work."""
    return Finding(check, Level.FAIL, message, advice, family)


def skip(check: str, message: str, advice: str = "", family: Family | None = None) -> Finding:
    """The check could not run."""
    return Finding(check, Level.SKIP, message, advice, family)


def passed(findings: Iterable[Finding]) -> bool:
    """Return whether no check failed; warnings and skipped checks do not count."""
    return all(finding.level is not Level.FAIL for finding in findings)
