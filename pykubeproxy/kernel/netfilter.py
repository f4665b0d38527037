"""One question to the kernel's netfilter over netlink, for what has no command-line tool of its own."""

import os
import socket
import struct

_NETLINK_NETFILTER = 12
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_ERRNO = struct.Struct("=i")
_ATTRIBUTE = struct.Struct("=HH")  # length with this header, type
_NLMSG_ERROR = 2
_TYPE_MASK = 0x3FFF  # the two upper bits are flags
REQUEST, ACK, CREATE, EXCLUSIVE = 0x1, 0x4, 0x400, 0x200


def ask(message: int, flags: int, family: int, attributes: bytes, seconds: float = 5) -> bytes:
    """Send one nfnetlink message (subsystem << 8 | command) and return the attributes of the answer.

    The answer is empty when the kernel only acknowledged. Works on the network namespace of the calling
    thread. Raises OSError with the kernel's error number, TimeoutError when there is no answer within
    `seconds`.
    """
    body = bytes((family, 0, 0, 0)) + attributes  # struct nfgenmsg: family, version, resource id
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER) as connection:
        connection.settimeout(seconds)
        connection.bind((0, 0))
        connection.send(_HEADER.pack(_HEADER.size + len(body), message, flags | REQUEST, 1, 0) + body)
        answer = connection.recv(65536)
    if _HEADER.unpack_from(answer)[1] != _NLMSG_ERROR:
        return answer[_HEADER.size + 4 :]
    (number,) = _ERRNO.unpack_from(answer, _HEADER.size)
    if number:
        raise OSError(-number, os.strerror(-number))
    return b""


def attribute(kind: int, value: bytes) -> bytes:
    """An attribute of a netlink message, padded to four bytes."""
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind) + value + bytes(-len(value) % 4)


def attributes(raw: bytes) -> dict[int, bytes]:
    """The attributes of an answer, by type."""
    found = {}
    while len(raw) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(raw)
        if length < _ATTRIBUTE.size:
            break
        found[kind & _TYPE_MASK] = raw[_ATTRIBUTE.size : length]
        raw = raw[(length + 3) & ~3 :]
    return found
