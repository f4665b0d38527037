"""What a picture of a trace shows: the chains that all packets pass, then the rows in which they part."""

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from itertools import chain, takewhile
from typing import NamedTuple

from pykubeproxy.inspect.routes import PacketVerdict
from pykubeproxy.inspect.trace.model import Outcome, Trace
from pykubeproxy.inspect.trace.packet import SNAT, Packet
from pykubeproxy.inspect.trace.picture_boxes import (
    Box,
    Line,
    choice_box,
    decision_box,
    decision_rule,
    hooks,
    trunk_boxes,
)
from pykubeproxy.inspect.trace.walk import Path, Step
from pykubeproxy.objects import address_and_port
from pykubeproxy.rules.parse import parse_target
from pykubeproxy.rules.ruleset import BUILT_IN, ChainKey
from pykubeproxy.wording import percent

# How many boxes are drawn one below the other and in a row, and how many groups and rows.
_TRUNK, _DECISIONS, _GROUPS, _ROWS = 14, 4, 5, 12


class Kind(Enum):
    """How packets end; a picture shows it by colour too."""

    KEPT = "kept"
    MASQUERADED = "masqueraded"
    REJECTED = "rejected"
    MIXED = "mixed"


class Row(NamedTuple):
    """A share of the packets: the box where their endpoint is chosen, and their end; None if there is none."""

    probability: float
    choice: Box | None
    end: Box | None


class Group(NamedTuple):
    """Rows with the same decisions after the choice of the endpoint."""

    kind: Kind
    decisions: tuple[Box, ...]
    rows: tuple[Row, ...]


class Picture(NamedTuple):
    """The packet, what happens to it, the chains that all packets pass, and their ends in groups."""

    title: str
    result: str
    trunk: tuple[Box, ...]
    groups: tuple[Group, ...]


class _OutcomePath(NamedTuple):
    """An outcome, its path before the first decision, and its decisions: the later hooks in which a rule matches."""

    outcome: Outcome
    points: Path
    decisions: tuple[Path, ...]

    @property
    def kind(self) -> Kind:
        if self.outcome.verdict in (PacketVerdict.DROP, PacketVerdict.REJECT):
            return Kind.REJECTED
        return Kind.MASQUERADED if SNAT in self.outcome.packet.states else Kind.KEPT


def picture(trace: Trace) -> Picture:
    """Choose what to draw of a trace; more endpoints, paths and chains than fit are summed up."""
    paths = [_outcome_path(outcome) for outcome in trace.outcomes]
    common = _common(paths)
    then = dict.fromkeys(point for path in paths for point in path.points[common : common + 1])
    trunk = trunk_boxes(paths[0].points[:common], list(then), trace.steps)
    return Picture(_title(trace.packet), _result(trace), _fewer(trunk, _TRUNK), tuple(_groups(paths, common)))


def _outcome_path(outcome: Outcome) -> _OutcomePath:
    matched = [hook for hook in hooks(outcome.path) if len(hook) > 1]
    before = list(takewhile(_translates, matched))
    if len(before) == len(matched) and outcome.verdict in (PacketVerdict.DROP, PacketVerdict.REJECT):
        del before[-1:]
    return _OutcomePath(outcome, tuple(chain.from_iterable(before)), tuple(matched[len(before) :]))


def _translates(hook: Path) -> bool:
    """Return whether rules of this hook may choose an endpoint, or come before those that do."""
    table, builtin = hook[0].table, hook[0].chain
    return builtin in ("PREROUTING", "OUTPUT") and table in ("raw", "mangle", "nat")


def _common(paths: Sequence[_OutcomePath]) -> int:
    """Return how many points all paths share, up to the jump to the chain that chooses the endpoint."""
    points = zip(*(path.points for path in paths), strict=False)
    shared = sum(1 for _ in takewhile(lambda alternatives: len(set(alternatives)) == 1, points))
    return min(shared, *(_before_choice(path.points) for path in paths))


def _before_choice(points: Path) -> int:
    for point in points:
        if isinstance(point, Step) and parse_target(point.rule) == "DNAT":
            entered = points.index(ChainKey(point.table, point.chain))
            return entered if point.chain in BUILT_IN else entered - 1
    return len(points)


def _groups(paths: Iterable[_OutcomePath], common: int) -> Iterator[Group]:
    """Yield groups in the order of the rules; the least probable ones are summed up."""
    alike: dict[tuple[object, ...], list[_OutcomePath]] = {}
    for path in paths:
        alike.setdefault((path.kind, *map(decision_rule, path.decisions)), []).append(path)
    groups = list(alike.values())
    shown = sorted(groups, key=_total, reverse=True)[: _GROUPS if len(groups) > _GROUPS + 1 else None]
    others = [path for group in groups if group not in shown for path in group]
    total = sum(map(len, shown))
    for group in groups:
        if group in shown:
            limit = _ROWS if total <= _ROWS else max(2, _ROWS // len(shown))
            decisions = (
                decision_box([path.decisions[number] for path in group])
                for number in range(len(group[0].decisions))
            )
            yield Group(group[0].kind, _fewer(decisions, _DECISIONS), tuple(_rows(group, common, limit)))
    if others:
        end = Box((Line(f"and {len(others)} more paths", "strong"), Line(percent(_total(others)))))
        yield Group(Kind.MIXED, (), (Row(_total(others), None, end),))


def _rows(paths: Sequence[_OutcomePath], common: int, limit: int) -> Iterator[Row]:
    shown = paths if len(paths) <= limit else paths[: limit - 1]
    for path in shown:
        yield Row(path.outcome.probability, choice_box(path.points[common:]), _end(path))
    if others := paths[len(shown) :]:
        share = _total(others)
        remark = _remark(others[0], share)
        more = Box((Line(f"and {len(others)} more", "strong"), Line(remark)))
        rejected = others[0].kind is Kind.REJECTED
        chosen = Box((Line(f"and {len(others)} more" if rejected else f"{len(others)} more chains", "soft"),))
        yield Row(share, chosen if others[0].points[common:] else None, None if rejected else more)


def _end(path: _OutcomePath) -> Box | None:
    """Return where a packet arrives; None if a rule rejects it."""
    if path.kind is Kind.REJECTED:
        return None
    at = address_and_port(path.outcome.packet.destination, path.outcome.packet.port)
    return Box((Line(at, "strong"), Line(_remark(path, path.outcome.probability))))


def _remark(path: _OutcomePath, share: float) -> str:
    if path.kind is Kind.MASQUERADED:
        return f"{percent(share)}, masqueraded"
    unchanged = path.outcome.verdict is PacketVerdict.PASS
    return f"{percent(share)}, {'passes unchanged' if unchanged else 'keeps its source'}"


def _fewer(boxes: Iterable[Box], limit: int) -> tuple[Box, ...]:
    """Sum up the boxes in the middle if there are too many."""
    known = tuple(boxes)
    if len(known) <= limit:
        return known
    first, last = limit // 2, (limit - 1) // 2
    more = Box((Line(f"and {len(known) - first - last} more chains", "soft"),))
    return (*known[:first], more, *known[len(known) - last :])


def _total(paths: Iterable[_OutcomePath]) -> float:
    return sum(path.outcome.probability for path in paths)


def _title(packet: Packet) -> str:
    destination = address_and_port(packet.destination, packet.port)
    by = f", by {packet.received_by}" if packet.received_by else ""
    where = ", from this node" if packet.starts_here else by
    return f"{packet.source} to {destination}, {packet.protocol.upper()}{where}"


def _result(trace: Trace) -> str:
    phrases = []
    if endpoints := trace.endpoints:
        masqueraded = sum(endpoint.masquerade for endpoint in endpoints)
        to = "the only endpoint" if len(endpoints) == 1 else f"one of {len(endpoints)} endpoints"
        source = {0: " and keeps its source", len(endpoints): ", masqueraded: its source is replaced"}
        some = f", masqueraded on the way to {masqueraded} of them"
        phrases.append(f"goes to {to}{source.get(masqueraded, some)}")
    for verdict, phrase in (
        (
            PacketVerdict.PASS,
            f"matches no service and passes {'masqueraded' if trace.masquerade else 'unchanged'}",
        ),
        (PacketVerdict.DROP, "is dropped"),
        (PacketVerdict.REJECT, "is rejected"),
    ):
        share = sum(outcome.probability for outcome in trace.outcomes if outcome.verdict is verdict)
        if share:
            phrases.append(phrase if share > 1 - 1e-9 else f"{phrase} with a probability of {percent(share)}")
    return "; ".join(phrases)
