"""Group the clients of an origin that get the same before, and the same after."""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

from pykubeproxy.inspect.meaning.addresses import (
    Addresses,
    Range,
    intersection,
    parse_addresses,
    subtract,
    union,
)
from pykubeproxy.inspect.meaning.outcomes import Meaning, MeaningChange, Outcome

# The outcomes of a packet with their probabilities.
Chances = Mapping[Outcome, float]


class ClientGroup(NamedTuple):
    """Clients, and what their packets get.

    `endpoints_only`: each of them is an endpoint of the service, which is masqueraded when it reaches itself.
    """

    clients: Addresses
    before: Chances
    after: Chances
    endpoints_only: bool


def differing_groups(change: MeaningChange) -> list[ClientGroup]:
    """Return the groups of clients that get something else after than before; the largest first."""
    groups: dict[tuple[frozenset[tuple[Outcome, float]], ...], list[Range]] = {}
    for clients in _ranges(change):
        chances = tuple(frozenset(_chances(it, clients).items()) for it in (change.before, change.after))
        if chances[0] != chances[1]:
            groups.setdefault(chances, []).append(clients)
    endpoints = endpoints_of(change)
    found = [
        ClientGroup(
            union([(it,) for it in clients]),
            dict(before),
            dict(after),
            not subtract(tuple(clients), endpoints),
        )
        for (before, after), clients in groups.items()
    ]
    return sorted(found, key=lambda it: -sum(last - first for first, last in it.clients))


def everyone(change: MeaningChange) -> Addresses:
    """Return all clients of the origin."""
    return union(
        (part.clients,)
        for meaning in (change.before, change.after)
        for parts in meaning.values()
        for part in parts
    )


def _ranges(change: MeaningChange) -> Iterator[Range]:
    """Yield ranges of clients between which nothing changes."""
    parts = [
        part.clients
        for meaning in (change.before, change.after)
        for some in meaning.values()
        for part in some
    ]
    known = union((it,) for it in parts)
    for first, following in pairwise(sorted({it.first for it in parts} | {it.last + 1 for it in parts})):
        yield from intersection((Range(first, following - 1),), known)


def _chances(meaning: Meaning, clients: Range) -> Chances:
    return {
        outcome: round(part.probability, 6)
        for outcome, parts in meaning.items()
        for part in parts
        if part.clients.first <= clients.first <= part.clients.last
    }


def endpoints_of(change: MeaningChange) -> Addresses:
    """Return the addresses of all endpoints."""
    outcomes = {outcome.endpoint for meaning in (change.before, change.after) for outcome in meaning}
    return union(parse_addresses(it.rpartition(":")[0].strip("[]")) for it in outcomes if it)
