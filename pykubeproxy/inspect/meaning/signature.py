"""Number the rules that packets to a destination can meet: with equal numbers, the same happens to them."""

import itertools
from collections.abc import Iterable
from functools import lru_cache

import msgspec

from pykubeproxy.inspect.meaning.sign_rule import SignedRule, sign_rule
from pykubeproxy.inspect.trace.chains import Chains
from pykubeproxy.inspect.trace.packet import Host, Packet
from pykubeproxy.inspect.trace.rule import RuleCondition
from pykubeproxy.rules.ruleset import ChainKey

# Chains that double the rules of the next one would make a signature too long.
_MOST_INLINED = 10_000
# How many chains to remember for other nodes: those of a cluster with 50,000 endpoints.
_MOST_CHAINS = 1 << 16
_ALL_BITS = 0xFFFFFFFF

# A rule that a packet can meet: its other conditions, its action, and the number of the chain below, or 0.
_Met = tuple[str, str, int]


class Signature(msgspec.Struct, frozen=True, gc=False):
    """What a chain with all chains below it does with packets to a destination.

    - `rules`: of the chain, with those of chains to which every packet goes; None if one of them leaves the chain early
    - `endpoints`: the targets of DNAT rules
    - `sources`: the values of conditions on the source
    - `bits`: those that rules may set in the mark
    - `final`: no packet leaves the chain at its end
    - `varies`: other destinations may meet other rules
    """

    number: int
    rules: tuple[_Met, ...] | None
    endpoints: frozenset[str]
    sources: frozenset[str]
    bits: int
    final: bool
    varies: bool


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

    def forget_many(self) -> None:
        """Limit memory. Equal rules may get another number from now on, which costs only time."""
        if len(self.chains) > _MOST_CHAINS or len(self._numbers) > 2 * _MOST_CHAINS:
            self._numbers.clear()
            self.chains.clear()


class Signer:
    """Computes signatures for the tables of one node. Names of chains and comments do not count."""

    def __init__(self, chains: Chains, host: Host, shared: SharedSignatures) -> None:
        self._chains = chains
        self._host = host
        self._shared = shared
        self._known: dict[tuple[ChainKey, int, str], Signature] = {}
        self._packet: Packet | None = None
        self._bits = _ALL_BITS
        self._of_packet: dict[tuple[ChainKey, int, str], Signature] = {}  # those that vary

    def sign(self, key: ChainKey, packet: Packet, bits: int = _ALL_BITS) -> Signature:
        """Return the signature of a chain for a packet; rules may have set no other `bits` of its mark."""
        if packet != self._packet:
            self._packet, self._of_packet = packet, {}
        self._bits = bits
        return self._sign(key, packet)

    def _sign(self, key: ChainKey, packet: Packet) -> Signature:
        at = (key, self._bits, packet.protocol)
        if known := self._known.get(at) or self._of_packet.get(at):
            return known
        if self._chains.is_long(key):
            rules = self._chains.rules(key, packet.destination, packet.port)
            signature = self._computed(key, map(sign_rule, rules), packet, varies=True)
        else:
            signature = self._short(key, packet)
        (self._of_packet if signature.varies else self._known)[at] = signature
        return signature

    def _short(self, key: ChainKey, packet: Packet) -> Signature:
        """Sign a chain, or take the signature of one with the same rules and the same chains below."""
        texts = tuple(self._chains.rules(key, packet.destination, packet.port))
        chain = _signed_chain(texts)
        below = [self._below(key, target, packet) for target in chain.targets]
        if chain.varies or any(it and it.varies for it in below):
            return self._computed(key, chain.rules, packet, varies=True)
        numbers = tuple([it.number if it else 0 for it in below])
        same = (texts, numbers, self._bits, packet.protocol)
        if (known := self._shared.chains.get(same)) is None:
            known = self._shared.chains[same] = self._computed(key, chain.rules, packet, varies=False)
        return known

    def _below(self, key: ChainKey, target: str, packet: Packet) -> Signature | None:
        below = ChainKey(key.table, target)
        return self._sign(below, packet) if below in self._chains else None

    def _computed(
        self, key: ChainKey, signed: Iterable[SignedRule], packet: Packet, varies: bool
    ) -> Signature:
        rules: list[_Met] = []
        endpoints: set[str] = set()
        sources: set[str] = set()
        bits, leaves, final = 0, False, False
        for rule in signed:
            if not rule.target or not self._meets(rule, packet):
                continue
            conditions = rule.conditions_for(self._bits)
            sources.update(rule.sources)
            bits |= rule.sets
            leaves |= rule.target == "RETURN" or rule.goto
            if below := self._below(key, rule.target, packet):
                endpoints |= below.endpoints
                sources |= below.sources
                bits |= below.bits
                if conditions or below.rules is None or rule.goto or len(rules) > _MOST_INLINED:
                    rules.append((conditions, rule.action, below.number))
                    final = rule.goto and not conditions
                else:
                    rules += below.rules
                    final = below.final
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
            varies,
        )

    def _meets(self, rule: SignedRule, packet: Packet) -> bool:
        if rule.protocols is not None and packet.protocol not in rule.protocols:
            return False
        return rule.possible(self._bits) and all(_meets(one, packet, self._host) for one in rule.destination)


class _SignedChain(msgspec.Struct, frozen=True):
    """The rules of a chain; `targets` are those that may be chains."""

    rules: tuple[SignedRule, ...]
    targets: tuple[str, ...]
    varies: bool


@lru_cache(maxsize=_MOST_CHAINS)
def _signed_chain(texts: tuple[str, ...]) -> _SignedChain:
    rules = tuple(map(sign_rule, texts))
    targets = tuple(dict.fromkeys(it.target for it in rules if it.target))
    return _SignedChain(rules, targets, any(it.destination for it in rules))


def _meets(one: RuleCondition, packet: Packet, host: Host) -> bool:
    """Return whether a packet meets a condition; none meets one with an unreadable value."""
    try:
        return bool(one.probability(packet, host))
    except (ValueError, ArithmeticError):
        return False
