"""The text of `pykubeproxy check`."""

from collections import Counter
from collections.abc import Iterable, Sequence

import click

from pykubeproxy.inspect.preflight.model import Finding, Level, passed
from pykubeproxy.wording import WIDTH, wrapped

_COLORS = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "red", Level.SKIP: "cyan"}
_LEVEL_WIDTH = max(len(level.value) for level in Level)


def text(findings: Sequence[Finding]) -> str:
    """Return the findings in 80 columns; styled for click.echo."""
    width = max((len(_title(finding)) for finding in findings), default=0)
    lines = [line for finding in findings for line in _lines(finding, width)]
    return "".join(f"{line}\n" for line in (*lines, "", _summary(findings)))


def _title(finding: Finding) -> str:
    return f"{finding.check} {finding.family.value}" if finding.family else finding.check


def _lines(finding: Finding, width: int) -> Iterable[str]:
    level = click.style(f"{finding.level.value:<{_LEVEL_WIDTH}}", fg=_COLORS[finding.level])
    start = f"  {_title(finding):<{width}}  "
    margin = " " * (_LEVEL_WIDTH + len(start))
    columns = WIDTH - len(margin)
    first, *others = (*wrapped(finding.message, width=columns), *wrapped(finding.advice, width=columns))
    yield f"{level}{start}{first}"
    yield from (margin + line for line in others)


def _summary(findings: Sequence[Finding]) -> str:
    """Such as "2 fail, 1 warn, 20 ok: this node is not ready for the proxy."."""
    count = Counter(finding.level for finding in findings)
    levels = (Level.FAIL, Level.WARN, Level.SKIP, Level.OK)
    counts = ", ".join(f"{count[level]} {level.value}" for level in levels if count[level])
    return f"{counts}: this node is {'ready' if passed(findings) else 'not ready'} for the proxy."
