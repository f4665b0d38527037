"""Asking an agent, when something else listens at its address."""

import contextlib
import gzip
import socket

import pytest

from pykubeproxy.cli import asking
from tests.fakes.canned import CHUNKED, Answer, CannedServer, chunk, whole


def failure(answer: Answer) -> str:
    """What is said of something that answers like this."""
    with CannedServer(answer) as canned, pytest.raises(asking.NoAnswer) as caught:
        asking.ask(canned.url, "/servicez")
    return str(caught.value).partition(": ")[2] or str(caught.value).replace(canned.url, "URL")


def without_end(_: str, connection: socket.socket) -> None:
    connection.sendall(CHUNKED)
    with contextlib.suppress(OSError):
        while True:
            connection.sendall(chunk(b" " * 65536))


def test_one_that_goes_on_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given up, by the time that it takes or by its length, however steadily something comes."""
    monkeypatch.setattr(asking, "_LONGEST", 1 << 20)
    assert failure(without_end) == "the answer has no end"
    monkeypatch.setattr(asking, "_LONGEST", 1 << 60)
    monkeypatch.setattr(asking, "_PATIENCE", 0.2)
    assert failure(without_end) == "the answer has no end"


def test_compressed_text_is_left_as_it_is() -> None:
    """None is asked for, and a little of it can stand for more than there is memory."""
    body = gzip.compress(bytes(1 << 20))
    with CannedServer(lambda _, it: it.sendall(whole(body, headers="Content-Encoding: gzip\r\n"))) as canned:
        assert asking.ask(canned.url, "/servicez") == body


def test_nobody_is_sent_elsewhere() -> None:
    """A redirection is an answer like any other that is none."""
    moved = whole(b"", "302 Found", "Location: http://192.0.2.1/\r\n")
    assert failure(lambda _, it: it.sendall(moved)) == "URL/servicez answers with status 302"
