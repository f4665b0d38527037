"""Count the entries of the connection tracking table, without the addresses of clients.

An entry takes about 10 microseconds, and memory holds only one read of netlink at a time.
"""

import ipaddress
import socket
import struct
from collections import Counter
from typing import NamedTuple

from pykubeproxy.kernel import netfilter
from pykubeproxy.kernel.netlink import ADDRESS_FAMILY, attributes
from pykubeproxy.objects import Family, address_and_port

# linux/netfilter/nfnetlink_conntrack.h
_GET = 1 << 8 | 1
_ORIGINAL, _STATUS, _PROTOCOL_INFO = 1, 3, 4
_ADDRESSES, _PORTS = 1, 2
_TO_ADDRESS = {Family.IPV4: 2, Family.IPV6: 4}
_NUMBER, _TO_PORT = 1, 3
_TCP_INFO, _STATE = 1, 1
# linux/netfilter/nf_conntrack_common.h
_SEEN_REPLY, _DST_NAT = 1 << 1, 1 << 5
# linux/netfilter/nf_conntrack_tcp.h
_TCP_STATES = (
    *("NONE", "SYN_SENT", "SYN_RECV", "ESTABLISHED", "FIN_WAIT", "CLOSE_WAIT", "LAST_ACK", "TIME_WAIT"),
    *("CLOSE", "SYN_SENT2"),
)
_PROTOCOLS = {
    socket.IPPROTO_TCP: "tcp",
    socket.IPPROTO_UDP: "udp",
    132: "sctp",
    socket.IPPROTO_ICMP: "icmp",
    socket.IPPROTO_ICMPV6: "icmpv6",
}


class Entry(NamedTuple):
    """What is counted of an entry; `destination` is "10.96.0.10:53" if that address was translated, else ""."""

    protocol: str
    state: str
    replied: bool
    destination: str


class Counts(NamedTuple):
    """Entries by protocol and state, and those with a translated destination by protocol, destination and state."""

    states: Counter[tuple[str, str]]
    destinations: Counter[tuple[str, str, bool]]


def count_entries(family: Family) -> Counts:
    """Count the entries of a family. Raises OSError without CAP_NET_ADMIN or without connection tracking."""
    counts = Counts(Counter(), Counter())
    for raw in netfilter.dump(_GET, ADDRESS_FAMILY[family], b""):
        entry = _entry(family, raw)
        counts.states[entry.protocol, entry.state] += 1
        if entry.destination:
            counts.destinations[entry.protocol, entry.destination, entry.replied] += 1
    return counts


def _entry(family: Family, raw: bytes) -> Entry:
    fields = attributes(raw)
    original = attributes(fields.get(_ORIGINAL, b""))
    ports = attributes(original.get(_PORTS, b""))
    number = ports.get(_NUMBER, b"\0")[0]
    protocol = _PROTOCOLS.get(number, str(number))
    status = int.from_bytes(fields.get(_STATUS, b""), "big")
    replied = bool(status & _SEEN_REPLY)
    state = "replied" if replied else "unreplied"
    if number == socket.IPPROTO_TCP:
        info = attributes(attributes(fields.get(_PROTOCOL_INFO, b"")).get(_TCP_INFO, b""))
        code = info.get(_STATE, b"\0")[0]
        state = _TCP_STATES[code] if code < len(_TCP_STATES) else str(code)
    destination = ""
    if status & _DST_NAT:
        address = attributes(original.get(_ADDRESSES, b"")).get(_TO_ADDRESS[family], b"")
        (port,) = struct.unpack(">H", ports.get(_TO_PORT, b"\0\0")[:2])
        destination = address_and_port(str(ipaddress.ip_address(address)), port)
    return Entry(protocol, state, replied, destination)
