"""Read addresses, interfaces and routes over rtnetlink, without pyroute2.

Everything works on the network namespace of the calling thread. Raises OSError with the kernel's error number, and
TimeoutError.
"""

import errno
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

from pykubeproxy.kernel import netlink
from pykubeproxy.kernel.netlink import attributes

# linux/rtnetlink.h, linux/if_link.h, linux/if_addr.h
_GET_LINK, _GET_ADDRESS, _GET_ROUTE = 18, 22, 26
_IFLA_IFNAME, _IFLA_LINKINFO, _IFLA_INFO_KIND = 3, 18, 1
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_RTA_DST, _RTA_OIF, _RTA_MULTIPATH, _RTA_TABLE = 1, 4, 9, 15
# struct ifinfomsg, ifaddrmsg, rtmsg and rtnexthop
_LINK = struct.Struct("=BxHiII")
_ADDRESS = struct.Struct("=BBBBI")
_ROUTE = struct.Struct("=BBBBBBBBI")
_NEXT_HOP = struct.Struct("=HBBi")
_INDEX = struct.Struct("=I")
_LOCAL = 2  # RTN_LOCAL
# No route; routes of type blackhole, prohibit and unreachable; no IPv6.
_NOT_ROUTED = frozenset(
    (errno.ENETUNREACH, errno.EINVAL, errno.EACCES, errno.EHOSTUNREACH, errno.EAFNOSUPPORT, errno.EOPNOTSUPP)
)
_TRIES = 5


class Link(NamedTuple):
    """An interface; `kind` is "" for a physical one and for lo."""

    interface: int
    name: str
    kind: str


class Address(NamedTuple):
    """An address, and the index of its interface."""

    address: str
    prefix_length: int
    interface: int


class Route(NamedTuple):
    """A route of a table; `destination` is "" for a default route, `interface` is an index, 0 if there is none."""

    destination: str
    prefix_length: int
    interface: int
    table: int


def links() -> Iterator[Link]:
    """Yield all interfaces."""
    for raw in _dump_consistently(_GET_LINK, _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0)):
        found = attributes(raw[_LINK.size :])
        kind = attributes(found.get(_IFLA_LINKINFO, b"")).get(_IFLA_INFO_KIND, b"")
        yield Link(_LINK.unpack_from(raw)[2], _text(found[_IFLA_IFNAME]), _text(kind))


def addresses(family: int) -> Iterator[Address]:
    """Yield the addresses of an address family, such as AF_INET."""
    for raw in _dump_consistently(_GET_ADDRESS, _ADDRESS.pack(family, 0, 0, 0, 0)):
        kind, length, _, _, index = _ADDRESS.unpack_from(raw)
        found = attributes(raw[_ADDRESS.size :])
        # On a point-to-point link, IFA_ADDRESS is the peer's.
        packed = found.get(_IFA_LOCAL) or found.get(_IFA_ADDRESS)
        if kind == family and packed:
            yield Address(socket.inet_ntop(family, packed), length, index)


def routes(family: int) -> Iterator[Route]:
    """Yield the routes of an address family in all tables, a multipath route with its first next hop."""
    body = _ROUTE.pack(family, 0, 0, 0, 0, 0, 0, 0, 0)
    for raw in netlink.dump(socket.NETLINK_ROUTE, _GET_ROUTE, body):
        kind, length, _, _, table, *_ = _ROUTE.unpack_from(raw)
        found = attributes(raw[_ROUTE.size :])
        index = 0
        if _RTA_OIF in found:
            (index,) = _INDEX.unpack(found[_RTA_OIF])
        elif _RTA_MULTIPATH in found:
            *_, index = _NEXT_HOP.unpack_from(found[_RTA_MULTIPATH])
        if _RTA_TABLE in found:  # the field of the header has one byte
            (table,) = _INDEX.unpack(found[_RTA_TABLE])
        if kind == family:
            packed = found.get(_RTA_DST)
            yield Route(socket.inet_ntop(family, packed) if packed else "", length, index, table)


def is_local(address: bytes) -> bool:
    """Return whether the route to an address, of 4 or 16 bytes in network order, has type local.

    As `-m addrtype --dst-type LOCAL`: interface addresses, 127.0.0.0/8, and ranges with such a route are local.
    """
    family = socket.AF_INET if len(address) == 4 else socket.AF_INET6
    query = _ROUTE.pack(family, 8 * len(address), 0, 0, 0, 0, 0, 0, 0) + netlink.attribute(_RTA_DST, address)
    try:
        answer = netlink.request(socket.NETLINK_ROUTE, netlink.message(_GET_ROUTE, 0, query))
    except OSError as error:
        if error.errno in _NOT_ROUTED:
            return False
        raise
    return bool(_ROUTE.unpack_from(answer)[7] == _LOCAL)


def _dump_consistently(message: int, body: bytes) -> Iterable[bytes]:
    """Dump again, a few times, if there were changes: the kernel then skips objects that did not change, too."""
    for _ in range(_TRIES):
        with suppress(InterruptedError):
            return tuple(netlink.dump(socket.NETLINK_ROUTE, message, body, consistent=True))
    return netlink.dump(socket.NETLINK_ROUTE, message, body)


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="surrogateescape")
