"""Number what tables of nftables do with packets to a destination: with equal numbers, the same happens to them.

A number stands for the rules that all packets may meet, and for the elements of sets and maps with the destination or
its endpoints, with the chains to which these lead.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import msgspec

from pykubeproxy.inspect.meaning.fingerprints import SharedNumbers
from pykubeproxy.inspect.packets.packet import Packet
from pykubeproxy.rules.nft_list import JUMPS, NAMED_SETS, Json, NftRuleset, SetKey, element_key
from pykubeproxy.rules.nft_text import expression_text
from pykubeproxy.rules.ruleset import ChainKey

_ADDRESS = re.compile(rb'"([0-9a-f.:]*[.:][0-9a-f.:]+)"(?:, ?"len": ?([0-9]+))?')
_NUMBER = re.compile(rb"(?<=[ :\[])[0-9]{1,5}(?=[],}])")
_RANGE = b'"range"'


class _At(NamedTuple):
    """The destination, protocol and port in the key of an element; "" and 0 for those that it does not have."""

    address: str = ""
    protocol: str = ""
    port: int = 0


class _Reached(NamedTuple):
    """Chains with all chains below them: a digest of their rules, and what these name; ports are among the numbers."""

    digest: bytes
    addresses: frozenset[str]
    numbers: frozenset[int]
    has_ranges: bool


class NftFingerprints:
    """The numbers of the rules of one node."""

    def __init__(self, ruleset: NftRuleset, shared: SharedNumbers) -> None:
        self._ruleset = ruleset
        self._shared = shared
        self._elements: dict[_At, list[bytes]] = {}
        self._of_address: dict[str, list[bytes]] = {}
        self._known: dict[tuple[bytes, ...], _Reached] = {}
        every = list(self._index())
        base = (key for key, chain in ruleset.chains.items() if chain.hook)
        self._frame = self._reached([*base, *self._jumps(every)], every)

    def of(self, packet: Packet) -> tuple[int, ...] | None:
        """Return numbers that are equal only if the same happens to packets; None if no numbers can tell."""
        keys = product((packet.destination, ""), (packet.protocol, ""), (packet.port, 0))
        first = self._lead(one for key in keys for one in self._elements.get(_At(*key), ()))
        there = sorted(first.addresses - {packet.destination})
        later = self._lead(
            (
                *(one for address in there for one in self._of_address.get(address, ())),
                *(
                    one
                    for key in product((packet.protocol, ""), sorted(first.numbers))
                    for one in self._elements.get(_At("", *key), ())
                ),
            )
        )
        if first.has_ranges or later.has_ranges or self._frame.has_ranges:
            return None
        return (
            self._shared.number_of(
                self._frame.digest + first.digest + later.digest,
                self._frame.addresses | first.addresses | later.addresses,
            ),
        )

    def _index(self) -> Iterator[bytes]:
        """Index the elements whose keys name a destination or a port; yield those that every packet may meet."""
        keys = _keys(self._ruleset)
        for name, one in self._ruleset.sets.items():
            # Elements with a timeout come with clients.
            for element in () if one.timeout else one.elements:
                at, rest = _place(element, keys.get(name, ()))
                text = msgspec.json.encode((name.name, rest))
                if at == _At():
                    yield text
                    continue
                self._elements.setdefault(at, []).append(text)
                if at.address:
                    self._of_address.setdefault(at.address, []).append(text)

    def _lead(self, elements: Iterable[bytes]) -> _Reached:
        """Return elements with the chains to which they lead."""
        texts = tuple(sorted(elements))
        if (known := self._known.get(texts)) is None:
            known = self._known[texts] = self._reached(self._jumps(texts), texts)
        return known

    def _jumps(self, texts: Iterable[bytes]) -> list[ChainKey]:
        """Return the chains of any table to which elements lead."""
        targets = {name.decode() for text in texts for name in JUMPS.findall(text)}
        return [key for key in self._ruleset.chains if key.chain in targets] if targets else []

    def _reached(self, chains: Iterable[ChainKey], texts: Sequence[bytes]) -> _Reached:
        found = list(texts)
        waiting, seen = list(chains), set[ChainKey]()
        while waiting:
            key = waiting.pop()
            if key in seen or key not in self._ruleset.chains:
                continue
            seen.add(key)
            chain = self._ruleset.chains[key]
            found.append(f"{key} {chain.hook} {chain.priority} {chain.kind} {chain.drops}".encode())
            for rule in chain.rules:
                found.append(rule.json)
                waiting += [ChainKey(key.table, name.decode()) for name in JUMPS.findall(rule.json)]
                for name in NAMED_SETS.findall(rule.json):
                    known = self._ruleset.sets.get(SetKey(key.table, name.decode()))
                    found.append(str(known.timeout if known else -1).encode())
        text = b"\n".join(found)
        named = {
            address.decode() + (f"/{length.decode()}" if length else "")
            for address, length in _ADDRESS.findall(text)
        }
        numbers = frozenset(map(int, _NUMBER.findall(text)))
        return _Reached(
            hashlib.blake2b(text, digest_size=16).digest(), frozenset(named), numbers, _RANGE in text
        )


def _keys(ruleset: NftRuleset) -> Mapping[SetKey, Sequence[str]]:
    """Return the fields in the keys by which rules look up each set or map; none if they use several keys."""
    found: dict[SetKey, set[tuple[str, ...]]] = {}
    for key, chain in ruleset.chains.items():
        for rule in chain.rules:
            for name, fields in _lookups(rule.statements) if b'"@' in rule.json else ():
                found.setdefault(SetKey(key.table, name[1:]), set()).add(fields)
    return {name: next(iter(fields)) for name, fields in found.items() if len(fields) == 1}


def _lookups(value: Json) -> Iterator[tuple[str, tuple[str, ...]]]:
    match value:
        case {"left": key, "right": str(name)} | {"key": key, "data": str(name)} if name.startswith("@"):
            parts = key["concat"] if isinstance(key, Mapping) and "concat" in key else [key]
            yield name, tuple(map(expression_text, parts)) if isinstance(parts, list) else ()
        case Mapping():
            for one in value.values():
                yield from _lookups(one)
        case list():
            for one in value:
                yield from _lookups(one)


def _place(element: Json, fields: Sequence[str]) -> tuple[_At, Json]:
    """Return the destination and port that the key of an element names, and the rest of the element.

    Without any, or with several, all of it is the rest.
    """
    key, data = element if isinstance(element, list) else (element, None)
    key = element_key(key)
    parts = key["concat"] if isinstance(key, Mapping) and "concat" in key else [key]
    at, rest = _At(), list[Json]()
    if not isinstance(parts, list) or len(parts) != len(fields):
        return _At(), element
    for field, part in zip(fields, parts, strict=True):
        match field.rpartition(" ")[2], part:
            case "daddr", str(address):
                at = at._replace(address=address)
            case "l4proto", str(protocol):
                at = at._replace(protocol=protocol)
            case "dport", int(port):
                at = at._replace(port=port)
            case (("daddr" | "l4proto" | "dport"), _):
                return _At(), element
            case _:
                rest.append(part)
    return at, [rest, data]
