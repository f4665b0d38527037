"""The picture of the states of a family's tables, from `TRANSITIONS` in `pykubeproxy.agent.work`."""

from collections.abc import Iterator
from html import escape

from pykubeproxy.agent.work import TRANSITIONS, TablesState, Trigger

_WIDTH, _HEIGHT, _MIDDLE, _BOX, _STEP = 1000, 350, 200, 130, 270
_STYLE = (
    "text{font-family:system-ui,sans-serif;font-size:12px;fill:#222;text-anchor:middle}"
    "rect{fill:#eef3fb;stroke:#4a6fa5}path{fill:none;stroke:#4a6fa5}.label{fill:#555}"
)


def states_of_tables() -> str:
    """Return the picture of the states, and of what moves from one to another."""
    states = [*TRANSITIONS]
    shapes: list[str] = []
    for number, state in enumerate(states):
        left = 30 + number * _STEP
        shapes.append(f'<rect x="{left}" y="{_MIDDLE - 17}" width="{_BOX}" height="34" rx="6"/>')
        shapes.append(f'<text x="{left + _BOX / 2}" y="{_MIDDLE + 4}">{name_of(state)}</text>')
        for trigger, target in TRANSITIONS[state].items():
            shapes += _arrow(number, states.index(target), trigger)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">'
        f"<title>The states of the tables of a family, and what moves them</title><style>{_STYLE}</style>"
        '<defs><marker id="end" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" style="fill:#4a6fa5"/></marker></defs>'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" style="fill:#fff;stroke:none"/>\n'
        + "\n".join(shapes)
        + "\n</svg>\n"
    )


def name_of(state: TablesState) -> str:
    """Return the name of a state, as the picture and docs/design.md have it."""
    return state.name.replace("_", " ").lower()


def _arrow(source: int, target: int, trigger: Trigger) -> Iterator[str]:
    """Yield an arrow, above the states if it leads to the right, below them if to the left."""
    side = -1 if target > source else 1
    height = 55 * abs(target - source)
    start = 30 + source * _STEP + _BOX / 2 - 25 * side
    end = 30 + target * _STEP + _BOX / 2 + 25 * side
    edge = _MIDDLE + side * 17
    bend = edge + side * height * 1.3
    yield f'<path d="M{start},{edge} C{start},{bend} {end},{bend} {end},{edge}" marker-end="url(#end)"/>'
    label_y = edge + side * height + (14 if side > 0 else -4)
    yield f'<text class="label" x="{(start + end) / 2}" y="{label_y}">{escape(trigger.value)}</text>'
