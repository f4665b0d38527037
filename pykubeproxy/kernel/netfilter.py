"""Exchange netlink messages with netfilter, for requests that no command-line tool serves well.

Everything works on the network namespace of the calling thread, and raises OSError as in `netlink`.
"""

import struct
from collections.abc import Iterator

from pykubeproxy.kernel import netlink

NETLINK_NETFILTER = 12
_NFGENMSG = struct.Struct(">BBH")  # family, version, resource id
_BATCH_BEGIN, _BATCH_END = 0x10, 0x11


def request(message: int, flags: int, family: int, attributes: bytes, seconds: float = 5) -> bytes:
    """Send one nfnetlink message (subsystem << 8 | command) and return the attributes of the answer.

    An acknowledgement has none.
    """
    sent = _message(message, flags, family, attributes)
    return netlink.request(NETLINK_NETFILTER, sent, seconds)[_NFGENMSG.size :]


def execute_batch(message: int, family: int, attributes: bytes, seconds: float = 5) -> None:
    """Execute one message as a batch, which every change of nftables must be."""
    subsystem = message >> 8
    batch = (
        _message(_BATCH_BEGIN, 0, 0, b"", subsystem)
        + _message(message, netlink.ACK, family, attributes)
        + _message(_BATCH_END, 0, 0, b"", subsystem)
    )
    # The kernel answers the first message of a batch that it rejects as a whole.
    netlink.request(NETLINK_NETFILTER, batch, seconds)


def dump(message: int, family: int, attributes: bytes, seconds: float = 5) -> Iterator[bytes]:
    """Yield the attributes of each object of a kind, lazily, as `netlink.dump` does."""
    body = _NFGENMSG.pack(family, 0, 0) + attributes
    return (raw[_NFGENMSG.size :] for raw in netlink.dump(NETLINK_NETFILTER, message, body, seconds))


def _message(message: int, flags: int, family: int, attributes: bytes, resource: int = 0) -> bytes:
    return netlink.message(message, flags, _NFGENMSG.pack(family, 0, resource) + attributes)
