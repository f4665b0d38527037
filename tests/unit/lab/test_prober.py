"""Connections, counted by who answered or how they failed; on the loopback interface."""

import json
import socket
import threading
from collections import Counter

import pytest

from pykubeproxy.lab.prober import Failed, Seen, Target, datagram_once, http_once


def listener(answer: bytes | None) -> Target:
    """A server that answers one connection so, or closes it without a word."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with server:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                if answer is not None:
                    connection.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    return Target(*server.getsockname())


BODY = {"pod": "web-1", "client": "127.0.0.1", "real_ip": ""}


def test_answer() -> None:
    """A pod's answer is what comes back."""
    target = listener(b"HTTP/1.1 200 OK\r\n\r\n" + json.dumps(BODY).encode())
    assert http_once(target, "", 0, 2.0) == BODY


@pytest.mark.parametrize(
    ("answer", "kind"),
    [(None, "closed"), (b"HTTP/1.1 502 x\r\n\r\n", "http 502"), (b"HTTP/1.1 200 OK\r\n\r\n{", "garbled")],
)
def test_failures(answer: bytes | None, kind: str) -> None:
    """A connection without a proper answer has failed, and says how."""
    with pytest.raises(Failed, match=kind):
        http_once(listener(answer), "", 0, 2.0)


def test_refused() -> None:
    """Where nobody listens both protocols are refused at once."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        target = Target(*free.getsockname())
    for once in (http_once, datagram_once):
        with pytest.raises(Failed, match="refused"):
            once(target, "", 0, 2.0)


def test_timeout() -> None:
    """A server that says nothing times out."""
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(Failed, match="timeout"):
        http_once(Target(*silent.getsockname()), "", 0, 0.05)


def test_adding_up() -> None:
    """Two observations add up; the slowest is the slower of the two."""
    one = Seen(pods=Counter({"a": 2}), errors=Counter({"refused": 1}), slowest=0.1)
    two = Seen(pods=Counter({"a": 1, "b": 4}), slowest=0.3)
    both = one + two
    assert (both.total, both.failed, both.slowest) == (8, 1, 0.3)
    assert str(both) == "a 3, b 4, refused 1"
