"""Read and destroy ipsets over netlink, in the calling thread's network namespace.

Everything raises OSError if the kernel has no ipsets or without CAP_NET_ADMIN.
"""

import errno
import os

from pykubeproxy.kernel import netfilter, netlink

# linux/netfilter/ipset/ip_set.h
_DESTROY, _LIST = 6 << 8 | 3, 6 << 8 | 7
_PROTOCOL, _SET_NAME, _PORT, _FLAGS, _ENTRIES = 1, 2, 4, 6, 8
_ONLY_NAMES = (1 << 1).to_bytes(4, "big")
_VERSION = netlink.attribute(_PROTOCOL, b"\6")


def names() -> frozenset[str]:
    """Return the names of all ipsets."""
    return frozenset(
        raw.get(_SET_NAME, b"").rstrip(b"\0").decode("ascii", "replace")
        for raw in map(
            netlink.attributes,
            netfilter.dump(_LIST, 0, _VERSION + netlink.attribute(_FLAGS, _ONLY_NAMES)),
        )
    )


def ports(name: str) -> frozenset[int]:
    """Return the ports in an ipset; none if there is no such ipset."""
    selector = _VERSION + netlink.string_attribute(_SET_NAME, name)
    found: set[int] = set()
    try:
        for raw in netfilter.dump(_LIST, 0, selector):
            entries = netlink.attributes(raw).get(_ENTRIES, b"")
            found |= {
                int.from_bytes(port, "big")
                for _, entry in netlink.elements(entries)
                if (port := netlink.attributes(entry).get(_PORT))
            }
    except FileNotFoundError:
        pass
    return frozenset(found)


def destroy(name: str) -> None:
    """Destroy an ipset. Raises OSError with EBUSY if a rule refers to it."""
    selector = _VERSION + netlink.string_attribute(_SET_NAME, name)
    try:
        netfilter.request(_DESTROY, netlink.ACK, 0, selector)
    except OSError as error:
        # The kernel has a code of its own for this, which is no error number.
        if error.errno == errno.EBADMSG:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY)) from None
        raise
