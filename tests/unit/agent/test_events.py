"""Events, as sent to the API server, and failures of that."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from pykubeproxy.agent.observe import events
from pykubeproxy.agent.observe.events import ApiRecorder, KubernetesEvent, as_object
from pykubeproxy.lab.apiserver import ApiServer
from pykubeproxy.objects import Key
from pykubeproxy.sources import Client
from tests.fakes.canned import CannedServer
from tests.fakes.cluster import server
from tests.fakes.recorder import FakeRecorder
from tests.fakes.waiting import PATIENCE, eventually

NS = 1_795_218_838_074_678_960
WEB = Key("default", "web")
STARTING = KubernetesEvent("Node", Key("", "node1"), "Normal", "Starting", "StartKubeProxy", "")
TAKEN = KubernetesEvent("Service", WEB, "Warning", "FailedToStartServiceHealthcheck", "Listen", "taken")
Record = Callable[..., ApiRecorder]


@pytest.fixture
def recorder() -> Iterator[Record]:
    """Create recorders with short pauses."""
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
    """Return the events on the server, sorted by name."""
    path = f"/apis/events.k8s.io/v1/namespaces/{namespace}/events"
    with Client(master=api.url).stream(path, {}, resource="events", idle=5) as pieces:
        listed: list[dict[str, Any]] = json.loads(b"".join(pieces))["items"]
    return listed


def test_event_objects_are_valid() -> None:
    """Names, times and fields follow events.k8s.io/v1; events of a Node are in namespace default."""
    silent = FakeRecorder()
    silent.on_service(Key("shop", "web"), "ServiceQuarantined", "does not serve shop/web: bad rule")
    made = as_object(silent.events[0], NS, "kube-proxy-node1")
    assert made == {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": f"web.{NS:x}", "namespace": "shop"},
        "eventTime": "2026-11-20T23:53:58.074678Z",
        "reportingController": "kube-proxy",
        "reportingInstance": "kube-proxy-node1",
        "action": "Sync",
        "reason": "ServiceQuarantined",
        "regarding": {"apiVersion": "v1", "kind": "Service", "namespace": "shop", "name": "web"},
        "type": "Warning",
        "note": "node node1 does not serve shop/web: bad rule",
    }
    start = as_object(STARTING, NS, "kube-proxy-node1")
    assert start["metadata"] == {"name": f"node1.{NS:x}", "namespace": "default"}
    assert start["regarding"] == {"apiVersion": "v1", "kind": "Node", "name": "node1", "uid": "node1"}
    slice_ = msgspec.structs.replace(silent.events[0], kind="EndpointSlice")
    about = as_object(slice_, NS, "kube-proxy-node1")["regarding"]
    assert about == made["regarding"] | {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice"}  # type: ignore[operator]


def test_long_texts_are_truncated() -> None:
    """A note has at most 1024 characters, a name at most 253."""
    content = as_object(
        msgspec.structs.replace(STARTING, regarding=Key("", "n" * 253), note="x" * 5000), NS, "i"
    )
    metadata = content["metadata"]
    assert isinstance(metadata, dict)
    assert len(metadata["name"]) <= 253
    assert len(str(content["note"])) == 1024


def test_events_reach_the_api_server(recorder: Record) -> None:
    """In order, in the namespace of their object. As in kube-proxy, the host's name does not follow hostnameOverride."""
    with server() as api:
        api_recorder = recorder(api.url)
        api_recorder.record(STARTING)
        api_recorder.record(TAKEN)
        eventually(lambda: len(stored(api)) == 2)
        assert sorted(it["reason"] for it in stored(api)) == ["FailedToStartServiceHealthcheck", "Starting"]
        assert stored(api)[0]["reportingInstance"] == f"kube-proxy-{socket.gethostname()}"
        entry = api.requests.entries("create", "events.events.k8s.io")[0]
        assert entry.path == "/apis/events.k8s.io/v1/namespaces/default/events"


def test_an_event_has_the_uid_of_its_service(recorder: Record) -> None:
    """`kubectl describe service` needs it; it is empty if the Service is unknown. No request asks for it."""
    with server() as api:
        api_recorder = recorder(api.url)
        api_recorder.uid_of = lambda key: {WEB: "0c5d"}.get(key, "")
        for service in (WEB, Key("default", "gone")):
            api_recorder.on_service(service, "ServiceQuarantined", "does not serve it")
        eventually(lambda: len(stored(api)) == 2)
        uids = [(it["regarding"]["name"], it["regarding"].get("uid", "")) for it in stored(api)]
        assert not api.requests.entries("list", "services")
    assert sorted(uids) == [("gone", ""), ("web", "0c5d")]


class Sender(Client):
    """Keep what is sent. While `stopped`, the server gives no answer."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.stopped = threading.Event()
        self.resumed = threading.Event()

    def post(self, path: str, body: Any, *, resource: str, idle: float) -> bytes:
        """Keep an event."""
        if self.stopped.is_set():
            self.resumed.wait(10)
        self.sent.append(body)
        return b""

    @property
    def notes(self) -> list[str]:
        return [it["note"] for it in self.sent]


class Toggled:
    """A recorder with a clock that the test moves, and no limit of events per second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(events, "_RATE", 1e6)
        monkeypatch.setattr(events, "_BURST", 1e6)
        self.now = 1000.0
        self.sender = Sender()
        self.recorder = ApiRecorder(self.sender, "node1", monotonic=lambda: self.now)

    def record(self, namespace: str, name: str, note: str) -> None:
        key = Key(namespace, name)
        self.recorder.record(KubernetesEvent("Service", key, "Warning", "R", "Sync", note))

    def sent(self, number: int) -> list[str]:
        eventually(lambda: len(self.sender.sent) >= number)
        time.sleep(0.05)
        return self.sender.notes


@pytest.fixture
def toggled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Toggled]:
    made = Toggled(monkeypatch)
    yield made
    made.recorder.close(1.0)


def test_events_of_one_object_are_summed_up(toggled: Toggled) -> None:
    """Three are sent at once, the others as one when the period is over, with their number."""
    for number in range(500):
        toggled.record("ns", "web", f"change {number}")
    assert toggled.sent(3) == ["change 0", "change 1", "change 2"]
    toggled.now += 601
    toggled.record("ns", "other", "first")
    assert toggled.sent(5)[3:] == ["change 499 (497 times since the last such event)", "first"]


def test_events_of_one_namespace_are_limited(toggled: Toggled) -> None:
    """Ten in each period; those of other namespaces and of Nodes are sent."""
    for number in range(50):
        toggled.record("hostile", f"s{number:02}", "note")
    toggled.record("victim", "web", "of the victim")
    toggled.recorder.record(STARTING)
    assert len(toggled.sent(12)) == 12
    for _ in range(4):
        toggled.now += 601
        before = len(toggled.sender.sent)
        toggled.record("victim", "web", "again")
        assert len(toggled.sent(before + 11)) == before + 11
    about = [it["regarding"] for it in toggled.sender.sent]
    names = [it["name"] for it in about if it.get("namespace") == "hostile"]
    assert names == [f"s{number:02}" for number in range(50)]


def test_namespaces_take_turns(toggled: Toggled) -> None:
    """Events that were recorded later do not wait for all of those before, while the server is slow."""
    toggled.sender.stopped.set()
    for number in range(10):
        toggled.record("hostile", f"s{number}", "hostile")
    toggled.record("victim", "web", "victim")
    toggled.sender.stopped.clear()
    toggled.sender.resumed.set()
    assert toggled.sent(11).index("victim") <= 2


def test_a_namespace_cannot_take_all_memory(toggled: Toggled, logged: list[MutableMapping[str, Any]]) -> None:
    """Events are dropped beyond a number; those of another namespace are not."""
    for number in range(1000):
        toggled.record("hostile", f"s{number}", "note")
    toggled.record("victim", "web", "of the victim")
    assert "of the victim" in toggled.sent(11)
    assert len(logged) == 1000 - 10 - 100
    assert {(line["event"], line["about"].namespace) for line in logged} == {("event dropped", "hostile")}


def test_close_sends_queued_events(recorder: Record) -> None:
    """A process that ends still reports why."""
    with server() as api:
        api_recorder = recorder(api.url)
        api_recorder.record(STARTING)
        api_recorder.close(5.0)
        assert [it["reason"] for it in stored(api)] == ["Starting"]


def test_transient_errors_are_retried(recorder: Record, logged: list[MutableMapping[str, Any]]) -> None:
    """No event is lost."""
    with server() as api:
        api.faults.fail(503, times=2, verb="create")
        recorder(api.url).record(STARTING)
        eventually(lambda: len(stored(api)) == 1)
    assert logged == []


def test_an_event_is_dropped_after_some_retries(
    recorder: Record, logged: list[MutableMapping[str, Any]]
) -> None:
    """One log line has the reason; the next event is sent."""
    with server() as api:
        api.faults.fail(503, times=4, verb="create")
        api_recorder = recorder(api.url)
        api_recorder.record(TAKEN)
        api_recorder.record(STARTING)
        eventually(lambda: len(stored(api)) == 1)
        assert stored(api)[0]["reason"] == "Starting"
    (line,) = logged
    assert line["reason"] == "FailedToStartServiceHealthcheck"
    assert "the API server failed (503" in line["error"]


@pytest.mark.parametrize("status", [403, 404, 409, 422, 500])
def test_a_rejected_event_is_not_retried(
    recorder: Record, logged: list[MutableMapping[str, Any]], status: int
) -> None:
    """Events of others do not wait for it: a tenant may fill the quota of events of its namespace."""
    with server() as api:
        api.faults.fail(status, times=1, verb="create")
        api_recorder = recorder(api.url)
        api_recorder.record(STARTING)
        api_recorder.close(5.0)
        assert stored(api) == []
    assert len(logged) == 1


def test_recording_never_blocks(recorder: Record) -> None:
    """With a server that does not answer."""
    with CannedServer(lambda _, __: time.sleep(PATIENCE)) as silent:
        api_recorder = recorder(silent.url)
        begun = time.monotonic()
        for _ in range(200):
            api_recorder.record(STARTING)
        api_recorder.close(0.1)
        assert time.monotonic() - begun < PATIENCE / 2


def test_no_recorder_drops_events() -> None:
    """Recording and closing do nothing."""
    silent = events.Recorder("node1")
    silent.record(STARTING)
    silent.close(1.0)
