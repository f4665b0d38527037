"""The agent's HTTP server, asked by an honest client."""

import errno
import socket
import threading

import pytest

from pykubeproxy.agent import http
from pykubeproxy.agent.http_server import Server
from tests.fakes.asking import ask, send
from tests.fakes.follower import eventually
from tests.unit.agent.conftest import Serve

PAGES = http.pages({"/a": lambda: http.text("first"), "/b": lambda: http.Answer(b"{}", http.JSON, 503)})


def test_a_page_comes_with_its_headers(serve: Serve) -> None:
    """Status, type, length and the order not to guess the type are what the page says."""
    status, headers, body = ask(serve(PAGES), "/b")
    assert (status, body) == (503, "{}")
    assert headers["Content-Type"] == "application/json"
    assert headers["Content-Length"] == "2"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Connection"] == "close"


def test_the_path_is_taken_without_its_query(serve: Serve) -> None:
    """A query changes nothing, whichever form the request names its target in; other paths are not there."""
    port = serve(PAGES)
    assert ask(port, "/a?verbose=1").body == "first"
    assert ask(port, "http://node:10256/a").body == "first"
    assert ask(port, "/a/").status == 404
    assert ask(port, "/%61").status == 404


def test_head_is_get_without_a_body(serve: Serve) -> None:
    """HEAD tells the length of what GET would give."""
    answer = send(serve(PAGES), b"HEAD /a HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b"\r\nContent-Length: 5\r\n" in answer
    assert answer.endswith(b"\r\n\r\n")


def test_old_clients_need_no_host(serve: Serve) -> None:
    """HTTP/1.0 as simple balancers speak it."""
    assert send(serve(PAGES), b"GET /a HTTP/1.0\r\n\r\n").endswith(b"\r\n\r\nfirst")


def test_a_request_may_come_in_pieces(serve: Serve) -> None:
    """Nothing is lost where packets end within a line."""
    with socket.create_connection(("127.0.0.1", serve(PAGES)), timeout=10) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n":
            connection.send(bytes([byte]))
        assert connection.makefile("rb").read().endswith(b"first")


def test_every_address_means_both_families(serve: Serve) -> None:
    """The host "" is reached by IPv4 and IPv6, one of a family by that alone."""
    both, four, six = (serve(PAGES, host=host) for host in ("", "0.0.0.0", "::"))
    assert ask(both, "/a", host="127.0.0.1").body == ask(both, "/a", host="::1").body == "first"
    assert ask(four, "/a", host="127.0.0.1").body == ask(six, "/a", host="::1").body == "first"
    for port, host in ((four, "::1"), (six, "127.0.0.1")):
        with pytest.raises(ConnectionRefusedError):
            ask(port, "/a", host=host)


def test_a_taken_port_is_an_error() -> None:
    """Whoever wants to listen learns at once why it cannot be."""
    server = Server("test")
    with socket.create_server(("127.0.0.1", 0)) as other:
        with pytest.raises(OSError, match="in use") as caught:
            server.listen("127.0.0.1", other.getsockname()[1], PAGES)
        assert caught.value.errno == errno.EADDRINUSE
    server.close()


def test_one_address_is_given_up_while_others_stay() -> None:
    """An address that was closed can be taken again at once, by another page too."""
    server = Server("test")
    server.listen("127.0.0.1", 0, PAGES)
    (kept,) = server.addresses()
    close = server.listen("127.0.0.1", 0, PAGES)
    (given_up,) = set(server.addresses()) - {kept}
    assert ask(given_up[1], "/a").body == "first"
    close()
    close()
    with pytest.raises(ConnectionRefusedError):
        ask(given_up[1], "/a")
    server.listen(*given_up, lambda request: http.text(request.path))
    assert ask(given_up[1], "/a").body == "/a"
    assert ask(kept[1], "/a").body == "first"
    server.close()


def test_closing_ends_what_is_under_way() -> None:
    """A closed server listens no longer, its connections end, and no thread or new listener of it stays."""
    server = Server("closing")
    server.listen("127.0.0.1", 0, PAGES)
    ((_, port),) = server.addresses()
    with socket.create_connection(("127.0.0.1", port), timeout=10) as stalling:
        stalling.send(b"GET")
        eventually(lambda: any(it.name == "closing-request" for it in threading.enumerate()))
        server.close()
        assert stalling.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        ask(port, "/a")
    with pytest.raises(OSError, match="closed"):
        server.listen("127.0.0.1", 0, PAGES)
    eventually(lambda: not any(it.name.startswith("closing") for it in threading.enumerate()))


def test_a_page_that_fails_is_not_the_end(serve: Serve) -> None:
    """An exception in a page is a 500 to its client, a line in the log, and nothing to others."""

    def broken() -> http.Answer:
        raise RuntimeError("what now")

    port = serve(http.pages({"/broken": broken, "/a": lambda: http.text("first")}))
    answer = ask(port, "/broken")
    assert (answer.status, "what now" in answer.body) == (500, False)
    assert ask(port, "/a").body == "first"
