"""List the UDP flows of the kernel's connection tracking table, and delete single ones.

A table may hold hundreds of thousands of entries. Each takes 4 microseconds here, 436 with pyroute2, and memory holds
only one read. Works on the network namespace of the calling thread.
"""

import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple

from pykubeproxy.kernel import netfilter, netlink
from pykubeproxy.kernel.netlink import ADDRESS_FAMILY
from pykubeproxy.objects import Family

# An address in network order, of 4 or 16 bytes, and a port.
AddressAndPort = tuple[bytes, int]

# linux/netfilter/nfnetlink_conntrack.h
_GET, _DELETE, _GET_STATS = 1 << 8 | 1, 1 << 8 | 2, 1 << 8 | 5
_ORIGINAL, _REPLY, _FILTER = 1, 2, 25
_TUPLE_PROTO, _PROTO_NUM, _FILTER_ORIGINAL_FLAGS, _FILTER_REPLY_FLAGS = 2, 1, 1, 2
_BY_PROTOCOL = 1 << 3
_NESTED = 0x8000
_HEADER = struct.Struct("=HH")  # length, type
_ZONE = struct.pack("=H", 18)

# CTA_TUPLE_ORIG and CTA_TUPLE_REPLY of a protocol with ports: source and destination address, protocol, source and
# destination port, each behind a header of four bytes.
_TUPLE = {
    family: struct.Struct(f">4x4x4x{size}s4x{size}s4x4xB3x4xH2x4xH2x")
    for family, size in ((Family.IPV4, 4), (Family.IPV6, 16))
}


class Flow(NamedTuple):
    """A conntrack entry: source and destination of the first packet before NAT, and the source of the replies.

    Without DNAT, `reply_source` is `destination`. `raw` is for `delete`.
    """

    source: AddressAndPort
    destination: AddressAndPort
    reply_source: AddressAndPort
    raw: bytes


def udp_flows(family: Family) -> Iterator[Flow]:
    """Yield the UDP flows of a family in the default conntrack zone.

    Flows that start or end meanwhile may come twice or not at all. Raises OSError without CAP_NET_ADMIN or without
    connection tracking.
    """
    layout = _TUPLE[family]
    size = layout.size
    # In another zone, CTA_TUPLE_ZONE makes the tuple longer, or CTA_ZONE follows both tuples.
    original = _HEADER.pack(size, _ORIGINAL | _NESTED)
    reply = _HEADER.pack(size, _REPLY | _NESTED)
    for raw in netfilter.dump(_GET, ADDRESS_FAMILY[family], _protocol_filter(socket.IPPROTO_UDP)):
        if len(raw) < 2 * size or raw[:4] != original or raw[size : size + 4] != reply:
            continue
        if raw[2 * size + 2 : 2 * size + 4] == _ZONE:
            continue
        source, destination, protocol, source_port, port = layout.unpack_from(raw)
        if protocol != socket.IPPROTO_UDP:  # Linux before 5.8 ignores the filter
            continue
        replier, _, _, reply_port, _ = layout.unpack_from(raw, size)
        yield Flow((source, source_port), (destination, port), (replier, reply_port), raw)


def delete(flow: Flow) -> bool:
    """Delete a flow from `udp_flows`. Return whether it still existed. Raises OSError, ValueError for any other flow."""
    family = Family.IPV4 if len(flow.source[0]) == 4 else Family.IPV6
    # A request without a tuple would delete the whole table.
    original = flow.raw[: _TUPLE[family].size]
    if original[:4] != _HEADER.pack(_TUPLE[family].size, _ORIGINAL | _NESTED):
        raise ValueError("this flow does not come from udp_flows")
    try:
        netfilter.request(_DELETE, netlink.ACK, ADDRESS_FAMILY[family], original)
    except FileNotFoundError:
        return False
    return True


def load() -> None:
    """Load connection tracking into the kernel, so that its settings exist. Raises OSError."""
    netfilter.request(_GET_STATS, 0, socket.AF_UNSPEC, b"")


def _protocol_filter(protocol: int) -> bytes:
    """Return the attributes that limit a dump to one protocol."""
    number = netlink.attribute(_PROTO_NUM, bytes((protocol,)))
    original = netlink.attribute(_TUPLE_PROTO | _NESTED, number)
    flags = netlink.attribute(_FILTER_ORIGINAL_FLAGS, struct.pack("=I", _BY_PROTOCOL))
    flags += netlink.attribute(_FILTER_REPLY_FLAGS, struct.pack("=I", 0))
    return netlink.attribute(_ORIGINAL | _NESTED, original) + netlink.attribute(_FILTER | _NESTED, flags)
