"""Send all clients at once through the rules: each rule splits them by source address."""

from collections.abc import Iterator, Sequence

import msgspec

from pykubeproxy.inspect.limit import RuleLimit
from pykubeproxy.inspect.meaning.addresses import Addresses, intersection, parse_addresses, subtract
from pykubeproxy.inspect.trace.chains import Chains
from pykubeproxy.inspect.trace.packet import Host, Packet
from pykubeproxy.inspect.trace.rule import CompiledRule, RuleCondition, compile_rule
from pykubeproxy.inspect.trace.walk import End, apply_target
from pykubeproxy.rules.parse import parse_rule
from pykubeproxy.rules.ruleset import ChainKey

_FORWARD = ChainKey("filter", "FORWARD")
_POSTROUTING = ChainKey("nat", "POSTROUTING")
# The built-in chains on the paths of packets, in order; those from elsewhere are routed after the first one.
_FROM_NODE = (ChainKey("nat", "OUTPUT"), ChainKey("filter", "OUTPUT"), _POSTROUTING)
_FROM_ELSEWHERE = (ChainKey("nat", "PREROUTING"),)
_TO_NODE = (ChainKey("filter", "INPUT"),)
_THROUGH_NODE = (_FORWARD, _POSTROUTING)
# The chains that packets meet before and after their destination may change.
BEFORE_DNAT = (*_FROM_NODE[:1], *_FROM_ELSEWHERE)
AFTER_DNAT = tuple(dict.fromkeys((*_FROM_NODE[1:], *_TO_NODE, *_THROUGH_NODE)))
# Packets to a service with 1000 endpoints visit fewer, each endpoint's those of later hooks.
_MOST_RULES, _LEAST_RULES, _TIMES = 1_000_000, 20_000, 200


class Affinity(msgspec.Struct, frozen=True):
    """A list of clients, by the name that `recent` gives it, and for how many seconds it counts."""

    name: str
    seconds: int


class Flow(msgspec.Struct, frozen=True):
    """Packets that differ only in their source.

    - `packet`: any of them; its source is not used
    - `clients`: their sources
    - `probability`: of getting here, for each of them
    - `remembered_in`: the list that remembers them from now on; "" for none
    - `recalled`: the list that sent a known client here; None for a new client
    - `accepted`: a rule accepts it in FORWARD, so the policy of that chain does not count
    """

    packet: Packet
    clients: Addresses
    probability: float = 1.0
    remembered_in: str = ""
    recalled: Affinity | None = None
    accepted: bool = False


class Arrival(msgspec.Struct, frozen=True):
    """A flow at the end of its path, or of one table. `end` is ACCEPT if it may go on."""

    flow: Flow
    end: End


class Rules:
    """The rules of one node, to send flows through; `own` are the node's addresses, with loopback."""

    def __init__(self, chains: Chains, host: Host, own: Addresses) -> None:
        self._chains = chains
        self._host = host
        self._own = own
        self._limit = RuleLimit(_MOST_RULES, _LEAST_RULES, _TIMES)

    def send(self, flow: Flow) -> Iterator[Arrival]:
        """Yield where packets end, those of the node itself if they start there. Raises TooManyRules."""
        self._limit = RuleLimit(_MOST_RULES, _LEAST_RULES, _TIMES)
        if flow.packet.starts_here:
            yield from self._hooks(_FROM_NODE, flow)
            return
        for arrival in self._hooks(_FROM_ELSEWHERE, flow):
            if arrival.end is not End.ACCEPT:
                yield arrival
            elif self._host.is_local(arrival.flow.packet.destination):
                yield from self._hooks(_TO_NODE, arrival.flow)
            else:
                yield from self._hooks(_THROUGH_NODE, arrival.flow)

    def _hooks(self, path: Sequence[ChainKey], flow: Flow) -> Iterator[Arrival]:
        if not path:
            yield Arrival(flow, End.ACCEPT)
            return
        for arrival in self._table(path[0], flow):
            if arrival.end is End.ACCEPT:
                yield from self._hooks(path[1:], arrival.flow)
            else:
                yield arrival

    def _table(self, key: ChainKey, flow: Flow) -> list[Arrival]:
        arrived: list[Arrival] = []
        left = self._chain(key, [flow], arrived)
        if key == _FORWARD:
            arrived = [
                Arrival(msgspec.structs.replace(it.flow, accepted=it.end is End.ACCEPT), it.end)
                for it in arrived
            ]
        policy = End.DROP if self._chains.drops(key) else End.ACCEPT
        return arrived + [Arrival(one, policy) for one in left]

    def _chain(self, key: ChainKey, flows: list[Flow], arrived: list[Arrival]) -> list[Flow]:
        """Send flows into a chain; return those that leave it, and add those that end to `arrived`."""
        returned: list[Flow] = []
        if not flows:
            return returned
        packet = flows[0].packet
        rules = self._chains.rules(key, packet.destination, packet.port)
        self._limit.enter(key, len(rules))
        for rule in map(compile_rule, rules):
            onward: list[Flow] = []
            self._limit.count(len(flows))
            for flow in flows:
                taken, others = self._split(rule, flow)
                onward += others
                for one in taken:
                    self._take(key, rule, one, onward, returned, arrived)
            flows = onward
            if not flows:
                break
        return returned + flows

    def _take(
        self,
        key: ChainKey,
        rule: CompiledRule,
        flow: Flow,
        onward: list[Flow],
        returned: list[Flow],
        arrived: list[Arrival],
    ) -> None:
        """Apply the target of a rule to a flow that matches it."""
        to = ChainKey(key.table, rule.target)
        if rule.target and to in self._chains:
            back = returned if rule.goto else onward
            back += self._chain(to, [flow], arrived)
        elif rule.target == "RETURN":
            returned.append(flow)
        else:
            effect = apply_target(rule, flow.packet)
            moved = msgspec.structs.replace(flow, packet=effect.packet)
            if effect.end:
                arrived.append(Arrival(moved, effect.end))
            else:
                onward.append(moved)

    def _split(self, rule: CompiledRule, flow: Flow) -> tuple[list[Flow], list[Flow]]:
        """Return the part that matches a rule, and the part that does not; none matches an unreadable rule."""
        try:
            matched = self._matched(rule, flow)
        except (ValueError, ArithmeticError):
            return [], [flow]
        if not matched.clients or not matched.probability:
            return [], [flow]
        if matched.recalled != flow.recalled:  # a client is known or new: this is no part of the new ones
            return [matched], [flow]
        others = []
        if missed := subtract(flow.clients, matched.clients):
            others.append(msgspec.structs.replace(flow, clients=missed))
        if left := flow.probability - matched.probability:
            others.append(msgspec.structs.replace(flow, clients=matched.clients, probability=left))
        return [matched], others

    def _matched(self, rule: CompiledRule, flow: Flow) -> Flow:
        clients, probability = flow.clients, flow.probability
        remembered_in, recalled = flow.remembered_in, flow.recalled
        for one in rule.conditions:
            if (sources := self._sources(one)) is not None:
                clients = subtract(clients, sources) if one.negated else intersection(clients, sources)
            elif one.option == "--rcheck":
                affinity = _affinity(rule)
                if flow.recalled not in (None, affinity):
                    probability = 0.0
                recalled = affinity
            elif one.option == "--set":
                remembered_in = _affinity(rule).name
            else:
                probability *= one.probability(flow.packet, self._host)
            if not clients or not probability:
                break
        return msgspec.structs.replace(
            flow, clients=clients, probability=probability, remembered_in=remembered_in, recalled=recalled
        )

    def _sources(self, one: RuleCondition) -> Addresses | None:
        """Return the sources that a condition names; None if it concerns something else."""
        if one.option in ("-s", "--src-range"):
            return parse_addresses(one.value)
        if one.option == "--src-type" and one.value == "LOCAL":
            return self._own
        return None


def _affinity(rule: CompiledRule) -> Affinity:
    """Return the list that a rule with `-m recent` names."""
    options = parse_rule(rule.text).options
    return Affinity(options.get("--name", ""), int(options.get("--seconds", "0")))
