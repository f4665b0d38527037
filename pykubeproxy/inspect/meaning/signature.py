"""Number the rules that packets to a destination can meet: with equal numbers, the same happens to them."""

from functools import lru_cache
from typing import NamedTuple

import msgspec

from pykubeproxy.inspect.trace.chains import Chains
from pykubeproxy.inspect.trace.packet import Host, Packet
from pykubeproxy.inspect.trace.rule import RuleCondition, compile_rule
from pykubeproxy.rules.parse import parse_options
from pykubeproxy.rules.ruleset import ChainKey

# Chains that double the rules of the next one would make a signature too long.
_MOST_INLINED = 10_000


class _Met(NamedTuple):
    """A rule for packets that meet its conditions on the destination.

    `conditions` are the other ones. `below` is the number of the chain that it jumps to, or 0.
    """

    conditions: str
    action: str
    below: int


# Numbers for sequences of rules, shared by all tables to compare.
Numbers = dict[tuple[_Met, ...], int]


class _Compiled(msgspec.Struct, frozen=True, gc=False):
    """A rule whose conditions on the destination are apart from the others.

    `action` is the target with its options, without the name of a chain of the proxy.
    """

    destination: tuple[RuleCondition, ...]
    conditions: str
    target: str
    action: str
    endpoint: str


class _Signature(NamedTuple):
    """The number of a chain with all chains below it.

    - `rules`: of the chain, with those of chains to which every packet goes; None if one of them leaves the chain early
    - `endpoints`: the targets of DNAT rules
    - `varies`: other destinations may meet other rules
    """

    number: int
    rules: tuple[_Met, ...] | None
    endpoints: frozenset[str]
    varies: bool


class Signer:
    """Computes signatures for the tables of one node. Names of chains and comments do not count."""

    def __init__(self, chains: Chains, host: Host, numbers: Numbers) -> None:
        self._chains = chains
        self._host = host
        self._numbers = numbers
        self._known: dict[ChainKey, _Signature] = {}
        self._packet: Packet | None = None
        self._of_packet: dict[ChainKey, _Signature] = {}  # those that vary

    def sign(self, key: ChainKey, packet: Packet) -> tuple[int, frozenset[str]]:
        """Return the number of the rules that a packet can meet in a chain and below, and the endpoints in them."""
        if packet != self._packet:
            self._packet, self._of_packet = packet, {}
        signature = self._sign(key, packet)
        return signature.number, signature.endpoints

    def _sign(self, key: ChainKey, packet: Packet) -> _Signature:
        if known := self._known.get(key) or self._of_packet.get(key):
            return known
        rules: list[_Met] = []
        endpoints: set[str] = set()
        leaves, varies = False, self._chains.is_long(key)
        for rule in map(_compile, self._chains.rules(key, packet.destination, packet.port)):
            varies |= bool(rule.destination)
            if not rule.target or not all(_meets(one, packet, self._host) for one in rule.destination):
                continue
            leaves |= rule.target == "RETURN" or rule.action.startswith("-g")
            below = ChainKey(key.table, rule.target)
            if below in self._chains:
                signature = self._sign(below, packet)
                endpoints |= signature.endpoints
                varies |= signature.varies
                apart = rule.conditions or signature.rules is None or rule.action != "-j"
                if apart or len(rules) > _MOST_INLINED:
                    rules.append(_Met(rule.conditions, rule.action, signature.number))
                else:
                    rules += signature.rules or ()
            else:
                rules.append(_Met(rule.conditions, f"{rule.action} {rule.target}", 0))
                if rule.endpoint:
                    endpoints.add(rule.endpoint)
        met = tuple(rules)
        number = self._numbers.setdefault(met, len(self._numbers) + 1)
        signature = _Signature(number, None if leaves else met, frozenset(endpoints), varies)
        (self._of_packet if varies else self._known)[key] = signature
        return signature


def _meets(one: RuleCondition, packet: Packet, host: Host) -> bool:
    """Return whether a packet meets a condition; none meets one with an unreadable value."""
    try:
        return bool(one.probability(packet, host))
    except (ValueError, ArithmeticError):
        return False


@lru_cache(maxsize=1 << 18)
def _compile(text: str) -> _Compiled:
    compiled = compile_rule(text)
    destination = tuple(one for one in compiled.conditions if one.condition.by_destination)
    if all(one.option == "-p" for one in destination):
        destination = ()
    apart = {"-m", "--comment", *(one.option for one in destination)}
    words: list[str] = []
    action: list[str] = []
    for name, value, negated in parse_options(text):
        if name in ("-j", "-g") or action:
            action += (name,) if name in ("-j", "-g") else (name, value)
        elif name not in apart:
            words += ("!", name, value) if negated else (name, value)
    return _Compiled(
        destination,
        " ".join(words),
        compiled.target,
        " ".join(action),
        compiled.options.get("--to-destination", "") if compiled.target == "DNAT" else "",
    )
