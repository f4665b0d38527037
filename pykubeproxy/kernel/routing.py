"""Read all routing tables and the rules of policy routing, of the calling thread's network namespace."""

import socket
from collections.abc import Iterator
from typing import Any, NamedTuple

from pykubeproxy.kernel.addresses import UNSPECIFIED, interface_names, open_iproute
from pykubeproxy.kernel.netlink import ADDRESS_FAMILY
from pykubeproxy.objects import Family

# linux/rtnetlink.h
_KINDS = (
    *("unspec", "unicast", "local", "broadcast", "anycast", "multicast", "blackhole", "unreachable"),
    *("prohibit", "throw", "nat"),
)
# linux/fib_rules.h
_ACTIONS = {1: "lookup", 2: "goto", 3: "nop", 6: "blackhole", 7: "unreachable", 8: "prohibit"}


class TableRoute(NamedTuple):
    """A route of one table, with one next hop; 0 and "" mean unset."""

    table: int
    network: str
    kind: str
    gateway: str
    interface: str
    priority: int


class RoutingRule(NamedTuple):
    """A rule of policy routing: packets that match go by `action`, such as "lookup" in a table."""

    priority: int
    family: str
    action: str
    table: int
    source: str
    destination: str
    mark: str
    in_interface: str
    out_interface: str


def all_routes(family: Family) -> Iterator[TableRoute]:
    """Yield the routes of all tables, each next hop of a multipath route as one. Raises KernelError."""
    with open_iproute("read the routes of this node") as route:
        names = interface_names()
        for message in route.get_routes(family=ADDRESS_FAMILY[family]):
            network = f"{message.get_attr('RTA_DST') or UNSPECIFIED[family]}/{message['dst_len']}"
            kind = _KINDS[message["type"]] if message["type"] < len(_KINDS) else str(message["type"])
            for hop in message.get_attr("RTA_MULTIPATH") or (message,):
                index = hop.get_attr("RTA_OIF") if hop is message else hop["oif"]
                yield TableRoute(
                    message.get_attr("RTA_TABLE") or message["table"],
                    network,
                    kind,
                    hop.get_attr("RTA_GATEWAY") or _via(hop),
                    names.get(index or 0, ""),
                    message.get_attr("RTA_PRIORITY") or 0,
                )


def routing_rules(family: Family) -> Iterator[RoutingRule]:
    """Yield the rules of policy routing, as the kernel orders them. Raises KernelError."""
    with open_iproute("read the routing rules of this node") as route:
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


def _via(hop: Any) -> str:
    """Return a gateway of the other family, "" if there is none."""
    via = hop.get_attr("RTA_VIA")
    return str(via["addr"]) if via and via.get("family") in (socket.AF_INET, socket.AF_INET6) else ""
