"""Fill the conntrack table of a network namespace, which has a limit of its own, with connections that do not exist."""

import errno
import itertools
import socket
import struct
from contextlib import suppress
from ipaddress import IPv4Address

from pykubeproxy.kernel import netlink
from pykubeproxy.kernel.netlink import attributes

# linux/netfilter/nfnetlink_conntrack.h
_NEW, _GET, _DELETE = 1 << 8 | 0, 1 << 8 | 1, 1 << 8 | 2
_ORIGINAL, _REPLY, _STATUS, _PROTOCOL_INFO, _TIMEOUT, _MARK, _MARK_MASK = 1, 2, 3, 4, 7, 8, 21
_TCP, _STATE = 1, 1
_NESTED = 0x8000
_IPV4 = struct.pack(">BBH", socket.AF_INET, 0, 0)
# The kernel makes room for new connections by dropping entries, but no assured ones that are established.
_SEEN_REPLY_ASSURED_CONFIRMED = 0b1110
_ESTABLISHED = b"\3"
# Addresses of documentation; their last bytes are replaced in each batch.
_SOURCE, _DESTINATION = IPv4Address("198.51.100.0").packed, IPv4Address("192.0.2.0").packed
_PORTS = range(1024, 1824)
_SECONDS = 24 * 3600
# Tells these entries from others.
_OURS = int.from_bytes(b"full", "big")


def fill() -> None:
    """Fill the table of the calling thread's namespace; established connections keep their entries. Raises OSError."""
    empty()
    _delete_closing()
    batch = b"".join(
        netlink.message(_NEW, netlink.CREATE | netlink.EXCLUSIVE | acknowledge, _IPV4 + _entry(port))
        for port in _PORTS
        for acknowledge in [netlink.ACK if port == _PORTS[-1] else 0]
    )
    for number in itertools.count():
        source = _SOURCE[:3] + bytes((number % 256,))
        destination = _DESTINATION[:3] + bytes((number // 256 % 256,))
        try:
            netlink.request(
                netlink.NETLINK_NETFILTER,
                batch.replace(_SOURCE, source).replace(_DESTINATION, destination),
            )
        except OSError as error:
            # Of a full table, or more such errors than the socket holds.
            if error.errno in (errno.ENOMEM, errno.ENOBUFS):
                return
            raise


def empty() -> None:
    """Remove what `fill` has added. Raises OSError."""
    marked = netlink.attribute(_MARK, struct.pack(">I", _OURS))
    marked += netlink.attribute(_MARK_MASK, b"\xff" * 4)
    netlink.netfilter_request(_DELETE, netlink.ACK, socket.AF_INET, marked)


def _delete_closing() -> None:
    """Delete the entries that the kernel would drop to make room, or soon."""
    for family in (socket.AF_INET, socket.AF_INET6):
        for raw in [*netlink.netfilter_dump(_GET, family, b"")]:
            fields = attributes(raw)
            info = attributes(attributes(fields.get(_PROTOCOL_INFO, b"")).get(_TCP, b""))
            if info.get(_STATE) != _ESTABLISHED:
                original = netlink.attribute(_ORIGINAL | _NESTED, fields[_ORIGINAL])
                with suppress(OSError):  # it has ended
                    netlink.netfilter_request(_DELETE, netlink.ACK, family, original)


def _entry(port: int) -> bytes:
    numbers = ((_STATUS, _SEEN_REPLY_ASSURED_CONFIRMED), (_TIMEOUT, _SECONDS), (_MARK, _OURS))
    state = netlink.attribute(_TCP | _NESTED, netlink.attribute(_STATE, _ESTABLISHED))
    return (
        _tuple(_ORIGINAL, _SOURCE, port, _DESTINATION, 443)
        + _tuple(_REPLY, _DESTINATION, 443, _SOURCE, port)
        + b"".join(netlink.attribute(kind, struct.pack(">I", number)) for kind, number in numbers)
        + netlink.attribute(_PROTOCOL_INFO | _NESTED, state)
    )


def _tuple(kind: int, source: bytes, source_port: int, destination: bytes, port: int) -> bytes:
    addresses = netlink.attribute(1, source) + netlink.attribute(2, destination)
    protocol = netlink.attribute(1, bytes((socket.IPPROTO_TCP,)))
    protocol += netlink.attribute(2, struct.pack(">H", source_port))
    protocol += netlink.attribute(3, struct.pack(">H", port))
    both = netlink.attribute(1 | _NESTED, addresses) + netlink.attribute(2 | _NESTED, protocol)
    return netlink.attribute(kind | _NESTED, both)
