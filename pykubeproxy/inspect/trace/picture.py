"""What a picture of a trace shows: the chains that all packets pass, then the rows in which they part."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from enum import Enum
from itertools import chain, takewhile
from typing import NamedTuple

from pykubeproxy.inspect.packets.iptables import EVERY_PACKET
from pykubeproxy.inspect.packets.packet import SNAT, Packet
from pykubeproxy.inspect.packets.walk import NodeTrace, Path, Step, WalkEnd
from pykubeproxy.inspect.routes import PacketVerdict
from pykubeproxy.objects import address_and_port
from pykubeproxy.rules.iptables_save import parse_rule, parse_target, without_comment
from pykubeproxy.rules.ruleset import BUILT_IN, ChainKey
from pykubeproxy.wording import listed, percent

# How many rules that match, and that do not, a box names.
_MATCHED, _UNMATCHED = 4, 2


class Line(NamedTuple):
    """A line in a box. `style` is "", "chain", "strong", "soft" or "mark"."""

    text: str
    style: str = ""


class Box(NamedTuple):
    """A stop of packets. `details` are rules in full, as iptables-save prints them."""

    lines: tuple[Line, ...]
    details: tuple[str, ...] = ()


class _ChainVisit:
    """One visit to a chain: matched rules, and the visits each jump returned from."""

    def __init__(self, key: ChainKey) -> None:
        self.key = key
        self.steps: list[Step] = []
        self.returned: dict[int, list[_ChainVisit]] = {}

    def lines(self) -> Iterator[tuple[Step, Line]]:
        for number, step in enumerate(self.steps):
            text, returned = _text(step), self.returned.get(number, ())
            if mark := _mark(step):
                yield step, Line(f"{mark}: {text}", "mark")
            elif not returned:
                yield step, Line(text)
            for visit in returned:
                if marks := listed(dict.fromkeys(visit.marks())):
                    yield step, Line(f"{marks}: {text}", "mark")
                else:
                    yield step, Line(f"{visit.key.chain} changes nothing: {text}")

    def marks(self) -> Iterator[str]:
        """Yield the marks set here and in chains that returned here."""
        for number, step in enumerate(self.steps):
            if mark := _mark(step):
                yield mark
            for visit in self.returned.get(number, ()):
                yield from visit.marks()


def hooks(points: Path) -> Iterator[Path]:
    """Divide a path: each part begins with a built-in chain."""
    start = 0
    for position, point in enumerate(points):
        if position and isinstance(point, ChainKey) and point.chain in BUILT_IN:
            yield points[start:position]
            start = position
    if points:
        yield points[start:]


def trunk_boxes(points: Path, then: Collection[ChainKey | Step], steps: Iterable[Step]) -> Iterator[Box]:
    """Yield the chains that all packets pass; `then` are the first points after them, `steps` all of the trace."""
    met: dict[ChainKey, list[Step]] = {}
    for step in steps:
        met.setdefault(ChainKey(step.table, step.chain), []).append(step)
    for hook in (parted := list(hooks(points))):
        following = [point for point in then if isinstance(point, Step) and hook is parted[-1]]
        for visit in _visits(hook, following[0] if following else None):
            parts = [step for step in following if (step.table, step.chain) == visit.key]
            yield _chain_box(visit, parts, met.get(visit.key, []))


def _chain_box(visit: _ChainVisit, parts: Sequence[Step], met: Sequence[Step]) -> Box:
    """Return a chain; `parts` are the rules by which packets leave it on different paths, `met` all that they meet."""
    lines = list(visit.lines())
    if len(parts) > 1:
        lines.append((parts[0], Line(f"each packet takes one of {len(parts)} paths at random")))
    elif parts:
        lines.append((parts[0], Line(_text(parts[0]))))
    end = max((met.index(step) for step, _ in lines if step in met), default=len(met))
    failed = {step.reason: step for step in reversed(met[:end]) if not step.matched}
    unmatched = [Line(f"no match: {_text(step)}", "soft") for step in reversed(failed.values())]
    return Box(
        (
            Line(" ".join(visit.key), "chain"),
            *_some(unmatched, _UNMATCHED),
            *_some([line for _, line in lines] or [Line("no rule decides", "soft")], _MATCHED),
        ),
        tuple(f"-A {step.chain} {step.rule}" for step in (*reversed(failed.values()), *visit.steps, *parts)),
    )


def choice_box(points: Path) -> Box | None:
    """Return the chain at the end of the points in which packets get their endpoint; None without points."""
    visits = [visit for visit in _visits(points) if visit.steps]
    if not visits:
        return None
    *between, last = visits
    step = last.steps[-1]
    marks = dict.fromkeys(Line(mark, "mark") for visit in visits for mark in visit.marks())
    because = [rule.reason for visit in visits for rule, line in visit.lines() if line.style == "mark"]
    through = [visit.key.chain for visit in between[1:]]
    lines = [
        Line(last.key.chain, "chain"),
        *([Line(f"through {listed(through, 1)}")] if through else []),
        *marks,
        Line(because[0] if because else _comment(step) or step.reason, "soft"),
    ]
    return Box(tuple(lines[:3]), _rules(points))


def decision_rule(hook: Path) -> tuple[object, ...]:
    """Return the hook and the rule that decides in it; equal for packets that meet the same decision."""
    step = _deciding(hook)
    return (hook[0], step and (step.table, step.chain, step.rule))


def decision_box(alike: Sequence[Path]) -> Box:
    """Return the decision of a hook on all of some packets; it is the same rule for each."""
    step = _deciding(alike[0])
    title = Line(f"{alike[0][0].table} {alike[0][0].chain}", "soft")
    if step is None:
        passed = [point.chain for point in alike[0][1:] if isinstance(point, ChainKey)]
        through = [Line(f"passes {listed(passed, 1)}")] if passed else []
        return Box((title, Line("no rule decides", "strong"), *through), _rules(alike[0]))
    target = parse_target(step.rule) or step.rule
    reasons = {deciding.reason for hook in alike if (deciding := _deciding(hook))}
    comment = _comment(step)
    if comment and (target in ("DROP", "REJECT") or reasons == {EVERY_PACKET}):
        reason = comment
    else:
        reason = step.reason if len(reasons) == 1 else without_comment(step.rule)
    chain = [Line(step.chain, "chain")] if step.chain not in BUILT_IN else []
    return Box((title, *chain, Line(target, "strong"), Line(reason)), _rules(alike[0]))


def _deciding(hook: Path) -> Step | None:
    """Return the rule that ends a packet's path through a table, else the last one that is not a jump."""
    steps = [
        point
        for point, after in zip(hook, (*hook[1:], None), strict=True)
        if isinstance(point, Step) and not isinstance(after, ChainKey)
    ]
    return steps[-1] if steps else None


def _visits(points: Path, then: Step | None = None) -> list[_ChainVisit]:
    """Return the chains that a packet is in after the last point, the outermost first; `then` is the next rule."""
    stack: list[_ChainVisit] = []
    for point in points:
        if isinstance(point, ChainKey):
            stack.append(_ChainVisit(point))
        else:
            _return_to(ChainKey(point.table, point.chain), stack)
            stack[-1].steps.append(point)
    if then:
        _return_to(ChainKey(then.table, then.chain), stack)
    return stack


def _return_to(key: ChainKey, stack: list[_ChainVisit]) -> None:
    """Leave chains until a packet is back in one; record in each what the chain below did."""
    while stack and stack[-1].key != key:
        left = stack.pop()
        if stack:
            stack[-1].returned.setdefault(len(stack[-1].steps) - 1, []).append(left)
    if not stack:
        stack.append(_ChainVisit(key))


def _mark(step: Step) -> str:
    """Return what a rule does to the mark of packets; "" for nothing."""
    if parse_target(step.rule) != "MARK":
        return ""
    value = parse_rule(step.rule).options.get("--set-xmark", "")
    bits, _, mask = value.partition("/")
    return f"sets the mark {bits}" if bits == mask else "changes the mark"


def _text(step: Step) -> str:
    comment = _comment(step)
    return f"{step.reason} ({comment})" if comment else step.reason


def _comment(step: Step) -> str:
    # Some comments continue with a remark for authors of rules.
    return parse_rule(step.rule).comment.partition(";")[0]


def _some(lines: Sequence[Line], limit: int) -> Sequence[Line]:
    if len(lines) <= limit:
        return lines
    return [*lines[: limit - 1], Line(f"and {len(lines) - limit + 1} more", "soft")]


def _rules(points: Path) -> tuple[str, ...]:
    return tuple(f"-A {point.chain} {point.rule}" for point in points if isinstance(point, Step))


# How many boxes are drawn one below the other and in a row, and how many groups and rows.
_TRUNK, _DECISIONS, _GROUPS, _ROWS = 14, 4, 5, 12


class EndKind(Enum):
    """How packets end; a picture shows it by colour too."""

    KEPT = "kept"
    MASQUERADED = "masqueraded"
    REJECTED = "rejected"
    MIXED = "mixed"


class PictureRow(NamedTuple):
    """A share of the packets: the box where their endpoint is chosen, and their end; None if there is none."""

    probability: float
    choice: Box | None
    end: Box | None


class PictureGroup(NamedTuple):
    """Rows with the same decisions after the choice of the endpoint."""

    kind: EndKind
    decisions: tuple[Box, ...]
    rows: tuple[PictureRow, ...]


class Picture(NamedTuple):
    """The packet, what happens to it, the chains that all packets pass, and their ends in groups."""

    title: str
    result: str
    trunk: tuple[Box, ...]
    groups: tuple[PictureGroup, ...]


class _OutcomePath(NamedTuple):
    """An outcome, its path before the first decision, and its decisions: the later hooks in which a rule matches."""

    outcome: WalkEnd
    points: Path
    decisions: tuple[Path, ...]

    @property
    def kind(self) -> EndKind:
        if self.outcome.verdict in (PacketVerdict.DROP, PacketVerdict.REJECT):
            return EndKind.REJECTED
        return EndKind.MASQUERADED if SNAT in self.outcome.packet.states else EndKind.KEPT


def picture(trace: NodeTrace) -> Picture:
    """Choose what to draw of a trace; more endpoints, paths and chains than fit are summed up."""
    paths = [_outcome_path(outcome) for outcome in trace.ends]
    common = _common(paths)
    then = dict.fromkeys(point for path in paths for point in path.points[common : common + 1])
    trunk = trunk_boxes(paths[0].points[:common], list(then), trace.steps)
    return Picture(_title(trace.packet), _result(trace), _fewer(trunk, _TRUNK), tuple(_groups(paths, common)))


def _outcome_path(outcome: WalkEnd) -> _OutcomePath:
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


def _groups(paths: Iterable[_OutcomePath], common: int) -> Iterator[PictureGroup]:
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
            yield PictureGroup(
                group[0].kind, _fewer(decisions, _DECISIONS), tuple(_rows(group, common, limit))
            )
    if others:
        end = Box((Line(f"and {len(others)} more paths", "strong"), Line(percent(_total(others)))))
        yield PictureGroup(EndKind.MIXED, (), (PictureRow(_total(others), None, end),))


def _rows(paths: Sequence[_OutcomePath], common: int, limit: int) -> Iterator[PictureRow]:
    shown = paths if len(paths) <= limit else paths[: limit - 1]
    for path in shown:
        yield PictureRow(path.outcome.probability, choice_box(path.points[common:]), _end(path))
    if others := paths[len(shown) :]:
        share = _total(others)
        remark = _remark(others[0], share)
        more = Box((Line(f"and {len(others)} more", "strong"), Line(remark)))
        rejected = others[0].kind is EndKind.REJECTED
        chosen = Box((Line(f"and {len(others)} more" if rejected else f"{len(others)} more chains", "soft"),))
        yield PictureRow(share, chosen if others[0].points[common:] else None, None if rejected else more)


def _end(path: _OutcomePath) -> Box | None:
    """Return where a packet arrives; None if a rule rejects it."""
    if path.kind is EndKind.REJECTED:
        return None
    at = address_and_port(path.outcome.packet.destination, path.outcome.packet.port)
    return Box((Line(at, "strong"), Line(_remark(path, path.outcome.probability))))


def _remark(path: _OutcomePath, share: float) -> str:
    if path.kind is EndKind.MASQUERADED:
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
    by = f", arriving on {packet.received_by}" if packet.received_by else ""
    where = ", from this node" if packet.starts_here else by
    return f"{packet.source} to {destination}, {packet.protocol.upper()}{where}"


def _result(trace: NodeTrace) -> str:
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
        share = sum(outcome.probability for outcome in trace.ends if outcome.verdict is verdict)
        if share:
            phrases.append(phrase if share > 1 - 1e-9 else f"{phrase} with a probability of {percent(share)}")
    return "; ".join(phrases)
