"""Walk a packet through the chains of one table; every outcome is kept with its probability."""

from collections.abc import Iterable

import msgspec

from pykubeproxy.inspect.trace.packet import Host, Packet
from pykubeproxy.inspect.trace.rule import CompiledRule, Match, compile_rule
from pykubeproxy.inspect.trace.targets import End, apply_target
from pykubeproxy.rules.ruleset import ChainKey, Ruleset

# The packets that one packet may become, with their probabilities.
Flows = dict[Packet, float]


class Step(msgspec.Struct, frozen=True, gc=False):
    """A packet meets a rule, and the reason why it matches or not.

    `rule` is the text that iptables-save prints after `-A CHAIN `, or "policy DROP" at the end of a built-in chain.
    """

    table: str
    chain: str
    rule: str
    matched: bool
    reason: str


class Exit(msgspec.Struct, frozen=True):
    """A packet that left a table, and the step that decided; None for the policy ACCEPT."""

    packet: Packet
    probability: float
    end: End
    step: Step | None


class Walk:
    """The path of one packet from a built-in chain until it leaves the table.

    `exits` are the possible ends. `steps` are in the order of the path, alternatives one after the other; irrelevant
    rules are left out.
    """

    def __init__(self, ruleset: Ruleset, host: Host, start: ChainKey, packet: Packet) -> None:
        self.exits: list[Exit] = []
        self.steps: list[Step] = []
        self._ruleset = ruleset
        self._host = host
        policy = End.DROP if ruleset.policies.get(start) == End.DROP.value else End.ACCEPT
        for through, probability in self._chain(start, {packet: 1.0}).items():
            step = None
            if policy is End.DROP:
                step = Step(
                    start.table, start.chain, "policy DROP", True, "no rule matched; the policy decides"
                )
                self.steps.append(step)
            self.exits.append(Exit(through, probability, policy, step))

    def _chain(self, key: ChainKey, flows: Flows) -> Flows:
        """Send packets into a chain; return those that leave it again."""
        returned: Flows = {}
        for rule in map(compile_rule, self._ruleset.chains.get(key, ())):
            matches = [(packet, rule.match(packet, self._host)) for packet in flows]
            if any(match.relevant for _, match in matches):
                flows = self._rule(key, rule, flows, matches, returned)
            if not flows:
                break
        add(returned, flows.items())
        return returned

    def _rule(
        self,
        key: ChainKey,
        rule: CompiledRule,
        flows: Flows,
        matches: list[tuple[Packet, Match]],
        returned: Flows,
    ) -> Flows:
        """Apply a rule to packets; return those that continue with the next rule."""
        onward: Flows = {}
        to = ChainKey(key.table, rule.target)
        for packet, match in matches:
            if match.probability < 1:
                add(onward, [(packet, flows[packet] * (1 - match.probability))])
            if not match.probability:
                if match.relevant:
                    self._step(key, rule, False, match.reason)
                continue
            probability = flows[packet] * match.probability
            if rule.target and to in self._ruleset.chains:
                self._step(key, rule, True, match.reason)
                add(returned if rule.goto else onward, self._chain(to, {packet: probability}).items())
            elif rule.target == "RETURN":
                self._step(key, rule, True, match.reason)
                add(returned, [(packet, probability)])
            else:
                effect = apply_target(rule, packet)
                step = self._step(key, rule, True, "; ".join(filter(None, (match.reason, effect.remark))))
                if effect.end:
                    self.exits.append(Exit(effect.packet, probability, effect.end, step))
                else:
                    add(onward, [(effect.packet, probability)])
        return onward

    def _step(self, key: ChainKey, rule: CompiledRule, matched: bool, reason: str) -> Step:
        step = Step(key.table, key.chain, rule.text, matched, reason)
        self.steps.append(step)
        return step


def add(flows: Flows, more: Iterable[tuple[Packet, float]]) -> None:
    """Add packets to a flow; the probabilities of equal packets add up."""
    for packet, probability in more:
        flows[packet] = flows.get(packet, 0.0) + probability
