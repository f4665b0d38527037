"""One rule as a packet meets it: its conditions in their order, and what becomes of the packet."""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from pykubeproxy.inspect.conditions import Condition, condition, unknown_module
from pykubeproxy.inspect.packet import Host, Packet

_WORD = re.compile(r'"(?:[^"\\]|\\.)*"|\S+')
_COMMENT = re.compile(r'-m comment --comment ("(?:[^"\\]|\\.)*"|\S+) ?')
_TARGETS = ("-j", "-g")


class Asked(NamedTuple):
    """A condition with its value in a rule, and whether the rule wants it not to be met."""

    condition: Condition
    value: str
    negated: bool

    def share(self, packet: Packet, host: Host) -> float:
        """The share of packets like this one that pass: 1, 0, or something in between by chance."""
        met = self.condition.share(self.value, packet, host)
        return 1.0 - met if self.negated else met

    def says(self, packet: Packet, passes: bool) -> str:
        """What is true of the packet here, in words."""
        return self.condition.says(self.value, packet, passes is not self.negated)


class Match(NamedTuple):
    """What a rule makes of a packet: the share of packets like it that the rule is for, and why."""

    share: float
    why: str
    concerns: bool
    """False if the rule is for other destinations, protocols or ports than the packet's."""


class Rule(msgspec.Struct, frozen=True):
    """A rule, taken apart for walking.

    - `target`: where it sends packets, "" if nowhere; with `goto` they do not come back
    - `options`: the target's own, with their values
    """

    text: str
    asked: tuple[Asked, ...]
    target: str
    goto: bool
    options: Mapping[str, str]

    def meet(self, packet: Packet, host: Host) -> Match:
        """Hold the packet against every condition, until one is not met; one with a value nobody can read is not."""
        try:
            return self._met(packet, host)
        except (ValueError, ArithmeticError) as error:
            return Match(0.0, f"a value of the rule cannot be read: {error}", True)

    def _met(self, packet: Packet, host: Host) -> Match:
        share = 1.0
        for position, asked in enumerate(self.asked):
            passing = asked.share(packet, host)
            if not passing:
                return self._failed(position, packet, host)
            share *= passing
        facts = [fact for asked in self.asked if (fact := asked.says(packet, True))]
        return Match(share, ", ".join(facts) or "every packet matches", True)

    def _failed(self, position: int, packet: Packet, host: Host) -> Match:
        concerns = all(
            asked.share(packet, host) for asked in self.asked[position:] if asked.condition.by_destination
        )
        return Match(0.0, self.asked[position].says(packet, False) if concerns else "", concerns)


def parse_rule(text: str) -> Rule:
    """Take a rule apart: the text that iptables-save prints after `-A CHAIN `."""
    asked: list[Asked] = []
    options: dict[str, str] = {}
    module = target = ""
    goto = False
    for name, value, negated in _options(text):
        if target:
            options[name] = value
        elif name in _TARGETS:
            target, goto = value, name == "-g"
        elif name == "-m":
            module = value
            if found := unknown_module(module):
                asked.append(Asked(found, "", False))
        elif found := condition(module if name.startswith("--") else "", name):
            asked.append(Asked(found, value, negated and found.known))
    return Rule(text, tuple(asked), target, goto, options)


def comment_of(text: str) -> str:
    """The comment of a rule's text, without the quotes around it; "" if there is none."""
    found = _COMMENT.search(text)
    if found is None:
        return ""
    return re.sub(r"\\(.)", r"\1", found[1][1:-1]) if found[1][0] == '"' else found[1]


def without_comment(text: str) -> str:
    """A rule's text without its comment."""
    return _COMMENT.sub("", text).strip()


def _options(text: str) -> Iterator[tuple[str, str, bool]]:
    """The options with their values, joined by spaces, and whether a "!" stood before them."""
    name, values, negated, next_negated = "", list[str](), False, False
    for word in _WORD.findall(text):
        if word == "!":
            next_negated = True
        elif word[0] == "-" and len(word) > 1 and not word[1].isdecimal():
            if name:
                yield name, " ".join(values), negated
            name, values, negated, next_negated = word, [], next_negated, False
        else:
            values.append(word)
    if name:
        yield name, " ".join(values), negated
