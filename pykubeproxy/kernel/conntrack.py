"""The kernel's table of connections: read as a stream, and relieved of single entries.

A reader of its own because a table may hold hundreds of thousands of entries: one costs some microseconds here, and
nothing is kept but a read of the kernel's. Both work on the network namespace of the calling thread.
"""

import errno
import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple

from pykubeproxy.kernel import netfilter
from pykubeproxy.kernel.domain import DOMAIN
from pykubeproxy.objects import Family

# An address in network order, of 4 or 16 bytes, and a port.
End = tuple[bytes, int]

# linux/netfilter/nfnetlink_conntrack.h
_GET, _DELETE, _GET_STATS = 1 << 8 | 1, 1 << 8 | 2, 1 << 8 | 5
_ORIGINAL, _REPLY, _ZONE, _FILTER = 1, 2, 18, 25
_TUPLE_PROTO, _PROTO_NUM, _FILTER_ORIGINAL_FLAGS, _FILTER_REPLY_FLAGS = 2, 1, 1, 2
_BY_PROTOCOL = 1 << 3
_NESTED = 0x8000
_HEADER = struct.Struct("=HH")

# Attributes CTA_TUPLE_ORIG and CTA_TUPLE_REPLY as the kernel writes them for protocols with ports: addresses of
# source and destination, protocol, ports of source and destination, every one behind a header of four bytes.
_TUPLE = {
    family: struct.Struct(f">4x4x4x{size}s4x{size}s4x4xB3x4xH2x4xH2x")
    for family, size in ((Family.IPV4, 4), (Family.IPV6, 16))
}


class Flow(NamedTuple):
    """An entry of the table: the first packet's ends as its sender saw them, and who sends the answers.

    Unless the flow was DNATed, `reply_source` is `destination`. `raw` is for `delete`.
    """

    source: End
    destination: End
    reply_source: End
    raw: bytes


def udp_flows(family: Family) -> Iterator[Flow]:
    """The UDP flows of a family, one by one; those in conntrack zones other than the default are left out.

    The kernel sends UDP entries only, and is not kept from anything meanwhile. What comes or goes while this runs may
    be seen twice or not at all. Raises OSError: not permitted (CAP_NET_ADMIN), or no connection tracking here.
    """
    layout = _TUPLE[family]
    size = layout.size
    # In another zone the tuple is longer, by its CTA_TUPLE_ZONE, or a CTA_ZONE follows both.
    original = _HEADER.pack(size, _ORIGINAL | _NESTED)
    reply = _HEADER.pack(size, _REPLY | _NESTED)
    for raw in netfilter.dump(_GET, DOMAIN[family], _only(socket.IPPROTO_UDP)):
        if (
            len(raw) < 2 * size
            or raw[:4] != original
            or raw[size : size + 4] != reply
            or _has_zone(raw, 2 * size)
        ):
            continue
        source, destination, protocol, source_port, port = layout.unpack_from(raw)
        if protocol != socket.IPPROTO_UDP:  # before Linux 5.8 the filter is not heeded
            continue
        answers, _, _, answering_port, _ = layout.unpack_from(raw, size)
        yield Flow((source, source_port), (destination, port), (answers, answering_port), raw)


def delete(flow: Flow) -> bool:
    """Delete the UDP entry of these ends; False if there is none any more. Raises OSError.

    `flow` has to be one that `udp_flows` gave; ValueError otherwise.
    """
    family = Family.IPV4 if len(flow.source[0]) == 4 else Family.IPV6
    # A request without a tuple would empty the whole table.
    wanted = flow.raw[: _TUPLE[family].size]
    if wanted[:4] != _HEADER.pack(_TUPLE[family].size, _ORIGINAL | _NESTED):
        raise ValueError("this flow does not come from udp_flows")
    try:
        netfilter.ask(_DELETE, netfilter.ACK, DOMAIN[family], wanted)
    except OSError as error:
        if error.errno == errno.ENOENT:
            return False
        raise
    return True


def load() -> None:
    """Have the kernel load its connection tracking, without which its settings are not there. Raises OSError."""
    netfilter.ask(_GET_STATS, 0, socket.AF_UNSPEC, b"")


def _only(protocol: int) -> bytes:
    """Attributes that ask for one protocol."""
    number = netfilter.attribute(_PROTO_NUM, bytes((protocol,)))
    wanted = netfilter.attribute(_TUPLE_PROTO | _NESTED, number)
    flags = netfilter.attribute(_FILTER_ORIGINAL_FLAGS, struct.pack("=I", _BY_PROTOCOL))
    flags += netfilter.attribute(_FILTER_REPLY_FLAGS, struct.pack("=I", 0))
    return netfilter.attribute(_ORIGINAL | _NESTED, wanted) + netfilter.attribute(_FILTER | _NESTED, flags)


def _has_zone(raw: bytes, start: int) -> bool:
    """Whether the attribute after the two tuples is CTA_ZONE, where the kernel puts it."""
    return len(raw) >= start + 4 and _HEADER.unpack_from(raw, start)[1] == _ZONE
