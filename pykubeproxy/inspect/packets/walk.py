"""Send a packet, or those of many clients, through the rules of a node in the kernel's order."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from pykubeproxy.inspect.limit import RuleLimit
from pykubeproxy.inspect.packets.packet import DNAT, LO, SNAT, UNTRACKED, NodeNetwork, Packet
from pykubeproxy.inspect.packets.rule_set import (
    NOT_KNOWN,
    BaseChain,
    Hook,
    PacketRule,
    RuleEffect,
    RuleEnd,
    RuleSet,
)
from pykubeproxy.inspect.routes import PacketVerdict
from pykubeproxy.objects import address_and_port
from pykubeproxy.rules.ruleset import ChainKey

# What a step counts as in rules: it takes memory, too.
_COST_OF_STEP = 100
# A trace to 40,000 endpoints visits fewer: each has some rules, and some steps on which to meet them.
_MOST_RULES, _LEAST_RULES, _TIMES = 50_000_000, 5_000_000, 1000
_FILTER_FORWARD = ChainKey("filter", "FORWARD")
# The state of packets that a chain at a hook has translated; no other chain there translates them again.
_TRANSLATED = {
    Hook.PREROUTING: DNAT,
    Hook.OUTPUT: DNAT,
    Hook.INPUT: SNAT,
    Hook.POSTROUTING: SNAT,
    Hook.FORWARD: "",
}
_REJECTIONS: dict[RuleEnd | None, PacketVerdict] = {
    RuleEnd.DROP: PacketVerdict.DROP,
    RuleEnd.REJECT: PacketVerdict.REJECT,
}


class Step(msgspec.Struct, frozen=True, gc=False):
    """A rule that the packet meets.

    - `table`: of iptables, or of nftables with its family, such as "inet firewalld"
    - `rule`: as iptables-save prints it after `-A CHAIN `, as nft prints it, or "policy DROP" at the end of a base chain
    - `matched`: the rule matches the packet
    - `reason`: why it matches or not
    - `comment`: of the rule, or ""
    - `does`: to packets that match: "accept", "drop", "reject", "return", "dnat", "snat", "mark", "jump", or "" for
      nothing
    - `to`: the endpoint of "dnat", "IP:PORT", or the chain of "jump"
    - `affinity`: for how many seconds the rule sends a client to its endpoint again; 0 for other rules
    """

    table: str
    chain: str
    rule: str
    matched: bool
    reason: str
    comment: str = ""
    does: str = ""
    to: str = ""
    affinity: int = 0


class Passage(NamedTuple):
    """The probability that a packet gets here, and the chain that replaced its destination last."""

    probability: float
    translated_in: ChainKey | None = None

    def part(self, share: float) -> "Passage":
        return self._replace(probability=self.probability * share)


# The packets that one packet may become.
Flows = dict[Packet, Passage]


class WalkEnd(msgspec.Struct, frozen=True):
    """One thing that may happen to a packet.

    - `packet`: at its end
    - `translated_in`: the chain that replaced its destination last; None if none did
    - `step`: the rule that drops or rejects it, if recorded
    """

    verdict: PacketVerdict
    packet: Packet
    probability: float
    translated_in: ChainKey | None = None
    step: Step | None = None


class NodeTrace(msgspec.Struct, frozen=True):
    """What happens to a packet on one node.

    - `packet`: with the interface it comes in by, if known
    - `ends`: all that may happen; their probabilities add up to 1, for each client
    - `steps`: the rules that it meets, if recorded, in the order of its path, alternatives one after the other
    """

    packet: Packet
    ends: tuple[WalkEnd, ...]
    steps: tuple[Step, ...] = ()


def walk(
    rules: Sequence[RuleSet],
    packet: Packet,
    network: NodeNetwork,
    *,
    record: bool = False,
    limit: RuleLimit | None = None,
) -> NodeTrace:
    """Send the first packet of a connection through all sets of rules of a node, base chains included.

    Follow every outcome. Assume that unknown conditions are not met, that unknown targets let the packet continue, and
    that a masqueraded packet keeps its source. `record` keeps steps. Raises TooManyRules.
    """
    if packet.source and not packet.starts_here and not packet.received_by:
        packet = msgspec.structs.replace(packet, received_by=network.interface_to(packet.source))
    walker = _Walker(rules, network, record, limit or RuleLimit(_MOST_RULES, _LEAST_RULES, _TIMES))
    delivered = walker.run(packet)
    ends = (
        WalkEnd(PacketVerdict.DNAT if DNAT in one.states else PacketVerdict.PASS, one, *passage)
        for one, passage in delivered.items()
    )
    return NodeTrace(packet, (*ends, *walker.stopped), tuple(walker.steps))


class _Walker:
    """The path of a packet across the node: the recorded steps, and the packets that a rule stopped."""

    def __init__(
        self, rules: Sequence[RuleSet], network: NodeNetwork, record: bool, limit: RuleLimit
    ) -> None:
        self.steps: list[Step] = []
        self.stopped: list[WalkEnd] = []
        self._rules = rules
        self._at_hook: dict[Hook, Sequence[tuple[BaseChain, RuleSet]]] = {}
        self.network = network
        self.record = record
        self.limit = limit

    def run(self, packet: Packet) -> Flows:
        """Return the packets that reach a destination, on this node or beyond."""
        if packet.starts_here:
            return self._from_here(self._to_send(packet))
        flows = self._hook(Hook.PREROUTING, {packet: Passage(1.0)})
        local, others = self._routed(flows)
        local = self._hook(Hook.INPUT, local)
        return local | self._leave(self._hook(Hook.FORWARD, others))

    def _from_here(self, packet: Packet) -> Flows:
        """Send a packet of the node itself; one to the node comes in again by lo, without a second translation."""
        local, others = self._routed(self._leave(self._hook(Hook.OUTPUT, {packet: Passage(1.0)})))
        local = {
            msgspec.structs.replace(one, received_by=LO, sent_by=""): passage
            for one, passage in local.items()
        }
        local = self._hook(Hook.PREROUTING, local, translated=True)
        return self._hook(Hook.INPUT, local, translated=True) | others

    def _leave(self, flows: Flows) -> Flows:
        return self._hook(
            Hook.POSTROUTING, {self._to_send(packet): passage for packet, passage in flows.items()}
        )

    def _to_send(self, packet: Packet) -> Packet:
        interface = self.network.interface_to(packet.destination)
        return packet if interface == packet.sent_by else msgspec.structs.replace(packet, sent_by=interface)

    def _routed(self, flows: Flows) -> tuple[Flows, Flows]:
        """Split packets into those to the node itself, and the others, with their outgoing interface."""
        local: Flows = {}
        others: Flows = {}
        for packet, passage in flows.items():
            if self.network.is_local(packet.destination):
                local[packet] = passage
            else:
                others[self._to_send(packet)] = passage
        return local, others

    def _hook(self, hook: Hook, flows: Flows, *, translated: bool = False) -> Flows:
        """Send packets through the base chains at a hook; those of translated connections are not translated again."""
        for base, rules in self._base_chains(hook) if flows else ():
            if not (translated and base.translates):
                flows = self._base_chain(base, rules, flows, _TRANSLATED[hook])
        return flows

    def _base_chains(self, hook: Hook) -> Sequence[tuple[BaseChain, RuleSet]]:
        """Return the base chains at a hook in the kernel's order, each with its rules."""
        if hook not in self._at_hook:
            found = [(base, rules) for rules in self._rules for base in rules.base_chains(hook)]
            self._at_hook[hook] = sorted(found, key=lambda one: one[0].order(hook))
        return self._at_hook[hook]

    def _base_chain(self, base: BaseChain, rules: RuleSet, flows: Flows, translated: str) -> Flows:
        """Return the packets that a base chain lets pass; `translated` is the state after a translation here."""
        through: Flows = {}
        walks: list[tuple[Packet, Sequence[Step]]] = []
        for packet, passage in flows.items():
            if base.translates and not {UNTRACKED, translated}.isdisjoint(packet.states):
                add(through, packet, passage)
                continue
            walked = _ChainWalk(self, base, rules, packet)
            for left, left_passage in walked.run(passage).items():
                add(through, left, left_passage)
            walks.append((packet, walked.steps))
        if self.record:
            self.steps += _merged(walks)
        return through


def _merged(walks: Iterable[tuple[Packet, Sequence[Step]]]) -> Iterator[Step]:
    """Yield the steps of alternative packets through one base chain; steps common to all come once."""
    groups: dict[tuple[Step, ...], list[Packet]] = {}
    for packet, steps in walks:
        groups.setdefault(tuple(steps), []).append(packet)
    common = set[Step]().union(*groups).intersection(*groups)
    for position, (alternative, packets) in enumerate(groups.items()):
        others = f" and {len(packets) - 1} more" if packets[1:] else ""
        destination = f"to {address_and_port(packets[0].destination, packets[0].port)}{others}"
        for step in alternative:
            if step not in common:
                yield msgspec.structs.replace(step, reason=f"{destination}: {step.reason}")
            elif not position:
                yield step


class _ChainWalk:
    """The way of one packet from a base chain through the chains below until it leaves them.

    `steps` leave out irrelevant rules.
    """

    def __init__(self, walker: _Walker, base: BaseChain, rules: RuleSet, packet: Packet) -> None:
        self.steps: list[Step] = []
        self._walker = walker
        self._base = base
        self._rules = rules
        self._packet = packet
        self._through: Flows = {}

    def run(self, passage: Passage) -> Flows:
        """Return the packets that pass."""
        key = self._base.key
        for packet, left in self._chain(key, {self._packet: passage}).items():
            if not self._base.drops:
                add(self._through, packet, left)
            else:
                policy = Step(
                    *key, "policy DROP", True, "no rule matched; the chain's policy applies", does="drop"
                )
                self.steps.append(policy)
                self._walker.stopped.append(WalkEnd(PacketVerdict.DROP, packet, *left, policy))
        return self._through

    def _chain(self, key: ChainKey, flows: Flows) -> Flows:
        """Send packets into a chain; return those that leave it again."""
        returned: Flows = {}
        rules = self._rules.met(key, self._packet)
        self._walker.limit.enter(key, len(rules))
        for rule in rules:
            self._walker.limit.count(len(flows))
            flows = self._rule(key, rule, flows, returned)
            if not flows:
                break
        for packet, passage in flows.items():
            add(returned, packet, passage)
        return returned

    def _rule(self, key: ChainKey, rule: PacketRule, flows: Flows, returned: Flows) -> Flows:
        """Apply a rule to packets; return those that continue with the next rule."""
        onward: Flows = {}
        for packet, passage in flows.items():
            split = rule.split(packet, self._walker.network)
            reason = rule.reason(packet, self._walker.network, split) if self._walker.record else ""
            if reason and not split.matched:
                self._step(key, rule, reason, packet)
            for missed, share in split.missed:
                add(onward, missed, passage.part(share))
            for effect, share in split.matched:
                part = passage.part(share)
                if DNAT in effect.packet.states[len(packet.states) :]:
                    part = part._replace(translated_in=key)
                step = self._step(key, rule, reason, packet, effect) if self._walker.record else None
                self._take(key, effect, part, step, onward, returned)
        return onward

    def _take(
        self,
        key: ChainKey,
        effect: RuleEffect,
        passage: Passage,
        step: Step | None,
        onward: Flows,
        returned: Flows,
    ) -> None:
        """Apply the effect of a rule on packets that match it."""
        packet = effect.packet
        if effect.jump and (to := self._rules.jump(key, effect.jump)):
            back = returned if effect.goto else onward
            for left, left_passage in self._chain(to, {packet: passage}).items():
                add(back, left, left_passage)
            return
        if verdict := _REJECTIONS.get(effect.end):
            self._walker.stopped.append(WalkEnd(verdict, packet, *passage, step))
        elif effect.end is RuleEnd.RETURN:
            add(returned, packet, passage)
        elif effect.end is None:
            add(onward, packet, passage)
        else:
            if packet.clients and self._base.key == _FILTER_FORWARD:
                packet = msgspec.structs.replace(packet, accepted=True)
            add(self._through, packet, passage)

    def _step(
        self,
        key: ChainKey,
        rule: PacketRule,
        reason: str,
        packet: Packet,
        effect: RuleEffect | None = None,
    ) -> Step:
        """Record that packets meet a rule; without an effect they do not match."""
        self._walker.limit.count(_COST_OF_STEP)
        does, to = _done(packet, effect) if effect else ("", "")
        remark = effect.remark if effect else ""
        if does == "jump" and not self._rules.jump(key, to):
            does, to, remark = "", "", f"{NOT_KNOWN} {to} and assumes that the packet continues"
        reason = "; ".join(filter(None, (reason, remark)))
        step = Step(
            key.table, key.chain, rule.text, effect is not None, reason, rule.comment, does, to, rule.affinity
        )
        self.steps.append(step)
        return step


def _done(before: Packet, effect: RuleEffect) -> tuple[str, str]:
    """Return what a rule does to a packet, and the endpoint or chain to which it goes, as in a step."""
    packet = effect.packet
    if effect.jump:
        return "jump", effect.jump
    match packet.states[len(before.states) :]:
        case (*_, "DNAT"):
            return "dnat", address_and_port(packet.destination, packet.port)
        case (*_, "SNAT"):
            return "snat", ""
    if effect.end:
        return effect.end.value.lower(), ""
    return ("mark", "") if packet.mark != before.mark else ("", "")


def add(flows: Flows, packet: Packet, passage: Passage) -> None:
    """Add a packet to a flow; the probabilities of equal packets add up."""
    known = flows.get(packet)
    flows[packet] = known._replace(probability=known.probability + passage.probability) if known else passage
