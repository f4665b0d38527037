"""The kernel's named packet counters, which rules with `-m nfacct` count into.

A rule that names a counter which does not exist is refused, so counters come first. Each network namespace
has its own.
"""

import errno
import struct
from typing import NamedTuple

from pykubeproxy.kernel import netfilter

# linux/netfilter/nfnetlink_acct.h
_NEW, _GET = 7 << 8, 7 << 8 | 1
_NAME, _PACKETS, _BYTES = 1, 2, 3


class Counter(NamedTuple):
    """What was counted since the counter was made."""

    packets: int
    bytes: int


class Ensured(NamedTuple):
    """Whether the counter is there, and if not, why."""

    ok: bool
    reason: str = ""


def ensure(name: str) -> Ensured:
    """Make the counter unless it exists; one that exists keeps its count. Names have up to 31 bytes."""
    try:
        netfilter.ask(_NEW, netfilter.ACK | netfilter.CREATE | netfilter.EXCLUSIVE, 0, _named(name))
    except OSError as error:
        if error.errno == errno.EEXIST:
            return Ensured(True)
        if error.errno == errno.EPERM:
            return Ensured(False, "no permission to make nfacct counters (CAP_NET_ADMIN)")
        return Ensured(
            False, f"the kernel cannot make nfacct counters (module nfnetlink_acct): {error.strerror}"
        )
    return Ensured(True)


def read(name: str) -> Counter | None:
    """The counter's value, None where there is no such counter or it cannot be read."""
    try:
        found = netfilter.attributes(netfilter.ask(_GET, 0, 0, _named(name)))
        (packets,) = struct.unpack(">Q", found[_PACKETS])
        (size,) = struct.unpack(">Q", found[_BYTES])
    except (OSError, KeyError, struct.error):
        return None
    return Counter(packets, size)


def _named(name: str) -> bytes:
    return netfilter.attribute(_NAME, name.encode() + b"\0")
