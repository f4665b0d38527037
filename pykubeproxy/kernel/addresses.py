"""The addresses of this network namespace, and word of their changes."""

import errno
import os
import select
import socket
import threading
from collections.abc import Callable

import msgspec

from pykubeproxy.kernel.domain import DOMAIN
from pykubeproxy.kernel.errors import KernelError
from pykubeproxy.objects import Family

# linux/rtnetlink.h: RTMGRP_IPV4_IFADDR and RTMGRP_IPV6_IFADDR
_ADDRESS_GROUPS = 0x10 | 0x100


class LocalAddress(msgspec.Struct, frozen=True, order=True):
    """An address of an interface: 192.168.99.10, 24, "eth0"."""

    address: str
    prefix_length: int
    interface: str


def local_addresses(family: Family) -> tuple[LocalAddress, ...]:
    """All addresses of a family, link-local ones too, sorted; of the calling thread's network namespace.

    Raises KernelError.
    """
    # It takes a tenth of a second to import, and most commands can do without.
    from pyroute2 import IPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    try:
        with IPRoute() as route:
            names = {link["index"]: link.get_attr("IFLA_IFNAME") for link in route.get_links()}
            found = [
                # On a point-to-point link IFA_ADDRESS is the other end's.
                LocalAddress(
                    message.get_attr("IFA_LOCAL") or message.get_attr("IFA_ADDRESS"),
                    message["prefixlen"],
                    names.get(message["index"], ""),
                )
                for message in route.get_addr(family=DOMAIN[family])
            ]
    except (NetlinkError, OSError) as error:
        raise KernelError(f"the addresses of this node cannot be read: {error}") from error
    return tuple(sorted(found))


class AddressWatch:
    """Calls `changed` after addresses came or went in the network namespace of the thread that made it.

    The calls come from a thread of its own and say only that something changed; many changes at once may give
    one call. An exception from `changed` ends that thread. Raises KernelError when it is made.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        try:
            self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
            self._socket.bind((0, _ADDRESS_GROUPS))
        except OSError as error:
            raise KernelError(f"the addresses of this node cannot be watched: {error.strerror}") from error
        self._socket.setblocking(False)
        self._stop = os.eventfd(0)
        self._thread = threading.Thread(target=self._run, name="addresses", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the watch; no call comes after this. Not to be called twice, nor from within `changed`."""
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        os.close(self._stop)
        self._socket.close()

    def _run(self) -> None:
        while self._stop not in select.select([self._socket.fileno(), self._stop], [], [])[0]:
            self._drain()
            self._changed()

    def _drain(self) -> None:
        """Take all that is there; what it says does not matter, nor whether some was dropped (ENOBUFS)."""
        while True:
            try:
                self._socket.recv(65536)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
