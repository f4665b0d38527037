"""Read addresses, interfaces and routes over rtnetlink, and watch the addresses.

The addresses of 60 interfaces take 9 ms, 74 ms with pyroute2. Only `remove_interface` and `routing_rules`, which few
commands need, use pyroute2: its import takes 0.1 s and 12 MB, and only the extra `node` installs it. Everything works on
the network namespace of the calling thread.
"""

import contextlib
import errno
import itertools
import select
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pykubeproxy.kernel import netlink
from pykubeproxy.kernel.errors import KernelError, require_linux, require_node
from pykubeproxy.kernel.netlink import ADDRESS_FAMILY, attributes
from pykubeproxy.kernel.system import namespaces_with
from pykubeproxy.objects import Family, family_of

if TYPE_CHECKING:
    from pyroute2 import IPRoute

# linux/rtnetlink.h, linux/if_link.h, linux/if_addr.h
_GET_LINK, _GET_ADDRESS, _GET_ROUTE = 18, 22, 26
# linux/net_namespace.h
_GET_NAMESPACE_ID, _NETNSA_ID, _NETNSA_FD = 90, 1, 3
_IFLA_IFNAME, _IFLA_LINKINFO, _IFLA_INFO_KIND = 3, 18, 1
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_RTA_DST, _RTA_OIF, _RTA_GATEWAY, _RTA_PRIORITY, _RTA_MULTIPATH, _RTA_TABLE, _RTA_VIA = 1, 4, 5, 6, 9, 15, 18
# struct ifinfomsg, ifaddrmsg, rtmsg and rtnexthop
_LINK = struct.Struct("=BxHiII")
_ADDRESS = struct.Struct("=BBBBI")
_ROUTE = struct.Struct("=BBBBBBBBI")
_NEXT_HOP = struct.Struct("=HBBi")
_NUMBER = struct.Struct("=I")
_ROUTE_KINDS = (
    *("unspec", "unicast", "local", "broadcast", "anycast", "multicast", "blackhole", "unreachable"),
    *("prohibit", "throw", "nat"),
)
_LOCAL = 2  # RTN_LOCAL
_MAIN_TABLE = 254  # RT_TABLE_MAIN
_ADDRESS_GROUPS = 0x10 | 0x100  # RTMGRP_IPV4_IFADDR, RTMGRP_IPV6_IFADDR
# linux/fib_rules.h
_ACTIONS = {1: "lookup", 2: "goto", 3: "nop", 6: "blackhole", 7: "unreachable", 8: "prohibit"}
# No route; routes of type blackhole, prohibit and unreachable; no IPv6.
_NOT_ROUTED = frozenset(
    (errno.ENETUNREACH, errno.EINVAL, errno.EACCES, errno.EHOSTUNREACH, errno.EAFNOSUPPORT, errno.EOPNOTSUPP)
)
_UNSPECIFIED = {Family.IPV4: "0.0.0.0", Family.IPV6: "::"}  # noqa: S104 - not bound to
_TRIES = 5


class LocalAddress(msgspec.Struct, frozen=True, order=True, rename="camel"):
    """An address of an interface: 192.168.99.10, 24, "eth0"."""

    address: str
    prefix_length: int
    interface: str


class Interface(msgspec.Struct, frozen=True, order=True):
    """A network interface and its kind, such as "bridge" or "veth"; "" for a physical one and for lo."""

    name: str
    kind: str


class TableRoute(msgspec.Struct, frozen=True, rename="camel"):
    """A route: to "10.244.1.0/24", of table 254 (main), with one next hop. 0 and "" are unset. `kind`, e.g. "unicast"."""

    table: int
    network: str
    kind: str = ""
    gateway: str = ""
    interface: str = ""
    priority: int = 0


class RoutingRule(msgspec.Struct, frozen=True, rename="camel"):
    """A rule of policy routing, with empty fields unset. `action`, e.g. "lookup"."""

    priority: int
    family: str
    action: str
    table: int
    source: str
    destination: str
    mark: str
    in_interface: str
    out_interface: str


def local_addresses(family: Family) -> tuple[LocalAddress, ...]:
    """Return all addresses of a family, link-local ones too, sorted. Raises KernelError."""
    with _kernel_errors("read the addresses of this node"):
        return tuple(sorted(_addresses(family, _interface_names())))


def interfaces() -> tuple[Interface, ...]:
    """Return all interfaces, sorted by name. Raises KernelError."""
    with _kernel_errors("read the interfaces of this node"):
        return tuple(sorted(interface for _, interface in _links()))


def routes(family: Family) -> tuple[TableRoute, ...]:
    """Return the routes of the main table, a multipath route with its first next hop. Raises KernelError."""
    with _kernel_errors("read the routes of this node"):
        first_hops = (hops[0] for hops in _routes(family, _interface_names()))
        return tuple(hop for hop in first_hops if hop.table == _MAIN_TABLE)


def all_routes(family: Family) -> tuple[TableRoute, ...]:
    """Return the routes of all tables, each next hop of a multipath route as one. Raises KernelError."""
    with _kernel_errors("read the routes of this node"):
        return tuple(itertools.chain.from_iterable(_routes(family, _interface_names())))


def is_local(address: bytes) -> bool:
    """Return whether the route to an address, of 4 or 16 bytes in network order, has type local. Raises OSError.

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


def source_to(address: str) -> str:
    """Return the address from which this namespace sends to another one. Raises KernelError."""
    with (
        _kernel_errors(f"find the way to {address}"),
        socket.socket(ADDRESS_FAMILY[family_of(address)], socket.SOCK_DGRAM) as unsent,
    ):
        unsent.connect((address, 1))
        return str(unsent.getsockname()[0])


def namespace_of_pod(address: str) -> str:
    """Return the path of the network namespace on this node that has the address of a pod. Raises KernelError.

    Of several with that address, as on a machine with many labs, take the one to which this namespace has a link.
    """
    found = namespaces_with(address)
    linked = [path for path in found if _is_linked(path)]
    if len(linked or found) != 1:
        what = "several network namespaces have" if found else "no network namespace of a visible process has"
        raise KernelError(
            f"{what} the address {address} of the pod; run this on the pod's node, as root of the host"
        )
    return (linked or found)[0]


def _is_linked(namespace: str) -> bool:
    """Return whether an interface of this network namespace has its peer in another one."""
    with contextlib.suppress(OSError), Path(namespace).open("rb") as file:
        query = bytes(4) + netlink.attribute(_NETNSA_FD, _NUMBER.pack(file.fileno()))
        answer = netlink.request(socket.NETLINK_ROUTE, netlink.message(_GET_NAMESPACE_ID, 0, query))
        # The kernel gives a namespace an id here when a link leads there, else -1.
        return _number(attributes(answer[4:]), _NETNSA_ID) != 0xFFFFFFFF
    return False


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


def remove_interface(name: str) -> None:
    """Remove an interface with its addresses, if it exists. Raises KernelError."""
    with _iproute(f"remove the interface {name}") as route:
        for index in route.link_lookup(ifname=name):
            route.link("del", index=index)


def routing_rules(family: Family) -> Iterator[RoutingRule]:
    """Yield the rules of policy routing, as the kernel orders them. Raises KernelError."""
    with _iproute("read the routing rules of this node") as route:
        for message in route.get_rules(family=ADDRESS_FAMILY[family]):
            mark, mask = message.get_attr("FRA_FWMARK"), message.get_attr("FRA_FWMASK")
            yield RoutingRule(
                priority=message.get_attr("FRA_PRIORITY") or 0,
                family=family.value,
                action=_ACTIONS.get(message["action"], str(message["action"])),
                table=message.get_attr("FRA_TABLE") or message["table"],
                source=_network(message.get_attr("FRA_SRC"), message["src_len"]),
                destination=_network(message.get_attr("FRA_DST"), message["dst_len"]),
                mark=f"{mark or 0:#x}/{mask or 0:#x}" if mark or mask else "",
                in_interface=message.get_attr("FRA_IIFNAME") or "",
                out_interface=message.get_attr("FRA_OIFNAME") or "",
            )


def _network(address: str | None, length: int) -> str:
    return f"{address}/{length}" if address else ""


def _links() -> Iterator[tuple[int, Interface]]:
    """Yield the index of each interface, and the interface."""
    for raw in _dump_consistently(_GET_LINK, _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0)):
        found = attributes(raw[_LINK.size :])
        kind = attributes(found.get(_IFLA_LINKINFO, b"")).get(_IFLA_INFO_KIND, b"")
        yield _LINK.unpack_from(raw)[2], Interface(_text(found[_IFLA_IFNAME]), _text(kind))


def _interface_names() -> dict[int, str]:
    return {index: interface.name for index, interface in _links()}


def _addresses(family: Family, names: dict[int, str]) -> Iterator[LocalAddress]:
    """Yield the addresses of a family; `names` are the interfaces by index."""
    domain = ADDRESS_FAMILY[family]
    for raw in _dump_consistently(_GET_ADDRESS, _ADDRESS.pack(domain, 0, 0, 0, 0)):
        kind, length, _, _, index = _ADDRESS.unpack_from(raw)
        found = attributes(raw[_ADDRESS.size :])
        # On a point-to-point link, IFA_ADDRESS is the peer's.
        packed = found.get(_IFA_LOCAL) or found.get(_IFA_ADDRESS)
        if kind == domain and packed:
            yield LocalAddress(socket.inet_ntop(domain, packed), length, names.get(index, ""))


def _routes(family: Family, names: dict[int, str]) -> Iterator[tuple[TableRoute, ...]]:
    """Yield the next hops of each route in all tables; `names` are the interfaces by index."""
    domain = ADDRESS_FAMILY[family]
    for raw in netlink.dump(socket.NETLINK_ROUTE, _GET_ROUTE, _ROUTE.pack(domain, 0, 0, 0, 0, 0, 0, 0, 0)):
        of_family, length, _, _, table, _, _, kind, _ = _ROUTE.unpack_from(raw)
        if of_family != domain:
            continue
        found = attributes(raw[_ROUTE.size :])
        packed = found.get(_RTA_DST)
        destination = socket.inet_ntop(domain, packed) if packed else _UNSPECIFIED[family]
        # The field of the header has one byte.
        table = _number(found, _RTA_TABLE) or table
        yield tuple(
            TableRoute(
                table,
                f"{destination}/{length}",
                _ROUTE_KINDS[kind] if kind < len(_ROUTE_KINDS) else str(kind),
                _gateway(domain, hop),
                names.get(index, ""),
                _number(found, _RTA_PRIORITY),
            )
            for index, hop in _next_hops(found)
        )


def _next_hops(route: dict[int, bytes]) -> Iterator[tuple[int, dict[int, bytes]]]:
    """Yield the index of the interface and the attributes of each next hop; of a route without one, 0 and its own."""
    if _RTA_MULTIPATH not in route:
        yield _number(route, _RTA_OIF), route
        return
    raw = route[_RTA_MULTIPATH]
    while len(raw) >= _NEXT_HOP.size:
        length, _, _, index = _NEXT_HOP.unpack_from(raw)
        yield index, attributes(raw[_NEXT_HOP.size : length])
        raw = raw[max(_NEXT_HOP.size, (length + 3) & ~3) :]


def _gateway(domain: int, hop: dict[int, bytes]) -> str:
    """Return the gateway of a next hop, maybe one of the other family; "" if there is none."""
    if packed := hop.get(_RTA_GATEWAY):
        return socket.inet_ntop(domain, packed)
    via = hop.get(_RTA_VIA, b"")
    of_family = int.from_bytes(via[:2], sys.byteorder)
    return socket.inet_ntop(of_family, via[2:]) if of_family in (socket.AF_INET, socket.AF_INET6) else ""


def _number(found: dict[int, bytes], kind: int) -> int:
    return int(_NUMBER.unpack(found[kind])[0]) if kind in found else 0


def _dump_consistently(message: int, body: bytes) -> Iterable[bytes]:
    """Dump again, a few times, if there were changes: the kernel then skips objects that did not change, too."""
    for _ in range(_TRIES):
        with contextlib.suppress(InterruptedError):
            return tuple(netlink.dump(socket.NETLINK_ROUTE, message, body, consistent=True))
    return netlink.dump(socket.NETLINK_ROUTE, message, body)


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="surrogateescape")


def _discard(events: socket.socket) -> None:
    """Read and ignore all pending messages. Ignore ENOBUFS too: the caller does not need dropped messages."""
    while True:
        try:
            events.recv(netlink.READ)
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
def _iproute(task: str) -> Iterator["IPRoute"]:
    """Open rtnetlink for a task. Raises KernelError."""
    require_node(("pyroute2",))
    from pyroute2 import IPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    try:
        with IPRoute() as route:
            yield route
    except (NetlinkError, OSError) as error:
        raise KernelError(f"cannot {task}: {error}") from error
