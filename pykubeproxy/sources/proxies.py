"""The proxy in front of an API server: choose it as client-go does, and connect through SOCKS5.

SOCKS5 follows RFC 1928, with user and password (RFC 1929) if the proxy requires them.
"""

import errno
import ipaddress
import socket
import struct
from collections.abc import Mapping
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from pykubeproxy.objects.check import cidr
from pykubeproxy.sources.watch import SourceError
from pykubeproxy.wording import without_password

_Ip = ipaddress.IPv4Address | ipaddress.IPv6Address

SOCKS = ("socks5", "socks5h")
_PORTS = {"http": "80", "https": "443"}
_ADVICE = "use an http://, https:// or socks5:// URL"
_VERSION, _CONNECT, _NAME = 5, 1, 3
_NO_LOGIN, _LOGIN = 0, 2
# The lengths of IPv4 and IPv6 addresses by type.
_LENGTHS = {1: 4, 4: 16}
_REASONS = {
    1: "general failure",
    2: "not allowed",
    3: "network unreachable",
    4: "host unreachable",
    5: "connection refused",
    6: "no answer in time",
    7: "command not supported",
    8: "address type not supported",
}


def proxy_for(server: str, proxy_url: str, environment: Mapping[str, str]) -> str | None:
    """Return the URL of the proxy for the URL of a server, None without a proxy.

    `proxy_url` is that of the kubeconfig, or empty; NO_PROXY does not apply to it. Raises SourceError.
    """
    if not proxy_url:
        return _from_environment(urlsplit(server), environment)
    if _is_url(proxy_url, ("http", "https", "socks5")):
        return proxy_url
    raise SourceError(f"cannot use proxy-url {shown(proxy_url)}: {_ADVICE}")


def user_of(url: str) -> tuple[str, str]:
    """Return the user and the password in a URL, empty if there are none."""
    parts = urlsplit(url)
    return unquote(parts.username or ""), unquote(parts.password or "")


def bypasses_proxy(server: SplitResult, no_proxy: str) -> bool:
    """Return whether NO_PROXY excludes a server. localhost and loopback addresses are always excluded."""
    host, port = server.hostname or "", str(server.port or _PORTS[server.scheme])
    ip = _ip(host)
    if host == "localhost" or (ip and ip.is_loopback):
        return True
    entries = [entry.strip().lower() for entry in no_proxy.split(",")]
    return "*" in entries or any(_matches(entry, host, port, ip) for entry in entries)


def _from_environment(server: SplitResult, environment: Mapping[str, str]) -> str | None:
    name = f"{server.scheme.upper()}_PROXY"
    value = _variable(environment, name)
    # client-go ignores a value with a space too.
    if not _is_word(value) or bypasses_proxy(server, _variable(environment, "NO_PROXY")):
        return None
    proxy = value if "://" in value else f"http://{value}"
    if name == "HTTP_PROXY" and environment.get("REQUEST_METHOD"):
        # In a CGI program, a client of the web server sets this variable, by the header "Proxy".
        raise SourceError("cannot use HTTP_PROXY while REQUEST_METHOD is set, as in a CGI program: unset one")
    if not _is_url(proxy, ("http", "https", *SOCKS)):
        raise SourceError(f"cannot use {name}={shown(proxy)}: {_ADVICE}")
    return proxy


def _variable(environment: Mapping[str, str], name: str) -> str:
    return environment.get(name) or environment.get(name.lower(), "")


def _is_word(text: str) -> bool:
    return bool(text) and text.isprintable() and " " not in text


def _is_url(text: str, schemes: tuple[str, ...]) -> bool:
    try:
        url = urlsplit(text)
        return _is_word(text) and url.scheme in schemes and bool(url.hostname) and url.port != 0
    except ValueError:
        return False


def shown(url: str) -> str:
    """Return a URL, which may lack its scheme, without user and password."""
    return without_password(url if "//" in url else f"//{url}").removeprefix("//")


def _matches(entry: str, host: str, port: str, ip: _Ip | None) -> bool:
    """Return whether an entry of NO_PROXY names a host: a network, or an address or domain with an optional port.

    A domain includes its subdomains; with a leading dot, it means only these.
    """
    try:
        network = ipaddress.ip_network(cidr(entry, "NO_PROXY"))
    except ValueError:
        pass
    else:
        return ip is not None and ip in network
    name, only_port = _split(entry)
    if not name or only_port not in ("", port):
        return False
    if ip:
        return _ip(name) == ip
    name = name.removeprefix("*") if name.startswith("*.") else name
    return host.endswith(name) if name.startswith(".") else f".{host}".endswith(f".{name}")


def _split(entry: str) -> tuple[str, str]:
    name, colon, port = entry.rpartition(":")
    if colon and name.startswith("[") and name.endswith("]"):
        return name[1:-1], port
    return (name, port) if colon and ":" not in name else (entry, "")


def _ip(host: str) -> _Ip | None:
    try:
        ip = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return getattr(ip, "ipv4_mapped", None) or ip


class _SocksRefused(OSError):
    def __init__(self, reason: str) -> None:
        super().__init__(errno.ECONNREFUSED, reason)


def request_connection(connection: Any, host: str, port: int, user: str, password: str) -> None:
    """Have the proxy connect to a host; the proxy resolves its name. Raises OSError."""
    methods = bytes([_NO_LOGIN, _LOGIN] if user else [_NO_LOGIN])
    connection.sendall(bytes([_VERSION, len(methods)]) + methods)
    version, method = _receive(connection, 2)
    if version != _VERSION:
        raise _SocksRefused("the proxy does not speak SOCKS5")
    if method not in methods:
        raise _SocksRefused("the SOCKS proxy requires another kind of login")
    if method == _LOGIN:
        connection.sendall(b"\x01" + _text(user) + _text(password))
        if _receive(connection, 2)[1] != 0:
            raise _SocksRefused("the SOCKS proxy does not accept user and password")
    connection.sendall(bytes([_VERSION, _CONNECT, 0]) + _address(host) + struct.pack("!H", port))
    _, reply, _, kind = _receive(connection, 4)
    if reply != 0:
        raise _SocksRefused(f"the SOCKS proxy cannot connect: {_REASONS.get(reply, f'reply {reply}')}")
    # Skip the proxy's own address and port.
    _receive(connection, (_LENGTHS.get(kind) or _receive(connection, 1)[0]) + 2)


def _address(host: str) -> bytes:
    for kind, family in ((1, socket.AF_INET), (4, socket.AF_INET6)):
        try:
            return bytes([kind]) + socket.inet_pton(family, host)
        except OSError:
            pass
    return bytes([_NAME]) + _text(host)


def _text(text: str) -> bytes:
    encoded = text.encode()
    if len(encoded) > 255:
        raise _SocksRefused("a SOCKS proxy takes at most 255 bytes of a name, user or password")
    return bytes([len(encoded)]) + encoded


def _receive(connection: Any, length: int) -> bytes:
    received = b""
    while len(received) < length:
        piece = connection.recv(length - len(received))
        if not piece:
            raise _SocksRefused("the SOCKS proxy closed the connection")
        received += piece
    return received
