"""Routes and conntrack's counters in /proc/net, for nodes whose pods have no program that prints them."""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

from pykubeproxy.inspect.packets.packet import NodeRoute

#: Prints all of them, as far as the kernel has them.
COMMAND = ("cat", "/proc/net/route", "/proc/net/ipv6_route", "/proc/net/stat/nf_conntrack")
_FAILURES = {"invalid": "invalid", "insert_failed": "insert-failed", "drop": "drop"}
# Interface, destination, gateway, flags, three numbers and the mask.
_IPV4 = re.compile(r"(\S+)\t([0-9A-F]{8})\t[0-9A-F]{8}\t([0-9A-F]{4})\t(?:\d+\t){3}([0-9A-F]{8})\t")
# Destination and its length, source and its length, gateway, metric, two counters, flags and the interface.
_IPV6 = re.compile(
    r"([0-9a-f]{32}) ([0-9a-f]{2}) [0-9a-f]{32} [0-9a-f]{2} [0-9a-f]{32} (?:[0-9a-f]{8} ){3}([0-9a-f]{8}) +(\S+)"
)
# linux/route.h, linux/ipv6_route.h: the route rejects packets; anycast addresses and those of the node.
_REJECT, _NO_UNICAST = 0x0200, 0x80100000


def parse_routes(text: str) -> Iterator[NodeRoute]:
    """Yield the routes in lines of both files. Skip other lines, and routes that lead to no interface."""
    for line in text.splitlines():
        with suppress(ValueError):
            if found := _IPV4.match(line):
                interface, address, flags, mask = found.groups()
                network = str(IPv4Network((_ipv4(address), str(_ipv4(mask)))))
            elif found := _IPV6.match(line):
                address, length, flags, interface = found.groups()
                network = str(IPv6Network((IPv6Address(bytes.fromhex(address)), int(length, 16))))
            else:
                continue
            if interface != "*" and not int(flags, 16) & (_REJECT | _NO_UNICAST):
                yield NodeRoute(network, interface)


def _ipv4(text: str) -> IPv4Address:
    """Read an address of a machine with little-endian byte order, as all but s390x have that run Kubernetes."""
    return IPv4Address(bytes.fromhex(text)[::-1])


def parse_failures(text: str) -> Mapping[str, int]:
    """Return how many packets conntrack failed on, by kind as in NodeView; {} if the kernel does not print that."""
    lines = (line.split() for line in text.splitlines())
    for names in lines:
        if names[:1] == ["entries"]:
            # Then comes a line for each processor.
            counts = [dict(zip(names, line, strict=False)) for line in lines]
            with suppress(ValueError):
                return {
                    kind: sum(int(one.get(name, "0"), 16) for one in counts)
                    for name, kind in _FAILURES.items()
                }
    return {}
