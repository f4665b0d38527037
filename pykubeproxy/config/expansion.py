"""How much a YAML text comes to: a few lines of aliases can stand for more than there is memory."""

from collections.abc import Iterable

import yaml

# Deeper than any object or configuration is; the loader in C overruns its stack at some ten thousand.
_DEEPEST = 200
# Characters, and values, that aliases may stand for in one text.
_MOST_ALIASED = 10_000_000


def check(events: Iterable[yaml.Event]) -> None:
    """Look through what `yaml.parse` gives. Raises yaml.MarkedYAMLError for a text that is too deep, or too much."""
    passed = aliased = 0
    sizes: dict[str, int] = {}  # of what has an anchor
    opened: list[
        tuple[str | None, int]
    ] = []  # the collections around: anchor, and what was passed before each
    for event in events:
        match event:
            case yaml.AliasEvent():
                size = sizes.get(str(event.anchor), 1)
                passed, aliased = passed + size, aliased + size
                if aliased > _MOST_ALIASED:
                    raise _too_much("its aliases stand for too much", event)
            case yaml.ScalarEvent():
                passed += 1 + len(event.value)
                if event.anchor:
                    sizes[event.anchor] = 1 + len(event.value)
            case yaml.CollectionStartEvent():
                opened.append((event.anchor, passed))
                passed += 1
                if len(opened) > _DEEPEST:
                    raise _too_much("it is nested too deeply", event)
            case yaml.CollectionEndEvent():
                anchor, before = opened.pop()
                if anchor:
                    sizes[anchor] = passed - before


def _too_much(problem: str, event: yaml.Event) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)  # type: ignore[arg-type]
