"""Watches of a faulty API server, endless responses, and responses byte by byte."""

import json
import re
import socket
import time
from contextlib import suppress

import msgspec
import pytest
from structlog.testing import capture_logs
from structlog.typing import EventDict

from pykubeproxy.lab.apiserver import SERVICES, Store
from pykubeproxy.objects import Deleted, Key, Kind, Service, Updated
from pykubeproxy.sources import Client, SourceError, api_watches
from pykubeproxy.sources.contact import Contact, OutageLog
from pykubeproxy.sources.failures import Failure
from tests.fakes.canned import CHUNKED, CannedServer, chunk, whole
from tests.fakes.cluster import SHORT, node, server, service, slice_of, watches
from tests.fakes.follower import Follower
from tests.fakes.waiting import eventually


def warnings(lines: list[EventDict]) -> list[str]:
    """The reasons of the warnings."""
    return [str(line.get("reason", line["event"])) for line in lines if line["log_level"] == "warning"]


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The reasons of failed attempts, also those that belong to an outage of the server and have no log line."""
    reasons: list[str] = []
    failed = OutageLog.failed

    def record(log: OutageLog, failure: Failure, retry_in: float) -> None:
        reasons.append(str(failure))
        failed(log, failure, retry_in)

    monkeypatch.setattr(OutageLog, "failed", record)
    return reasons


def test_dropped_connections_resume_at_the_last_version(failures: list[str]) -> None:
    """Without a list and without a log line."""
    with server() as api, capture_logs() as lines:
        with Follower(watches(api.url, Kind.SERVICE)) as follower:
            follower.sees()
            api.requests.wait(1, "watch")
            api.faults.drop_connections()
            api.store.create(service("a"))
            follower.sees("a")
            assert follower.lists() == 1
        (failure,) = failures
        assert re.fullmatch("the connection to .* broke(: .*)?", failure)
        assert not lines


@pytest.mark.parametrize("version", [0, 1001])
def test_a_server_restored_from_a_backup_is_listed(version: int) -> None:
    """Its versions are older than those of the watches, which would stay silent. It may know the Node's last change."""
    often = msgspec.structs.replace(SHORT, quiet=0.1)
    store = Store(first_version=1000)
    with server(store=store) as before, Follower(watches(before.url, timing=often)) as follower:
        before.store.create(node("n1", "192.168.99.10"))
        follower.sees("n1", kind=Kind.NODE)
        for number in range(20):
            before.store.create(service(f"a{number}"))
        follower.sees(*(f"a{number}" for number in range(20)))
        before.requests.wait(3, "watch")
        before.stop()
        after = server(port=before.port, store=Store(first_version=version))
        after.store.load([service("old"), slice_of("old", "10.1.0.1"), node("n1", "192.168.99.10")])
        with after:
            follower.sees("old")
            follower.sees("old", kind=Kind.ENDPOINT_SLICE)
            after.store.create(service("new"))
            follower.sees("old", "new")


def test_compacted_history_is_listed_again() -> None:
    """An expired version (410) leads to a list of a later state at once, without a warning."""
    with server() as api, capture_logs() as lines:
        api.store.load([service("a"), service("b")])
        with Follower(watches(api.url, Kind.SERVICE)) as follower:
            follower.sees("a", "b")
            api.requests.wait(1, "watch")
            api.stop()
            api.store.merge_patch(SERVICES, "default", "a", {"spec": {"ports": [{"port": 81}]}})
            api.store.delete(SERVICES, "default", "b")
            api.store.create(service("c"))
            api.faults.compact()
            api.start()
            follower.sees("a", "c")
            assert follower.lists() == 2
        assert "resourceVersion=0" not in api.requests.entries("list")[-1].query
        assert not [text for text in warnings(lines) if "410" in text]


def test_watches_that_end_at_once_are_no_hot_loop() -> None:
    """If every watch ends at once, requests slow down, with one warning."""
    with server() as api, capture_logs() as lines:
        with Follower(watches(api.url, Kind.SERVICE)) as follower:
            follower.sees()
            api.requests.clear()
            deadline = time.monotonic() + 1.5
            while time.monotonic() < deadline or api.requests.count("watch") < 2:
                api.faults.end_watches()
                time.sleep(0.002)
            assert api.requests.count("watch") <= 12
        assert "the API server ends the watch at once" in warnings(lines)


@pytest.mark.parametrize("status", [500, 503, 403, 404, 400, 422, 302])
@pytest.mark.parametrize("verb", ["list", "watch"])
def test_errors_are_waited_out(status: int, verb: str) -> None:
    with server() as api:
        api.store.create(service("a"))
        api.faults.fail(status, times=3, verb=verb)
        with Follower(watches(api.url, Kind.SERVICE)) as follower:
            follower.sees("a")
            api.store.create(service("b"))
            follower.sees("a", "b")


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_is_honoured(status: int) -> None:
    with server() as api:
        api.faults.fail(status, verb="list", retry_after=1)
        started = time.monotonic()
        with Follower(watches(api.url, Kind.SERVICE)) as follower:
            follower.sees()
            assert time.monotonic() - started >= 1.0


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (401, "does not accept the credentials"),
        (403, "services are not permitted"),
        (404, "does not serve services"),
        (429, "fewer requests"),
        (500, "failed"),
    ],
)
def test_error_of_a_single_try(status: int, words: str) -> None:
    with server() as api:
        api.faults.fail(status)
        with pytest.raises(SourceError, match=words) as caught:
            watches(api.url, Kind.SERVICE)[0].once()
        assert str(caught.value).startswith("cannot list services: ")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("verb", ["list", "watch"])
def test_truncated_json(verb: str) -> None:
    """Truncated JSON is rejected, and its changes arrive later."""
    with server() as api:
        api.store.create(service("a"))
        api.faults.truncate(2, verb=verb)
        with Follower(watches(api.url, Kind.SERVICE)) as follower:
            follower.sees("a")
            api.store.create(service("b"))
            follower.sees("a", "b")
            api.store.create(service("c"))
            follower.sees("a", "b", "c")


def test_hanging_server() -> None:
    with server() as api:
        api.store.create(service("a"))
        api.faults.hang(verb="list")
        with Follower(watches(api.url, Kind.SERVICE)) as follower:
            api.requests.wait(2, "list")
            api.faults.release()
            follower.sees("a")


def test_unreachable_server(failures: list[str]) -> None:
    """Refused connections are no lines of a watch; the objects arrive when the server is back."""
    api = server()
    with api:
        api.store.create(service("a"))
    with capture_logs() as lines, Follower(watches(api.url, Kind.SERVICE)) as follower:
        eventually(lambda: failures)
        time.sleep(1.0)
        with api:
            follower.sees("a")
    assert failures[0] == f"no connection to {api.url}: Connection refused"
    assert not [line for line in lines if line["event"] == "watch failed"]


def test_object_that_cannot_be_decoded() -> None:
    """A faulty object is one warning per version and counts as deleted until a valid version."""
    with server() as api, capture_logs() as lines:
        api.store.create(service("bad", ports=[{"port": "http"}]), verbatim=True)
        api.store.create(service("a"))
        with Follower(watches(api.url, Kind.SERVICE)) as follower:
            follower.sees("a")
            api.store.replace(service("a", clusterIP=5), verbatim=True)
            follower.sees()
            assert follower.events[-1] == Deleted(Kind.SERVICE, Key("default", "a"))
            api.stop()
            api.store.create(service("b"))
            api.faults.compact()
            api.start()
            follower.sees("b")
            assert follower.lists() == 2  # with both bad objects in it, of the versions known
            api.store.replace(service("a", clusterIP=5, type="NodePort"), verbatim=True)
            eventually(lambda: sum("default/a is" in text for text in warnings(lines)) == 2)
            api.store.delete(SERVICES, "default", "bad")
            api.store.create(service("end"))
            follower.sees("b", "end")
            api.store.replace(service("a", clusterIP="10.96.0.77"), verbatim=True)
            follower.sees("a", "b", "end")
    skipped = [text for text in warnings(lines) if "is skipped" in text]
    assert (
        len([text for text in skipped if "default/bad is skipped: spec.ports[0].port: expected" in text]) == 1
    )
    assert len(skipped) == 3


def test_slow_node_watch_does_not_hold_up_the_others() -> None:
    """Each kind is watched independently."""
    with server() as api:
        api.store.load([service("a"), slice_of("a", "10.1.0.1")])
        api.faults.fail(500, times=10_000, path="/nodes")
        with Follower(watches(api.url, timing=SHORT)) as follower:
            follower.sees("a")
            follower.sees("a", kind=Kind.ENDPOINT_SLICE)
            assert Kind.NODE not in follower.state


def listing(version: int, *names: str) -> bytes:
    """A complete response with a list of Services."""
    items = [{k: v for k, v in service(name).items() if k in ("metadata", "spec")} for name in names]
    body = {"kind": "ServiceList", "metadata": {"resourceVersion": str(version)}, "items": items}
    return whole(json.dumps(body).encode())


def event(kind: str, version: int, name: str) -> bytes:
    """One line of a watch."""
    it = service(name)
    it["metadata"]["resourceVersion"] = str(version)
    return json.dumps({"type": kind, "object": it}).encode() + b"\n"


GARBAGE = [
    b"",
    b"\r\n\r\n",
    b"SSH-2.0-OpenSSH_9.2\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{",
    b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n{",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
    b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc",
    b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 300 + b"\r\n",
    b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
    b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:9/\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 204 No Content\r\n\r\n",
    b"HTTP/1.1 500 \xff\r\nContent-Length: 2\r\n\r\n{}",
    b"HTTP/1.1 429 Slow\r\nRetry-After: soon\r\nContent-Length: 2\r\n\r\n{}",
    whole(b"<html>hello</html>"),
    whole(b'{"kind": "Status", "status": "Success"}'),
    whole(b'{"kind": "PodList", "metadata": {"resourceVersion": "1"}, "items": []}'),
    whole(b"[" * 100_000),
    whole(b"\xff\xfe"),
]


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("watching", [False, True])
def test_garbage_is_a_failure_with_a_reason_of_one_line(
    garbage: bytes, watching: bool, failures: list[str]
) -> None:
    """The next try succeeds."""
    tries: list[str] = []

    def answer(target: str, connection: socket.socket) -> None:
        if ("watch=true" in target) is watching and len(tries) < 2:
            tries.append(target)
            connection.sendall(garbage)
        elif "watch=true" in target:
            connection.sendall(CHUNKED + chunk(event("ADDED", 6, "b")))
            connection.recv(1)
        else:
            connection.sendall(listing(5, "a"))

    with CannedServer(answer) as canned:
        with Follower(watches(canned.url, Kind.SERVICE)) as follower:
            follower.sees("a", "b")
        assert len(tries) == 2
        assert failures
        assert all("\n" not in it and len(it) < 500 for it in failures)


@pytest.mark.parametrize(
    "line",
    [
        b"{}\n",
        b"nonsense\n",
        b'{"type": "ADDED"}\n',
        b'{"type": "ADDED", "object": 5}\n',
        b'{"type": "ADDED", "object": {"metadata": null}}\n',
        b'{"type": "DELETED", "object": {"metadata": {"name": 5}}}\n',
        b'{"type": "BOOKMARK", "object": {}}\n',
        b'{"type": "NEWS", "object": {}}\n',
        b'{"type": "ERROR", "object": {"code": "x"}}\n',
        b"\n\n\r\n",
    ],
)
def test_odd_event_before_a_good_one(line: bytes) -> None:
    watched: list[str] = []

    def answer(target: str, connection: socket.socket) -> None:
        if "watch=true" not in target:
            connection.sendall(listing(7, "a", "b") if len(watched) > 1 else listing(5, "a"))
            return
        watched.append(target)
        good = event("ADDED", 6, "b") if "resourceVersion=5" in target else b""
        connection.sendall(CHUNKED + chunk(line + good))
        connection.recv(1)

    with CannedServer(answer) as canned, Follower(watches(canned.url, Kind.SERVICE)) as follower:
        follower.sees("a", "b")


def test_watch_without_chunks() -> None:
    """Events of a stream without chunks are not delayed until the connection closes."""

    def answer(target: str, connection: socket.socket) -> None:
        if "watch=true" not in target:
            connection.sendall(listing(5, "a"))
            return
        connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + event("ADDED", 6, "b"))
        connection.recv(1)

    with CannedServer(answer) as canned, Follower(watches(canned.url, Kind.SERVICE)) as follower:
        started = time.monotonic()
        follower.sees("a", "b")
        assert time.monotonic() - started < 0.9  # sooner than the idle time


BRIEF = msgspec.structs.replace(SHORT, list=0.5)


def test_an_endless_list_times_out() -> None:
    """Although data keeps coming; then it is retried."""
    with server() as api, capture_logs() as lines:
        api.store.create(service("a"))
        api.faults.drip(verb="list")
        with Follower(watches(api.url, Kind.SERVICE, BRIEF)) as follower:
            api.requests.wait(3, "list")
            assert not follower.events
            api.faults.clear()
            follower.sees("a")
        assert warnings(lines)[0] == "the API server's response takes too long"


def test_lists_fail_from_the_first_failure_to_the_next_list() -> None:
    """An API server that is away does not count: the pages of all nodes would show it."""
    with server() as api:
        (watch,) = watches(api.url, Kind.SERVICE)
        for fault, fails in ((403, True), (503, True), (500, True), (0, False), (503, False)):
            api.faults.clear()
            if fault:
                api.faults.fail(fault, verb="list")
            before = watch.list_outage
            with suppress(SourceError):
                watch.once()
            assert bool(watch.list_outage) is fails
            if before and watch.list_outage:
                assert watch.list_outage.seconds > before.seconds


def test_failed_lists_do_not_count_while_the_server_is_away() -> None:
    """An API server that ends may answer one more list with an error, on all nodes."""
    with server() as api:
        client = Client(master=api.url, qps=-1, contact=Contact(limit=0.3))
        watch = api_watches(client, "n1", SHORT)[0]
        api.faults.fail(500, verb="list", times=100_000)
        with Follower([watch]):
            for status, fails in ((500, True), (503, False), (500, True)):
                api.faults.clear()
                api.faults.fail(status, verb="list", times=100_000)
                eventually(lambda: bool(watch.list_outage) is fails)


def test_repeated_events_are_ignored() -> None:
    """An older version never replaces a newer one."""
    with server() as api:
        api.faults.echo()
        with Follower(watches(api.url, Kind.SERVICE)) as follower:
            follower.sees()
            api.requests.wait(1, "watch")
            api.store.create(service("a"))
            for port in range(81, 91):
                api.store.merge_patch(SERVICES, "default", "a", {"spec": {"ports": [{"port": port}]}})
            api.store.create(service("gone"))
            api.store.delete(SERVICES, "default", "gone")
            api.store.create(service("end"))
            follower.sees("a", "end")
            eventually(lambda: port_of(follower) == 90)
            ports = [
                event.object.ports[0].port
                for event in follower.events
                if isinstance(event, Updated) and isinstance(event.object, Service)
            ]
            assert [port for port in ports if port > 80] == sorted(port for port in ports if port > 80)
            assert follower.lists() == 1
            time.sleep(0.3)  # the last echo
            assert follower.names() == {"a", "end"}


def port_of(follower: Follower) -> int:
    found = follower.state[Kind.SERVICE].get(Key("default", "a"))
    return found.ports[0].port if isinstance(found, Service) else 0


@pytest.mark.parametrize(
    "versions", [("7", "7", "7"), ("9", "8", "10"), ("b", "a", "c"), ("9" * 5000, "1", "2")]
)
def test_incomparable_versions_keep_the_last_event(versions: tuple[str, str, str]) -> None:
    """Equal versions, and versions that are no numbers."""
    meta = {"name": "a", "namespace": "default"}
    events = [
        {
            "type": "MODIFIED",
            "object": {
                "metadata": meta | {"resourceVersion": version},
                "spec": {"clusterIP": "10.96.0.9", "ports": [{"port": port}]},
            },
        }
        for port, version in enumerate(versions, 81)
    ]
    listed = {"kind": "ServiceList", "metadata": {"resourceVersion": "5"}, "items": []}

    def answer(target: str, connection: socket.socket) -> None:
        if "watch=true" in target:
            connection.sendall(CHUNKED)
            for event in events:
                connection.sendall(chunk(json.dumps(event).encode() + b"\n"))
            connection.recv(1)
        else:
            connection.sendall(whole(json.dumps(listed).encode()))

    with CannedServer(answer) as canned, Follower(watches(canned.url, Kind.SERVICE)) as follower:
        eventually(lambda: Kind.SERVICE in follower.state and port_of(follower) == 83)
