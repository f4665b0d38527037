"""Exchange netlink messages with the kernel, over any protocol, in the network namespace of the calling thread.

Everything raises OSError with the kernel's error number, and TimeoutError if the kernel does not answer in time.
"""

import contextlib
import errno
import os
import select
import socket
import struct
import sys
from collections.abc import Iterator

from pykubeproxy.objects import Family

ADDRESS_FAMILY = {Family.IPV4: socket.AF_INET, Family.IPV6: socket.AF_INET6}
HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
REQUEST, ACK, CREATE, EXCLUSIVE, DUMP = 0x1, 0x4, 0x400, 0x200, 0x300
_DUMP_INTERRUPTED = 0x10
NETLINK_NETFILTER = 12
_NFGENMSG = struct.Struct(">BBH")  # family, version, resource id
_BATCH_BEGIN, _BATCH_END = 0x10, 0x11
_ERROR, _DONE = 2, 3
_ATTRIBUTE = struct.Struct("=HH")  # length with this header, type
_TYPE_MASK = 0x3FFF  # the two upper bits are flags
# The kernel returns up to 32 KiB for each read of a dump.
READ = 65536
_FORCE_BUFFER = 33  # SO_RCVBUFFORCE


def message(kind: int, flags: int, body: bytes) -> bytes:
    """Return a message of a kind, such as RTM_GETROUTE."""
    return HEADER.pack(HEADER.size + len(body), kind, flags | REQUEST, 1, 0) + body


def request(protocol: int, sent: bytes, seconds: float = 5) -> bytes:
    """Send messages and return the body of the first answer, empty if it is an acknowledgement."""
    with _connection(protocol, sent, seconds) as connection:
        answer = connection.recv(READ)
    if _length_type_flags(answer)[1] != _ERROR:
        return answer[HEADER.size :]
    _raise_if_error(answer)
    return b""


def dump(
    protocol: int, kind: int, body: bytes, seconds: float = 5, *, consistent: bool = False
) -> Iterator[bytes]:
    """Yield the body of each object of a kind, in the order of the kernel.

    Lazy: holds one read at a time. Objects added or removed during the dump may come twice or not at all. If
    `consistent`, raise InterruptedError when the kernel reports changes during the dump.
    """
    with _connection(protocol, message(kind, DUMP, body), seconds) as connection:
        while True:
            answer = connection.recv(READ)
            start = 0
            while start < len(answer):
                length, answered, flags = _length_type_flags(answer, start)
                if consistent and flags & _DUMP_INTERRUPTED:
                    raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))
                if answered in (_ERROR, _DONE):
                    _raise_if_error(answer[start:])
                    return
                yield answer[start + HEADER.size : start + length]
                start += (length + 3) & ~3


def subscribe(protocol: int, groups: int, buffer: int) -> socket.socket:
    """Return a socket that gets the events of groups, a bit for each. `buffer` is its size in bytes."""
    connection = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol)
    try:
        with contextlib.suppress(PermissionError):
            connection.setsockopt(socket.SOL_SOCKET, _FORCE_BUFFER, buffer)
        connection.bind((0, groups))
    except OSError:
        connection.close()
        raise
    return connection


def events(connection: socket.socket, seconds: float) -> Iterator[bytes]:
    """Yield the bodies of the events that have come; wait for the first one. Raises OSError if some were lost."""
    while select.select([connection], [], [], seconds)[0]:
        seconds = 0
        answer = connection.recv(READ)
        start = 0
        while start < len(answer):
            length, _, _ = _length_type_flags(answer, start)
            yield answer[start + HEADER.size : start + length]
            start += (length + 3) & ~3


def attribute(kind: int, value: bytes) -> bytes:
    """Encode an attribute, padded to four bytes."""
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind) + value + bytes(-len(value) % 4)


def string_attribute(kind: int, value: str) -> bytes:
    """Encode an attribute that is a null-terminated string."""
    return attribute(kind, value.encode() + b"\0")


def attributes(raw: bytes) -> dict[int, bytes]:
    """Decode attributes into values by type."""
    return dict(elements(raw))


def elements(raw: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the type and value of each attribute; a list has several of one type."""
    start = 0
    while len(raw) - start >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(raw, start)
        if length < _ATTRIBUTE.size:
            return
        yield kind & _TYPE_MASK, raw[start + _ATTRIBUTE.size : start + length]
        start += (length + 3) & ~3


def _connection(protocol: int, messages: bytes, seconds: float) -> socket.socket:
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
    if len(answer) >= start + HEADER.size:
        length, kind, flags, *_ = HEADER.unpack_from(answer, start)
        if length >= HEADER.size:
            return length, kind, flags
    raise OSError(errno.EBADMSG, os.strerror(errno.EBADMSG))


def _raise_if_error(answer: bytes) -> None:
    _length_type_flags(answer)
    raw = answer[HEADER.size : HEADER.size + 4]
    code = -int.from_bytes(raw, sys.byteorder, signed=True)
    if len(raw) < 4 or not 0 <= code < 4096:
        code = errno.EBADMSG
    if code:
        raise OSError(code, os.strerror(code))


def netfilter_request(kind: int, flags: int, family: int, attributes: bytes, seconds: float = 5) -> bytes:
    """Send one nfnetlink message (subsystem << 8 | command) and return the attributes of the answer.

    An acknowledgement has none.
    """
    sent = _netfilter_message(kind, flags, family, attributes)
    return request(NETLINK_NETFILTER, sent, seconds)[_NFGENMSG.size :]


def netfilter_batch(kind: int, family: int, attributes: bytes, seconds: float = 5) -> None:
    """Execute one message as a batch, which every change of nftables must be."""
    subsystem = kind >> 8
    batch = (
        _netfilter_message(_BATCH_BEGIN, 0, 0, b"", subsystem)
        + _netfilter_message(kind, ACK, family, attributes)
        + _netfilter_message(_BATCH_END, 0, 0, b"", subsystem)
    )
    # The kernel answers the first message of a batch that it rejects as a whole.
    request(NETLINK_NETFILTER, batch, seconds)


def netfilter_dump(kind: int, family: int, attributes: bytes, seconds: float = 5) -> Iterator[bytes]:
    """Yield the attributes of each object of a kind, lazily, as `dump` does."""
    body = _NFGENMSG.pack(family, 0, 0) + attributes
    return (raw[_NFGENMSG.size :] for raw in dump(NETLINK_NETFILTER, kind, body, seconds))


def _netfilter_message(kind: int, flags: int, family: int, attributes: bytes, resource: int = 0) -> bytes:
    return message(kind, flags, _NFGENMSG.pack(family, 0, resource) + attributes)
