"""Which proxy is used for an API server, and bytes to and from a SOCKS5 proxy.

The expected choices are those of client-go 1.36, tried with its code.
"""

import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from pykubeproxy.sources import SourceError
from pykubeproxy.sources.proxies import bypasses_proxy, proxy_for, request_connection

PROXY = "http://proxy:3128"


def test_the_proxy_of_the_kubeconfig_wins_over_the_environment() -> None:
    """NO_PROXY does not apply to it, and loopback addresses are no exception."""
    environment = {"HTTPS_PROXY": PROXY, "NO_PROXY": "*"}
    assert proxy_for("https://10.0.0.1", "http://own:1", environment) == "http://own:1"
    assert proxy_for("https://127.0.0.1", "http://own:1", environment) == "http://own:1"


@pytest.mark.parametrize(
    "proxy", ["socks5h://p:1", "ftp://p:1", "10.0.0.1:3128", "proxy:3128", "http://", "p q"]
)
def test_an_unusable_proxy_of_the_kubeconfig_is_refused(proxy: str) -> None:
    with pytest.raises(SourceError, match=r"cannot use proxy-url .*: use an http://"):
        proxy_for("https://10.0.0.1", proxy, {})


@pytest.mark.parametrize(
    ("server", "environment", "proxy"),
    [
        ("https://h", {"HTTPS_PROXY": PROXY}, PROXY),
        ("https://h", {"https_proxy": PROXY}, PROXY),
        ("https://h", {"HTTPS_PROXY": PROXY, "https_proxy": "http://other:1"}, PROXY),
        ("https://h", {"HTTPS_PROXY": "", "https_proxy": PROXY}, PROXY),
        ("https://h", {"HTTP_PROXY": PROXY}, None),
        ("https://h", {"ALL_PROXY": PROXY, "all_proxy": PROXY}, None),
        ("http://h", {"HTTP_PROXY": PROXY}, PROXY),
        ("http://h", {"http_proxy": PROXY}, PROXY),
        ("http://h", {"HTTPS_PROXY": PROXY}, None),
        ("https://h", {"HTTPS_PROXY": "proxy:3128"}, PROXY),
        ("https://h", {"HTTPS_PROXY": "10.9.9.9"}, "http://10.9.9.9"),
        ("https://h", {"HTTPS_PROXY": "socks5://p"}, "socks5://p"),
        ("https://h", {"HTTPS_PROXY": "socks5h://p"}, "socks5h://p"),
        ("https://h", {"HTTPS_PROXY": "https://me:secret@p"}, "https://me:secret@p"),
        ("https://h", {"HTTPS_PROXY": " http://p"}, None),
        ("https://h", {"HTTPS_PROXY": PROXY, "NO_PROXY": "h"}, None),
        ("https://h", {"HTTPS_PROXY": PROXY, "no_proxy": "h"}, None),
        ("https://h", {"HTTPS_PROXY": PROXY, "NO_PROXY": "other", "no_proxy": "h"}, PROXY),
        # In a CGI program, clients set HTTP_PROXY.
        ("https://h", {"HTTPS_PROXY": PROXY, "HTTP_PROXY": PROXY, "REQUEST_METHOD": "GET"}, PROXY),
    ],
)
def test_the_proxy_of_the_environment(server: str, environment: dict[str, str], proxy: str | None) -> None:
    assert proxy_for(server, "", environment) == proxy


def test_http_proxy_is_refused_in_a_cgi_program() -> None:
    with pytest.raises(SourceError, match="cannot use HTTP_PROXY while REQUEST_METHOD is set"):
        proxy_for("http://h", "", {"HTTP_PROXY": PROXY, "REQUEST_METHOD": "GET"})


@pytest.mark.parametrize("proxy", ["socks4://me:secret@p", "http://me:secret@p:port", "http://[::1"])
def test_an_unusable_proxy_of_the_environment_is_refused(proxy: str) -> None:
    """The message does not have its password."""
    with pytest.raises(SourceError, match=r"cannot use HTTPS_PROXY=.*: use an http://") as caught:
        proxy_for("https://h", "", {"HTTPS_PROXY": proxy})
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "server",
    [
        "http://localhost",
        "https://localhost:6443",
        "https://127.0.0.1:6443",
        "https://127.9.9.9",
        "https://[::1]",
        "https://[::ffff:127.0.0.1]:6443",
    ],
)
def test_localhost_and_loopback_addresses_have_no_proxy(server: str) -> None:
    assert proxy_for(server, "", {"HTTP_PROXY": PROXY, "HTTPS_PROXY": PROXY}) is None


@pytest.mark.parametrize(
    ("server", "no_proxy", "bypasses"),
    [
        ("https://10.0.0.1", "", False),
        ("https://10.0.0.1", "*", True),
        ("https://10.0.0.1", "other, *", True),
        ("https://10.0.0.1:6443", "10.0.0.0/8", True),
        ("https://10.0.0.1:6443", "192.0.2.1 , 10.0.0.0/8", True),
        ("https://10.0.0.1", "010.000.0.0/8", True),
        ("https://10.0.0.1", "10.0.0.0/33", False),
        ("https://10.0.0.1", "10.0.", False),
        ("https://10.0.0.1", "10.0.0.1", True),
        ("https://10.0.0.1:6443", "10.0.0.1:6443", True),
        ("https://10.0.0.1", "10.0.0.1:443", True),
        ("http://10.0.0.1", "10.0.0.1:80", True),
        ("https://10.0.0.1", "10.0.0.1:80", False),
        ("https://10.0.0.1", "10.0.0.1:", True),
        ("https://[::ffff:10.0.0.1]", "10.0.0.0/8", True),
        ("https://[fd00::1]", "fd00::/8", True),
        ("https://[fd00::1]", "fd00::1", True),
        ("https://[fd00::1]:6443", "[fd00::1]:6443", True),
        ("https://[fd00::1]", "[fd00::1]:6443", False),
        ("https://[fd00::1]", "[fd00::1]", False),
        ("https://example.com", "example.com", True),
        ("https://EXAMPLE.com", "Example.Com", True),
        ("https://api.example.com", "example.com", True),
        ("https://notexample.com", "example.com", False),
        ("https://example.com", ".example.com", False),
        ("https://api.example.com", ".example.com", True),
        ("https://api.example.com", "*.example.com", True),
        ("https://example.com", "*.example.com", False),
        ("https://api.example.com", "*example.com", False),
        ("https://api.example.com:6443", "example.com:6443", True),
        ("https://api.example.com", "example.com:6443", False),
        ("https://example.com", "com", True),
        ("https://example.com", ":443,,[]:443", False),
        ("https://10.0.0.1", "0.0.1", False),
    ],
)  # fmt: skip
def test_no_proxy_excludes_as_in_go(server: str, no_proxy: str, bypasses: bool) -> None:
    assert bypasses_proxy(urlsplit(server), no_proxy) is bypasses


Pair = tuple[socket.socket, socket.socket]
# The proxy's own address and port follow, here 0.0.0.0:0.
CONNECTED = b"\x05\x00\x00\x01" + bytes(6)


@pytest.fixture
def pair() -> Iterator[Pair]:
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
def test_a_connection_is_requested(pair: Pair, host: str, address: bytes, bound: bytes) -> None:
    """What follows the answer is left to the server."""
    ours, proxys = pair
    proxys.sendall(b"\x05\x00" + b"\x05\x00\x00" + bound + b"\x00\x00" + b"server")
    request_connection(ours, host, 6443, "", "")
    assert proxys.recv(100) == b"\x05\x01\x00" + b"\x05\x01\x00" + address + b"\x19\x2b"
    assert ours.recv(100) == b"server"


def test_user_and_password_are_sent_if_the_proxy_wants_them(pair: Pair) -> None:
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
def test_a_refusal_has_its_reason(pair: Pair, reply: bytes, reason: str) -> None:
    ours, proxys = pair
    proxys.sendall(reply)
    proxys.shutdown(socket.SHUT_WR)
    with pytest.raises(OSError, match=reason):
        request_connection(ours, "h", 1, "me", "pw")


def test_a_long_name_is_refused(pair: Pair) -> None:
    ours, proxys = pair
    proxys.sendall(b"\x05\x00")
    with pytest.raises(OSError, match="at most 255 bytes"):
        request_connection(ours, "h" * 256, 1, "", "")
