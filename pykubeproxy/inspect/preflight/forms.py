"""Findings as text for people, in 80 columns, and as a document for programs."""

import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence

import click

from pykubeproxy import API_VERSION
from pykubeproxy.inspect.forms import WIDTH
from pykubeproxy.inspect.preflight.finding import Finding, Level, fit

_COLOURS = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "red", Level.SKIP: "cyan"}
_LEVEL_WIDTH = max(len(level.value) for level in Level)


def document(findings: Iterable[Finding], node_name: str, backend: str) -> dict[str, object]:
    """The findings as a document for JSON, of version pykubeproxy/v1.

    {"apiVersion": "pykubeproxy/v1", "node": the name looked for in the cluster,
     "backend": "nft"|"legacy", "" if there is none,
     "fit": whether nothing fails,
     "checks": [{"check": "privileges"|"iptables"|"kernel"|"tables"|"other-tables"|"leftovers"|"proxies"|"ports"|
                          "node-ports"|"forwarding"|"rp-filter"|"br-netfilter"|"conntrack"|"api-server"|"node"|
                          "permissions",
                 "family": "IPv4"|"IPv6", null if it is for both,
                 "level": "ok"|"warn"|"fail"|"skip",
                 "text": what was found, "advice": what to do, "" if nothing}]}

    A check may have several entries; more checks and keys may be added. The texts are for people, and may change.
    """
    found = list(findings)
    return {
        "apiVersion": API_VERSION,
        "node": node_name,
        "backend": backend,
        "fit": fit(found),
        "checks": [
            {
                "check": finding.check,
                "family": finding.family.value if finding.family else None,
                "level": finding.level.value,
                "text": finding.text,
                "advice": finding.advice,
            }
            for finding in found
        ],
    }


def text(findings: Sequence[Finding]) -> str:
    """The findings for people; styled, which click.echo undoes where it is not a terminal."""
    width = max((len(_title(finding)) for finding in findings), default=0)
    lines = [line for finding in findings for line in _lines(finding, width)]
    return "".join(f"{line}\n" for line in (*lines, "", _summary(findings)))


def _title(finding: Finding) -> str:
    return f"{finding.check} {finding.family.value}" if finding.family else finding.check


def _lines(finding: Finding, width: int) -> Iterable[str]:
    level = click.style(f"{finding.level.value:<{_LEVEL_WIDTH}}", fg=_COLOURS[finding.level])
    start = f"  {_title(finding):<{width}}  "
    margin = " " * (_LEVEL_WIDTH + len(start))
    said = _wrapped(finding.text, WIDTH - len(margin))
    yield f"{level}{start}{said[0]}"
    for line in (*said[1:], *_wrapped(finding.advice, WIDTH - len(margin))):
        yield margin + line


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False)


def _summary(findings: Sequence[Finding]) -> str:
    """Such as "2 fail, 1 warn, 20 ok: this node is not fit"."""
    count = Counter(finding.level for finding in findings)
    counted = ", ".join(
        f"{count[level]} {level.value}"
        for level in (Level.FAIL, Level.WARN, Level.SKIP, Level.OK)
        if count[level]
    )
    return f"{counted}: the node is {'fit' if fit(findings) else 'not fit'} for the proxy."
