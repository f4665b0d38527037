"""Tables of nftables proper, beside those that iptables keeps there."""

import errno
import socket

from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.nftables.main import NFTables

from pykubeproxy.objects import Family

_DOMAIN = {Family.IPV4: socket.AF_INET, Family.IPV6: socket.AF_INET6}


def remove_table(family: Family, name: str) -> bool:
    """Delete a table with all that is in it; returns whether it was there.

    Raises OSError if the kernel has no nftables, or without CAP_NET_ADMIN.
    """
    with NFTables(nfgen_family=_DOMAIN[family]) as nftables:
        try:
            nftables.table("del", name=name)
        except NetlinkError as error:
            if error.code == errno.ENOENT:
                return False
            raise OSError(error.code, str(error)) from error
    return True
