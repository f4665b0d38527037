"""The findings about nodes as one report."""

import enum
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from pykubeproxy.objects import Family
from pykubeproxy.report.document import Report
from pykubeproxy.report.text import GAP, Block, Cell, Heading, Row, Sentence, Table, Tone
from pykubeproxy.wording import natural


class Level(enum.Enum):
    """How a check ended; "skip" if it could not run, which says nothing about the node."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


class Finding(msgspec.Struct, frozen=True, rename="camel"):
    """The result of one check.

    - `check`: its name, such as "rp-filter"; there may be several findings of one check
    - `level`: how it ended
    - `message`: what it found, for people
    - `advice`: what to do, for people; "" for nothing
    - `family`: null for both
    """

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


_TONES: dict[Level, Tone] = {
    Level.OK: "good",
    Level.WARN: "warning",
    Level.FAIL: "bad",
    Level.SKIP: "part",
}


class CheckedNode(msgspec.Struct, frozen=True, rename="camel"):
    """What the checks found on one node.

    - `node`: its name in the cluster
    - `checks`: one finding or more for each check
    - `passed`: no check failed
    - `complete`: no check was skipped
    - `proxy`: such as "kube-proxy v1.35.1"; "" if unknown or without a pod
    - `pod`: NAMESPACE/NAME of its pod, or ""
    - `backend`: "nft" or "legacy", or "" if unknown
    - `configuration`: where the configuration comes from, "" if it does not matter
    - `migrate_to`: the mode of kube-proxy, if the checks are about a change to it; else ""
    """

    node: str
    checks: tuple[Finding, ...]
    passed: bool
    complete: bool
    proxy: str = ""
    pod: str = ""
    backend: str = ""
    configuration: str = ""
    migrate_to: str = ""


class CheckReport(Report, frozen=True):
    """The findings about nodes, ordered by name.

    - `passed`: no check failed on any node
    - `nodes`: one entry for each node
    """

    passed: bool
    nodes: tuple[CheckedNode, ...]

    def blocks(self, *, wide: bool) -> Iterator[Block]:
        """Return problems and advice of each node, and a summary; `wide` shows what passed or was skipped too."""
        above: Sequence[Finding] = ()
        for one in self.nodes:
            # Of another node, what is skipped shows that nobody could read it.
            passed = (Level.OK, Level.SKIP) if one.configuration else (Level.OK,)
            shown = [check for check in one.checks if wide or check.level not in passed or check.advice]
            if len(self.nodes) > 1 or not one.configuration:
                if wide or shown or above:
                    yield GAP
                without = "" if shown else ": no problems"
                yield Heading(one.node, rest=f"  {one.proxy or 'no pod of a proxy'}{without}")
            yield Table(
                [_row(check) for check in shown], ("LEVEL", "CHECK", "RESULT") if wide and shown else ()
            )
            above = shown
            if one.configuration:
                yield GAP
                yield Sentence(f"Configuration: {one.configuration}.")
                yield Sentence(_summary(one))

    def names(self) -> Iterable[str]:
        """Return the nodes on which a check failed."""
        return [f"node/{node.node}" for node in self.nodes if not node.passed]


def checked_node(
    node: str,
    checks: Sequence[Finding],
    *,
    proxy: str = "",
    pod: str = "",
    backend: str = "",
    configuration: str = "",
    migrate_to: str = "",
) -> CheckedNode:
    """Return the checks of a node with their result; warnings and skipped checks are no failures."""
    levels = {check.level for check in checks}
    return CheckedNode(
        node,
        tuple(checks),
        Level.FAIL not in levels,
        Level.SKIP not in levels,
        proxy,
        pod,
        backend,
        configuration,
        migrate_to,
    )


def check_report(nodes: Iterable[CheckedNode]) -> CheckReport:
    """Return the report about nodes."""
    ordered = tuple(sorted(nodes, key=lambda node: natural(node.node)))
    return CheckReport(passed=all(node.passed for node in ordered), nodes=ordered)


def _row(finding: Finding) -> Row:
    title = f"{finding.check} {finding.family.value}" if finding.family else finding.check
    return Row(
        (Cell(finding.level.value, _TONES[finding.level]), title, Cell(finding.message, then=finding.advice))
    )


def _summary(checked: CheckedNode) -> str:
    """Return text such as "2 fail, 1 warn, 20 ok: this node is not ready for the proxy."."""
    count = Counter(check.level for check in checked.checks)
    levels = (Level.FAIL, Level.WARN, Level.SKIP, Level.OK)
    counts = ", ".join(f"{count[level]} {level.value}" for level in levels if count[level])
    ready = "ready" if checked.passed else "not ready"
    apart = ", apart from what was skipped" if checked.passed and not checked.complete else ""
    what = f"{checked.migrate_to} mode" if checked.migrate_to else "the proxy"
    return f"{counts}: this node is {ready} for {what}{apart}."
