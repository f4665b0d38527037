"""Bytes to and from a SOCKS5 proxy."""

import socket
from collections.abc import Iterator

import pytest

from pykubeproxy.sources.socks import request_connection

# The proxy's own address and port follow, here 0.0.0.0:0.
CONNECTED = b"\x05\x00\x00\x01" + bytes(6)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, proxys = socket.socketpair()
    with ours, proxys:
        ours.settimeout(5)
        yield ours, proxys


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("h.example", b"\x03\x09h.example"),
        ("192.0.2.1", b"\x01\xc0\x00\x02\x01"),
        ("fd00::1", b"\x04\xfd" + bytes(14) + b"\x01"),
    ],
)
@pytest.mark.parametrize("bound", [b"\x01" + bytes(4), b"\x04" + bytes(16), b"\x03\x02ab"])
def test_a_connection_is_requested(
    pair: tuple[socket.socket, socket.socket], host: str, address: bytes, bound: bytes
) -> None:
    """What follows the answer is left to the server."""
    ours, proxys = pair
    proxys.sendall(b"\x05\x00" + b"\x05\x00\x00" + bound + b"\x00\x00" + b"server")
    request_connection(ours, host, 6443, "", "")
    assert proxys.recv(100) == b"\x05\x01\x00" + b"\x05\x01\x00" + address + b"\x19\x2b"
    assert ours.recv(100) == b"server"


def test_user_and_password_are_sent_if_the_proxy_wants_them(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, proxys = pair
    proxys.sendall(b"\x05\x02" + b"\x01\x00" + CONNECTED)
    request_connection(ours, "h", 1, "me", "pw")
    assert proxys.recv(100) == b"\x05\x02\x00\x02" + b"\x01\x02me\x02pw" + b"\x05\x01\x00\x03\x01h\x00\x01"


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n", "the proxy does not speak SOCKS5"),
        (b"\x05\xff", "the SOCKS proxy requires another kind of login"),
        (b"\x05\x02\x01\x01", "the SOCKS proxy does not accept user and password"),
        (b"\x05\x00\x05\x04\x00\x01", "the SOCKS proxy cannot connect: host unreachable"),
        (b"\x05\x00\x05\x63\x00\x01", "the SOCKS proxy cannot connect: reply 99"),
        (b"\x05\x00\x05\x00\x00\x01\x00", "the SOCKS proxy closed the connection"),
    ],
)
def test_a_refusal_has_its_reason(
    pair: tuple[socket.socket, socket.socket], reply: bytes, reason: str
) -> None:
    ours, proxys = pair
    proxys.sendall(reply)
    proxys.shutdown(socket.SHUT_WR)
    with pytest.raises(OSError, match=reason):
        request_connection(ours, "h", 1, "me", "pw")


def test_a_long_name_is_refused(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, proxys = pair
    proxys.sendall(b"\x05\x00")
    with pytest.raises(OSError, match="at most 255 bytes"):
        request_connection(ours, "h" * 256, 1, "", "")
