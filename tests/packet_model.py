"""An independent evaluator of rules: the outcomes of a packet and their probabilities.

It shares no code with the renderer. Packets are the first of their connection. `recent` matches a client only if
`remembered` names its list.
"""

import functools
import shlex
from collections import Counter
from collections.abc import Mapping
from ipaddress import ip_address, ip_network
from typing import NamedTuple

import msgspec

from pykubeproxy.rules.ruleset import ChainKey, Ruleset

# Options without a value; all others take one.
_WITHOUT_VALUE = {"--reap", "--rsource", "--set", "--rcheck", "--random-fully"}
_FINAL = {"DROP", "REJECT", "ACCEPT", "MASQUERADE"}


class Packet(msgspec.Struct, frozen=True):
    """`local_source` and `local_destination` tell whether the node owns the address (addrtype LOCAL)."""

    source: str
    destination: str
    protocol: str
    port: int
    interface: str = "eth0"
    local_source: bool = False
    local_destination: bool = False
    states: frozenset[str] = frozenset({"NEW"})
    remembered: frozenset[str] = frozenset()


class Outcome(NamedTuple):
    """`verdict` is DROP, REJECT, ACCEPT, "to ADDRESS:PORT", or "" if no rule decided."""

    verdict: str
    mark: int


Outcomes = Mapping[Outcome, float]
_Rule = tuple[tuple[str, str, bool], ...]


class Walker:
    """Evaluates packets in the chains of one ruleset. `visited` is the number of rules that the last one visited."""

    def __init__(self, ruleset: Ruleset) -> None:
        self._chains = ruleset.chains
        self.visited = 0

    def walk(self, packet: Packet, table: str, *chains: str) -> Outcomes:
        """Return the outcomes of a packet in these chains, in order; the probabilities add up to 1."""
        self.visited = 0
        states: Counter[int] = Counter({0: 1.0})
        done: Counter[Outcome] = Counter()
        for chain in chains:
            states = self._chain(packet, table, chain, states, done)
        for mark, weight in states.items():
            done[Outcome("", mark)] += weight
        return {outcome: weight for outcome, weight in done.items() if weight}

    def _chain(
        self, packet: Packet, table: str, chain: str, states: Counter[int], done: Counter[Outcome]
    ) -> Counter[int]:
        """Add the final outcomes to `done`; return the marks and weights of packets that pass the chain."""
        left: Counter[int] = Counter()
        for text in self._chains[ChainKey(table, chain)]:
            if not states:
                break
            self.visited += 1
            rule = _parse(text)
            share = _share(rule, packet, states)
            taken = Counter({mark: weight * share.get(mark, 0.0) for mark, weight in states.items()})
            taken = Counter({mark: weight for mark, weight in taken.items() if weight})
            target = _value(rule, "-j")
            if not taken or not target:
                continue
            states = states - taken if target != "MARK" else states
            if target == "RETURN":
                left += taken
            elif target == "MARK":
                states = _marked(rule, states, taken)
            elif target == "DNAT":
                done.update(
                    {Outcome(f"to {_value(rule, '--to-destination')}", m): w for m, w in taken.items()}
                )
            elif target in _FINAL:
                done.update({Outcome(target, mark): weight for mark, weight in taken.items()})
            else:
                states = states + self._chain(packet, table, target, taken, done)
        return states + left


@functools.lru_cache(maxsize=200_000)
def _parse(text: str) -> _Rule:
    """A rule as (option, value, whether negated); the match module stands in front of its options."""
    words = iter(shlex.split(text))
    rule: list[tuple[str, str, bool]] = []
    negated = False
    for word in words:
        if word == "!":
            negated = True
            continue
        rule.append((word, "" if word in _WITHOUT_VALUE else next(words), negated))
        negated = False
    return tuple(rule)


@functools.cache
def _lies_in(address: str, network: str) -> bool:
    return ip_address(address) in ip_network(network)


def _value(rule: _Rule, option: str) -> str:
    return next((value for name, value, _ in rule if name == option), "")


def _share(rule: _Rule, packet: Packet, states: Counter[int]) -> dict[int, float]:
    """For each mark, which part of such packets a rule matches."""
    share = dict.fromkeys(states, 1.0)
    for option, value, negated in rule:
        for mark in share:
            share[mark] *= _matches(rule, option, value, negated, packet, mark)
        if not any(share.values()):
            break
    return share


def _matches(rule: _Rule, option: str, value: str, negated: bool, packet: Packet, mark: int) -> float:
    match option:
        case "--probability":
            return float(value)
        case "-s":
            holds = _lies_in(packet.source, value)
        case "-d":
            holds = _lies_in(packet.destination, value)
        case "-i":
            holds = (
                packet.interface.startswith(value[:-1]) if value.endswith("+") else packet.interface == value
            )
        case "-p":
            holds = packet.protocol == value
        case "--dport":
            first, _, last = value.partition(":")
            holds = int(first) <= packet.port <= int(last or first)
        case "--dst-type":
            holds = packet.local_destination
        case "--src-type":
            holds = packet.local_source
        case "--ctstate":
            holds = bool(packet.states & set(value.split(",")))
        case "--mark":
            mark_value, mask = (int(part, 16) for part in value.split("/"))
            holds = mark & mask == mark_value
        case "--rcheck":
            holds = _value(rule, "--name") in packet.remembered
        case _:
            holds = True
            assert not negated, f"! {option}"
    return float(holds is not negated)


def _marked(rule: _Rule, states: Counter[int], taken: Counter[int]) -> Counter[int]:
    """--set-xmark VALUE/MASK: clear the bits of the mask, then xor the value."""
    value, mask = (int(part, 16) for part in _value(rule, "--set-xmark").split("/"))
    after = states - taken
    for mark, weight in taken.items():
        after[(mark & ~mask) ^ value] += weight
    return after
