"""JSON, with the path of each duplicate key."""

import json
from collections.abc import Iterator
from typing import NoReturn


class _Object(dict[str, object]):
    """A JSON object. `repeated` are its duplicate keys, of which the last counts."""

    repeated: tuple[str, ...]


def document(text: str) -> tuple[object, tuple[tuple[str, ...], ...]]:
    """Return the value in a text, and the path of each duplicate key. Raises ValueError for text that is not JSON."""
    try:
        content = json.loads(text, object_pairs_hook=_object, parse_constant=_no_number)
        return content, tuple(_repeated(content, ()))
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg}, line {error.lineno}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _object(pairs: list[tuple[str, object]]) -> _Object:
    content = _Object(pairs)
    keys = [key for key, _ in pairs]
    content.repeated = tuple(key for at, key in enumerate(keys) if key in keys[:at])
    return content


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number")


def _repeated(content: object, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    if isinstance(content, _Object):
        yield from ((*path, key) for key in content.repeated)
        for key, value in content.items():
            yield from _repeated(value, (*path, key))
