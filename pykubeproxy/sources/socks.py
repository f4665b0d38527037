"""Ask a SOCKS5 proxy for a connection (RFC 1928), with user and password if it requires them (RFC 1929)."""

import errno
import socket
import struct

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


class _Refused(OSError):
    def __init__(self, reason: str) -> None:
        super().__init__(errno.ECONNREFUSED, reason)


def request_connection(connection: socket.socket, host: str, port: int, user: str, password: str) -> None:
    """Have the proxy connect to a host; the proxy resolves its name. Raises OSError."""
    methods = bytes([_NO_LOGIN, _LOGIN] if user else [_NO_LOGIN])
    connection.sendall(bytes([_VERSION, len(methods)]) + methods)
    version, method = _receive(connection, 2)
    if version != _VERSION:
        raise _Refused("the proxy does not speak SOCKS5")
    if method not in methods:
        raise _Refused("the SOCKS proxy requires another kind of login")
    if method == _LOGIN:
        connection.sendall(b"\x01" + _text(user) + _text(password))
        if _receive(connection, 2)[1] != 0:
            raise _Refused("the SOCKS proxy does not accept user and password")
    connection.sendall(bytes([_VERSION, _CONNECT, 0]) + _address(host) + struct.pack("!H", port))
    _, reply, _, kind = _receive(connection, 4)
    if reply != 0:
        raise _Refused(f"the SOCKS proxy cannot connect: {_REASONS.get(reply, f'reply {reply}')}")
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
        raise _Refused("a SOCKS proxy takes at most 255 bytes of a name, user or password")
    return bytes([len(encoded)]) + encoded


def _receive(connection: socket.socket, length: int) -> bytes:
    received = b""
    while len(received) < length:
        piece = connection.recv(length - len(received))
        if not piece:
            raise _Refused("the SOCKS proxy closed the connection")
        received += piece
    return received
