"""An independent evaluator of rules: the outcomes of a packet and their probabilities.

It shares no code with the renderer. Packets are the first of their connection. `recent` matches a client only if
`remembered` names its list.
"""

import functools
import shlex
from collections.abc import Mapping
from ipaddress import ip_address, ip_network
from typing import NamedTuple, TypeVar

import msgspec

from pykubeproxy.rules.ruleset import ChainKey, Ruleset

# Options without a value; all others take one.
_WITHOUT_VALUE = {"--reap", "--rsource", "--set", "--rcheck", "--random-fully"}
_FINAL = {"DROP", "REJECT", "ACCEPT", "MASQUERADE"}
_MATCHES = {
    *(
        "--probability",
        "-s",
        "-d",
        "-i",
        "-p",
        "--dport",
        "--dst-type",
        "--src-type",
        "--ctstate",
        "--rcheck",
    ),
}


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
T = TypeVar("T")


class _Rule(NamedTuple):
    """`matches` has options, values and whether they are negated; a mark is (value, mask, whether negated)."""

    matches: tuple[tuple[str, str, bool], ...]
    mark: tuple[int, int, bool] | None
    options: Mapping[str, str]


class Walker:
    """Evaluates packets in the chains of one ruleset. `visited` is the number of rules that the last one visited."""

    def __init__(self, ruleset: Ruleset) -> None:
        self._chains = ruleset.chains
        self.visited = 0

    def walk(self, packet: Packet, table: str, *chains: str) -> Outcomes:
        """Return the outcomes of a packet in these chains, in order; the probabilities add up to 1."""
        self.visited = 0
        states = {0: 1.0}
        done: dict[Outcome, float] = {}
        for chain in chains:
            states = self._chain(packet, table, chain, states, done)
        _add(done, {Outcome("", mark): weight for mark, weight in states.items()})
        return {outcome: weight for outcome, weight in done.items() if weight}

    def _chain(
        self, packet: Packet, table: str, chain: str, states: dict[int, float], done: dict[Outcome, float]
    ) -> dict[int, float]:
        """Add the final outcomes to `done`; return the marks and weights of packets that pass the chain."""
        states, left = dict(states), dict[int, float]()
        for text in self._chains[ChainKey(table, chain)]:
            if not states:
                break
            self.visited += 1
            rule = _parse(text)
            share = _share(rule, packet)
            target = rule.options.get("-j")
            if not share or not target:
                continue
            taken = {mark: weight * share for mark, weight in states.items() if _has_mark(rule, mark)}
            for mark, weight in taken.items():
                states[mark] -= weight
                if states[mark] <= 0:
                    del states[mark]
            if target == "RETURN":
                _add(left, taken)
            elif target == "MARK":
                value, mask = _numbers(rule.options["--set-xmark"])
                for mark, weight in taken.items():
                    _add(states, {(mark & ~mask) ^ value: weight})
            elif target == "DNAT":
                verdict = f"to {rule.options['--to-destination']}"
                _add(done, {Outcome(verdict, mark): weight for mark, weight in taken.items()})
            elif target in _FINAL:
                _add(done, {Outcome(target, mark): weight for mark, weight in taken.items()})
            elif taken:
                _add(states, self._chain(packet, table, target, taken, done))
        _add(states, left)
        return states


def _add(to: dict[T, float], weights: Mapping[T, float]) -> None:
    for key, weight in weights.items():
        to[key] = to.get(key, 0.0) + weight


@functools.lru_cache(maxsize=200_000)
def _parse(text: str) -> _Rule:
    """Options in order; the match module stands in front of its options."""
    words = iter(shlex.split(text) if '"' in text else text.split())
    matches: list[tuple[str, str, bool]] = []
    options: dict[str, str] = {}
    mark = None
    negated = False
    for word in words:
        if word == "!":
            negated = True
            continue
        value = "" if word in _WITHOUT_VALUE else next(words)
        options.setdefault(word, value)
        if word == "--mark":
            mark = (*_numbers(value), negated)
        elif word in _MATCHES:
            matches.append((word, value, negated))
        else:
            assert not negated, f"! {word}"
        negated = False
    return _Rule(tuple(matches), mark, options)


@functools.cache
def _lies_in(address: str, network: str) -> bool:
    return ip_address(address) in ip_network(network)


def _numbers(text: str) -> tuple[int, int]:
    """VALUE/MASK."""
    value, mask = text.split("/")
    return int(value, 16), int(mask, 16)


def _has_mark(rule: _Rule, mark: int) -> bool:
    if rule.mark is None:
        return True
    value, mask, negated = rule.mark
    return (mark & mask == value) is not negated


def _share(rule: _Rule, packet: Packet) -> float:
    """Return which part of such packets a rule matches, whatever their mark."""
    share = 1.0
    for option, value, negated in rule.matches:
        if option == "--probability":
            share *= float(value)
        elif _matches(rule, option, value, packet) is negated:
            return 0.0
    return share


def _matches(rule: _Rule, option: str, value: str, packet: Packet) -> bool:
    match option:
        case "-s":
            return _lies_in(packet.source, value)
        case "-d":
            return _lies_in(packet.destination, value)
        case "-i":
            return (
                packet.interface.startswith(value[:-1]) if value.endswith("+") else packet.interface == value
            )
        case "-p":
            return packet.protocol == value
        case "--dport":
            first, _, last = value.partition(":")
            return int(first) <= packet.port <= int(last or first)
        case "--dst-type":
            return packet.local_destination
        case "--src-type":
            return packet.local_source
        case "--ctstate":
            return bool(packet.states & set(value.split(",")))
        case _:  # --rcheck
            return rule.options["--name"] in packet.remembered
