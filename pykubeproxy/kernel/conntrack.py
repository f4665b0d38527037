"""List, delete and count the entries of the kernel's connection tracking table.

A table may hold hundreds of thousands of entries. Listing takes 4 microseconds for each, 436 with pyroute2, counting 10,
and memory holds only one read. Works on the network namespace of the calling thread.
"""

import ipaddress
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from pykubeproxy.kernel import netlink, system
from pykubeproxy.kernel.netlink import ADDRESS_FAMILY, attributes
from pykubeproxy.objects import Family, address_and_port, family_of

# An address in network order, of 4 or 16 bytes, and a port.
AddressAndPort = tuple[bytes, int]

# linux/netfilter/nfnetlink_conntrack.h
_GET, _DELETE, _GET_STATS = 1 << 8 | 1, 1 << 8 | 2, 1 << 8 | 5
_ORIGINAL, _REPLY, _FILTER = 1, 2, 25
_FILTER_ORIGINAL_FLAGS, _FILTER_REPLY_FLAGS = 1, 2
_BY_SOURCE, _BY_DESTINATION, _BY_PROTOCOL, _BY_PORT = 1 << 0, 1 << 1, 1 << 3, 1 << 5
_NESTED = 0x8000
_HEADER = struct.Struct("=HH")  # length, type

# CTA_TUPLE_ORIG and CTA_TUPLE_REPLY of a protocol with ports: source and destination address, protocol, source and
# destination port, each behind a header of four bytes.
_TUPLE = {
    family: struct.Struct(f">4x4x4x{size}s4x{size}s4x4xB3x4xH2x4xH2x")
    for family, size in ((Family.IPV4, 4), (Family.IPV6, 16))
}
_STATUS, _PROTOCOL_INFO, _TIMEOUT, _MARK = 3, 4, 7, 8
_ZONE = struct.pack("=H", 18)
_ADDRESSES, _PORTS = 1, 2
_TO_ADDRESS = {Family.IPV4: 2, Family.IPV6: 4}
_FROM_ADDRESS = {Family.IPV4: 1, Family.IPV6: 3}
_NUMBER, _FROM_PORT, _TO_PORT = 1, 2, 3
_TCP_INFO, _SCTP_INFO, _STATE = 1, 3, 1
# linux/netfilter/nf_conntrack_common.h
_SEEN_REPLY, _ASSURED, _DST_NAT = 1 << 1, 1 << 2, 1 << 5
# linux/netfilter/nf_conntrack_tcp.h
_TCP_STATES = (
    *("NONE", "SYN_SENT", "SYN_RECV", "ESTABLISHED", "FIN_WAIT", "CLOSE_WAIT", "LAST_ACK", "TIME_WAIT"),
    *("CLOSE", "SYN_SENT2"),
)
# linux/netfilter/nf_conntrack_sctp.h
_SCTP_STATES = (
    *("NONE", "CLOSED", "COOKIE_WAIT", "COOKIE_ECHOED", "ESTABLISHED", "SHUTDOWN_SENT", "SHUTDOWN_RECD"),
    *("SHUTDOWN_ACK_SENT", "HEARTBEAT_SENT"),
)
_IPPROTO_SCTP = 132
_STATES = {socket.IPPROTO_TCP: (_TCP_INFO, _TCP_STATES), _IPPROTO_SCTP: (_SCTP_INFO, _SCTP_STATES)}
_PROTOCOLS = {
    socket.IPPROTO_TCP: "tcp",
    socket.IPPROTO_UDP: "udp",
    _IPPROTO_SCTP: "sctp",
    socket.IPPROTO_ICMP: "icmp",
    socket.IPPROTO_ICMPV6: "icmpv6",
}
_NUMBERS = {name: number for number, name in _PROTOCOLS.items()}
# Packets that match no connection and cannot start one; entries that lost a race; packets that found the table full.
FAILURES = {4: "invalid", 9: "insert-failed", 10: "drop"}
_GET_CPU_STATS = 1 << 8 | 4
# NFNLGRP_CONNTRACK_NEW, _UPDATE and _DESTROY
_EVENT_GROUPS = 0b111
_EVENT_BYTES, _EVENT_SECONDS = 8 << 20, 0.05
_WITH_PORTS = (socket.IPPROTO_TCP, socket.IPPROTO_UDP, _IPPROTO_SCTP)


class TrackedFlow(NamedTuple):
    """A conntrack entry: source and destination of the first packet before NAT, and the source of the replies.

    Without DNAT, `reply_source` is `destination`. `raw` is for `delete`.
    """

    source: AddressAndPort
    destination: AddressAndPort
    reply_source: AddressAndPort
    raw: bytes


def udp_flows(family: Family) -> Iterator[TrackedFlow]:
    """Yield the UDP flows of a family in the default conntrack zone.

    Flows that start or end meanwhile may come twice or not at all. Raises OSError without CAP_NET_ADMIN or without
    connection tracking.
    """
    return _flows(family, socket.IPPROTO_UDP)


def _flows(family: Family, wanted: int) -> Iterator[TrackedFlow]:
    for raw, original, reply in _in_default_zone(family, _filter(family, wanted)):
        source, destination, protocol, source_port, port = original
        if protocol == wanted:  # Linux before 5.8 ignores the filter
            replier, _, _, reply_port, _ = reply
            yield TrackedFlow((source, source_port), (destination, port), (replier, reply_port), raw)


# Source and destination address, protocol, source and destination port.
_Tuple = tuple[bytes, bytes, int, int, int]


def _in_default_zone(family: Family, limit: bytes) -> Iterator[tuple[bytes, _Tuple, _Tuple]]:
    """Yield the entries of protocols with ports, each with its tuples of both directions."""
    return _with_tuples(family, netlink.netfilter_dump(_GET, ADDRESS_FAMILY[family], limit))


def _with_tuples(family: Family, entries: Iterable[bytes]) -> Iterator[tuple[bytes, _Tuple, _Tuple]]:
    layout = _TUPLE[family]
    size = layout.size
    # In another zone, CTA_TUPLE_ZONE makes the tuple longer, or CTA_ZONE follows both tuples.
    original = _HEADER.pack(size, _ORIGINAL | _NESTED)
    reply = _HEADER.pack(size, _REPLY | _NESTED)
    for raw in entries:
        if len(raw) < 2 * size or raw[:4] != original or raw[size : size + 4] != reply:
            continue
        if raw[2 * size + 2 : 2 * size + 4] != _ZONE:
            yield raw, layout.unpack_from(raw), layout.unpack_from(raw, size)


def delete(flow: TrackedFlow) -> bool:
    """Delete a flow from `udp_flows`. Return whether it still existed. Raises OSError, ValueError for any other flow."""
    family = Family.IPV4 if len(flow.source[0]) == 4 else Family.IPV6
    # A request without a tuple would delete the whole table.
    original = flow.raw[: _TUPLE[family].size]
    if original[:4] != _HEADER.pack(_TUPLE[family].size, _ORIGINAL | _NESTED):
        raise ValueError("this flow does not come from udp_flows")
    try:
        netlink.netfilter_request(_DELETE, netlink.ACK, ADDRESS_FAMILY[family], original)
    except FileNotFoundError:
        return False
    return True


def load() -> None:
    """Load connection tracking into the kernel, so that its settings exist. Raises OSError."""
    netlink.netfilter_request(_GET_STATS, 0, socket.AF_UNSPEC, b"")


def _filter(family: Family, protocol: int, source: str = "", destination: str = "", port: int = 0) -> bytes:
    """Return the attributes that limit a dump by what is given of the first packet; a port needs a protocol.

    They leave IPv6 addresses out: the kernel would yield all flows but those with these addresses (Linux 6.18).
    """
    addresses = proto = b""
    flags = 0
    for address, kind, flag in (
        (source, _FROM_ADDRESS[family], _BY_SOURCE),
        (destination, _TO_ADDRESS[family], _BY_DESTINATION),
    ):
        if address and family is Family.IPV4:
            addresses += netlink.attribute(kind, ipaddress.ip_address(address).packed)
            flags |= flag
    if protocol:
        proto += netlink.attribute(_NUMBER, bytes((protocol,)))
        flags |= _BY_PROTOCOL
    if port:
        proto += netlink.attribute(_TO_PORT, struct.pack(">H", port))
        flags |= _BY_PORT
    if not flags:
        return b""
    original = netlink.attribute(_ADDRESSES | _NESTED, addresses) if addresses else b""
    original += netlink.attribute(_PORTS | _NESTED, proto) if proto else b""
    both = netlink.attribute(_FILTER_ORIGINAL_FLAGS, struct.pack("=I", flags))
    both += netlink.attribute(_FILTER_REPLY_FLAGS, struct.pack("=I", 0))
    return netlink.attribute(_ORIGINAL | _NESTED, original) + netlink.attribute(_FILTER | _NESTED, both)


class _CountedEntry(NamedTuple):
    """What is counted of an entry; `destination` is "10.96.0.10:53" if that address was translated, else ""."""

    protocol: str
    state: str
    replied: bool
    destination: str


class ConntrackCounts(NamedTuple):
    """Entries by protocol and state, and those with a translated destination by protocol, destination and state."""

    states: Counter[tuple[str, str]]
    destinations: Counter[tuple[str, str, bool]]


def count_entries(family: Family) -> ConntrackCounts:
    """Count the entries of a family. Raises OSError without CAP_NET_ADMIN or without connection tracking."""
    counts = ConntrackCounts(Counter(), Counter())
    for raw in netlink.netfilter_dump(_GET, ADDRESS_FAMILY[family], b""):
        entry = _entry(family, raw)
        counts.states[entry.protocol, entry.state] += 1
        if entry.destination:
            counts.destinations[entry.protocol, entry.destination, entry.replied] += 1
    return counts


def _entry(family: Family, raw: bytes) -> _CountedEntry:
    fields = attributes(raw)
    original = attributes(fields.get(_ORIGINAL, b""))
    ports = attributes(original.get(_PORTS, b""))
    number = ports.get(_NUMBER, b"\0")[0]
    protocol = _PROTOCOLS.get(number, str(number))
    status = int.from_bytes(fields.get(_STATUS, b""), "big")
    replied = bool(status & _SEEN_REPLY)
    state = "replied" if replied else "unreplied"
    if number == socket.IPPROTO_TCP:
        state = _state(number, fields)
    destination = ""
    if status & _DST_NAT:
        address = attributes(original.get(_ADDRESSES, b"")).get(_TO_ADDRESS[family], b"")
        (port,) = struct.unpack(">H", ports.get(_TO_PORT, b"\0\0")[:2])
        destination = address_and_port(str(ipaddress.ip_address(address)), port)
    return _CountedEntry(protocol, state, replied, destination)


def flow_lines(
    family: Family, protocol: str = "", *, source: str = "", destination: str = "", port: int = 0
) -> Iterator[str]:
    """Yield the TCP, UDP and SCTP flows of a family in the default zone, as lines of /proc/net/nf_conntrack.

    Many kernels lack that file. What is given must match the first packet: the `protocol`, "tcp", "udp" or "sctp", the
    addresses, and with a protocol the destination `port`. Kernels before Linux 5.8 ignore protocol and port. Raises
    OSError as `udp_flows` does.
    """
    limit = _filter(family, _NUMBERS[protocol] if protocol else 0, source, destination, port)
    ends = [ipaddress.ip_address(address).packed if address else b"" for address in (source, destination)]
    for raw, *directions in _in_default_zone(family, limit):
        matches = all(end in (b"", found) for end, found in zip(ends, directions[0], strict=False))
        if matches and directions[0][2] in _WITH_PORTS:
            yield _line(family, attributes(raw), directions)


def flow_lines_of(protocol: int, source: str, destination: str, port: int) -> Iterator[str]:
    """Yield the flows with these ends and this number of the protocol, as `flow_lines` does."""
    return flow_lines(
        family_of(source), _PROTOCOLS[protocol], source=source, destination=destination, port=port
    )


def failure_counts() -> dict[str, int]:
    """Return how many packets this namespace's conntrack failed on, by kind as in FAILURES. Raises OSError."""
    counts = dict.fromkeys(FAILURES.values(), 0)
    for raw in netlink.netfilter_dump(_GET_CPU_STATS, socket.AF_UNSPEC, b""):  # for each processor
        for kind, value in netlink.elements(raw):
            if kind in FAILURES:
                counts[FAILURES[kind]] += int.from_bytes(value, "big")
    return counts


def _line(family: Family, fields: dict[int, bytes], directions: Sequence[_Tuple]) -> str:
    """Return an entry as a line of /proc/net/nf_conntrack."""
    domain, number = ADDRESS_FAMILY[family], directions[0][2]
    status = int.from_bytes(fields.get(_STATUS, b""), "big")
    # Without a timeout, hardware forwards the packets.
    timeout = f"{int.from_bytes(fields[_TIMEOUT], 'big')} " if _TIMEOUT in fields else ""
    state = f"{_state(number, fields)} " if number in _STATES else ""
    original, reply = (
        f"src={socket.inet_ntop(domain, one[0])} dst={socket.inet_ntop(domain, one[1])} sport={one[3]} dport={one[4]} "
        for one in directions
    )
    return (
        f"{family.value.lower()} {int(domain)} {_PROTOCOLS[number]} {number} {timeout}{state}"
        f"{original}{'' if status & _SEEN_REPLY else '[UNREPLIED] '}"
        f"{reply}{'[ASSURED] ' if status & _ASSURED else ''}mark={int.from_bytes(fields.get(_MARK, b''), 'big')}"
    )


class FirstPacket(NamedTuple):
    """The first packet of a flow before NAT: the number of its protocol, addresses and ports."""

    protocol: int
    source: str
    source_port: int
    destination: str
    port: int

    @property
    def family(self) -> Family:
        return family_of(self.source)

    @property
    def _tuple(self) -> _Tuple:
        source, destination = (ipaddress.ip_address(one).packed for one in (self.source, self.destination))
        return source, destination, self.protocol, self.source_port, self.port

    def delete(self) -> bool:
        """Delete the entry of the flow in the default zone. Return whether it existed. Raises OSError."""
        source, destination, *_ = self._tuple
        addresses = netlink.attribute(_FROM_ADDRESS[self.family], source)
        addresses += netlink.attribute(_TO_ADDRESS[self.family], destination)
        ports = netlink.attribute(_NUMBER, bytes((self.protocol,)))
        ports += netlink.attribute(_FROM_PORT, struct.pack(">H", self.source_port))
        ports += netlink.attribute(_TO_PORT, struct.pack(">H", self.port))
        both = netlink.attribute(_ADDRESSES | _NESTED, addresses) + netlink.attribute(_PORTS | _NESTED, ports)
        original = netlink.attribute(_ORIGINAL | _NESTED, both)
        try:
            netlink.netfilter_request(_DELETE, netlink.ACK, ADDRESS_FAMILY[self.family], original)
        except FileNotFoundError:
            return False
        return True


class FlowWatch:
    """Follows the entries of flows from their first packet on, also of those that end at once, as after a reset.

    Begin before these packets, of one family, are sent. Raises OSError.
    """

    def __init__(self, flows: Sequence[FirstPacket]) -> None:
        self._keys = [flow._tuple for flow in flows]
        self._family = flows[0].family
        self._fields: dict[_Tuple, dict[int, bytes]] = {key: {} for key in self._keys}
        self._found: dict[_Tuple, tuple[Sequence[_Tuple], float]] = {}
        self.lost = system.read_setting("net/netfilter/nf_conntrack_events") == "0"
        self._events = netlink.subscribe(netlink.NETLINK_NETFILTER, _EVENT_GROUPS, _EVENT_BYTES)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="conntrack", daemon=True)
        self._thread.start()

    def end(self) -> list[tuple[str, float]]:
        """End, and return the last known state of each flow as `flow_lines` does, and when it began; "" without one.

        The time is that of the monotonic clock. Afterwards `lost` says whether flows may be missing.
        """
        self._ended.set()
        self._thread.join()
        self._events.close()
        return [self._state(key) for key in self._keys]

    def _state(self, key: _Tuple) -> tuple[str, float]:
        if key not in self._found:
            return "", 0.0
        directions, began = self._found[key]
        return _line(self._family, self._fields[key], directions), began

    def _follow(self) -> None:
        while True:
            last = self._ended.is_set()
            try:
                events = netlink.events(self._events, 0 if last else _EVENT_SECONDS)
                # A header of nfnetlink comes first.
                for raw, original, reply in _with_tuples(self._family, (event[4:] for event in events)):
                    if original in self._fields:
                        self._fields[original].update(attributes(raw))
                        self._found.setdefault(original, ((original, reply), time.monotonic()))
            except OSError:
                self.lost = True
            if last:
                return


def _state(number: int, fields: dict[int, bytes]) -> str:
    """Return the state of a TCP or SCTP connection."""
    kind, names = _STATES[number]
    info = attributes(attributes(fields.get(_PROTOCOL_INFO, b"")).get(kind, b""))
    code = info.get(_STATE, b"\0")[0]
    return names[code] if code < len(names) else str(code)
