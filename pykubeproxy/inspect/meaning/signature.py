"""Number the rules that packets to a destination can meet: with equal numbers, the same happens to them."""

import itertools
from collections.abc import Sequence
from functools import lru_cache

import msgspec

from pykubeproxy.inspect.limit import RuleLimit
from pykubeproxy.inspect.meaning.sign_rule import SignedRule, sign_rule
from pykubeproxy.inspect.trace.chains import Chains
from pykubeproxy.inspect.trace.packet import Packet
from pykubeproxy.rules.ruleset import ChainKey

# Chains that double the rules of the next one would make a signature too long.
_MOST_INLINED = 10_000
# How many rules, endpoints and sources all signatures of a node may have; chains repeat those of the chains below.
_MOST_VALUES, _LEAST_VALUES, _TIMES = 50_000_000, 5_000_000, 100
# How many chains to remember for other nodes: those of a cluster with 50,000 endpoints.
_MOST_CHAINS = 1 << 16
_ALL_BITS = 0xFFFFFFFF

# A rule that a packet can meet: its other conditions, its action, and the number of the chain below, or 0.
_Met = tuple[str, str, int]
# A chain, the bits of the mark that may be set, and a protocol.
_At = tuple[ChainKey, int, str]


class Signature(msgspec.Struct, frozen=True, gc=False):
    """What a chain with all chains below it does with packets to a destination.

    - `rules`: of the chain, with those of chains to which every packet goes; None if one of them leaves the chain early
    - `endpoints`: the targets of DNAT rules
    - `sources`: the values of conditions on the source
    - `bits`: those that rules may set in the mark
    - `final`: no packet leaves the chain at its end
    """

    number: int
    rules: tuple[_Met, ...] | None
    endpoints: frozenset[str]
    sources: frozenset[str]
    bits: int
    final: bool


class SharedSignatures:
    """Signatures of chains of any node. Nodes share most chains, so each is signed once."""

    def __init__(self) -> None:
        self._next = itertools.count(1)
        self._numbers: dict[tuple[_Met, ...], int] = {}
        self.chains: dict[tuple[object, ...], Signature] = {}

    def number(self, rules: tuple[_Met, ...]) -> int:
        """Return the number for a sequence of rules; it is never used for another one."""
        if (known := self._numbers.get(rules)) is None:
            known = self._numbers[rules] = next(self._next)
        return known

    def forget_many(self) -> bool:
        """Limit memory. Return whether equal rules get another number from now on, which costs only time."""
        full = len(self.chains) > _MOST_CHAINS or len(self._numbers) > 2 * _MOST_CHAINS
        if full:
            self._numbers.clear()
            self.chains.clear()
        return full


class Signer:
    """Computes signatures for the tables of one node. Names of chains and comments do not count."""

    def __init__(self, chains: Chains, shared: SharedSignatures) -> None:
        self._chains = chains
        self._limit = RuleLimit(_MOST_VALUES, _LEAST_VALUES, _TIMES)
        self._shared = shared
        self._known: dict[_At, Signature] = {}
        self._packet: Packet | None = None
        self._bits = _ALL_BITS
        # Those of chains whose rules differ by destination.
        self._of_packet: dict[_At, Signature] = {}

    def sign(self, key: ChainKey, packet: Packet, bits: int = _ALL_BITS) -> Signature:
        """Return the signature of a chain for a packet; rules may have set no other `bits` of its mark.

        Raises TooManyRules.
        """
        if packet != self._packet:
            self._packet, self._of_packet = packet, {}
        self._bits = bits
        return self._sign(key, packet)

    def _sign(self, key: ChainKey, packet: Packet) -> Signature:
        at = (key, self._bits, packet.protocol)
        if known := self._known.get(at) or self._of_packet.get(at):
            return known
        rules, varies = self._rules(key, packet)
        self._limit.enter(key, len(rules))
        below: list[Signature | None] = []
        for rule in rules:
            to = ChainKey(key.table, rule.target)
            if to in self._chains:
                below.append(self._sign(to, packet))
                varies = varies or (to, self._bits, packet.protocol) in self._of_packet
            else:
                below.append(None)
        numbers = [it.number if it else 0 for it in below]
        same = (tuple([it.text for it in rules]), tuple(numbers), self._bits)
        if (signature := self._shared.chains.get(same)) is None:
            signature = self._shared.chains[same] = self._computed(rules, below)
        (self._of_packet if varies else self._known)[at] = signature
        return signature

    def _rules(self, key: ChainKey, packet: Packet) -> tuple[Sequence[SignedRule], bool]:
        """Return the rules that a packet can match, and whether packets to other destinations can match others."""
        texts = self._chains.rules(key, packet.destination, packet.port)
        if varies := self._chains.is_long(key):
            rules: Sequence[SignedRule] = [*map(sign_rule, texts)]
        else:
            chain = _signed_chain(tuple(texts))
            rules, varies = chain.rules, chain.varies
        bits, protocol = self._bits, packet.protocol
        if varies:
            rules = [it for it in rules if not it.destination or it.meets(packet)]
        return [
            it for it in rules if (not it.protocols or protocol in it.protocols) and it.possible(bits)
        ], varies

    def _computed(self, signed: Sequence[SignedRule], below: Sequence[Signature | None]) -> Signature:
        rules: list[_Met] = []
        endpoints: set[str] = set()
        sources: set[str] = set()
        bits, leaves, final = 0, False, False
        for rule, onward in zip(signed, below, strict=True):
            conditions = rule.conditions_for(self._bits)
            sources.update(rule.sources)
            bits |= rule.sets
            leaves |= rule.target == "RETURN" or rule.goto
            if onward:
                self._limit.count(len(onward.rules or ()) + len(onward.endpoints) + len(onward.sources))
                endpoints |= onward.endpoints
                sources |= onward.sources
                bits |= onward.bits
                if conditions or onward.rules is None or rule.goto or len(rules) > _MOST_INLINED:
                    rules.append((conditions, rule.action, onward.number))
                    final = rule.goto and not conditions
                else:
                    rules += onward.rules
                    final = onward.final
            else:
                rules.append((conditions, f"{rule.action} {rule.target}", 0))
                final = rule.ends and not conditions
                if rule.endpoint:
                    endpoints.add(rule.endpoint)
            if final:
                break
        met = tuple(rules)
        return Signature(
            self._shared.number(met),
            None if leaves else met,
            frozenset(endpoints),
            frozenset(sources),
            bits,
            final and not leaves,
        )


class _SignedChain(msgspec.Struct, frozen=True):
    """The rules of a chain that may match; `varies`: not for all destinations."""

    rules: tuple[SignedRule, ...]
    varies: bool


@lru_cache(maxsize=_MOST_CHAINS)
def _signed_chain(texts: tuple[str, ...]) -> _SignedChain:
    rules = tuple(it for it in map(sign_rule, texts) if it.target and not it.never)
    return _SignedChain(rules, any(it.destination for it in rules))
