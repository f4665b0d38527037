"""Calls side by side, with a bound."""

import threading
from collections.abc import Iterator

import pytest

from pykubeproxy.nodes.cluster import side_by_side
from tests.fakes.waiting import PATIENCE


def test_results_come_as_they_are_ready() -> None:
    """A slow call holds up no other."""
    go_on = threading.Event()

    def work(number: int) -> int:
        assert number or go_on.wait(10)
        return number

    results = side_by_side(work, range(4), 2)
    assert [next(results) for _ in range(3)] == [1, 2, 3]
    go_on.set()
    assert list(results) == [0]


def test_bound_counts_running_calls_and_waiting_results() -> None:
    """A slow caller holds at most as many results as calls may run."""
    lock, started = threading.Lock(), list[int]()
    three = threading.Semaphore(0)

    def work(number: int) -> int:
        with lock:
            started.append(number)
        three.release()
        return number

    results: Iterator[int] = side_by_side(work, range(100), 3)
    next(results)
    for _ in range(4):  # three at first, and one for the result that was taken
        assert three.acquire(timeout=PATIENCE)
    assert not three.acquire(timeout=0.05)
    assert len(started) == 4
    assert len(list(results)) == 99


def test_error_reaches_the_caller() -> None:
    def work(number: int) -> int:
        raise ValueError(f"item {number}")

    with pytest.raises(ValueError, match="item 7"):
        list(side_by_side(work, [7], 4))


def test_nothing_to_do() -> None:
    assert list(side_by_side(str, [], 4)) == []
