"""Events as the API server gets them, and what becomes of them when it is not well."""

import gzip
import socket
import time
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import pytest
from structlog.testing import capture_logs

from pykubeproxy.agent.observe import events
from pykubeproxy.agent.observe.events import ApiRecorder, as_object
from pykubeproxy.lab.apiserver import ApiServer
from pykubeproxy.objects import Family, Key
from pykubeproxy.sources import Client
from tests.fakes.canned import CannedServer, whole
from tests.fakes.cluster import server, service
from tests.fakes.follower import eventually

NS = 1_795_218_838_074_678_960
WEB = Key("default", "web")
Record = Callable[..., ApiRecorder]


@pytest.fixture
def recorder() -> Iterator[Record]:
    """A recorder at a server, with short pauses."""
    made: list[ApiRecorder] = []

    def start(url: str, pauses: tuple[float, ...] = (0.02, 0.02, 0.02)) -> ApiRecorder:
        made.append(ApiRecorder(Client(master=url, qps=-1), "node1", pauses))
        return made[-1]

    yield start
    for it in made:
        it.close(0.0)


@pytest.fixture
def logged() -> Iterator[list[MutableMapping[str, Any]]]:
    with capture_logs() as lines:
        yield lines


def stored(api: ApiServer, namespace: str = "default") -> list[dict[str, Any]]:
    """The events that the server has, in the order of their names."""
    listed: list[dict[str, Any]] = (
        Client(master=api.url)
        .get(f"/apis/events.k8s.io/v1/namespaces/{namespace}/events", {}, asked="events", idle=5)
        .json()["items"]
    )
    return listed


def test_an_event_has_what_the_api_requires() -> None:
    """Names, times and fields are those of events.k8s.io/v1; a Node's events are in namespace default."""
    assert as_object(
        events.port_taken("node1", Key("shop", "web"), 32000, "Address already in use"),
        NS,
        "kube-proxy-node1",
    ) == {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": f"web.{NS:x}", "namespace": "shop"},
        "eventTime": "2026-11-20T23:53:58.074678Z",
        "reportingController": "kube-proxy",
        "reportingInstance": "kube-proxy-node1",
        "action": "Listen",
        "reason": "FailedToStartServiceHealthcheck",
        "regarding": {"apiVersion": "v1", "kind": "Service", "namespace": "shop", "name": "web"},
        "type": "Warning",
        "note": "node node1 cannot serve the health check of shop/web on port 32000: Address already in use",
    }
    start = as_object(events.starting("node1"), NS, "kube-proxy-node1")
    assert start["metadata"] == {"name": f"node1.{NS:x}", "namespace": "default"}
    assert start["regarding"] == {"apiVersion": "v1", "kind": "Node", "name": "node1", "uid": "node1"}
    assert (start["type"], start["reason"]) == ("Normal", "Starting")


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (events.health_server_failed("node1", "taken"), "FailedToStartProxierHealthcheck"),
        (events.metrics_server_failed("node1", "taken"), "FailedToStartMetricServer"),
        (events.set_aside("node1", WEB, "bad rule"), "ServiceSetAside"),
        (events.rules_repaired("node1", Family.IPV4, "nat: 1 rule gone", ("nft",)), "RulesRepaired"),
    ],
)
def test_troubles_are_warnings(made: events.Event, reason: str) -> None:
    """Events that ask for somebody's attention are of type Warning and say what for."""
    content = as_object(made, NS, "kube-proxy-node1")
    assert (content["type"], content["reason"]) == ("Warning", reason)
    assert content["action"]
    assert content["note"]


def test_long_texts_are_cut_to_what_the_api_takes() -> None:
    """A note of at most 1024 characters, a name of at most 253."""
    content = as_object(events.set_aside("n" * 253, Key("", "n" * 253), "x" * 5000), NS, "i")
    metadata = content["metadata"]
    assert isinstance(metadata, dict)
    assert len(metadata["name"]) <= 253
    assert len(str(content["note"])) == 1024


def test_events_reach_the_api_server(recorder: Record) -> None:
    """What is recorded is soon there, in its namespace and in its order."""
    with server() as api:
        api_recorder = recorder(api.url)
        api_recorder.record(events.starting("node1"))
        api_recorder.record(events.port_taken("node1", WEB, 32000, "taken"))
        eventually(lambda: len(stored(api)) == 2)
        assert sorted(it["reason"] for it in stored(api)) == ["FailedToStartServiceHealthcheck", "Starting"]
        entry = api.requests.entries("create", "events.events.k8s.io")[0]
        assert entry.path == "/apis/events.k8s.io/v1/namespaces/default/events"


def test_the_uid_of_a_service_is_asked_for(recorder: Record) -> None:
    """With it `kubectl describe service` shows the event; without the Service, or an answer, there is none."""
    with server() as api:
        made = api.store.create(service("web", clusterIP="10.96.0.10"))
        api_recorder = recorder(api.url)
        api_recorder.record(events.set_aside("node1", WEB, "bad rule"))
        api_recorder.record(events.set_aside("node1", Key("default", "gone"), "bad rule"))
        eventually(lambda: len(stored(api)) == 2)
        api.faults.fail(403, times=1, verb="list", path="services")
        api_recorder.record(events.set_aside("node1", WEB, "worse rule"))
        eventually(lambda: len(stored(api)) == 3)
        uids = [(it["regarding"]["name"], it["regarding"].get("uid", "")) for it in stored(api)]
    assert sorted(uids) == [("gone", ""), ("web", ""), ("web", made["metadata"]["uid"])]


@pytest.mark.parametrize(
    "answer",
    [
        whole(b'{"x":' + b"[" * 5000 + b"]" * 5000 + b"}"),
        whole(b'{"items":"none"}'),
        whole(gzip.compress(b'{"items":[]}'), headers="Content-Encoding: gzip\r\n"),
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{",
    ],
    ids=["deep", "of another form", "compressed unasked", "broken off"],
)
def test_a_uid_that_cannot_be_had_costs_the_uid_alone(recorder: Record, answer: bytes) -> None:
    """Whatever is answered, the event is sent, and the next one too."""

    def ask(target: str, connection: socket.socket) -> None:
        connection.sendall(answer if "fieldSelector" in target else whole(b"{}", "201 Created"))

    with CannedServer(ask) as odd:
        api_recorder = recorder(odd.url)
        for _ in range(2):
            api_recorder.record(events.set_aside("node1", WEB, "bad rule"))
        eventually(lambda: sum(it.endswith("/events") for it in odd.requests) == 2)


def test_closing_sends_what_is_waiting(recorder: Record) -> None:
    """A process that is about to end still tells why."""
    with server() as api:
        api_recorder = recorder(api.url)
        api_recorder.record(events.metrics_server_failed("node1", "taken"))
        api_recorder.close(5.0)
        assert [it["reason"] for it in stored(api)] == ["FailedToStartMetricServer"]


def test_a_failing_server_is_asked_again(recorder: Record, logged: list[MutableMapping[str, Any]]) -> None:
    """Errors that pass delay an event, they do not lose it."""
    with server() as api:
        api.faults.fail(503, times=2, verb="create")
        recorder(api.url).record(events.starting("node1"))
        eventually(lambda: len(stored(api)) == 1)
    assert logged == []


def test_an_event_that_cannot_be_had_is_given_up(
    recorder: Record, logged: list[MutableMapping[str, Any]]
) -> None:
    """After a few tries it is dropped with one line that says why, and the next has its turn."""
    with server() as api:
        api.faults.fail(403, times=4, verb="create")
        api_recorder = recorder(api.url)
        api_recorder.record(events.port_taken("node1", WEB, 32000, "taken"))
        api_recorder.record(events.starting("node1"))
        eventually(lambda: len(stored(api)) == 1)
        assert stored(api)[0]["reason"] == "Starting"
    (line,) = logged
    assert line["what"] == "FailedToStartServiceHealthcheck"
    assert "new events are not permitted (403" in line["reason"]


def test_a_refused_event_is_not_sent_twice(recorder: Record, logged: list[MutableMapping[str, Any]]) -> None:
    """What the server calls invalid will not be valid the next time."""
    with server() as api:
        api.faults.fail(422, times=1, verb="create")
        api_recorder = recorder(api.url)
        api_recorder.record(events.starting("node1"))
        api_recorder.close(5.0)
        assert stored(api) == []
    assert len(logged) == 1


def test_recording_never_waits(recorder: Record, logged: list[MutableMapping[str, Any]]) -> None:
    """With a server that never answers, any number of events is recorded at once; those too many are dropped."""
    with CannedServer(lambda _, __: time.sleep(10)) as silent:
        api_recorder = recorder(silent.url)
        begun = time.monotonic()
        for _ in range(200):
            api_recorder.record(events.starting("node1"))
        api_recorder.close(0.1)
        assert time.monotonic() - begun < 1
    assert 95 <= len(logged) <= 100


def test_without_an_api_server_nothing_happens() -> None:
    """Where there is nobody to tell, recording is no trouble."""
    silent = events.NoRecorder()
    silent.record(events.starting("node1"))
    silent.close(1.0)
