"""A rule compiled for tracing: its conditions in order, its target, and the target's options."""

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import msgspec

from pykubeproxy.inspect.trace.conditions import Condition, condition, unknown_module
from pykubeproxy.inspect.trace.packet import Host, Packet
from pykubeproxy.rules.parse import parse_options


class RuleCondition(NamedTuple):
    """A condition with its value in a rule."""

    condition: Condition
    value: str
    negated: bool

    def probability(self, packet: Packet, host: Host) -> float:
        """Return the probability that such a packet passes."""
        met = self.condition.probability(self.value, packet, host)
        return 1.0 - met if self.negated else met

    def describe(self, packet: Packet, passes: bool) -> str:
        """Return why the packet passes, or why not."""
        return self.condition.describe(self.value, packet, passes is not self.negated)


class Match(NamedTuple):
    """The probability that a rule matches such a packet, and why."""

    probability: float
    reason: str
    relevant: bool
    """False if the rule is for another destination, protocol or port."""


class CompiledRule(msgspec.Struct, frozen=True):
    """A rule; after a jump with `goto` packets do not return. `options` are the target's."""

    text: str
    conditions: tuple[RuleCondition, ...]
    target: str
    goto: bool
    options: Mapping[str, str]

    def match(self, packet: Packet, host: Host) -> Match:
        """Evaluate the conditions up to the first that fails; one with an unreadable value fails."""
        try:
            return self._match(packet, host)
        except (ValueError, ArithmeticError) as error:
            return Match(0.0, f"a value in the rule cannot be read: {error}", True)

    def _match(self, packet: Packet, host: Host) -> Match:
        total = 1.0
        for position, one in enumerate(self.conditions):
            probability = one.probability(packet, host)
            if not probability:
                relevant = all(
                    other.probability(packet, host)
                    for other in self.conditions[position:]
                    if other.condition.by_destination
                )
                return Match(0.0, one.describe(packet, False) if relevant else "", relevant)
            total *= probability
        facts = [fact for one in self.conditions if (fact := one.describe(packet, True))]
        return Match(total, ", ".join(facts) or "every packet matches", True)


@lru_cache(maxsize=65536)
def compile_rule(text: str) -> CompiledRule:
    """Compile a rule, the text that iptables-save prints after `-A CHAIN `."""
    conditions: list[RuleCondition] = []
    options: dict[str, str] = {}
    module = target = ""
    goto = False
    for name, value, negated in parse_options(text):
        if target:
            options[name] = value
        elif name in ("-j", "-g"):
            target, goto = value, name == "-g"
        elif name == "-m":
            module = value
            if found := unknown_module(module):
                conditions.append(RuleCondition(found, "", False))
        elif found := condition(module if name.startswith("--") else "", name):
            conditions.append(RuleCondition(found, value, negated and found.known))
    return CompiledRule(text, tuple(conditions), target, goto, options)
