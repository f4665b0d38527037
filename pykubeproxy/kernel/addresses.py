"""Read the addresses, interfaces and routes of the calling thread's network namespace, and watch the addresses.

Functions that need pyroute2 import it themselves: the import takes 0.1 s and 12 MB, and only the extra `node` installs it.
"""

import contextlib
import errno
import select
import socket
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from pykubeproxy.kernel import rtnetlink
from pykubeproxy.kernel.errors import KernelError
from pykubeproxy.kernel.netlink import ADDRESS_FAMILY
from pykubeproxy.kernel.requirements import require_linux, require_node
from pykubeproxy.objects import Family

if TYPE_CHECKING:
    from pyroute2 import IPRoute

# linux/rtnetlink.h: RTMGRP_IPV4_IFADDR and RTMGRP_IPV6_IFADDR
_ADDRESS_GROUPS = 0x10 | 0x100
_RT_TABLE_MAIN = 254
UNSPECIFIED = {Family.IPV4: "0.0.0.0", Family.IPV6: "::"}  # noqa: S104 - not bound to


class LocalAddress(msgspec.Struct, frozen=True, order=True):
    """An address of an interface: 192.168.99.10, 24, "eth0"."""

    address: str
    prefix_length: int
    interface: str


class Interface(msgspec.Struct, frozen=True, order=True):
    """A network interface and its kind, such as "bridge" or "veth"; "" for a physical one and for lo."""

    name: str
    kind: str


class NetworkRoute(NamedTuple):
    """A network, "10.244.1.0/24", and its interface; "" if there is none, as for a blackhole route."""

    network: str
    interface: str


def local_addresses(family: Family) -> tuple[LocalAddress, ...]:
    """Return all addresses of a family, link-local ones too, sorted. Raises KernelError."""
    with _kernel_errors("read the addresses of this node"):
        names = interface_names()
        addresses = [
            LocalAddress(it.address, it.prefix_length, names.get(it.interface, ""))
            for it in rtnetlink.addresses(ADDRESS_FAMILY[family])
        ]
    return tuple(sorted(addresses))


def interfaces() -> tuple[Interface, ...]:
    """Return all interfaces, sorted by name. Raises KernelError."""
    with _kernel_errors("read the interfaces of this node"):
        return tuple(sorted(Interface(link.name, link.kind) for link in rtnetlink.links()))


def remove_interface(name: str) -> None:
    """Remove an interface with its addresses, if it exists. Raises KernelError."""
    with open_iproute(f"remove the interface {name}") as route:
        for index in route.link_lookup(ifname=name):
            route.link("del", index=index)


def routes(family: Family) -> tuple[NetworkRoute, ...]:
    """Return the routes of the main table, a multipath route with its first next hop. Raises KernelError."""
    with _kernel_errors("read the routes of this node"):
        names = interface_names()
        return tuple(
            NetworkRoute(
                f"{it.destination or UNSPECIFIED[family]}/{it.prefix_length}", names.get(it.interface, "")
            )
            for it in rtnetlink.routes(ADDRESS_FAMILY[family])
            if it.table == _RT_TABLE_MAIN
        )


def watch_addresses(changed: Callable[[], None]) -> None:
    """Call `changed` from a new thread whenever addresses are added or removed; one call may stand for many changes.

    An exception from `changed` ends the thread. Raises KernelError if the kernel rejects the subscription.
    """
    try:
        events = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        events.bind((0, _ADDRESS_GROUPS))
    except OSError as error:
        raise KernelError(f"cannot watch the addresses of this node: {error.strerror}") from error
    events.setblocking(False)

    def run() -> None:
        while True:
            select.select([events], [], [])
            _discard(events)
            changed()

    threading.Thread(target=run, name="addresses", daemon=True).start()


def _discard(events: socket.socket) -> None:
    """Read and ignore all pending messages. Ignore ENOBUFS too: the caller does not need dropped messages."""
    while True:
        try:
            events.recv(65536)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno != errno.ENOBUFS:
                raise


@contextlib.contextmanager
def _kernel_errors(task: str) -> Iterator[None]:
    """Turn an OSError of rtnetlink into a KernelError. Raises NotANode on another system than Linux."""
    require_linux()
    try:
        yield
    except OSError as error:
        raise KernelError(f"cannot {task}: {error}") from error


@contextlib.contextmanager
def open_iproute(task: str) -> Iterator["IPRoute"]:
    """Open rtnetlink for a task. Raises KernelError."""
    require_node(("pyroute2",))
    from pyroute2 import IPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    try:
        with IPRoute() as route:
            yield route
    except (NetlinkError, OSError) as error:
        raise KernelError(f"cannot {task}: {error}") from error


def interface_names() -> dict[int, str]:
    """Return the names of all interfaces by index. Raises OSError."""
    return {link.interface: link.name for link in rtnetlink.links()}
