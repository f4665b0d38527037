"""Sets of addresses of one family, as ranges of numbers."""

import ipaddress
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from pykubeproxy.objects import Family


class Range(NamedTuple):
    """The addresses from first to last, both included, as numbers."""

    first: int
    last: int


# Sorted, without overlaps.
Addresses = tuple[Range, ...]


def every_address(family: Family) -> Addresses:
    """Return all addresses of a family."""
    return (Range(0, (1 << (128 if family is Family.IPV6 else 32)) - 1),)


@lru_cache(maxsize=65536)
def parse_addresses(text: str) -> Addresses:
    """Parse "address", "address/length", "address/mask" or "first-last". Raises ValueError."""
    first, dash, last = text.partition("-")
    if dash:
        return (Range(int(ipaddress.ip_address(first)), int(ipaddress.ip_address(last))),)
    network = ipaddress.ip_network(text, strict=False)
    return (Range(int(network.network_address), int(network.broadcast_address)),)


def union(sets: Iterable[Addresses]) -> Addresses:
    """Return the addresses in any of the sets."""
    joined: list[Range] = []
    for one in sorted(part for addresses in sets for part in addresses):
        if joined and one.first <= joined[-1].last + 1:
            joined[-1] = Range(joined[-1].first, max(joined[-1].last, one.last))
        else:
            joined.append(one)
    return tuple(joined)


def intersection(some: Addresses, others: Addresses) -> Addresses:
    """Return the addresses in both sets."""
    return tuple(
        Range(max(one.first, other.first), min(one.last, other.last))
        for one in some
        for other in others
        if one.first <= other.last and other.first <= one.last
    )


def subtract(some: Addresses, others: Addresses) -> Addresses:
    """Return the addresses of the first set that are not in the second."""
    return tuple(part for one in some for part in _parts(one, others))


def _parts(one: Range, others: Addresses) -> Iterator[Range]:
    first = one.first
    for other in others:
        if other.last < first or other.first > one.last:
            continue
        if other.first > first:
            yield Range(first, other.first - 1)
        first = other.last + 1
    if first <= one.last:
        yield Range(first, one.last)


def render_range(family: Family, one: Range) -> str:
    """Return a range as an address, a network, or "first-last"."""
    kind = ipaddress.IPv6Address if family is Family.IPV6 else ipaddress.IPv4Address
    first, last = kind(one.first), kind(one.last)
    if first == last:
        return str(first)
    networks = list(ipaddress.summarize_address_range(first, last))
    return str(networks[0]) if len(networks) == 1 else f"{first}-{last}"
