"""What probes and nodes showed: the observations of `trace --live`, as values."""

from collections.abc import Collection, Iterator, Mapping

import msgspec

from pykubeproxy.inspect.flows import Flow
from pykubeproxy.inspect.node import NodeRules
from pykubeproxy.inspect.trace.journey import TracedVisit, TracedWay
from pykubeproxy.kernel.hits import RuleHit
from pykubeproxy.kernel.probes import Probe
from pykubeproxy.rules.iptables_save import parse_rule
from pykubeproxy.rules.nft_text import rule_text
from pykubeproxy.rules.ruleset import ChainKey


class RuleRise(msgspec.Struct, frozen=True):
    """By how much a rule's counter rose while the probes were sent.

    - `rule`: its text
    - `packets`: by how many packets; those of other connections count too
    - `stops`: the rule drops or rejects packets
    """

    table: str
    chain: str
    rule: str
    packets: int
    stops: bool


class NodeView(msgspec.Struct, frozen=True, rename="camel"):
    """What a node shows about the probes.

    - `flows`: the conntrack entry of each probe, in the order of the probes; null for none
    - `delays`: seconds from the first packet of each probe to its entry; null if unknown
    - `unread`: why conntrack or the counters are unknown, or null
    - `rises`: rules whose counters rose, and rules that stop packets, with 0 if theirs did not
    - `met`: how many packets met the first rule that all probes meet here, with those of other connections; null if unknown
    - `changed`: rules that the trace met were changed meanwhile
    - `hits`: the rules of nftables that the first packets of the probes met on the node that sends, with --rules-hit
    - `failures`: how many packets conntrack failed on meanwhile, with those of other connections, as far as it is known:
      "invalid", "insert-failed", and "drop" if its table is full
    """

    node: str
    flows: tuple[Flow | None, ...] = ()
    delays: tuple[float | None, ...] = ()
    unread: str | None = None
    rises: tuple[RuleRise, ...] = ()
    met: int | None = None
    changed: bool = False
    hits: tuple[RuleHit, ...] = ()
    failures: Mapping[str, int] = {}


class Listening(msgspec.Struct, frozen=True):
    """A connection to an endpoint from its own node.

    - `port`: the number of its port
    - `probe`: how the connection ended
    """

    address: str
    port: int
    node: str
    probe: Probe


class Observations(msgspec.Struct, frozen=True):
    """All that was observed.

    - `probes`: in the order in which they were sent
    - `nodes`: what each node on the way shows, the first node first
    - `listening`: connections to endpoints that did not answer
    """

    probes: tuple[Probe, ...]
    nodes: tuple[NodeView, ...] = ()
    listening: tuple[Listening, ...] = ()

    def view(self, node: str) -> NodeView | None:
        """Return the view of a node, None if it is unknown."""
        return next((view for view in self.nodes if view.node == node and view.unread is None), None)

    def flow(self, node: str, number: int) -> Flow | None:
        """Return the entry of a probe on a node."""
        view = self.view(node)
        return view.flows[number] if view and number < len(view.flows) else None

    def failures(self, node: str, kind: str) -> int:
        """Return how many packets conntrack of a node failed on, 0 if that is unknown."""
        view = self.view(node)
        return view.failures.get(kind, 0) if view else 0


# Packets by chain, position and text of the rule, and whether the rule stops them.
_Counted = Mapping[tuple[ChainKey, int, str], tuple[int, bool]]


def visited_chains(way: TracedWay, node: str) -> tuple[ChainKey, ...]:
    """Return the chains that packets of a way meet on a node."""
    steps = (step for visit in _visits(way, node) for step in visit.steps)
    return tuple(dict.fromkeys(ChainKey(step.table, step.chain) for step in steps))


def counts(rules: NodeRules, chains: Collection[ChainKey]) -> _Counted:
    """Return the counters of the rules in these chains, as far as rules count."""
    return {
        (key, at, text): (packets, stops)
        for key in chains
        for at, (text, packets, stops) in enumerate(_counted(rules, key))
    }


def _counted(rules: NodeRules, key: ChainKey) -> Iterator[tuple[str, int, bool]]:
    if rules.nftables and key in rules.nftables.chains:
        for rule in rules.nftables.chains[key].rules:
            packets = [
                value["packets"]
                for statement in rule.statements
                for value in [statement.get("counter")]
                if isinstance(value, Mapping) and isinstance(value.get("packets"), int)
            ]
            if packets:
                stops = any(kind in statement for statement in rule.statements for kind in ("drop", "reject"))
                yield rule_text(rule), int(str(packets[0])), stops
    elif key in rules.ruleset.chains and key in rules.counters:
        for text, count in zip(rules.ruleset.chains[key], rules.counters[key], strict=False):
            yield text, count.packets, parse_rule(text).options.get("-j") in ("DROP", "REJECT")


def rises(before: _Counted, after: _Counted) -> tuple[RuleRise, ...]:
    """Return the rules whose counters rose, and all that stop packets; not those that are new or count from 0 again."""
    risen = {rule: packets - before[rule][0] for rule, (packets, _) in after.items() if rule in before}
    return tuple(
        RuleRise(*key, text, packets, after[key, at, text][1])
        for (key, at, text), packets in risen.items()
        if packets > 0 or (packets == 0 and after[key, at, text][1])
    )


def met(way: TracedWay, node: str, before: _Counted, after: _Counted) -> int | None:
    """Return how many packets met the first rule that all packets of a way meet on a node; None if it is not counted."""
    for visit in _visits(way, node):
        for step in visit.steps:
            if step.matched:
                key = ChainKey(step.table, step.chain)
                same = [one for one in before.keys() & after.keys() if one[0] == key and one[2] == step.rule]
                return sum(after[one][0] - before[one][0] for one in same) if same else None
    return None


def _visits(way: TracedWay, node: str) -> Iterator[TracedVisit]:
    return (visit for visit in way.visits if visit.node == node)
