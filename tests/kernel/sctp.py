"""SCTP packets as bytes (RFC 9260): the kernel of a test machine often has no SCTP sockets, but tracks its connections."""

import struct
from typing import NamedTuple

PROTOCOL = 132
INIT, INIT_ACK, ABORT = 1, 2, 6
_HEADER, _CHUNK = struct.Struct(">HHI4s"), struct.Struct(">BBH")
# Initiate tag, receiver window, streams out and in, first TSN.
_INIT = struct.Struct(">IIHHI")
_WINDOW = 65536
_COOKIE = 7
# Reversed Castagnoli polynomial (RFC 9260, appendix A).
_POLYNOMIAL = 0x82F63B78


class SctpPacket(NamedTuple):
    """A packet with one chunk: ports, the verification tag, the kind of chunk, its initiate tag, and a cookie."""

    source: int
    destination: int
    verification: int
    kind: int
    initiate: int = 0
    cookie: bytes = b""

    def encoded(self) -> bytes:
        """Return the packet with its checksum."""
        body = b""
        if self.kind != ABORT:
            body = _INIT.pack(self.initiate, _WINDOW, 1, 1, 1)
        if self.kind == INIT_ACK:
            parameter = struct.pack(">HH", _COOKIE, 4 + len(self.cookie)) + self.cookie
            body += parameter + bytes(-len(parameter) % 4)
        chunk = _CHUNK.pack(self.kind, 0, _CHUNK.size + len(body)) + body
        ports = self.source, self.destination, self.verification
        checksum = struct.pack("<I", crc32c(_HEADER.pack(*ports, bytes(4)) + chunk))
        return _HEADER.pack(*ports, checksum) + chunk

    @classmethod
    def decoded(cls, data: bytes) -> "SctpPacket":
        """Read a packet with its first chunk."""
        source, destination, verification, checksum = _HEADER.unpack_from(data)
        zeroed = data[:8] + bytes(4) + data[12:]
        assert checksum == struct.pack("<I", crc32c(zeroed)), "wrong checksum"
        kind, _, _ = _CHUNK.unpack_from(data, _HEADER.size)
        start = _HEADER.size + _CHUNK.size
        initiate = _INIT.unpack_from(data, start)[0] if kind in (INIT, INIT_ACK) else 0
        cookie = b""
        if kind == INIT_ACK:
            start += _INIT.size
            _, length = struct.unpack_from(">HH", data, start)
            cookie = data[start + 4 : start + length]
        return cls(source, destination, verification, kind, initiate, cookie)


def crc32c(data: bytes) -> int:
    """Return the checksum of SCTP."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (_POLYNOMIAL if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF
