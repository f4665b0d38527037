"""The API server with faults: it misbehaves as ordered, and behaves again after that."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import urllib3

from pykubeproxy.lab.apiserver import NODES, SERVICES
from tests.fakes.faulty_apiserver import FaultyApiServer
from tests.unit.lab.apiserver.conftest import Client, Maker

PATH = "/api/v1/services"


@pytest.fixture
def server() -> Iterator[FaultyApiServer]:
    with FaultyApiServer() as running:
        yield running


@pytest.fixture
def filled(server: FaultyApiServer, service: Maker) -> FaultyApiServer:
    server.store.load([service("a"), service("b")])
    return server


@pytest.fixture
def in_background() -> Iterator[Callable[..., Any]]:
    """Runs a function on a thread; `result()` waits for what it returns."""
    threads = []

    class Call:
        def __init__(self, function: Any, *arguments: Any) -> None:
            self.outcome: list[Any] = []
            self.thread = threading.Thread(target=lambda: self.outcome.append(function(*arguments)))
            self.thread.start()
            threads.append(self.thread)

        def result(self) -> Any:
            self.thread.join(10)
            return self.outcome[0]

    yield Call
    for thread in threads:
        thread.join(10)


def order(client: Client, **what: Any) -> None:
    """Order a fault over HTTP."""
    answer = client.ask("POST", "/_lab/faults", what)
    assert answer.status == 200, answer.text


def test_errors_for_a_number_of_matching_requests(filled: FaultyApiServer, client: Client) -> None:
    """Only requests with the verb and path are hit, only so often; a Retry-After goes along."""
    filled.faults.fail(503, times=2, verb="list", path="services", retry_after=7)
    assert client.ask("GET", "/api/v1/nodes").status == 200
    assert client.ask("GET", f"{PATH}?watch=1&timeoutSeconds=1&resourceVersion=3").status == 200
    answers = [client.ask("GET", PATH) for _ in range(3)]
    assert [answer.status for answer in answers] == [503, 503, 200]
    assert answers[0].headers["Retry-After"] == "7"
    assert answers[0].json["reason"] == "ServiceUnavailable"


def test_errors_ordered_over_http(filled: FaultyApiServer, client: Client) -> None:
    """The control path takes the same orders, and names what it does not understand."""
    order(client, do="error", status=500, verb="get")
    assert client.ask("GET", "/api/v1/namespaces/default/services/a").status == 500
    assert client.ask("GET", "/api/v1/namespaces/default/services/a").status == 200
    refused = client.ask("POST", "/_lab/faults", {"do": "explode"})
    assert refused.status == 400
    assert "explode" in refused.json["message"]


def test_dropped_connections(filled: FaultyApiServer, client: Client) -> None:
    """A watch breaks off in the middle, without the end of its chunked body; the next request is served."""
    events = client.watch(f"{PATH}?watch=1&timeoutSeconds=60")
    assert next(events)["type"] == "ADDED"
    assert next(events)["type"] == "ADDED"
    filled.faults.drop_connections()
    with pytest.raises(urllib3.exceptions.ProtocolError):
        next(events)
    assert client.names(PATH) == ["a", "b"]


def test_hang_until_released(
    filled: FaultyApiServer, client: Client, in_background: Callable[..., Any]
) -> None:
    """Requests are accepted and not answered; when released they are."""
    filled.faults.hang(path="services")
    assert client.ask("GET", "/api/v1/nodes").status == 200
    call = in_background(client.names, PATH)
    filled.requests.wait(1, "list", "services")
    call.thread.join(0.2)
    assert call.thread.is_alive()
    filled.faults.release()
    assert call.result() == ["a", "b"]
    assert client.names(PATH) == ["a", "b"]


def test_hang_for_some_seconds(filled: FaultyApiServer, client: Client) -> None:
    """It ends by itself."""
    start = time.monotonic()
    order(client, do="hang", seconds=0.6)
    assert client.names(PATH) == ["a", "b"]
    assert time.monotonic() - start >= 0.5
    start = time.monotonic()
    client.names(PATH)
    assert time.monotonic() - start < 0.5


def test_delay(filled: FaultyApiServer, client: Client) -> None:
    """Each matching request takes that much longer, until cleared."""
    filled.faults.delay(0.5, verb="list")
    for _ in range(2):
        start = time.monotonic()
        client.names(PATH)
        assert time.monotonic() - start >= 0.5
    filled.faults.clear()
    start = time.monotonic()
    client.names(PATH)
    assert time.monotonic() - start < 0.5


def test_truncated_list(filled: FaultyApiServer, client: Client) -> None:
    """HTTP is fine, the JSON stops in the middle, once."""
    whole = client.ask("GET", PATH).text
    filled.faults.truncate()
    cut = client.ask("GET", PATH)
    assert cut.status == 200
    assert cut.text == whole[: len(whole) // 2]
    assert client.ask("GET", PATH).text == whole


def test_truncated_watch(filled: FaultyApiServer, client: Client) -> None:
    """The last event stops in the middle, then the stream ends as if nothing were wrong."""
    filled.faults.truncate(verb="watch")
    text = client.ask("GET", f"{PATH}?watch=1&timeoutSeconds=60").text
    first, second = text.split("\n")
    assert first.endswith("}")
    assert second.startswith('{"type":"ADDED"')
    assert not second.endswith("}}")


def test_watches_end_when_told(filled: FaultyApiServer, client: Client) -> None:
    """The stream ends properly, long before its time; a new watch is served."""
    events = client.watch(f"{PATH}?watch=1&resourceVersion={filled.store.version}&timeoutSeconds=600")
    filled.faults.end_watches()
    assert list(events) == []
    version = filled.store.version
    events = client.watch(f"{PATH}?watch=1&resourceVersion={version}&timeoutSeconds=600")
    filled.store.delete(SERVICES, "default", "a")
    assert next(events)["type"] == "DELETED"


def test_frozen_watches_say_nothing_and_catch_up(
    filled: FaultyApiServer, client: Client, in_background: Callable[..., Any]
) -> None:
    """No event and no end while frozen, not even after the watch's time; all events once thawed."""
    events = client.watch(f"{PATH}?watch=1&resourceVersion={filled.store.version}&timeoutSeconds=1")
    filled.faults.freeze_watches()
    filled.store.delete(SERVICES, "default", "a")
    call = in_background(next, events)
    call.thread.join(1.3)
    assert call.thread.is_alive()
    filled.faults.thaw_watches()
    assert call.result()["type"] == "DELETED"


def test_watches_that_begin_while_frozen_are_frozen(
    filled: FaultyApiServer, client: Client, in_background: Callable[..., Any]
) -> None:
    """They are accepted, and not even what is there is told before the thaw."""
    filled.faults.freeze_watches()
    events = client.watch(f"{PATH}?watch=1&timeoutSeconds=60")
    call = in_background(next, events)
    call.thread.join(0.3)
    assert call.thread.is_alive()
    order(client, do="thaw-watches")
    assert call.result()["object"]["metadata"]["name"] == "a"


def test_compaction_answers_old_versions_with_410(filled: FaultyApiServer, client: Client) -> None:
    """A watch that has read everything goes on; a new one from an old version gets the ERROR event."""
    filled.faults.freeze_watches()
    behind = client.watch(f"{PATH}?watch=1&resourceVersion={filled.store.version}&timeoutSeconds=60")
    filled.store.delete(SERVICES, "default", "a")
    filled.faults.compact()
    filled.faults.thaw_watches()
    assert list(behind) == []  # what it has missed cannot be told any more
    old = filled.store.version - 1
    (error,) = client.watch(f"{PATH}?watch=1&resourceVersion={old}&timeoutSeconds=5")
    assert error["type"] == "ERROR"
    assert error["object"]["message"] == f"too old resource version: {old} ({old + 1})"
    events = client.watch(f"{PATH}?watch=1&resourceVersion={old + 1}&timeoutSeconds=60")
    filled.store.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n"}})
    filled.faults.compact()  # not noticed by a watch that has missed nothing
    filled.store.delete(SERVICES, "default", "b")
    assert next(events)["type"] == "DELETED"


def test_stopped_and_started_again(filled: FaultyApiServer, client: Client) -> None:
    """An outage: connections are refused, then the same objects are there on the same port."""
    filled.stop()
    with pytest.raises(urllib3.exceptions.HTTPError):
        client.names(PATH)
    filled.start()
    assert client.names(PATH) == ["a", "b"]


def test_requests_are_counted(filled: FaultyApiServer, client: Client) -> None:
    """By verb and resource, with their query; the control path does not count."""
    client.names(f"{PATH}?limit=5")
    client.ask("GET", f"{PATH}?watch=1&timeoutSeconds=1&resourceVersion=3")
    client.ask("GET", "/apis/discovery.k8s.io/v1/endpointslices")
    client.ask("DELETE", "/api/v1/nodes/none")
    assert filled.requests.counts() == {
        "list services": 1,
        "watch services": 1,
        "list endpointslices.discovery.k8s.io": 1,
        "delete nodes": 1,
    }
    assert filled.requests.entries()[0].query == "limit=5"
    assert filled.requests.count("list") == 2
    assert filled.requests.count(resource="services") == 2
    assert [entry.name for entry in filled.requests.entries("delete", NODES.qualified)] == ["none"]
    filled.requests.clear()
    assert filled.requests.count() == 0
    with pytest.raises(TimeoutError, match="0 requests"):
        filled.requests.wait(1, seconds=0.01)
