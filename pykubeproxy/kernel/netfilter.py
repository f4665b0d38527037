"""Questions to the kernel's netfilter over netlink, for what no command-line tool does well enough."""

import errno
import os
import socket
import struct
from collections.abc import Iterator

NETLINK_NETFILTER = 12
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_ABOUT = struct.Struct(">BBH")  # struct nfgenmsg: family, version, resource id
_ERRNO = struct.Struct("=i")
_ATTRIBUTE = struct.Struct("=HH")  # length with this header, type
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_BATCH_BEGIN, _BATCH_END = 0x10, 0x11
_TYPE_MASK = 0x3FFF  # the two upper bits are flags
REQUEST, ACK, CREATE, EXCLUSIVE, DUMP = 0x1, 0x4, 0x400, 0x200, 0x300
# The kernel fills up to 32 KiB for each read of a dump.
_READ = 65536


def ask(message: int, flags: int, family: int, attributes: bytes, seconds: float = 5) -> bytes:
    """Send one nfnetlink message (subsystem << 8 | command) and return the attributes of the answer.

    The answer is empty when the kernel only acknowledged. Works on the network namespace of the calling
    thread. Raises OSError with the kernel's error number, TimeoutError when there is no answer within
    `seconds`.
    """
    with _sent(_message(message, flags, family, attributes), seconds) as connection:
        answer = connection.recv(_READ)
    if _head(answer)[1] != _NLMSG_ERROR:
        return answer[_HEADER.size + 4 :]
    _raise_if_error(answer)
    return b""


def change(message: int, family: int, attributes: bytes, seconds: float = 5) -> None:
    """Have one message carried out that the kernel takes only in a batch, as everything that changes nftables.

    Raises OSError and TimeoutError as `ask` does.
    """
    subsystem = message >> 8
    batch = (
        _message(_BATCH_BEGIN, 0, 0, b"", subsystem)
        + _message(message, ACK, family, attributes)
        + _message(_BATCH_END, 0, 0, b"", subsystem)
    )
    # Where the batch as a whole is refused the answer is one to its beginning.
    with _sent(batch, seconds) as connection:
        _raise_if_error(connection.recv(_READ))


def dump(message: int, family: int, attributes: bytes, seconds: float = 5) -> Iterator[bytes]:
    """Ask for everything of a kind; yields the attributes of one entry after the other, as the kernel sends them.

    Holds one read at a time. The kernel goes on where it stopped, so the caller may take its time, and what
    comes or goes meanwhile may be seen twice or not at all. Raises OSError and TimeoutError as `ask` does.
    """
    with _sent(_message(message, DUMP, family, attributes), seconds) as connection:
        while True:
            answer = connection.recv(_READ)
            start = 0
            while start < len(answer):
                length, kind = _head(answer, start)
                if kind in (_NLMSG_ERROR, _NLMSG_DONE):
                    _raise_if_error(answer[start:])
                    return
                yield answer[start + _HEADER.size + 4 : start + length]
                start += (length + 3) & ~3


def _message(message: int, flags: int, family: int, attributes: bytes, resource: int = 0) -> bytes:
    body = _ABOUT.pack(family, 0, resource) + attributes
    return _HEADER.pack(_HEADER.size + len(body), message, flags | REQUEST, 1, 0) + body


def _sent(messages: bytes, seconds: float) -> socket.socket:
    """A connection on which the messages have been sent."""
    connection = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER)
    try:
        connection.settimeout(seconds)
        connection.bind((0, 0))
        connection.send(messages)
    except OSError:
        connection.close()
        raise
    return connection


def _head(answer: bytes, start: int = 0) -> tuple[int, int]:
    """Length and type of a message. Raises OSError for what is none, with which a reader would not get on."""
    if len(answer) < start + _HEADER.size or (found := _HEADER.unpack_from(answer, start))[0] < _HEADER.size:
        raise OSError(errno.EBADMSG, os.strerror(errno.EBADMSG))
    return found[0], found[1]


def _raise_if_error(answer: bytes) -> None:
    _head(answer)
    if len(answer) < _HEADER.size + _ERRNO.size:
        raise OSError(errno.EBADMSG, os.strerror(errno.EBADMSG))
    (number,) = _ERRNO.unpack_from(answer, _HEADER.size)
    if number:
        code = -number if -4096 < number < 0 else errno.EBADMSG
        raise OSError(code, os.strerror(code))


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
