"""Tables of nftables proper, beside those that iptables keeps there."""

import errno

from pykubeproxy.kernel import netfilter
from pykubeproxy.kernel.domain import DOMAIN
from pykubeproxy.objects import Family

# linux/netfilter/nf_tables.h
_GET_TABLE, _DELETE_TABLE = 10 << 8 | 1, 10 << 8 | 2
_NAME = 1


def remove_table(family: Family, name: str) -> bool:
    """Delete a table with all that is in it; returns whether it was there.

    Raises OSError if the kernel has no nftables, or without CAP_NET_ADMIN. (The kernel then answers to the batch rather
    than to what is in it, for which pyroute2 0.9.7 waits for ever.)
    """
    try:
        netfilter.change(_DELETE_TABLE, DOMAIN[family], netfilter.attribute(_NAME, name.encode() + b"\0"))
    except OSError as error:
        if error.errno == errno.ENOENT:
            return False
        raise
    return True


def has_table(family: Family, name: str) -> bool:
    """Whether there is such a table. Raises OSError if the kernel has no nftables, or without CAP_NET_ADMIN."""
    try:
        netfilter.ask(_GET_TABLE, 0, DOMAIN[family], netfilter.attribute(_NAME, name.encode() + b"\0"))
    except OSError as error:
        if error.errno == errno.ENOENT:
            return False
        raise
    return True
