"""Responses that violate the API."""

import json
import socket
import time

import pytest
from structlog.testing import capture_logs

from pykubeproxy.objects import Kind
from pykubeproxy.sources import SourceError
from tests.fakes.canned import CHUNKED, CannedServer, chunk, whole
from tests.fakes.cluster import service, watches
from tests.fakes.follower import Follower, eventually


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
def test_garbage_is_one_log_line(garbage: bytes, watching: bool) -> None:
    """The next try succeeds."""
    tries = []

    def answer(target: str, connection: socket.socket) -> None:
        if ("watch=true" in target) is watching and len(tries) < 2:
            tries.append(target)
            connection.sendall(garbage)
        elif "watch=true" in target:
            connection.sendall(CHUNKED + chunk(event("ADDED", 6, "b")))
            connection.recv(1)
        else:
            connection.sendall(listing(5, "a"))

    with CannedServer(answer) as canned, capture_logs() as lines:
        with Follower(watches(canned.url, Kind.SERVICE)) as follower:
            follower.sees("a", "b")
        assert len(tries) == 2
        reasons = [line["reason"] for line in lines if line["event"] == "watch failed"]
        assert reasons
        assert all("\n" not in it and len(it) < 500 for it in reasons)


def test_garbage_in_a_single_try() -> None:
    """A single try ends with an error of one line."""
    with (
        CannedServer(lambda target, connection: connection.sendall(whole(b"<html>"))) as canned,
        pytest.raises(SourceError, match="no list of Services"),
    ):
        watches(canned.url, Kind.SERVICE)[0].once()


def test_event_without_end() -> None:
    """An endless line is a failure, and a list follows."""
    sent: list[int] = []

    def answer(target: str, connection: socket.socket) -> None:
        if "watch=true" not in target:
            connection.sendall(listing(5, "a"))
            return
        connection.sendall(CHUNKED)
        sent.append(0)
        while True:
            connection.sendall(chunk(b"x" * (1 << 20)))
            sent[-1] += 1

    with CannedServer(answer) as canned, capture_logs() as lines:
        with Follower(watches(canned.url, Kind.SERVICE)) as follower:
            eventually(lambda: follower.lists() >= 2)
        assert max(sent) < 40
    assert any("bytes that are no object" in str(line.get("reason")) for line in lines)


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
    """Changes after an invalid event arrive, if need be by a list."""
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


def test_duplicates_change_nothing() -> None:
    """Repeated events and the deletion of an unknown object change nothing."""

    def answer(target: str, connection: socket.socket) -> None:
        if "watch=true" not in target:
            connection.sendall(listing(5, "a"))
            return
        twice = [event("ADDED", 6, "b")] * 2 + [event("DELETED", 7, "a")] * 2 + [event("MODIFIED", 8, "b")]
        connection.sendall(CHUNKED + b"".join(map(chunk, [*twice, event("DELETED", 9, "never")])))
        connection.recv(1)

    with CannedServer(answer) as canned, Follower(watches(canned.url, Kind.SERVICE)) as follower:
        follower.sees("b")


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


def test_two_lists_of_half_a_page() -> None:
    """Half a list is not a list."""
    count: list[int] = []

    def answer(target: str, connection: socket.socket) -> None:
        if "watch=true" in target:
            connection.sendall(CHUNKED)
            connection.recv(1)
            return
        count.append(1)
        text = listing(5, "a", "b", "c")
        connection.sendall(text if len(count) == 3 else text[:-40])

    with CannedServer(answer) as canned, Follower(watches(canned.url, Kind.SERVICE)) as follower:
        follower.sees("a", "b", "c")
        assert follower.lists() == 1


def test_list_without_end() -> None:
    """A list that repeats the same page is a failure."""
    body = {"kind": "ServiceList", "metadata": {"resourceVersion": "5", "continue": "x"}, "items": []}
    text = whole(json.dumps(body).encode())
    with (
        CannedServer(lambda target, connection: connection.sendall(text)) as canned,
        pytest.raises(SourceError, match="same page"),
    ):
        watches(canned.url, Kind.SERVICE)[0].once()


def test_list_that_fails_in_the_middle_complains_once() -> None:
    """A faulty object on the first page is logged once, however often the second page fails."""
    bad = {"metadata": {"name": "bad", "resourceVersion": "3"}, "spec": 5}
    failures: list[str] = []

    def answer(target: str, connection: socket.socket) -> None:
        if "watch=true" in target:
            connection.sendall(CHUNKED)
            connection.recv(1)
        elif "continue" not in target:
            body = {
                "kind": "ServiceList",
                "metadata": {"resourceVersion": "5", "continue": "x"},
                "items": [bad],
            }
            connection.sendall(whole(json.dumps(body).encode()))
        elif len(failures) < 3:
            failures.append(target)
            connection.sendall(whole(b"{}", "500 Internal Server Error"))
        else:
            connection.sendall(listing(5, "a"))

    with CannedServer(answer) as canned, capture_logs() as lines:
        with Follower(watches(canned.url, Kind.SERVICE)) as follower:
            follower.sees("a")
        assert sum(line["event"] == "object skipped" for line in lines) == 1
