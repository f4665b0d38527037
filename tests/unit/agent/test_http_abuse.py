"""The agent's HTTP server, asked by clients that mean harm or make no sense."""

import contextlib
import resource
import socket
import threading
import time
from http.client import HTTPException

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubeproxy.agent import http
from tests.fakes.asking import ask, send
from tests.fakes.follower import eventually
from tests.unit.agent.conftest import Serve


def page(_: str) -> http.Answer:
    """What an honest client gets."""
    return http.text("fine")


def status(answer: bytes) -> int:
    """The status of an answer on the wire."""
    return int(answer.split()[1])


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc", 405),
        (b"DELETE / HTTP/1.1\r\nHost: x\r\n\r\n", 405),
        (b"CONNECT evil:1 HTTP/1.1\r\nHost: x\r\n\r\n", 405),
        (b"get / HTTP/1.1\r\nHost: x\r\n\r\n", 405),
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc", 413),
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", 413),
        (b"GET / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", 413),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\n folded: y\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nname : y\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nno colon\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\nContent-Length: 3\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: \0\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: b\rContent-Length: 3\r\n\r\nabc", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 0\r\n\r\nabc", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nTransfer-Encoding: x\r\n\r\n", 413),
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length : 3\r\n\r\nabc", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: +3\r\n\r\nabc", 413),
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
def test_what_is_no_get_is_refused(serve: Serve, request_: bytes, expected: int) -> None:
    """Other methods, bodies and malformed requests get a status that says why, and never the page."""
    port = serve(page)
    answer = send(port, request_)
    assert status(answer) == expected
    assert b"\r\nX-Content-Type-Options: nosniff\r\n" in answer
    assert b"fine" not in answer
    assert ask(port).body == "fine"


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /" + b"a" * http.LONGEST_HEAD + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nCookie: " + b"a" * (1 << 20),
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * http.MOST_HEADERS + b"\r\n",
        b"a" * (1 << 20),
    ],
    ids=["path", "header", "many headers", "no line at all"],
)
def test_a_huge_head_is_refused(serve: Serve, request_: bytes) -> None:
    """More than is allowed is not read; the client still gets to know why."""
    port = serve(page)
    assert status(send(port, request_)) == 431
    assert ask(port).body == "fine"


def test_a_huge_body_is_not_kept(serve: Serve) -> None:
    """A client that sends and sends is cut off, and nothing of what it sends is stored."""
    port = serve(page)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                connection.sendall(b"a" * (1 << 20))
            pytest.fail("a gigabyte was taken")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20 * 1024  # KiB


def test_slow_clients_are_cut_off(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time for a request counts from its beginning: a byte now and then does not prolong it."""
    monkeypatch.setattr(http, "REQUEST_SECONDS", 0.3)
    with socket.create_connection(("127.0.0.1", serve(page)), timeout=10) as connection:
        begun = time.monotonic()
        connection.sendall(b"GET / HTTP/1.1\r\n")
        connection.settimeout(0.02)
        answer = b""
        while not answer and time.monotonic() < begun + 5:
            connection.send(b"a: b\r\n"[:1])
            with contextlib.suppress(TimeoutError):
                answer = connection.recv(100)
    assert status(answer) == 408
    assert 0.25 < time.monotonic() - begun < 2


def test_stalling_clients_do_not_keep_others_out(serve: Serve) -> None:
    """With all places taken by clients that stall, an honest one is served at once, and threads stay few."""
    port = serve(page, connections=4)
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
            connection.sendall(b"GET / HTTP/1.1\r\n")
        for _ in range(20):
            begun = time.monotonic()
            assert ask(port).body == "fine"
            assert time.monotonic() - begun < 1
            assert sum(it.name == "test-request" for it in threading.enumerate()) <= 5


def test_a_flood_does_not_keep_others_out(serve: Serve) -> None:
    """Clients that open connections as fast as they can and say nothing: an honest one may be cut off, not for long."""
    port, over = serve(page, connections=8), threading.Event()

    def flood() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as it:
                it.send(b"GET /")
                over.wait(0.002)

    def served() -> bool:
        with contextlib.suppress(OSError, HTTPException):
            return ask(port).body == "fine"
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


@pytest.mark.parametrize(
    "path",
    [
        "//healthz",
        "/../healthz",
        "/healthz/",
        "/./healthz",
        "/%68ealthz",
        "/healthz%00",
        "/healthz;a",
        "/HEALTHZ",
    ],
)
def test_a_path_is_what_it_is(serve: Serve, path: str) -> None:
    """Nothing is decoded, folded or walked: there are pages, not files."""
    port = serve(http.pages({"/healthz": lambda: http.text("fine")}))
    assert ask(port, path).status == 404
    assert ask(port, "/healthz?verbose").status == 200


def test_many_at_once_are_served(serve: Serve) -> None:
    """Clients that come together, fewer than the backlog, all get their page, one after the other if need be."""
    port = serve(page, connections=32)
    bodies: list[str] = []
    clients = [threading.Thread(target=lambda: bodies.append(ask(port).body)) for _ in range(32)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    assert bodies == ["fine"] * 32


def test_clients_that_leave_are_nothing_special(serve: Serve) -> None:
    """Connections that end before, within or right after a request leave no thread behind."""
    port = serve(page)
    for request_ in (b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n") * 10:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            # A reset instead of an orderly end.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            connection.sendall(request_)
    assert ask(port).body == "fine"
    eventually(lambda: not any(it.name == "test-request" for it in threading.enumerate()))


@given(st.one_of(st.binary(max_size=200), st.text(" /:\r\nGETHPOST.1*%\x00é", max_size=80).map(str.encode)))
def test_any_head_is_taken_or_refused(head: bytes) -> None:
    """Whatever stands before the empty line, it is a request for a path or gets a status, and nothing else happens."""
    try:
        method, path = http._request(head)
    except http._Refused as refused:
        assert 400 <= refused.answer.status < 600
    else:
        assert method in ("GET", "HEAD")
        assert path.startswith("/")
        assert path.isprintable()
