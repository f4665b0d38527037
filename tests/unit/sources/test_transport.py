"""Connections to an API server: the addresses it has, and compressed responses."""

import gzip
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pykubeproxy.sources import Client
from pykubeproxy.sources.failures import Failure
from pykubeproxy.sources.transport import unpacked
from tests.fakes.canned import CannedServer, whole
from tests.fakes.kubeconfigs import write_kubeconfig

RESOLVE = socket.getaddrinfo


def connect(client: Client) -> None:
    try:
        with client.stream("/", {}, resource="services", idle=2.0) as pieces:
            list(pieces)
    except Failure:
        pass


def resolving(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Resolve every name to these addresses."""

    def getaddrinfo(host: str, port: int, **options: Any) -> list[Any]:
        if not addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [found for address in addresses for found in RESOLVE(address, port, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


@pytest.mark.parametrize(
    ("master", "known"),
    [
        ("https://10.0.0.1:6443", ("10.0.0.1", 6443)),
        ("https://10.0.0.1", ("10.0.0.1", 443)),
        ("http://10.0.0.1/prefix", ("10.0.0.1", 80)),
        ("https://[FD00:0::1]:6443", ("fd00::1", 6443)),
        ("https://[::ffff:10.0.0.1]:6443", ("10.0.0.1", 6443)),
        ("https://me:secret@10.0.0.1:6443", ("10.0.0.1", 6443)),
    ],
)
def test_an_address_is_known_before_any_request(master: str, known: tuple[str, int]) -> None:
    assert Client(master=master).server_addresses() == {known}


def test_all_addresses_of_a_name_are_known_after_the_first_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even those that the client does not need, and if it cannot connect to any."""
    resolving(monkeypatch, "127.0.0.1", "127.0.0.2", "::1")
    client = Client(master="http://api.example:1", qps=-1)
    assert client.server_addresses() == frozenset()
    connect(client)
    assert client.server_addresses() == {("127.0.0.1", 1), ("127.0.0.2", 1), ("::1", 1)}


def test_addresses_of_a_name_that_changes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest 64; a name that no longer resolves changes nothing."""
    client = Client(master="http://api.example:1", qps=-1)
    for number in range(1, 71):
        resolving(monkeypatch, f"127.0.1.{number}", "127.0.0.1")
        connect(client)
    resolving(monkeypatch)
    connect(client)
    newest = {(f"127.0.1.{number}", 1) for number in range(8, 71)}
    assert client.server_addresses() == newest | {("127.0.0.1", 1)}


def test_the_addresses_of_a_proxy_replace_those_of_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packets go to the proxy only."""
    cluster = {"server": "https://10.0.0.1:6443", "proxy-url": "http://127.0.0.9:3128"}
    client = Client(write_kubeconfig(tmp_path, cluster), qps=-1)
    assert client.server_addresses() == {("127.0.0.9", 3128)}
    path = write_kubeconfig(tmp_path, {**cluster, "proxy-url": "http://proxy.example:3128"})
    resolving(monkeypatch, "127.0.0.7", "127.0.0.8")
    client = Client(path, qps=-1)
    connect(client)
    assert client.server_addresses() == {("127.0.0.7", 3128), ("127.0.0.8", 3128)}


def test_a_dead_address_does_not_stop_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """It tries the next address of the name."""
    resolving(monkeypatch, "127.0.0.2", "127.0.0.1")
    with CannedServer(lambda target, connection: connection.sendall(whole(b"{}"))) as canned:
        client = Client(master=canned.url.replace("127.0.0.1", "api.example"))
        with client.stream("/", {}, resource="services", idle=2.0) as pieces:
            assert b"".join(pieces) == b"{}"


TEXT = random.Random(1).randbytes(1000) * 200
WHOLE = gzip.compress(TEXT, mtime=0)


def pieces(data: bytes, size: int) -> Iterator[bytes]:
    """Yield data as it might arrive."""
    return (data[at : at + size] for at in range(0, len(data), size))


@pytest.mark.parametrize("size", [1, 7, 1000, 1 << 20])
def test_content_does_not_depend_on_how_bytes_arrive(size: int) -> None:
    assert b"".join(unpacked(pieces(WHOLE, size))) == TEXT


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_several_gzip_members_are_one_text(size: int) -> None:
    """A server may compress part by part."""
    parts = gzip.compress(b"one, ") + gzip.compress(b"") + gzip.compress(b"two")
    assert b"".join(unpacked(pieces(parts, size))) == b"one, two"


def test_an_empty_body_has_no_content() -> None:
    assert not list(unpacked(iter([])))


def test_a_bomb_is_unpacked_only_as_far_as_it_is_read() -> None:
    """Each piece is small, however much of the content a few bytes hold."""
    bomb = gzip.compress(bytes(1 << 26))
    assert len(bomb) < 70_000
    content = unpacked(iter([bomb]))
    for _ in range(10):
        assert len(next(content)) <= 1 << 16


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"{}", "corrupt gzip data"),
        (b"\x1f\x8b\x08garbage-garbage-garbage", "corrupt gzip data"),
        (WHOLE[:500] + bytes([WHOLE[500] ^ 1]) + WHOLE[501:], "corrupt gzip data"),
        (WHOLE + b"more", "corrupt gzip data"),
        (WHOLE[:-1], "ended in the middle of gzip data"),
        (WHOLE[: len(WHOLE) // 2], "ended in the middle of gzip data"),
        (WHOLE[:5], "ended in the middle of gzip data"),
    ],
    ids=["no gzip", "no deflate", "a flipped bit", "more data", "no last byte", "half", "half a header"],
)
def test_corrupt_or_incomplete_data_is_a_failure(data: bytes, reason: str) -> None:
    """The reason is one line, with advice."""
    with pytest.raises(Failure, match=reason) as caught:
        list(unpacked(pieces(data, 100)))
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("or set disable-compression in the kubeconfig")
    assert caught.value.persistent
