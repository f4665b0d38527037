"""Exchange netlink messages with netfilter, for requests that no command-line tool serves well.

Everything works on the network namespace of the calling thread.
"""

import errno
import os
import socket
import struct
import sys
from collections.abc import Iterator

from pykubeproxy.objects import Family

ADDRESS_FAMILY = {Family.IPV4: socket.AF_INET, Family.IPV6: socket.AF_INET6}
NETLINK_NETFILTER = 12
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_NFGENMSG = struct.Struct(">BBH")  # family, version, resource id
_ATTRIBUTE = struct.Struct("=HH")  # length with this header, type
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_BATCH_BEGIN, _BATCH_END = 0x10, 0x11
_TYPE_MASK = 0x3FFF  # the two upper bits are flags
REQUEST, ACK, CREATE, EXCLUSIVE, DUMP = 0x1, 0x4, 0x400, 0x200, 0x300
_DUMP_INTERRUPTED = 0x10
# The kernel returns up to 32 KiB for each read of a dump.
_READ = 65536


def request(message: int, flags: int, family: int, attributes: bytes, seconds: float = 5) -> bytes:
    """Send one nfnetlink message (subsystem << 8 | command) and return the attributes of the answer.

    An acknowledgement has none. Raises OSError with the kernel's error number, TimeoutError after `seconds`.
    """
    with _sent(_message(message, flags, family, attributes), seconds) as connection:
        answer = connection.recv(_READ)
    if _length_type_flags(answer)[1] != _NLMSG_ERROR:
        return answer[_HEADER.size + _NFGENMSG.size :]
    _raise_if_error(answer)
    return b""


def execute_batch(message: int, family: int, attributes: bytes, seconds: float = 5) -> None:
    """Execute one message as a batch, which every change of nftables must be. Raises as `request` does."""
    subsystem = message >> 8
    batch = (
        _message(_BATCH_BEGIN, 0, 0, b"", subsystem)
        + _message(message, ACK, family, attributes)
        + _message(_BATCH_END, 0, 0, b"", subsystem)
    )
    # The kernel answers the first message of a batch that it rejects as a whole.
    with _sent(batch, seconds) as connection:
        _raise_if_error(connection.recv(_READ))


def dump(message: int, family: int, attributes: bytes, seconds: float = 5) -> Iterator[bytes]:
    """Yield the attributes of each object of a kind, in the order of the kernel. Raises as `request` does.

    Lazy: holds one read at a time. Objects added or removed during the dump may come twice or not at all.
    """
    body = _NFGENMSG.pack(family, 0, 0) + attributes
    return (raw[_NFGENMSG.size :] for raw in dump_messages(NETLINK_NETFILTER, message, body, seconds))


def dump_messages(
    protocol: int, message: int, body: bytes, seconds: float = 5, *, consistent: bool = False
) -> Iterator[bytes]:
    """Yield the body of each message of a dump, as `dump` does, over any netlink protocol.

    If `consistent`, raise InterruptedError when the kernel reports changes during the dump.
    """
    query = _HEADER.pack(_HEADER.size + len(body), message, DUMP | REQUEST, 1, 0) + body
    with _sent(query, seconds, protocol) as connection:
        while True:
            answer = connection.recv(_READ)
            start = 0
            while start < len(answer):
                length, kind, flags = _length_type_flags(answer, start)
                if consistent and flags & _DUMP_INTERRUPTED:
                    raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))
                if kind in (_NLMSG_ERROR, _NLMSG_DONE):
                    _raise_if_error(answer[start:])
                    return
                yield answer[start + _HEADER.size : start + length]
                start += (length + 3) & ~3


def attribute(kind: int, value: bytes) -> bytes:
    """Encode a netlink attribute, padded to four bytes."""
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind) + value + bytes(-len(value) % 4)


def string_attribute(kind: int, value: str) -> bytes:
    """Encode a netlink attribute that is a null-terminated string."""
    return attribute(kind, value.encode() + b"\0")


def attributes(raw: bytes) -> dict[int, bytes]:
    """Decode netlink attributes into values by type."""
    return dict(elements(raw))


def elements(raw: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the type and value of each netlink attribute; a list has several of one type."""
    start = 0
    while len(raw) - start >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(raw, start)
        if length < _ATTRIBUTE.size:
            return
        yield kind & _TYPE_MASK, raw[start + _ATTRIBUTE.size : start + length]
        start += (length + 3) & ~3


def _message(message: int, flags: int, family: int, attributes: bytes, resource: int = 0) -> bytes:
    body = _NFGENMSG.pack(family, 0, resource) + attributes
    return _HEADER.pack(_HEADER.size + len(body), message, flags | REQUEST, 1, 0) + body


def _sent(messages: bytes, seconds: float, protocol: int = NETLINK_NETFILTER) -> socket.socket:
    """Return a socket on which the messages have been sent."""
    connection = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol)
    try:
        connection.settimeout(seconds)
        connection.bind((0, 0))
        connection.send(messages)
    except OSError:
        connection.close()
        raise
    return connection


def _length_type_flags(answer: bytes, start: int = 0) -> tuple[int, int, int]:
    """Return the start of a message's header. Raises OSError if it is malformed, on which a reader would loop."""
    if len(answer) >= start + _HEADER.size:
        length, kind, flags, *_ = _HEADER.unpack_from(answer, start)
        if length >= _HEADER.size:
            return length, kind, flags
    raise OSError(errno.EBADMSG, os.strerror(errno.EBADMSG))


def _raise_if_error(answer: bytes) -> None:
    _length_type_flags(answer)
    raw = answer[_HEADER.size : _HEADER.size + 4]
    code = -int.from_bytes(raw, sys.byteorder, signed=True)
    if len(raw) < 4 or not 0 <= code < 4096:
        code = errno.EBADMSG
    if code:
        raise OSError(code, os.strerror(code))
