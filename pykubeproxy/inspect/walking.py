"""Through the chains of one table: jumps followed, chances multiplied, all outcomes kept with their shares."""

from collections.abc import Iterable

import msgspec

from pykubeproxy.inspect.matching import Match, Rule, parse_rule
from pykubeproxy.inspect.packet import Host, Packet
from pykubeproxy.inspect.targets import Effect, End, act
from pykubeproxy.rules.ruleset import ChainKey, Ruleset

# The packets that one packet may have become, and the share of all packets like it that became so.
Flows = dict[Packet, float]


class Step(msgspec.Struct, frozen=True, gc=False):
    """A packet meets a rule.

    `rule` is the text that iptables-save prints after `-A CHAIN `, or "policy DROP" where the end of a kernel's chain
    decided. `why` says in words why the rule matched, or did not.
    """

    table: str
    chain: str
    rule: str
    matched: bool
    why: str


class Left(msgspec.Struct, frozen=True):
    """A packet that left a table, and by which step."""

    packet: Packet
    share: float
    end: End
    step: Step | None


class Rules:
    """The rules of a Ruleset, taken apart chain by chain when a packet first comes there."""

    def __init__(self, ruleset: Ruleset) -> None:
        self._ruleset = ruleset
        self._parsed: dict[ChainKey, tuple[Rule, ...]] = {}

    def __contains__(self, key: ChainKey) -> bool:
        return key in self._ruleset.chains

    def of(self, key: ChainKey) -> tuple[Rule, ...]:
        """The rules of a chain; none if there is no such chain."""
        if key not in self._parsed:
            self._parsed[key] = tuple(map(parse_rule, self._ruleset.chains.get(key, ())))
        return self._parsed[key]

    def policy(self, key: ChainKey) -> End:
        """What becomes of packets at the end of one of the kernel's chains."""
        return End.DROP if self._ruleset.policies.get(key) == End.DROP.value else End.ACCEPT


class Walk:
    """One packet's way from one of the kernel's chains of a table until it leaves the table.

    `left` is how it may have left; `steps` are in the order of the way, what may happen instead of each other one
    after the other. Rules for other destinations are passed over in silence.
    """

    def __init__(self, rules: Rules, host: Host, start: ChainKey, packet: Packet) -> None:
        self.left: list[Left] = []
        self.steps: list[Step] = []
        self._rules = rules
        self._host = host
        end = rules.policy(start)
        for through, share in self._chain(start, {packet: 1.0}).items():
            self.left.append(Left(through, share, end, self._by_policy(start) if end is End.DROP else None))

    def _chain(self, key: ChainKey, flows: Flows) -> Flows:
        """Let packets into a chain; returns those that come back out of it."""
        returned: Flows = {}
        for rule in self._rules.of(key):
            matches = [(packet, rule.meet(packet, self._host)) for packet in flows]
            if any(match.concerns for _, match in matches):
                flows = self._rule(key, rule, flows, matches, returned)
            if not flows:
                break
        add(returned, flows.items())
        return returned

    def _rule(
        self, key: ChainKey, rule: Rule, flows: Flows, matches: list[tuple[Packet, Match]], returned: Flows
    ) -> Flows:
        """Let packets meet a rule; returns those that go on to the next one."""
        onward: Flows = {}
        for packet, match in matches:
            share = flows[packet]
            if match.share < 1:
                add(onward, [(packet, share * (1 - match.share))])
            if match.share:
                self._taken(key, rule, packet, share * match.share, match.why, onward, returned)
            elif match.concerns:
                self._step(key, rule, False, match.why)
        return onward

    def _taken(
        self,
        key: ChainKey,
        rule: Rule,
        packet: Packet,
        share: float,
        why: str,
        onward: Flows,
        returned: Flows,
    ) -> None:
        """A rule applies to a packet: on to another chain, out of this one, out of the table, or to the next rule."""
        to = ChainKey(key.table, rule.target)
        if rule.target and to in self._rules:
            self._step(key, rule, True, why)
            add(returned if rule.goto else onward, self._chain(to, {packet: share}).items())
        elif rule.target == "RETURN":
            self._step(key, rule, True, why)
            add(returned, [(packet, share)])
        else:
            effect = act(rule, packet)
            step = self._step(key, rule, True, "; ".join(filter(None, (why, effect.remark))))
            self._apply(effect, share, step, onward)

    def _apply(self, effect: Effect, share: float, step: Step, onward: Flows) -> None:
        if effect.end:
            self.left.append(Left(effect.packet, share, effect.end, step))
        else:
            add(onward, [(effect.packet, share)])

    def _step(self, key: ChainKey, rule: Rule, matched: bool, why: str) -> Step:
        step = Step(key.table, key.chain, rule.text, matched, why)
        self.steps.append(step)
        return step

    def _by_policy(self, key: ChainKey) -> Step:
        step = Step(key.table, key.chain, "policy DROP", True, "no rule decided, so the chain's policy does")
        self.steps.append(step)
        return step


def add(flows: Flows, more: Iterable[tuple[Packet, float]]) -> None:
    """Let more packets into a flow; shares of equal ones add up."""
    for packet, share in more:
        flows[packet] = flows.get(packet, 0.0) + share
