"""Addresses as numbers: networks with any mask, and sets of addresses of one family as ranges."""

import ipaddress
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from pykubeproxy.inspect.limit import TooManyRules
from pykubeproxy.objects import Family


class Range(NamedTuple):
    """The addresses from first to last, both included, as numbers."""

    first: int
    last: int


# A mask with so many gaps names 4096 ranges.
_MOST_GAPS = 12

# Sorted, without overlaps.
Addresses = tuple[Range, ...]


@lru_cache(maxsize=65536)
def number(address: str) -> int:
    """Return an address as a number. Raises ValueError."""
    return int(ipaddress.ip_address(address))


def contains(network: str, address: str) -> bool:
    """Return whether "address", "address/length" or "address/mask" contains an address; masks may have gaps."""
    if (":" in network) is not (":" in address):
        return False
    bits, mask = bits_and_mask(network)
    return number(address) & mask == bits


@lru_cache(maxsize=65536)
def bits_and_mask(network: str) -> tuple[int, int]:
    """Return the bits of a network and its mask. Raises ValueError."""
    address, _, length = network.partition("/")
    width = 128 if ":" in address else 32
    if length.isdecimal() or not length:
        mask = (1 << width) - (1 << (width - int(length or width)))
    else:
        mask = number(length)
    return number(address) & mask, mask


def every_address(family: Family) -> Addresses:
    """Return all addresses of a family."""
    return (Range(0, (1 << (128 if family is Family.IPV6 else 32)) - 1),)


@lru_cache(maxsize=65536)
def parse_addresses(text: str) -> Addresses:
    """Parse "address", "address/length", "address/mask" or "first-last".

    Raises ValueError, or TooManyRules if the mask leaves out too many bits.
    """
    first, dash, last = text.partition("-")
    if dash:
        return (Range(number(first), number(last)),)
    return tuple(_masked(text))


def _masked(text: str) -> Iterator[Range]:
    """Yield the ranges of addresses that have the bits of a network in its mask, which may have gaps."""
    start, mask = bits_and_mask(text)
    width = 128 if ":" in text else 32
    free = [bit for bit in range(width) if not mask >> bit & 1]
    block = next((position for position, bit in enumerate(free) if position != bit), len(free))
    gaps = free[block:]
    if len(gaps) > _MOST_GAPS:
        raise TooManyRules(
            f"the mask of {text} has too many gaps to compare what its rule does; check that rule"
        )
    for chosen in range(1 << len(gaps)):
        first = start | sum(1 << bit for position, bit in enumerate(gaps) if chosen >> position & 1)
        yield Range(first, first + (1 << block) - 1)


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
