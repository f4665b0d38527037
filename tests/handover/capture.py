"""A packet capture of a namespace that keeps the last seconds in a ring of memory."""

import ctypes
import mmap
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pykubeproxy.lab.network import Namespace

# linux/if_packet.h, linux/if_ether.h, asm/socket.h
_SOL_PACKET, _RX_RING, _VERSION, _VERSION_3, _ALL, _ATTACH_FILTER = 263, 5, 10, 2, 3, 26
_BLOCK, _BLOCKS, _FRAME, _BLOCK_MILLISECONDS = 1 << 20, 96, 2048, 100
_KEEP = _BLOCKS - 16  # the kernel writes to the others
_TO_KERNEL, _TO_USER = 0, 1
_STATUS = struct.Struct("=8xI")
_BLOCK_HEAD = struct.Struct("=8xIII")  # status, packets, offset of the first
_PACKET_HEAD = struct.Struct("=IIIIIIHH")  # next, seconds, nanoseconds, captured, length, status, mac, net
_ADDRESS, _ADDRESS_OFFSET = struct.Struct("=H2siHBB8s"), 48  # sockaddr_ll
_SNAP = 128  # bytes kept of each packet
_RETURN_SNAP = struct.pack("=HBBI", 0x06, 0, 0, _SNAP)  # a BPF program of one instruction
_PCAP_HEAD = struct.pack("=IHHiIII", 0xA1B23C4D, 2, 4, 0, 0, 65535, 276)  # nanoseconds, LINKTYPE_LINUX_SLL2
_OUTGOING = 4
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
    """A captured packet; `data` begins with the IP header, `link` is the head of a record of Linux "cooked" captures."""

    seconds: int
    nanoseconds: int
    interface: int
    outgoing: bool
    link: bytes
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
    """Captures all packets of a namespace, from construction to `close`."""

    def __init__(self, namespace: Namespace) -> None:
        with namespace.entered():
            self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(_ALL))
            self._names = dict(socket.if_nameindex())
        program = ctypes.create_string_buffer(_RETURN_SNAP)
        self._socket.setsockopt(
            socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program))
        )
        self._socket.setsockopt(_SOL_PACKET, _VERSION, _VERSION_3)
        frames = _BLOCK * _BLOCKS // _FRAME
        ring = struct.pack("7I", _BLOCK, _BLOCKS, _FRAME, frames, _BLOCK_MILLISECONDS, 0, 0)
        self._socket.setsockopt(_SOL_PACKET, _RX_RING, ring)
        self._ring = mmap.mmap(self._socket.fileno(), _BLOCK * _BLOCKS)
        self._oldest = self._next = 0  # numbers of blocks; the ring holds each at its number modulo _BLOCKS
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._release_old, name="capture", daemon=True)
        self._thread.start()

    def packets(self) -> Iterator[Packet]:
        """Stop capturing and yield the packets of the last seconds."""
        time.sleep(2 * _BLOCK_MILLISECONDS / 1000)  # until the kernel has passed on its last block
        self._stop()
        self._advance()
        for number in range(self._oldest, self._next):
            yield from self._packets_of(number % _BLOCKS * _BLOCK)

    def interface(self, packet: Packet) -> str:
        """Return the name of a packet's interface."""
        return self._names.get(packet.interface, str(packet.interface))

    def close(self) -> None:
        """End the capture."""
        self._stop()
        self._ring.close()
        self._socket.close()

    def _stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _release_old(self) -> None:
        while not self._ended.wait(_BLOCK_MILLISECONDS / 1000):
            self._advance()
            while self._next - self._oldest > _KEEP:
                struct.pack_into("=I", self._ring, self._oldest % _BLOCKS * _BLOCK + 8, _TO_KERNEL)
                self._oldest += 1

    def _advance(self) -> None:
        """Find the blocks that the kernel has filled."""
        while self._next - self._oldest < _BLOCKS:
            (status,) = _STATUS.unpack_from(self._ring, self._next % _BLOCKS * _BLOCK)
            if not status & _TO_USER:
                return
            self._next += 1

    def _packets_of(self, block: int) -> Iterator[Packet]:
        _, count, offset = _BLOCK_HEAD.unpack_from(self._ring, block)
        place = block + offset
        for _ in range(count):
            step, seconds, nanoseconds, captured, _, _, _, net = _PACKET_HEAD.unpack_from(self._ring, place)
            address = _ADDRESS.unpack_from(self._ring, place + _ADDRESS_OFFSET)
            _, protocol, interface, hardware, kind, length, link_address = address
            link = struct.pack("!2sHiHBB8s", protocol, 0, interface, hardware, kind, length, link_address)
            data = self._ring[place + net : place + net + captured]
            yield Packet(seconds, nanoseconds, interface, kind == _OUTGOING, link, data)
            place += step


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


def connection(packets: Iterator[Packet], source: Endpoint, target: Endpoint) -> list[Packet]:
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


def describe(capture: Capture, packets: list[Packet]) -> str:
    """Return the last packets as text, one in a line."""
    return "\n".join(
        f"  {packet.seconds % 1000}.{packet.nanoseconds // 1000:06} {capture.interface(packet):8}"
        f" {'out' if packet.outgoing else 'in '} {segment(packet.data) or packet.data.hex()}"
        for packet in packets[-_SHOWN:]
    )


def write(path: Path, packets: list[Packet]) -> None:
    """Write packets as a pcap file."""
    with path.open("wb") as file:
        file.write(_PCAP_HEAD)
        for item in packets:
            length = len(item.link) + len(item.data)
            file.write(struct.pack("=IIII", item.seconds, item.nanoseconds, length, length))
            file.write(item.link + item.data)
