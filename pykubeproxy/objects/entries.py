"""Read the entries of a list of the API, and collect the invalid ones."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from pykubeproxy.objects.check import Invalid
from pykubeproxy.objects.values import RejectedValue

_LONGEST_VALUE = 160

_In = TypeVar("_In")
_Out = TypeVar("_Out")


def numbered(field: str, entries: Iterable[_In] | None) -> Iterator[tuple[str, _In]]:
    """Yield the entries of a list with their fields, such as "spec.ports[0]"."""
    return ((f"{field}[{i}]", entry) for i, entry in enumerate(entries or ()))


def accepted(
    entries: Iterable[tuple[str, _In]],
    read: Callable[[_In, str], _Out],
    rejected: list[RejectedValue],
    skipped: str = "it",
) -> tuple[_Out, ...]:
    """Return what `read` makes of each entry and its field; add the invalid ones to `rejected`."""
    found = []
    for field, entry in entries:
        try:
            found.append(read(entry, field))
        except Invalid as error:
            value = shortened(error.value, _LONGEST_VALUE) if isinstance(error.value, str) else error.value
            rejected.append(RejectedValue(error.field, value, error.reason, skipped))
    return tuple(found)


def accepted_or(
    default: _Out, field: str, value: _In, read: Callable[[_In, str], _Out], rejected: list[RejectedValue]
) -> _Out:
    """Return what `read` makes of a value, or the default if it is invalid."""
    return next(iter(accepted([(field, value)], read, rejected)), default)


def shortened(text: str, longest: int) -> str:
    """Cut the middle out of a long text: its end may say what is wrong."""
    return text if len(text) <= longest else f"{text[: longest - 80]} ... {text[-75:]}"
