"""Queries to the loop: one at a time, with a timeout."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pykubeproxy.agent.observe import status_service
from pykubeproxy.agent.observe.query import Query
from pykubeproxy.agent.observe.status import Filter
from pykubeproxy.agent.observe.status_service import StatusService
from pykubeproxy.objects import Node
from pykubeproxy.services.cluster import Cluster

Box = queue.SimpleQueue[Query[Any]]


def service_with(box: Box) -> StatusService:
    # Queries for objects need neither families nor observers.
    return StatusService("n", None, None, box.put)  # type: ignore[arg-type]


def test_one_query_at_a_time() -> None:
    """Concurrent clients queue; the loop never has more than one query."""
    box: Box = queue.SimpleQueue()
    service, everybody = service_with(box), threading.Barrier(9)

    def ask() -> object:
        everybody.wait()
        return service.objects(Filter())

    with ThreadPoolExecutor(8) as clients:
        answers = [clients.submit(ask) for _ in range(8)]
        everybody.wait()
        for _ in answers:
            query = box.get(timeout=10)
            assert box.empty()
            query.answer(Cluster(), ())
    assert [it.result().node for it in answers] == [Node("n")] * 8  # type: ignore[attr-defined]


def test_a_query_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is None, and the query is cancelled."""
    monkeypatch.setattr(status_service, "_TIMEOUT", 0.05)
    box: Box = queue.SimpleQueue()
    service = service_with(box)
    assert service.objects(Filter()) is None
    assert service.objects(Filter()) is None
    assert [box.get_nowait().future.cancelled() for _ in range(2)] == [True, True]
