"""Read the entries of a list of the API, and collect the invalid ones."""

from collections.abc import Callable, Iterable
from typing import TypeVar

from pykubeproxy.objects.check import Invalid
from pykubeproxy.objects.values import RejectedValue

_LONGEST_VALUE = 160
# Keep this many invalid entries of a list: a list may have a hundred thousand.
_MOST_REJECTED = 100

_In = TypeVar("_In")
_Out = TypeVar("_Out")


def accepted(
    field: str,
    entries: Iterable[tuple[int, _In]],
    read: Callable[[_In], _Out],
    rejected: list[RejectedValue],
    skipped: str = "it",
) -> tuple[_Out, ...]:
    """Return what `read` makes of each numbered entry of a list; add the first hundred invalid ones to `rejected`.

    `field` is the path of the list, such as "spec.ports". `read` raises Invalid with the path below the entry, such as
    ".port"; `skipped` says what is skipped then.
    """
    found = []
    first, more = len(rejected), 0
    for number, entry in entries:
        try:
            found.append(read(entry))
        except Invalid as error:
            if len(rejected) - first < _MOST_REJECTED:
                rejected.append(_rejected(f"{field}[{number}]{error.field}", error, skipped))
            else:
                more += 1
    if more:
        last = rejected[-1]
        rejected[-1] = last._replace(reason=f"{last.reason} ({more} more entries are invalid)")
    return tuple(found)


def accepted_or(
    default: _Out, field: str, value: _In, read: Callable[[_In, str], _Out], rejected: list[RejectedValue]
) -> _Out:
    """Return what `read` makes of a value and its field, or the default if the value is invalid."""
    try:
        return read(value, field)
    except Invalid as error:
        rejected.append(_rejected(error.field, error, "it"))
        return default


def _rejected(field: str, error: Invalid, skipped: str) -> RejectedValue:
    value = shortened(error.value, _LONGEST_VALUE) if isinstance(error.value, str) else error.value
    return RejectedValue(field, value, error.reason, skipped)


def shortened(text: str, longest: int) -> str:
    """Cut the middle out of a long text: its end may say what is wrong."""
    return text if len(text) <= longest else f"{text[: longest - 80]} ... {text[-75:]}"
