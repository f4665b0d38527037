"""Connections on the loopback interface, counted by answer or kind of failure."""

import socket
import threading
from collections import Counter

import pytest

from pykubeproxy.lab.prober import ProbeError, ProbeResult, ProbeTarget, probe_tcp


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


@pytest.mark.parametrize(
    ("answer", "kind"),
    [(None, "closed"), (b"HTTP/1.1 502 x\r\n\r\n", "HTTP 502"), (b"HTTP/1.1 200 OK\r\n\r\n{", "garbled")],
)
def test_failure_has_a_kind(answer: bytes | None, kind: str) -> None:
    """A connection without a valid answer raises its kind of failure."""
    with pytest.raises(ProbeError, match=kind):
        probe_tcp(listener(answer), "", 2.0)


def test_results_add_up() -> None:
    """Counts add up; slowest is the maximum."""
    one = ProbeResult(pods=Counter({"a": 2}), errors=Counter({"refused": 1}), slowest=0.1)
    two = ProbeResult(pods=Counter({"a": 1, "b": 4}), slowest=0.3)
    both = one + two
    assert (both.total, both.failed, both.slowest) == (8, 1, 0.3)
    assert str(both) == "a 3, b 4, 1 refused"
