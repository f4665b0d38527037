"""Number the rules that packets to a destination can meet: with equal numbers, the same happens to them."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, reduce
from operator import or_
from typing import NamedTuple

import msgspec

from pykubeproxy.inspect.limit import RuleLimit
from pykubeproxy.inspect.packets.iptables import (
    IptablesRules,
    RuleCondition,
    compile_rule,
    mark_and_mask,
    unknown_module,
)
from pykubeproxy.inspect.packets.packet import DNAT, NEW, SNAT, UNTRACKED, NodeNetwork, Packet
from pykubeproxy.inspect.packets.rule_set import BaseChain, Hook
from pykubeproxy.rules.iptables_save import parse_number, parse_options
from pykubeproxy.rules.ruleset import ChainKey

# How many rules one node may have on the way of packets to all its destinations.
_MOST_RULES, _LEAST_RULES, _TIMES = 50_000_000, 5_000_000, 100
# How many chains to remember for other nodes: those of a cluster with 50,000 endpoints.
_MOST_CHAINS = 1 << 17
# Cap inlining: nested chains grow exponentially.
_MOST_INLINED = 256
# Options of a rule that change nothing for a packet.
_WITHOUT_EFFECT = frozenset(("-m", "--comment", "--nfacct-name", "--random-fully"))
_SOURCES = ("-s", "--src-range")
# Conditions on the destination do not depend on the node.
_NO_NETWORK = NodeNetwork()
_ALL_BITS = 0xFFFFFFFF
# Versions of kube-proxy give probabilities with 5 to 11 decimals.
_DECIMALS = 5


class _ReducedRule(msgspec.Struct, frozen=True, gc=False):
    """What a rule does to first packets whose destination, port and protocol meet its conditions.

    - `text`: without these conditions, comments and the name of a chain
    - `sources`, `endpoint`: the addresses that it names
    - `never`: no first packet meets the conditions
    - `needs`: the bits that must be set in the mark of a packet that matches
    - `stays_with`: the bits without which each packet leaves the chain here
    - `sets`: the bits of the mark that it may set
    """

    destination: tuple[RuleCondition, ...]
    protocol: tuple[RuleCondition, ...]
    text: str
    target: str
    goto: bool
    sources: tuple[str, ...]
    endpoint: str
    never: bool
    needs: int
    stays_with: int
    sets: int

    def meets(self, packet: Packet) -> bool:
        """Return whether a packet meets the conditions on the destination; none meets one with an unreadable value."""
        try:
            return all(one.probability(packet, _NO_NETWORK) for one in (*self.destination, *self.protocol))
        except (ValueError, ArithmeticError):
            return False


@lru_cache(maxsize=1 << 16)
def _reduced(text: str) -> _ReducedRule:
    compiled = compile_rule(text)
    named = [one for one in compiled.conditions if one.condition.by_destination]
    apart = {"-j", "-g", *(one.option for one in named)}
    words = ["-g"] if compiled.goto else []
    sources: list[str] = []
    never, needs, stays_with = False, 0, 0
    for name, value, negated in parse_options(text):
        if name in apart or (name in _WITHOUT_EFFECT and not (name == "-m" and unknown_module(value))):
            continue
        if name in ("--ctstate", "--state") and (met := _of_first_packet(value, negated)) is not None:
            never |= not met
            continue
        if name == "--mark" and "connmark" not in text:
            if negated:
                stays_with = _bits(value)
            else:
                needs |= _bits(value)
        elif name == "--probability":
            value = _rounded(value)
        words.append(f"! {name} {value}" if negated else f"{name} {value}")
        if name in _SOURCES:
            sources.append(value)
    return _ReducedRule(
        tuple(one for one in named if one.option != "-p"),
        tuple(one for one in named if one.option == "-p"),
        " ".join(words),
        compiled.target,
        compiled.goto,
        tuple(sources),
        compiled.options.get("--to-destination", "") if compiled.target == "DNAT" else "",
        never,
        needs,
        stays_with if compiled.target == "RETURN" and not (named or never) and len(words) == 1 else 0,
        reduce(or_, map(_bits, compiled.options.values()), 0) if compiled.target == "MARK" else 0,
    )


def _of_first_packet(value: str, negated: bool) -> bool | None:
    """Return whether first packets are in one of these states; None if it depends on address translation."""
    states = set(value.split(","))
    if NEW in states:
        return not negated
    return None if states & {DNAT, SNAT, UNTRACKED} else negated


def _bits(mark: str) -> int:
    """Return the bits of a mark such as "0x4000/0x4000"; 0 if it is unreadable, as no packet matches then."""
    try:
        return mark_and_mask(mark)[0]
    except ValueError:
        return 0


def _rounded(probability: str) -> str:
    try:
        return f"{float(probability):.{_DECIMALS}f}"
    except ValueError:
        return probability


# Each rule of a chain, with the number of the chain to which it jumps, or 0.
_Numbered = tuple[tuple[str, int], ...]


class NamedValues(NamedTuple):
    """The endpoints ("ip:port") that rules choose, the addresses of these and of sources, the bits of marks they set."""

    endpoints: frozenset[str]
    addresses: frozenset[str]
    bits: int


class _ChainFacts(NamedTuple):
    """What is known about a chain with a number.

    - `inlined`: its rules, for chains that send every packet here; None if there are many, or one leaves the chain early
    - `endpoints`, `sources`, `bits`: those that its own rules name or set
    - `below`: the numbers of the chains to which it jumps
    """

    inlined: _Numbered | None
    endpoints: Sequence[str]
    sources: Sequence[str]
    bits: int
    below: Sequence[int]


class SharedNumbers:
    """The numbers of chains of any node. Nodes share most chains."""

    def __init__(self) -> None:
        self._next = itertools.count(1)
        self._numbers: dict[_Numbered, int] = {}
        self._chains: dict[int, _ChainFacts] = {}
        self._known: dict[tuple[int, ...], NamedValues] = {}
        # The number of a chain in which nothing happens.
        self.nothing = self.number((), ())

    def number(self, rules: Sequence[_ReducedRule], below: Sequence[int]) -> int:
        """Return the number of a chain with these rules; it is never used for others."""
        numbered = self._numbered(rules, below)
        if (known := self._numbers.get(numbered)) is None:
            known = self._numbers[numbered] = next(self._next)
            returns = any(rule.goto or rule.target == "RETURN" for rule in rules)
            self._chains[known] = _ChainFacts(
                numbered if not returns and len(numbered) <= _MOST_INLINED else None,
                tuple(rule.endpoint for rule in rules if rule.endpoint),
                tuple(source for rule in rules for source in rule.sources),
                reduce(or_, [rule.sets for rule in rules], 0),
                tuple(number for number in below if number),
            )
        return known

    def number_of(self, content: bytes, addresses: Iterable[str]) -> int:
        """Return the number of rules with this content, which name these addresses; it is never used for others."""
        numbered = ((content.hex(), 0),)
        if (known := self._numbers.get(numbered)) is None:
            known = self._numbers[numbered] = next(self._next)
            self._chains[known] = _ChainFacts(None, (), tuple(addresses), 0, ())
        return known

    def _numbered(self, rules: Sequence[_ReducedRule], below: Sequence[int]) -> _Numbered:
        """Return the rules with those of chains to which every packet goes."""
        found: list[tuple[str, int]] = []
        for rule, jump in zip(rules, below, strict=True):
            if not jump:
                found.append((f"{rule.text} {rule.target}", 0))
            elif not rule.text and (inlined := self._chains[jump].inlined) is not None:
                found += inlined
            else:
                found.append((rule.text, jump))
        return tuple(found)

    def named(self, numbers: tuple[int, ...]) -> "NamedValues":
        """Return the addresses that chains with these numbers and those below name."""
        if (known := self._known.get(numbers)) is None:
            own = [self._chains[number] for number in self._with_below(numbers)]
            endpoints = frozenset(endpoint for one in own for endpoint in one.endpoints)
            addresses = {endpoint.rpartition(":")[0].strip("[]") for endpoint in endpoints}
            addresses.update(source for one in own for source in one.sources)
            known = self._known[numbers] = NamedValues(
                endpoints, frozenset(addresses), reduce(or_, [one.bits for one in own], 0)
            )
        return known

    def forget_many(self) -> bool:
        """Limit memory. Return whether equal rules get another number from now on, which costs only time."""
        full = len(self._numbers) > _MOST_CHAINS or len(self._known) > _MOST_CHAINS
        if full:
            self._numbers.clear()
            self._chains.clear()
            self._known.clear()
            self.nothing = self.number((), ())
        return full

    def _with_below(self, numbers: Iterable[int]) -> set[int]:
        found: set[int] = set()
        waiting = [abs(number) for number in numbers]
        while waiting:
            number = waiting.pop()
            if number not in found:
                found.add(number)
                waiting += self._chains[number].below
        return found


class Fingerprints:
    """The numbers of the chains of one node."""

    def __init__(self, rules: IptablesRules, shared: SharedNumbers) -> None:
        self._rules = rules
        self._shared = shared
        self._limit = RuleLimit(_MOST_RULES, _LEAST_RULES, _TIMES)
        # By chain, protocol and bits of the mark: the same for all destinations, or those of the latest packet.
        self._fixed: dict[tuple[ChainKey, str, int], int] = {}
        self._of_packet: dict[tuple[ChainKey, str, int], int] = {}
        first = [base for hook in (Hook.PREROUTING, Hook.OUTPUT) for base in rules.base_chains(hook)]
        self._before = [base for base in first if base.key.table in ("raw", "mangle", "nat")]
        self._after = [base for hook in Hook for base in rules.base_chains(hook) if base not in self._before]
        self._known: dict[Packet, tuple[int, ...] | None] = {}
        self._known_after: dict[tuple[tuple[bool, ...], str, int], tuple[int, ...]] = {}
        self._narrow_addresses: set[str] = set()
        self._narrow_ports: set[int] = set()
        self._wide_rules: dict[_ReducedRule, None] = {}
        self._index_after()

    def of(self, packet: Packet) -> tuple[int, ...] | None:
        """Return numbers that are equal only if the same happens to packets; None if no numbers can tell.

        Raises TooManyRules.
        """
        if packet not in self._known:
            self._known[packet] = self._numbers(packet)
        return self._known[packet]

    def _numbers(self, packet: Packet) -> tuple[int, ...] | None:
        before = self._of_chains(self._before, packet, _ALL_BITS)
        endpoints, _, bits = self._shared.named(before)
        there = [packet, *(_translated(packet.protocol, endpoint) for endpoint in sorted(endpoints))]
        after = [self._after_translation(possible, bits) for possible in there]
        if len(set(after)) == 1:
            del after[1:]
        later = self._shared.named(tuple(number for some in after for number in some))
        if later.endpoints or later.bits & ~bits:
            return None
        return (*before, *(number for some in after for number in some))

    def _after_translation(self, packet: Packet, bits: int) -> tuple[int, ...]:
        """Return the numbers after DNAT; they are the same for destinations that meet the same rules."""
        met = self._met_after(packet)
        if met is None:
            return self._of_chains(self._after, packet, bits)
        case = (met, packet.protocol, bits)
        if (known := self._known_after.get(case)) is None:
            known = self._known_after[case] = self._of_chains(self._after, packet, bits)
        return known

    def _met_after(self, packet: Packet) -> tuple[bool, ...] | None:
        """Return which rules after DNAT a packet meets; None if one of them names its destination or port."""
        if packet.destination in self._narrow_addresses or packet.port in self._narrow_ports:
            return None
        return tuple([rule.meets(packet) for rule in self._wide_rules])

    def _index_after(self) -> None:
        """Find the rules after DNAT that have conditions on the destination."""
        for rule in self._rules_below(base.key for base in self._after):
            values = {one.option: one.value for one in rule.destination if not one.negated}
            address, _, length = values.get("-d", "").partition("/")
            if address and length in ("", "128" if ":" in address else "32"):
                self._narrow_addresses.add(address)
            elif port := parse_number(values.get("--dport", "")):
                self._narrow_ports.add(port)
            elif rule.destination:
                self._wide_rules[rule] = None

    def _rules_below(self, keys: Iterable[ChainKey]) -> Iterator[_ReducedRule]:
        waiting, seen = [*keys], set[ChainKey]()
        while waiting:
            key = waiting.pop()
            if key in seen:
                continue
            seen.add(key)
            for rule in map(_reduced, self._rules.texts(key)):
                yield rule
                if to := self._rules.jump(key, rule.target):
                    waiting.append(to)

    def _of_chains(self, chains: Iterable[BaseChain], packet: Packet, bits: int) -> tuple[int, ...]:
        """Return the numbers of base chains for packets whose mark has no other bits."""
        self._of_packet = {}
        numbers = [(self._number(base.key, packet, bits), base.drops) for base in chains]
        return tuple([-number if drops else number for number, drops in numbers])

    def _number(self, key: ChainKey, packet: Packet, bits: int) -> int:
        at = (key, packet.protocol, bits)
        if (known := self._fixed.get(at) or self._of_packet.get(at)) is not None:
            return known
        every = self._rules.met(key, packet)
        self._limit.enter(key, len(every))
        reduced = [_reduced(compiled_rule.text) for compiled_rule in every]
        varies = self._rules.is_long(key) or any(reduced_rule.destination for reduced_rule in reduced)
        rules: list[_ReducedRule] = []
        below: list[int] = []
        for rule in reduced:
            if rule.stays_with & ~bits:
                break
            if rule.never or rule.needs & ~bits or not rule.target:
                continue
            if (rule.destination or rule.protocol) and not rule.meets(packet):
                continue
            number = 0
            if to := self._rules.jump(key, rule.target):
                number = self._number(to, packet, bits)
                varies = varies or (to, packet.protocol, bits) not in self._fixed
                if number == self._shared.nothing and not rule.goto:
                    continue
            rules.append(rule)
            below.append(number)
        number = self._shared.number(rules, below)
        (self._of_packet if varies else self._fixed)[at] = number
        return number


@lru_cache(maxsize=1 << 14)
def _translated(protocol: str, endpoint: str) -> Packet:
    address, _, port = endpoint.rpartition(":")
    return Packet(protocol, "", address.strip("[]"), int(port) if port.isdecimal() else 0)
