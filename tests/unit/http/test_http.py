"""The HTTP server with honest clients."""

import errno
import socket
import threading
from http.client import HTTPConnection

import pytest

from pykubeproxy import http
from pykubeproxy.http.server import Server
from tests.fakes.http_client import fetch, send_bytes
from tests.fakes.waiting import PATIENCE, eventually
from tests.unit.agent.conftest import Serve

PAGES = http.router(
    {"/a": lambda _: http.text("first"), "/b": lambda _: http.Response(b"{}", http.JSON, 503)}
)


def test_a_page_comes_with_its_headers(serve: Serve) -> None:
    """Status, type and length are the handler's; browsers must not guess the type."""
    status, headers, body = fetch(serve(PAGES), "/b")
    assert (status, body) == (503, "{}")
    assert headers["Content-Type"] == "application/json"
    assert headers["Content-Length"] == "2"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "Connection" not in headers


def test_the_router_ignores_the_query(serve: Serve) -> None:
    """In both forms of a request target; any other path is a 404."""
    port = serve(PAGES)
    assert fetch(port, "/a?verbose=1").body == "first"
    assert fetch(port, "http://node:10256/a").body == "first"
    assert fetch(port, "/a/").status == 404
    assert fetch(port, "/%61").status == 404


def test_head_is_get_without_a_body(serve: Serve) -> None:
    """HEAD returns the length of the body of GET."""
    answer = send_bytes(serve(PAGES), b"HEAD /a HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert b"\r\nContent-Length: 5\r\n" in answer
    assert answer.endswith(b"\r\n\r\n")


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "get", "OTHER"])
def test_any_method_gets_the_page(serve: Serve, method: str) -> None:
    """As in kube-proxy; the connection serves further requests."""
    request = f"{method} /a HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode()
    last = b"GET /b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    answer = send_bytes(serve(PAGES), request * 2 + last)
    assert answer.count(b"HTTP/1.1 200 OK\r\n") == answer.count(b"\r\n\r\nfirst") == 2
    assert answer.endswith(b"{}")


@pytest.mark.parametrize(
    ("path", "location"),
    [
        ("//a", "/a"),
        ("/b/../a", "/a"),
        ("/./b//?y=1&z=%20", "/b/?y=1&z=%20"),
        ("/../x", "/x"),
        ("//", "/"),
    ],
)
def test_unclean_paths_are_redirected(serve: Serve, path: str, location: str) -> None:
    """If the handler wants it; never to another host."""
    port = serve(http.redirecting(PAGES))
    for method in ("GET", "HEAD", "POST"):
        status, headers, _ = fetch(port, path, method)
        assert (status, headers["Location"]) == (301, location)
    for clean in ("/a", "/c", "/a/", "/", "/.a"):
        assert fetch(port, clean).status == (200 if clean == "/a" else 404)


def test_old_clients_need_no_host(serve: Serve) -> None:
    """HTTP/1.0, as simple load balancers use it."""
    assert send_bytes(serve(PAGES), b"GET /a HTTP/1.0\r\n\r\n").endswith(b"\r\n\r\nfirst")


def test_a_request_may_come_in_pieces(serve: Serve) -> None:
    """Packets may end within a line."""
    with socket.create_connection(("127.0.0.1", serve(PAGES)), timeout=PATIENCE) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in b"GET /a HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n":
            connection.send(bytes([byte]))
        assert connection.makefile("rb").read().endswith(b"first")


def test_one_connection_takes_several_requests(serve: Serve) -> None:
    """Requests sent ahead are answered in order; a client may ask to close."""
    request = b"GET /%s HTTP/1.1\r\nHost: x\r\n%s\r\n"
    answer = send_bytes(serve(PAGES), request % (b"a", b"") * 2 + request % (b"b", b"Connection: close\r\n"))
    assert [answer.count(status) for status in (b"HTTP/1.1 200 OK", b"HTTP/1.1 503 ")] == [2, 1]
    assert answer.endswith(b"{}")


def test_idle_connections_are_closed_without_a_response(serve: Serve) -> None:
    """The limit counts from the last response."""
    answer = send_bytes(serve(PAGES, idle_seconds=0.1), b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer.endswith(b"\r\n\r\nfirst")


def test_a_stream_is_sent_piece_by_piece(serve: Serve) -> None:
    """Each piece arrives before the next is made; the connection serves another request afterwards."""
    go_on = threading.Event()

    def stream(write: http.Send, _: int) -> None:
        write(b"one,")
        assert go_on.wait(10)
        write(b"two")

    client = HTTPConnection("127.0.0.1", serve(lambda _: http.Response(stream=stream)), timeout=PATIENCE)
    for _ in range(2):
        go_on.clear()
        client.request("GET", "/")
        answer = client.getresponse()
        assert answer.read(4) == b"one,"
        go_on.set()
        assert answer.read() == b"two"
    client.close()


def test_old_clients_get_a_stream_until_the_end(serve: Serve) -> None:
    """HTTP/1.0 has no chunks."""
    port = serve(lambda _: http.Response(stream=lambda write, _: write(b"all")))
    assert send_bytes(port, b"GET / HTTP/1.0\r\n\r\n").endswith(b"\r\n\r\nall")


def test_a_body_up_to_the_limit_reaches_the_handler(serve: Serve) -> None:
    """With a length or in chunks; one byte more is refused."""
    port = serve(lambda request: http.Response(request.body[::-1]), body_bytes=3)
    head = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    for body in (b"Content-Length: 3\r\n\r\nabc", b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"):
        assert send_bytes(port, head + body).endswith(b"cba")
    for body in (
        b"Content-Length: 4\r\n\r\nabcd",
        b"Transfer-Encoding: chunked\r\n\r\n4\r\nabcd\r\n0\r\n\r\n",
    ):
        assert send_bytes(port, head + body).startswith(b"HTTP/1.1 413 ")


def test_every_address_means_both_families(serve: Serve) -> None:
    """The host "" listens on IPv4 and IPv6, "0.0.0.0" and "::" on one of them."""
    both, four, six = (serve(PAGES, host=host) for host in ("", "0.0.0.0", "::"))
    assert fetch(both, "/a", host="127.0.0.1").body == fetch(both, "/a", host="::1").body == "first"
    assert fetch(four, "/a", host="127.0.0.1").body == fetch(six, "/a", host="::1").body == "first"
    for port, host in ((four, "::1"), (six, "127.0.0.1")):
        with pytest.raises(ConnectionRefusedError):
            fetch(port, "/a", host=host)


def test_a_taken_port_is_an_error() -> None:
    """The caller gets the errno and text of the bind."""
    server = Server("test")
    with socket.create_server(("127.0.0.1", 0)) as other:
        with pytest.raises(OSError, match="in use") as caught:
            server.listen("127.0.0.1", other.getsockname()[1], PAGES)
        assert caught.value.errno == errno.EADDRINUSE
    server.close()


def test_one_address_closes_while_others_stay() -> None:
    """A closed address can be reused at once, with another handler."""
    server = Server("test")
    server.listen("127.0.0.1", 0, PAGES)
    (kept,) = server.addresses()
    close = server.listen("127.0.0.1", 0, PAGES)
    (closed,) = set(server.addresses()) - {kept}
    assert fetch(closed[1], "/a").body == "first"
    close()
    close()
    with pytest.raises(ConnectionRefusedError):
        fetch(closed[1], "/a")
    server.listen(*closed, lambda request: http.text(request.path))
    assert fetch(closed[1], "/a").body == "/a"
    assert fetch(kept[1], "/a").body == "first"
    server.close()


def test_closing_ends_open_connections() -> None:
    """A closed server has no listener, connection or thread, and accepts no new listener."""
    server = Server("closing")
    server.listen("127.0.0.1", 0, PAGES)
    ((_, port),) = server.addresses()
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as stalling:
        stalling.send(b"GET")
        eventually(lambda: any(it.name == "closing-request" for it in threading.enumerate()))
        server.close()
        assert stalling.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        fetch(port, "/a")
    with pytest.raises(OSError, match="closed"):
        server.listen("127.0.0.1", 0, PAGES)
    eventually(lambda: not any(it.name.startswith("closing") for it in threading.enumerate()))


def test_a_failing_handler_affects_only_its_client(serve: Serve) -> None:
    """Its exception is a 500 for the client and a line in the log."""

    def broken(_: http.Request) -> http.Response:
        raise RuntimeError("what now")

    port = serve(http.router({"/broken": broken, "/a": lambda _: http.text("first")}))
    answer = fetch(port, "/broken")
    assert (answer.status, "what now" in answer.body) == (500, False)
    assert fetch(port, "/a").body == "first"


def test_an_upgraded_connection_belongs_to_the_handler(serve: Serve) -> None:
    """The handler gets what the client sent ahead, writes everything itself, and then the connection closes."""

    def upgrade(connection: socket.socket, received: bytes) -> None:
        connection.sendall(b"HTTP/1.1 101 Switching Protocols\r\n\r\n" + received[::-1])

    port = serve(lambda request: http.Response(upgrade=upgrade if request.path == "/up" else None))
    head = b"GET %s HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: backwards\r\n\r\n"
    assert send_bytes(port, head % b"/up" + b"abc") == b"HTTP/1.1 101 Switching Protocols\r\n\r\ncba"
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
        connection.sendall(head % b"/other")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 OK\r\n"), (
            "a refused upgrade is a usual request"
        )
