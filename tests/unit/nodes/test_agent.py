"""Fetching pages when another server listens at the agent's address."""

import contextlib
import gzip
import socket

import pytest

from pykubeproxy.nodes import agent as client
from tests.fakes.canned import CHUNKED, Answer, CannedServer, chunk, whole


def failure(answer: Answer) -> str:
    """What is said of something that answers like this."""
    with CannedServer(answer) as canned, pytest.raises(client.NoAgent) as caught:
        client.fetch(canned.url, "/servicez")
    return str(caught.value).partition(": ")[2] or str(caught.value).replace(canned.url, "URL")


def without_end(_: str, connection: socket.socket) -> None:
    connection.sendall(CHUNKED)
    with contextlib.suppress(OSError):
        while True:
            connection.sendall(chunk(b" " * 65536))


def test_endless_response(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give up after a time and a size, however steadily data arrives."""
    monkeypatch.setattr(client, "_MAX_BYTES", 1 << 20)
    assert failure(without_end) == "the response exceeds 64 MiB or 30 s"
    monkeypatch.setattr(client, "_MAX_BYTES", 1 << 60)
    monkeypatch.setattr(client, "_MAX_SECONDS", 0.2)
    assert failure(without_end) == "the response exceeds 64 MiB or 30 s"


def test_compressed_response_is_not_decoded() -> None:
    """The client requests no compression, and a small response could expand beyond memory."""
    body = gzip.compress(bytes(1 << 20))
    with CannedServer(lambda _, it: it.sendall(whole(body, headers="Content-Encoding: gzip\r\n"))) as canned:
        assert client.fetch(canned.url, "/servicez") == body


def test_redirects_are_not_followed() -> None:
    """A redirect is an error like any other status."""
    moved = whole(b"", "302 Found", "Location: http://192.0.2.1/\r\n")
    assert failure(lambda _, it: it.sendall(moved)) == "URL/servicez returned status 302"
