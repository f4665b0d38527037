"""Send a packet, or those of many clients, through the rules of a node in the kernel's order."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import msgspec

from pykubeproxy.inspect.limit import RuleLimit
from pykubeproxy.inspect.packets.packet import DNAT, SNAT, UNTRACKED, NodeNetwork, Packet
from pykubeproxy.inspect.packets.rules import BaseChain, Hook, PacketRule, PacketRules, RuleEnd
from pykubeproxy.inspect.routes import PacketVerdict
from pykubeproxy.objects import address_and_port
from pykubeproxy.rules.ruleset import ChainKey

# What a step counts as in rules: it takes memory, too.
_COST_OF_STEP = 100
# A trace to 40,000 endpoints visits fewer: each has some rules, and some steps on which to meet them.
_MOST_RULES, _LEAST_RULES, _TIMES = 50_000_000, 5_000_000, 1000
_FILTER_FORWARD = ChainKey("filter", "FORWARD")
_REJECTIONS = {RuleEnd.DROP: PacketVerdict.DROP, RuleEnd.REJECT: PacketVerdict.REJECT}


class Step(msgspec.Struct, frozen=True, gc=False):
    """A packet meets a rule, and the reason why it matches or not.

    `rule` is the text that iptables-save prints after `-A CHAIN `, or "policy DROP" at the end of a built-in chain.
    """

    table: str
    chain: str
    rule: str
    matched: bool
    reason: str


# The chains that a packet entered and the rules that it matched, in order.
Path = tuple[ChainKey | Step, ...]
# A path from its end: the last point and the trail before it. Alternatives share their beginning.
_Trail = tuple[ChainKey | Step, "_Trail | None"]


class Passage(NamedTuple):
    """The probability that a packet gets here, and its trail; `points` is how many it has."""

    probability: float
    trail: _Trail | None = None
    points: int = 0

    @property
    def path(self) -> Path:
        """Return the chains and rules in order."""
        points: list[ChainKey | Step] = []
        trail = self.trail
        while trail:
            point, trail = trail
            points.append(point)
        return tuple(reversed(points))

    def part(self, share: float) -> "Passage":
        return self._replace(probability=self.probability * share)

    def past(self, point: ChainKey | Step | None) -> "Passage":
        """Return the passage behind a point; None if nothing is recorded."""
        return Passage(self.probability, (point, self.trail), self.points + 1) if point else self


# The packets that one packet may become.
Flows = dict[Packet, Passage]


class WalkEnd(msgspec.Struct, frozen=True):
    """One thing that may happen to a packet: the packet at its end, how probable that is, and its path if recorded."""

    verdict: PacketVerdict
    packet: Packet
    probability: float
    path: Path = ()


class TracedEndpoint(msgspec.Struct, frozen=True):
    """An endpoint that the packet may reach, and whether it is masqueraded on the way."""

    address: str
    port: int
    probability: float
    masquerade: bool


class Rejection(msgspec.Struct, frozen=True):
    """A step that drops or rejects the packet."""

    verdict: PacketVerdict
    probability: float
    step: Step


class NodeTrace(msgspec.Struct, frozen=True, dict=True):
    """What happens to a packet on one node.

    - `packet`: with the interface it comes in by, if known
    - `ends`: all that may happen; their probabilities add up to 1, for each client
    - `steps`: the rules that it meets, if recorded, in the order of its path, alternatives one after the other
    """

    packet: Packet
    ends: tuple[WalkEnd, ...]
    steps: tuple[Step, ...] = ()

    @property
    def delivered(self) -> tuple[WalkEnd, ...]:
        """The ends in which no rule stops the packet."""
        return tuple(one for one in self.ends if one.verdict in (PacketVerdict.DNAT, PacketVerdict.PASS))

    @property
    def masquerade(self) -> bool:
        """Whether the source is replaced, whichever destination the packet reaches."""
        return bool(self.delivered) and all(SNAT in one.packet.states for one in self.delivered)

    @cached_property
    def endpoints(self) -> tuple[TracedEndpoint, ...]:
        """The endpoints in the order of the rules."""
        found: dict[tuple[str, int], list[WalkEnd]] = {}
        for one in self.ends:
            if one.verdict is PacketVerdict.DNAT:
                found.setdefault((one.packet.destination, one.packet.port), []).append(one)
        return tuple(
            TracedEndpoint(
                address,
                port,
                sum(one.probability for one in some),
                all(SNAT in one.packet.states for one in some),
            )
            for (address, port), some in found.items()
        )

    @cached_property
    def rejections(self) -> tuple[Rejection, ...]:
        """The recorded rules that stop the packet."""
        found: dict[tuple[PacketVerdict, Step], float] = {}
        for one in self.ends:
            if one.verdict in _REJECTIONS.values() and one.path and isinstance(step := one.path[-1], Step):
                found[one.verdict, step] = found.get((one.verdict, step), 0.0) + one.probability
        return tuple(Rejection(verdict, total, step) for (verdict, step), total in found.items())

    @property
    def verdict(self) -> PacketVerdict:
        """DNAT if the packet may reach an endpoint; else the most probable verdict."""
        totals = {PacketVerdict.PASS: 0.0}
        for one in self.ends:
            totals[one.verdict] = totals.get(one.verdict, 0.0) + one.probability
        return (
            PacketVerdict.DNAT
            if PacketVerdict.DNAT in totals
            else max(totals, key=lambda verdict: totals[verdict])
        )


def walk(
    rules: PacketRules,
    packet: Packet,
    network: NodeNetwork,
    *,
    record: bool = False,
    limit: RuleLimit | None = None,
) -> NodeTrace:
    """Send the first packet of a connection through the rules of a node, built-in chains included.

    Follow every outcome. Assume that unknown conditions are not met, that unknown targets let the packet continue, and
    that a masqueraded packet keeps its source. `record` keeps steps and paths. Raises TooManyRules.
    """
    if packet.source and not packet.starts_here and not packet.received_by:
        packet = msgspec.structs.replace(packet, received_by=network.interface_to(packet.source))
    walker = _Walker(rules, network, record, limit or RuleLimit(_MOST_RULES, _LEAST_RULES, _TIMES))
    delivered = walker.run(packet)
    ends = (walker.end(_verdict(one), one, passage) for one, passage in delivered.items())
    return NodeTrace(packet, (*ends, *walker.stopped), tuple(walker.steps))


def _verdict(packet: Packet) -> PacketVerdict:
    return PacketVerdict.DNAT if DNAT in packet.states else PacketVerdict.PASS


class _Exit(NamedTuple):
    """A packet that left a base chain."""

    packet: Packet
    passage: Passage
    end: RuleEnd


class _Walker:
    """The path of a packet across the node: the recorded steps, and the packets that a rule stopped."""

    def __init__(self, rules: PacketRules, network: NodeNetwork, record: bool, limit: RuleLimit) -> None:
        self.steps: list[Step] = []
        self.stopped: list[WalkEnd] = []
        self._rules = rules
        self._network = network
        self._record = record
        self._limit = limit

    def run(self, packet: Packet) -> Flows:
        """Return the packets that reach a destination, on this node or beyond."""
        if packet.starts_here:
            return self._from_here(self._to_send(packet))
        flows = self._hook(Hook.PREROUTING, {packet: Passage(1.0)})
        local, others = self._routed(flows)
        local = self._hook(Hook.INPUT, local)
        return local | self._leave(self._hook(Hook.FORWARD, others))

    def end(self, verdict: PacketVerdict, packet: Packet, passage: Passage) -> WalkEnd:
        """Return an end of a packet."""
        self._limit.count(passage.points)
        return WalkEnd(verdict, packet, passage.probability, passage.path)

    def _from_here(self, packet: Packet) -> Flows:
        """Send a packet of the node itself; one to the node comes in again by lo, without a second translation."""
        local, others = self._routed(self._leave(self._hook(Hook.OUTPUT, {packet: Passage(1.0)})))
        local = {
            msgspec.structs.replace(one, received_by="lo", sent_by=""): passage
            for one, passage in local.items()
        }
        local = self._hook(Hook.PREROUTING, local, translated=True)
        return self._hook(Hook.INPUT, local, translated=True) | others

    def _leave(self, flows: Flows) -> Flows:
        return self._hook(
            Hook.POSTROUTING, {self._to_send(packet): passage for packet, passage in flows.items()}
        )

    def _to_send(self, packet: Packet) -> Packet:
        interface = self._network.interface_to(packet.destination)
        return packet if interface == packet.sent_by else msgspec.structs.replace(packet, sent_by=interface)

    def _routed(self, flows: Flows) -> tuple[Flows, Flows]:
        """Split packets into those to the node itself, and the others, with their outgoing interface."""
        local: Flows = {}
        others: Flows = {}
        for packet, passage in flows.items():
            if self._network.is_local(packet.destination):
                local[packet] = passage
            else:
                others[self._to_send(packet)] = passage
        return local, others

    def _hook(self, hook: Hook, flows: Flows, *, translated: bool = False) -> Flows:
        """Send packets through the base chains at a hook; those of translated connections are not translated again."""
        for base in self._rules.base_chains(hook) if flows else ():
            if not (translated and base.translates):
                flows = self._base_chain(base, flows)
        return flows

    def _base_chain(self, base: BaseChain, flows: Flows) -> Flows:
        """Return the packets that a base chain lets pass."""
        through: Flows = {}
        walks: list[tuple[Packet, Sequence[Step]]] = []
        for packet, passage in flows.items():
            if base.translates and UNTRACKED in packet.states:
                add(through, packet, passage)
                continue
            walked = _ChainWalk(self._rules, self._network, self._record, self._limit, base, packet, passage)
            walks.append((packet, walked.steps))
            for left in walked.exits:
                if left.end is RuleEnd.ACCEPT:
                    add(through, left.packet, left.passage)
                else:
                    self.stopped.append(self.end(_REJECTIONS[left.end], left.packet, left.passage))
        if self._record:
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

    `exits` are the possible ends. `steps` leave out irrelevant rules.
    """

    def __init__(
        self,
        rules: PacketRules,
        network: NodeNetwork,
        record: bool,
        limit: RuleLimit,
        base: BaseChain,
        packet: Packet,
        passage: Passage,
    ) -> None:
        self.exits: list[_Exit] = []
        self.steps: list[Step] = []
        self._rules = rules
        self._network = network
        self._record = record
        self._limit = limit
        self._packet = packet
        self._in_forward = base.key == _FILTER_FORWARD
        policy = Step(*base.key, "policy DROP", True, "no rule matched; the chain's policy applies")
        for through, left in self._chain(base.key, {packet: passage}).items():
            if not base.drops:
                self.exits.append(_Exit(through, left, RuleEnd.ACCEPT))
            else:
                self.steps.append(policy)
                self.exits.append(_Exit(through, left.past(policy if record else None), RuleEnd.DROP))

    def _chain(self, key: ChainKey, flows: Flows) -> Flows:
        """Send packets into a chain; return those that leave it again."""
        if self._record:
            flows = {packet: passage.past(key) for packet, passage in flows.items()}
        returned: Flows = {}
        rules = self._rules.met(key, self._packet)
        self._limit.enter(key, len(rules))
        for rule in rules:
            self._limit.count(len(flows))
            flows = self._rule(key, rule, flows, returned)
            if not flows:
                break
        for packet, passage in flows.items():
            add(returned, packet, passage)
        return returned

    def _rule(self, key: ChainKey, rule: PacketRule, flows: Flows, returned: Flows) -> Flows:
        """Apply a rule to packets; return those that continue with the next rule."""
        splits = [(packet, rule.split(packet, self._network)) for packet in flows]
        if not any(split.matched for _, split in splits):
            for packet, split in splits if self._record else ():
                if reason := rule.reason(packet, self._network, split):
                    self._step(key, rule, False, reason)
            return flows
        onward: Flows = {}
        for packet, split in splits:
            for missed, share in split.missed:
                add(onward, missed, flows[packet].part(share))
            reason = rule.reason(packet, self._network, split) if self._record else ""
            if not split.matched and reason:
                self._step(key, rule, False, reason)
            for matched, share in split.matched:
                self._take(key, rule, matched, flows[packet].part(share), reason, onward, returned)
        return onward

    def _take(
        self,
        key: ChainKey,
        rule: PacketRule,
        packet: Packet,
        passage: Passage,
        reason: str,
        onward: Flows,
        returned: Flows,
    ) -> None:
        """Apply the target of a rule to a packet that matches it."""
        if to := self._rules.jump(key, rule.target):
            step = self._step(key, rule, True, reason)
            back = returned if rule.goto else onward
            for left, left_passage in self._chain(to, {packet: passage.past(step)}).items():
                add(back, left, left_passage)
            return
        effect = rule.apply(packet)
        step = self._step(key, rule, True, "; ".join(filter(None, (reason, effect.remark))))
        behind = passage.past(step)
        if effect.end is RuleEnd.RETURN:
            add(returned, packet, behind)
        elif effect.end is None:
            add(onward, effect.packet, behind)
        else:
            found = effect.packet
            if self._in_forward and found.clients and effect.end is RuleEnd.ACCEPT:
                found = msgspec.structs.replace(found, accepted=True)
            self.exits.append(_Exit(found, behind, effect.end))

    def _step(self, key: ChainKey, rule: PacketRule, matched: bool, reason: str) -> Step | None:
        if not self._record:
            return None
        self._limit.count(_COST_OF_STEP)
        step = Step(key.table, key.chain, rule.text, matched, reason)
        self.steps.append(step)
        return step


def add(flows: Flows, packet: Packet, passage: Passage) -> None:
    """Add a packet to a flow; the probabilities of equal packets add up, and the first path stays."""
    known = flows.get(packet)
    flows[packet] = known._replace(probability=known.probability + passage.probability) if known else passage
