"""Align the order of rules: two may change places if no packet matches both, or if both do the same to it."""

import heapq
import ipaddress
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations_with_replacement

import msgspec

from pykubeproxy.rules.iptables_save import parse_options

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_Ports = tuple[int, int]
# The single destination address, the protocol and the single destination port, each "" if a rule names none.
_Key = tuple[str, str, str]

# Matches on fields of a packet that no rule of its chain changes.
_FIXED = frozenset(
    {"-s", "-d", "-p", "-i", "-o", "--dport", "--sport", "--dst-type", "--src-type", "--ctstate"}
)
# Matches that depend on earlier rules, or that count the packets that reach them.
_DEPENDENT = frozenset({"--mark", "--nfacct-name"})
_TARGET = frozenset({"-j", "-g", "--reject-with"})
_REMARKS = frozenset({"-m", "--comment"})
_KNOWN = _FIXED | _DEPENDENT | _TARGET | _REMARKS
_ANY_PROTOCOL = ("all", "0")


class _Rule(msgspec.Struct, frozen=True, gc=False):
    """The packets that a rule may match, and what it does to them; None and "" stand for any.

    `swappable`: the rule may change places with one that does the same to the same packet.
    """

    key: _Key = ("", "", "")
    source: _Network | None = None
    destination: _Network | None = None
    ports: _Ports | None = None
    effect: Mapping[str, str] = {}
    swappable: bool = False

    def may_swap(self, other: "_Rule") -> bool:
        """Return whether the order of two rules makes no difference to any packet."""
        same_effect = self.swappable and other.swappable and self.effect == other.effect
        return same_effect or not self._may_meet(other)

    def _may_meet(self, other: "_Rule") -> bool:
        return (
            (not self.key[1] or not other.key[1] or self.key[1] == other.key[1])
            and _overlap(self.source, other.source)
            and _overlap(self.destination, other.destination)
            and (
                self.ports is None
                or other.ports is None
                or (self.ports[0] <= other.ports[1] and other.ports[0] <= self.ports[1])
            )
        )


def aligned(rules: Sequence[str], like: Sequence[str]) -> tuple[str, ...]:
    """Return the rules of a chain in the order of `like`, as far as this changes nothing for any packet.

    The result equals `like` if and only if swaps of neighbours that may change places lead there. A rule with an unknown
    match swaps with none.
    """
    if tuple(rules) == tuple(like):
        return tuple(rules)
    after, waits_for = _successors(rules)
    places = _places(rules, like)
    ready = [(place, number) for number, place in enumerate(places) if not waits_for[number]]
    heapq.heapify(ready)
    order: list[str] = []
    while ready:
        _, number = heapq.heappop(ready)
        order.append(rules[number])
        for later in after[number]:
            waits_for[later] -= 1
            if not waits_for[later]:
                heapq.heappush(ready, (places[later], later))
    return tuple(order)


def _places(rules: Sequence[str], like: Sequence[str]) -> list[int]:
    """Return the place of each rule in `like`; a rule that it lacks goes with the rule before it."""
    known: dict[str, list[int]] = defaultdict(list)
    for place in range(len(like) - 1, -1, -1):
        known[like[place]].append(place)
    places, last = [], -1
    for rule in rules:
        if known.get(rule):
            last = known[rule].pop()
        places.append(last)
    return places


def _successors(rules: Sequence[str]) -> tuple[list[list[int]], list[int]]:
    """Return for each rule the later ones that must stay behind it, and how many earlier ones it must stay behind."""
    parsed = [_parse(rule) for rule in rules]
    after: list[list[int]] = [[] for _ in rules]
    waits_for = [0] * len(rules)
    for one, other in _candidates([rule.key for rule in parsed]):
        if not parsed[one].may_swap(parsed[other]):
            first, second = sorted((one, other))
            after[first].append(second)
            waits_for[second] += 1
    return after, waits_for


def _candidates(keys: Sequence[_Key]) -> Iterator[tuple[int, int]]:
    """Yield each pair of rules whose keys do not exclude a common packet, without comparing all pairs."""
    shapes: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, key in enumerate(keys):
        shapes[tuple(part for part, value in enumerate(key) if value)].append(number)
    for shape, other in combinations_with_replacement(shapes, 2):
        common = [part for part in shape if part in other]
        found: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for number in shapes[other]:
            found[tuple(keys[number][part] for part in common)].append(number)
        for number in shapes[shape]:
            for second in found.get(tuple(keys[number][part] for part in common), ()):
                if shape != other or number < second:
                    yield number, second


def _parse(text: str) -> _Rule:
    options = [*parse_options(text)]
    if not all(name in _KNOWN for name, _, _ in options):
        return _Rule()
    plain = {name: value for name, value, negated in options if name in _FIXED and not negated}
    try:
        source, destination = (_network(plain.get(name, "")) for name in ("-s", "-d"))
        ports = _ports(plain.get("--dport", ""))
    except ValueError:
        return _Rule()
    protocol = plain.get("-p", "")
    return _Rule(
        key=(
            str(destination.network_address) if destination and destination.num_addresses == 1 else "",
            "" if protocol in _ANY_PROTOCOL else protocol,
            str(ports[0]) if ports and ports[0] == ports[1] else "",
        ),
        source=source,
        destination=destination,
        ports=ports,
        effect={name: value for name, value, _ in options if name in _TARGET},
        swappable=not any(name in _DEPENDENT for name, _, _ in options),
    )


def _network(text: str) -> _Network | None:
    """Raises ValueError for a mask with gaps."""
    return ipaddress.ip_network(text) if text else None


def _ports(text: str) -> _Ports | None:
    if not text:
        return None
    first, _, last = text.partition(":")
    return int(first), int(last or first)


def _overlap(one: _Network | None, other: _Network | None) -> bool:
    return one is None or other is None or one.overlaps(other)
