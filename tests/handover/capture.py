"""A packet capture of a namespace that keeps the last seconds in memory."""

import socket
import struct
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pykubeproxy.lab.network import Namespace

_ALL = 3  # linux/if_ether.h
_RECEIVE_BUFFER_FORCED, _BUFFER = 33, 64 << 20  # SO_RCVBUFFORCE, bytes
_PAUSE = 0.1  # seconds
_KEPT = 300_000  # packets, those of more than ten seconds
_SNAP = 128  # bytes kept of each packet
_PCAP_HEAD = struct.pack("=IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 65535, 101)  # LINKTYPE_RAW
_TCP, _UDP = 6, 17
_FLAGS = "FSRPA"
_SHOWN = 40


class Endpoint(NamedTuple):
    """An address and a port."""

    address: str
    port: int

    def __str__(self) -> str:
        return f"{self.address} {self.port}"


class Packet(NamedTuple):
    """A captured packet: when, and where; `data` begins with the IP header."""

    time: float
    interface: str
    outgoing: bool
    data: bytes


class Segment(NamedTuple):
    """A TCP segment or UDP datagram; the numbers of a datagram are 0, its flags ""."""

    source: Endpoint
    target: Endpoint
    sequence: int = 0
    acknowledged: int = 0
    flags: str = ""

    def __str__(self) -> str:
        return (
            f"{self.source} > {self.target} {self.flags or 'UDP'} seq {self.sequence} ack {self.acknowledged}"
        )


class Capture:
    """Captures all packets of a namespace and keeps the latest, from construction to `close`."""

    def __init__(self, namespace: Namespace) -> None:
        with namespace.entered():
            self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(_ALL))
        self._socket.setsockopt(socket.SOL_SOCKET, _RECEIVE_BUFFER_FORCED, _BUFFER)
        self._socket.settimeout(_PAUSE)
        self._packets: deque[Packet] = deque(maxlen=_KEPT)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="capture", daemon=True)
        self._thread.start()

    def packets(self) -> list[Packet]:
        """Stop capturing and return the packets of the last seconds."""
        time.sleep(2 * _PAUSE)
        self._stop()
        return list(self._packets)

    def close(self) -> None:
        """End the capture."""
        self._stop()
        self._socket.close()

    def _stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.is_set():
            with suppress(TimeoutError):
                data, (interface, _, kind, *_) = self._socket.recvfrom(_SNAP)
                self._packets.append(Packet(time.time(), interface, kind == socket.PACKET_OUTGOING, data))


def segment(data: bytes) -> Segment | None:
    """Parse an IP packet; return None if it is neither TCP nor UDP."""
    if data[0] >> 4 == 4:
        protocol, offset = data[9], (data[0] & 15) * 4
        family, source, target = socket.AF_INET, data[12:16], data[16:20]
    else:
        protocol, offset = data[6], 40
        family, source, target = socket.AF_INET6, data[8:24], data[24:40]
    if protocol not in (_TCP, _UDP) or len(data) < offset + 8:
        return None
    ports = struct.unpack_from("!HH", data, offset)
    start, end = (
        Endpoint(socket.inet_ntop(family, address), port)
        for address, port in zip((source, target), ports, strict=True)
    )
    if protocol == _UDP or len(data) < offset + 14:
        return Segment(start, end)
    sequence, acknowledged, _, flags = struct.unpack_from("!IIBB", data, offset + 4)
    named = "".join(name for bit, name in enumerate(_FLAGS) if flags >> bit & 1)
    return Segment(start, end, sequence, acknowledged, named)


def connection(packets: list[Packet], source: Endpoint, target: Endpoint) -> list[Packet]:
    """Return the packets of a connection, before and after translation, and the errors that quote it.

    NAT changes addresses and ports, but not the sequence number of the SYN.
    """
    quoted = struct.pack("!HH", source[1], target[1])
    parsed = [(packet, segment(packet.data)) for packet in packets if len(packet.data) >= 20]
    first = {
        item.sequence
        for _, item in parsed
        if item and item.flags == "S" and (item.source, item.target) == (source, target)
    }
    numbers = first | {(number + 1) % (1 << 32) for number in first}
    return [
        packet
        for packet, item in parsed
        if (quoted in packet.data[40:] if item is None else _belongs(item, {source, target}, numbers))
    ]


def _belongs(item: Segment, ends: set[Endpoint], numbers: set[int]) -> bool:
    return {item.source, item.target} == ends or bool(
        item.flags and {item.sequence, item.acknowledged} & numbers
    )


def describe(packets: list[Packet]) -> str:
    """Return the last packets as text, one in a line."""
    return "\n".join(
        f"  {packet.time % 1000:.6f} {packet.interface:8} {'out' if packet.outgoing else 'in '}"
        f" {segment(packet.data) or packet.data.hex()}"
        for packet in packets[-_SHOWN:]
    )


def write(path: Path, packets: list[Packet]) -> None:
    """Write packets as a pcap file."""
    with path.open("wb") as file:
        file.write(_PCAP_HEAD)
        for item in packets:
            seconds, microseconds = divmod(int(item.time * 1_000_000), 1_000_000)
            file.write(struct.pack("=IIII", seconds, microseconds, len(item.data), len(item.data)))
            file.write(item.data)
