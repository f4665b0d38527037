"""Items that are made while they are read: neither has the reader to wait for all of them, nor memory to hold them."""

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Again(Generic[_T]):
    """Items that `make` makes anew each time they are read."""

    def __init__(self, make: Callable[[], Iterator[_T]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[_T]:
        return self._make()
