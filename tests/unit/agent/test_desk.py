"""Asking the loop: in turn, and not for ever."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pykubeproxy.agent.observe import status_service as desk
from pykubeproxy.agent.observe.query import Query
from pykubeproxy.agent.observe.status import Filter
from pykubeproxy.agent.observe.status_service import StatusService
from pykubeproxy.objects import Node
from pykubeproxy.services.cluster import Cluster

Box = queue.SimpleQueue[Query[Any]]


def desk_with(box: Box) -> StatusService:
    # Neither families nor observers are asked for the objects.
    return StatusService("n", None, None, box.put)  # type: ignore[arg-type]


def test_one_question_at_a_time() -> None:
    """However many ask at once, the loop finds one of them in its mailbox, and the next when that is answered."""
    box: Box = queue.SimpleQueue()
    asked, everybody = desk_with(box), threading.Barrier(9)

    def ask() -> object:
        everybody.wait()
        return asked.objects(Filter())

    with ThreadPoolExecutor(8) as clients:
        answers = [clients.submit(ask) for _ in range(8)]
        everybody.wait()
        for _ in answers:
            enquiry = box.get(timeout=10)
            assert box.empty()
            enquiry.meet(Cluster(), ())
    assert [it.result().node for it in answers] == [Node("n")] * 8  # type: ignore[attr-defined]


def test_a_loop_that_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is told then, and whoever waited in vain leaves no question that anybody has to answer."""
    monkeypatch.setattr(desk, "_PATIENCE", 0.05)
    box: Box = queue.SimpleQueue()
    asked = desk_with(box)
    assert asked.objects(Filter()) is None
    assert asked.objects(Filter()) is None
    assert [box.get_nowait().answer.cancelled() for _ in range(2)] == [True, True]
