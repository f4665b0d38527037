"""The findings of `pykubeproxy check`, as text and as a JSON document."""

import enum
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from pykubeproxy import API_VERSION
from pykubeproxy.objects import Family
from pykubeproxy.wording import WIDTH, SafeText, styled, text_of, wrapped


class Level(enum.Enum):
    """How a check ended; SKIP if it could not run. That says nothing about the node."""

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


class Check(msgspec.Struct, frozen=True):
    """A check by its name, of one family or of the whole node. Each method returns a finding."""

    name: str
    family: Family | None = None

    def ok(self, message: str) -> Finding:
        """The check passes."""
        return Finding(self.name, Level.OK, message, "", self.family)

    def warn(self, message: str, advice: str) -> Finding:
        """Services work, but there is a risk."""
        return Finding(self.name, Level.WARN, message, advice, self.family)

    def fail(self, message: str, advice: str) -> Finding:
        """Some or all services do not work."""
        return Finding(self.name, Level.FAIL, message, advice, self.family)

    def skip(self, message: str, advice: str = "") -> Finding:
        """The check could not run."""
        return Finding(self.name, Level.SKIP, message, advice, self.family)


_COLORS = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "red", Level.SKIP: "cyan"}
_LEVEL_WIDTH = max(len(level.value) for level in Level)


def passed(findings: Iterable[Finding]) -> bool:
    """Return whether no check failed; warnings and skipped checks do not count."""
    return all(finding.level is not Level.FAIL for finding in findings)


def complete(findings: Iterable[Finding]) -> bool:
    """Return whether every check could run."""
    return all(finding.level is not Level.SKIP for finding in findings)


def text(findings: Sequence[Finding], configuration: str) -> SafeText:
    """Return the findings in 80 columns, and where the configuration comes from."""
    summary = (*wrapped(f"Configuration: {configuration}.", "", "  "), *wrapped(_summary(findings)))
    return text_of(finding_lines(findings), summary)


def finding_lines(findings: Sequence[Finding]) -> Iterable[str]:
    """Return the findings in 80 columns."""
    width = max((len(_title(finding)) for finding in findings), default=0)
    return (line for finding in findings for line in _lines(finding, width))


def _title(finding: Finding) -> str:
    return f"{finding.check} {finding.family.value}" if finding.family else finding.check


def _lines(finding: Finding, width: int) -> Iterable[str]:
    level = styled(f"{finding.level.value:<{_LEVEL_WIDTH}}", _COLORS[finding.level])
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
    ready = "ready" if passed(findings) else "not ready"
    apart = ", apart from what was skipped" if passed(findings) and not complete(findings) else ""
    return f"{counts}: this node is {ready} for the proxy{apart}."


def document(
    findings: Sequence[Finding], node_name: str, backend: str, configuration: str
) -> dict[str, object]:
    """The findings as a JSON document of version pykubeproxy/v1.

    {"apiVersion": "pykubeproxy/v1", "node": the name looked up in the cluster,
     "backend": "nft"|"legacy", "" if there is none,
     "configuration": where the configuration comes from,
     "passed": true if no check failed,
     "complete": true if no check was skipped,
     "checks": [{"check": "privileges"|"iptables"|"kernel"|"tables"|"other-tables"|"leftovers"|"proxies"|"ports"|
                          "node-ports"|"forwarding"|"rp-filter"|"br-netfilter"|"conntrack"|"api-server"|"node"|
                          "permissions"|"networks",
                 "level": "ok"|"warn"|"fail"|"skip"; "skip" if it could not run, with the reason as "message",
                 "message": what the check found, "advice": what to do, or "",
                 "family": "IPv4"|"IPv6", null for both}]}

    A check may have several entries. Checks and keys may be added. Messages and advice are for people and may change.
    """
    return {
        "apiVersion": API_VERSION,
        "node": node_name,
        "backend": backend,
        "configuration": configuration,
        "passed": passed(findings),
        "complete": complete(findings),
        "checks": msgspec.to_builtins(findings),
    }
