"""The picture of the states of pending work, from `TRANSITIONS` in `pykubeproxy.agent.work`."""

from collections.abc import Iterator
from html import escape

from pykubeproxy.agent.work import TRANSITIONS, TRIGGERS, Part, State, Trigger

_WIDTH, _BOX, _HEIGHT, _STEP = 960, 150, 34, 330
_STYLE = (
    "text{font-family:system-ui,sans-serif;font-size:13px;fill:#222}.part{font-weight:600;font-size:14px}"
    ".label{font-size:12px;fill:#555;text-anchor:middle}.state{text-anchor:middle}"
    "rect{fill:#eef3fb;stroke:#4a6fa5}path{fill:none;stroke:#4a6fa5}"
)


def pending_work() -> str:
    """Return docs/assets/work.svg: for each part of the pending work, its states and what moves it."""
    shapes: list[str] = []
    top = 30
    for part in Part:
        drawn, top = _part(part, top)
        shapes += drawn
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top}" role="img">'
        "<title>The states of the pending work of a family, and what moves it</title>"
        f"<style>{_STYLE}</style>"
        '<defs><marker id="end" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" style="fill:#4a6fa5"/></marker></defs>'
        f'<rect width="{_WIDTH}" height="{top}" style="fill:#fff;stroke:none"/>\n'
        + "\n".join(shapes)
        + "\n</svg>\n"
    )


def _part(part: Part, top: int) -> tuple[list[str], int]:
    """Return the shapes of one part, and where the next one begins."""
    states = [*TRANSITIONS[part]]
    middle = top + (120 if len(states) > 2 else 86)
    shapes = [f'<text class="part" x="20" y="{top}">{escape(part.value)}</text>']
    for number, state in enumerate(states):
        left = 60 + number * _STEP
        name = state.name.replace("_", " ").lower()
        shapes.append(
            f'<rect x="{left}" y="{middle - _HEIGHT / 2}" width="{_BOX}" height="{_HEIGHT}" rx="6"/>'
        )
        shapes.append(f'<text class="state" x="{left + _BOX / 2}" y="{middle + 4}">{name}</text>')
    for source, target, triggers in _moves(part):
        shapes += _arrow(states.index(source), states.index(target), middle, triggers)
    return shapes, middle + 110


def _moves(part: Part) -> Iterator[tuple[State, State, list[Trigger]]]:
    for source, moves in TRANSITIONS[part].items():
        for target in dict.fromkeys(moves.values()):
            yield source, target, [trigger for trigger, state in moves.items() if state is target]


def _arrow(source: int, target: int, middle: int, triggers: list[Trigger]) -> Iterator[str]:
    """Yield an arrow, above the states if it leads to the right, below them if to the left."""
    side = -1 if target > source else 1
    height = 30 * abs(target - source) + 10
    start = 60 + source * _STEP + _BOX / 2 + 20 * -side
    end = 60 + target * _STEP + _BOX / 2 + 20 * side
    edge = middle + side * _HEIGHT / 2
    bend = edge + side * height * 1.3
    yield f'<path d="M{start},{edge} C{start},{bend} {end},{bend} {end},{edge}" marker-end="url(#end)"/>'
    label = ", or ".join(TRIGGERS[trigger] for trigger in triggers)
    yield f'<text class="label" x="{(start + end) / 2}" y="{edge + side * height + (14 if side > 0 else -4)}">{escape(label)}</text>'
