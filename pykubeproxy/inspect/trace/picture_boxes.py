"""The boxes in a picture of a trace: chains, and the rules that decide in them."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from pykubeproxy.inspect.trace.walk import Path, Step
from pykubeproxy.rules.parse import parse_rule, parse_target, without_comment
from pykubeproxy.rules.ruleset import BUILT_IN, ChainKey
from pykubeproxy.wording import listed

# How many rules that match, and that do not, a box names.
_MATCHED, _UNMATCHED = 4, 2
_EVERY = "every packet matches"


class Line(NamedTuple):
    """A line in a box. `style` is "", "chain", "strong", "soft" or "mark"."""

    text: str
    style: str = ""


class Box(NamedTuple):
    """A stop of packets. `details` are rules in full, as iptables-save prints them."""

    lines: tuple[Line, ...]
    details: tuple[str, ...] = ()


class _Visit:
    """A stay in a chain: the rules that matched, each with what the chains did to which it jumped and that returned."""

    def __init__(self, key: ChainKey) -> None:
        self.key = key
        self.steps: list[Step] = []
        self.returned: dict[int, list[_Visit]] = {}

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


def _chain_box(visit: _Visit, parts: Sequence[Step], met: Sequence[Step]) -> Box:
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
        passed = [it.chain for it in alike[0][1:] if isinstance(it, ChainKey)]
        through = [Line(f"passes {listed(passed, 1)}")] if passed else []
        return Box((title, Line("no rule decides", "strong"), *through), _rules(alike[0]))
    target = parse_target(step.rule) or step.rule
    reasons = {it.reason for hook in alike if (it := _deciding(hook))}
    comment = _comment(step)
    if comment and (target in ("DROP", "REJECT") or reasons == {_EVERY}):
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


def _visits(points: Path, then: Step | None = None) -> list[_Visit]:
    """Return the chains that a packet is in after the last point, the outermost first; `then` is the next rule."""
    stack: list[_Visit] = []
    for point in points:
        if isinstance(point, ChainKey):
            stack.append(_Visit(point))
        else:
            _return_to(ChainKey(point.table, point.chain), stack)
            stack[-1].steps.append(point)
    if then:
        _return_to(ChainKey(then.table, then.chain), stack)
    return stack


def _return_to(key: ChainKey, stack: list[_Visit]) -> None:
    """Leave chains until a packet is back in one; note in each what the chain below did."""
    while stack and stack[-1].key != key:
        left = stack.pop()
        if stack:
            stack[-1].returned.setdefault(len(stack[-1].steps) - 1, []).append(left)
    if not stack:
        stack.append(_Visit(key))


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
