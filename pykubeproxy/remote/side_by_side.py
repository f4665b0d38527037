"""Call a function for several items on threads, and pass each result on as soon as it is there."""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class _Failed(NamedTuple):
    """An error of the function, to raise on the caller's thread."""

    error: Exception


def side_by_side(
    function: Callable[[_Item], _Result], items: Sequence[_Item], at_once: int
) -> Iterator[_Result]:
    """Yield the result for each item in the order in which they are ready; raise what the function raises.

    At most `at_once` calls run, or wait for the caller to take their results. When the caller stops, running calls are
    abandoned: their threads do not keep the program alive.
    """
    todo: queue.SimpleQueue[_Item] = queue.SimpleQueue()
    for item in items:
        todo.put(item)
    done: queue.SimpleQueue[_Result | _Failed] = queue.SimpleQueue()
    slots = threading.Semaphore(at_once)
    stopped = threading.Event()

    def work() -> None:
        while True:
            slots.acquire()
            try:
                item = todo.get_nowait()
            except queue.Empty:
                return
            if stopped.is_set():
                return
            try:
                done.put(function(item))
            except Exception as error:
                done.put(_Failed(error))

    for _ in range(min(at_once, len(items))):
        threading.Thread(target=work, daemon=True, name="node-reader").start()
    try:
        for _ in items:
            result = done.get()
            slots.release()
            if isinstance(result, _Failed):
                raise result.error
            yield result
    finally:
        stopped.set()
        for _ in range(at_once):
            slots.release()
