"""The HTTP server with hostile or broken clients."""

import contextlib
import resource
import socket
import threading
import time
from http.client import HTTPException

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubeproxy import http
from tests.fakes.http_client import exchange, fetch, send_bytes
from tests.fakes.waiting import PATIENCE, eventually
from tests.unit.agent.conftest import Serve

LIMITS = http.Limits()


def page(_: http.Request) -> http.Response:
    return http.text("fine")


def status(answer: bytes) -> int:
    return int(answer.split()[1])


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (b"CONNECT evil:1 HTTP/1.1\r\nHost: x\r\n\r\n", 405),
        (b"CONNECT /a HTTP/1.1\r\nHost: x\r\n\r\n", 405),
        (b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\n folded: y\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: b\r\n\tfolded: y\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nname : y\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nno colon\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\nContent-Length: 3\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: \0\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: b\rContent-Length: 3\r\n\r\nabc", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 0\r\n\r\nabc", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nTransfer-Encoding: x\r\n\r\n", 501),
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length : 3\r\n\r\nabc", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: +3\r\n\r\nabc", 400),
        (b"GET * HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET http://[::1 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET /\x07 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET  / HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET /\r\n\r\n", 400),
        (b"\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\nHost: x\r\n\r\n", 505),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    ],
)
def test_malformed_requests_are_refused(serve: Serve, request_: bytes, expected: int) -> None:
    """They get an error status and never reach the handler."""
    port = serve(page)
    answer = send_bytes(port, request_)
    assert status(answer) == expected
    assert b"\r\nX-Content-Type-Options: nosniff\r\n" in answer
    assert b"fine" not in answer
    assert fetch(port).body == "fine"


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /" + b"a" * LIMITS.head_bytes + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nCookie: " + b"a" * (1 << 20),
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * LIMITS.headers + b"\r\n",
        b"a" * (1 << 20),
    ],
    ids=["path", "header", "many headers", "no line at all"],
)
def test_a_huge_head_is_refused(serve: Serve, request_: bytes) -> None:
    """The server reads no more than the limit, and the client gets the status."""
    port = serve(page)
    assert status(send_bytes(port, request_)) == 431
    assert fetch(port).body == "fine"


@pytest.mark.parametrize(
    "body",
    [
        b"Content-Length: 55\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"Content-Length: 3\r\nExpect: 100-continue\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\nnonsense\r\n",
    ],
)
def test_a_body_is_ignored(serve: Serve, body: bytes) -> None:
    """As in kube-proxy, a request with a body gets its page; here the connection then closes, with nothing read from it."""
    port = serve(lambda request: http.text(request.path))
    answer = send_bytes(port, b"POST /a HTTP/1.1\r\nHost: x\r\n" + body)
    assert status(answer) == 200
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b"\r\nConnection: close\r\n" in answer
    assert answer.endswith(b"\r\n\r\n/a")


def test_a_huge_body_is_not_kept(serve: Serve) -> None:
    """A client that keeps sending is cut off, and nothing it sends is stored."""
    port = serve(page)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                connection.sendall(b"a" * (1 << 20))
            pytest.fail("a gigabyte was taken")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20 * 1024  # KiB


def test_slow_clients_are_cut_off(serve: Serve) -> None:
    """The time for a request counts from its start; a byte now and then does not extend it."""
    with socket.create_connection(
        ("127.0.0.1", serve(page, request_seconds=0.3)), timeout=PATIENCE
    ) as connection:
        begun = time.monotonic()
        connection.sendall(b"GET / HTTP/1.1\r\n")
        connection.settimeout(0.02)
        answer = b""
        while not answer and time.monotonic() < begun + PATIENCE:
            connection.send(b"a: b\r\n"[:1])
            with contextlib.suppress(TimeoutError):
                answer = connection.recv(100)
    assert status(answer) == 408
    assert time.monotonic() - begun > 0.25


def test_stalling_clients_do_not_keep_others_out(serve: Serve) -> None:
    """With stalling clients at the limit, an honest one is served, and threads stay few."""
    port = serve(page, connections=4, request_seconds=PATIENCE)
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE))
            connection.sendall(b"GET / HTTP/1.1\r\n")
        for _ in range(20):
            begun = time.monotonic()
            assert fetch(port).body == "fine"
            assert time.monotonic() - begun < PATIENCE / 2
            assert sum(it.name == "test-request" for it in threading.enumerate()) <= 5


def test_a_busy_connection_outlives_idle_ones(serve: Serve) -> None:
    """At the limit, the connection whose latest request is oldest ends first, not the one opened first."""
    port = serve(page, connections=3)
    request = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    with contextlib.ExitStack() as stack:

        def connect() -> socket.socket:
            return stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE))

        busy, idle = connect(), connect()
        for connection in (busy, idle, *[busy] * 3):
            connection.sendall(request)
            assert connection.recv(1000).endswith(b"fine")
        for _ in range(2):  # the second one exceeds the limit
            stalling = connect()
            stalling.sendall(b"GET")
            time.sleep(0.05)
        assert idle.recv(1) == b""
        busy.sendall(request)
        assert busy.recv(1000).endswith(b"fine")


def test_many_connections_of_one_client_do_not_end_those_of_others(serve: Serve) -> None:
    """At the limit, a client with most connections loses its own oldest; one with few keeps an older one."""
    port = serve(page, connections=4)
    with contextlib.ExitStack() as stack:

        def connect(source: str) -> socket.socket:
            made = socket.create_connection(("127.0.0.1", port), 10, source_address=(source, 0))
            return stack.enter_context(made)

        probes = [connect("127.0.0.1"), connect("127.0.0.3")]
        attack: list[socket.socket] = []
        for _ in range(40):
            for probe in probes:
                probe.sendall(b"GET / HTTP/1.1\r\n"[len(attack) : len(attack) + 1])  # slowly
            attack.append(connect("127.0.0.2"))
            attack[-1].sendall(b"GET /")
        for ended in attack[:30]:
            assert ended.recv(1) == b""
        for probe in probes:
            probe.sendall(b"Host: x\r\n\r\n")
            assert probe.recv(1000).endswith(b"fine")


def test_a_slow_second_request_is_cut_off(serve: Serve) -> None:
    """On a kept connection the time for a request counts from its first byte."""
    with socket.create_connection(
        ("127.0.0.1", serve(page, request_seconds=0.2)), timeout=PATIENCE
    ) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(1000).endswith(b"fine")
        time.sleep(0.4)
        connection.sendall(b"GET /")
        assert status(connection.recv(1000)) == 408


def test_a_flood_does_not_keep_others_out(serve: Serve) -> None:
    """An honest client is served soon while others open connections as fast as they can and send nothing."""
    port, over = serve(page, connections=8), threading.Event()

    def flood() -> None:
        while not over.is_set():
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as it,
            ):
                it.send(b"GET /")
                over.wait(0.002)

    def served() -> bool:
        with contextlib.suppress(OSError, HTTPException):
            return fetch(port).body == "fine"
        return False

    floods = [threading.Thread(target=flood) for _ in range(4)]
    for it in floods:
        it.start()
    try:
        for _ in range(5):
            eventually(served)
    finally:
        over.set()
        for it in floods:
            it.join()


def test_clients_that_leave_leave_no_thread(serve: Serve) -> None:
    """Connections may end before, within or right after a request."""
    port = serve(page)
    for request_ in (b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n") * 10:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            # A reset instead of an orderly end.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            connection.sendall(request_)
    assert fetch(port).body == "fine"
    eventually(lambda: not any(it.name == "test-request" for it in threading.enumerate()))


@given(st.one_of(st.binary(max_size=200), st.text(" /:\r\nGETHPOST.1*%\x00é", max_size=80).map(str.encode)))
def test_any_head_is_accepted_or_refused(head: bytes) -> None:
    requests: list[http.Request] = []

    def handle(request: http.Request) -> http.Response:
        requests.append(request)
        return http.text("fine")

    answer = exchange(head + b"\r\n\r\n", handle)
    assert requests or 400 <= status(answer) < 600
    for request in requests:
        assert request.path.startswith("/")
        assert request.path.isprintable()


@pytest.mark.parametrize("head", [b"HEAD /p HTTP/1.0\r\nA: b\nA: b", b"HEAD * HTTP/1.1\r\nHost: x"])
def test_a_refused_head_request_gets_no_body(head: bytes) -> None:
    answer = exchange(head + b"\r\n\r\n", lambda request: http.text("fine"))
    assert status(answer) == 400
    assert answer.endswith(b"\r\n\r\n")
