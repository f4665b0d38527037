"""Connections on the loopback interface, counted by answer or kind of failure."""

import json
import socket
import threading
from collections import Counter

import pytest

from pykubeproxy.lab.prober import ProbeError, ProbeResult, ProbeTarget, probe_tcp, probe_udp


def listener(answer: bytes | None) -> ProbeTarget:
    """A server that answers one connection, or closes it without an answer."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with server:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                if answer is not None:
                    connection.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    return ProbeTarget(*server.getsockname())


BODY = {"pod": "web-1", "client": "127.0.0.1", "real_ip": ""}


def test_answer_is_returned() -> None:
    """The pod's answer is returned."""
    target = listener(b"HTTP/1.1 200 OK\r\n\r\n" + json.dumps(BODY).encode())
    assert probe_tcp(target, "", 2.0) == BODY


@pytest.mark.parametrize(
    ("answer", "kind"),
    [(None, "closed"), (b"HTTP/1.1 502 x\r\n\r\n", "http 502"), (b"HTTP/1.1 200 OK\r\n\r\n{", "garbled")],
)
def test_failure_has_a_kind(answer: bytes | None, kind: str) -> None:
    """A connection without a valid answer raises its kind of failure."""
    with pytest.raises(ProbeError, match=kind):
        probe_tcp(listener(answer), "", 2.0)


def test_closed_port_refuses() -> None:
    """A closed port refuses both protocols at once."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        target = ProbeTarget(*free.getsockname())
    with pytest.raises(ProbeError, match="refused"):
        probe_tcp(target, "", 2.0)
    with pytest.raises(ProbeError, match="refused"):
        probe_udp(target, 2.0)


def test_silent_server_times_out() -> None:
    """A server without an answer times out."""
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(ProbeError, match="timeout"):
        probe_tcp(ProbeTarget(*silent.getsockname()), "", 0.05)


def test_results_add_up() -> None:
    """Counts add up; slowest is the maximum."""
    one = ProbeResult(pods=Counter({"a": 2}), errors=Counter({"refused": 1}), slowest=0.1)
    two = ProbeResult(pods=Counter({"a": 1, "b": 4}), slowest=0.3)
    both = one + two
    assert (both.total, both.failed, both.slowest) == (8, 1, 0.3)
    assert str(both) == "a 3, b 4, refused 1"
