"""Walk a packet through the chains of one table; every outcome is kept with its probability."""

import enum
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from pykubeproxy.inspect.limit import RuleLimit
from pykubeproxy.inspect.trace.chains import Chains
from pykubeproxy.inspect.trace.packet import DNAT, SNAT, UNTRACKED, Host, Packet, number
from pykubeproxy.inspect.trace.rule import NOT_KNOWN, CompiledRule, Match, compile_rule, mark_and_mask
from pykubeproxy.rules.parse import parse_number
from pykubeproxy.rules.ruleset import ChainKey

# What a step counts as in rules: it takes memory, too.
_COST_OF_STEP = 100


class End(enum.Enum):
    """How a packet leaves a table."""

    ACCEPT = "ACCEPT"
    DROP = "DROP"
    REJECT = "REJECT"


class Effect(msgspec.Struct, frozen=True):
    """The packet after a target; without an end it continues with the next rule. `remark` may be ""."""

    packet: Packet
    end: End | None = None
    remark: str = ""


# Targets that count, log, or change fields no known condition reads.
_NO_EFFECT = frozenset(
    [
        "AUDIT",
        "CHECKSUM",
        "CLASSIFY",
        "CONNMARK",
        "CONNSECMARK",
        "CT",
        "DSCP",
        "HL",
        "LOG",
        "NFLOG",
        "SECMARK",
        "SET",
        "TCPMSS",
        "TOS",
        "TRACE",
        "TTL",
        "ULOG",
    ]
)


def apply_target(rule: CompiledRule, packet: Packet) -> Effect:
    """Apply the target of a rule that matches; it must not be a chain."""
    try:
        return _applied(rule.target, rule.options, packet)
    except ValueError as error:
        return Effect(packet, remark=f"cannot parse a value in the rule: {error}")


def _applied(target: str, options: Mapping[str, str], packet: Packet) -> Effect:
    if target in ("ACCEPT", "DROP", "REJECT"):
        return Effect(packet, End(target))
    if target == "DNAT":
        return Effect(_dnat(packet, options.get("--to-destination", "")), End.ACCEPT)
    if target in ("MASQUERADE", "SNAT"):
        return Effect(_snat(packet, options.get("--to-source", "")), End.ACCEPT)
    if target == "MARK":
        return Effect(msgspec.structs.replace(packet, mark=_mark(packet.mark, options)))
    if target == "NOTRACK" or (target == "CT" and "--notrack" in options):
        remark = "the connection is not tracked and skips table nat"
        return Effect(msgspec.structs.replace(packet, states=(UNTRACKED,)), remark=remark)
    if target and target not in _NO_EFFECT:
        return Effect(packet, remark=f"{NOT_KNOWN} {target} and assumes that the packet continues")
    return Effect(packet)


def _dnat(packet: Packet, to: str) -> Packet:
    """Replace the destination; an address or port that is not given stays."""
    address, port = _first(to)
    return msgspec.structs.replace(
        packet,
        destination=address or packet.destination,
        port=_port(port) if port else packet.port,
        states=(*packet.states, DNAT),
    )


def _snat(packet: Packet, to: str) -> Packet:
    """Replace the source; it stays for MASQUERADE, which picks an address of the node."""
    return msgspec.structs.replace(
        packet, source=_first(to)[0] or packet.source, states=(*packet.states, SNAT)
    )


def _first(text: str) -> tuple[str, str]:
    """Parse "address:port", "[address]:port" or either part alone; of a range take the first. Raises ValueError."""
    if text.startswith("["):
        address, _, rest = text[1:].partition("]")
        port = rest.rpartition("]")[2].removeprefix(":")
    elif text.count(":") > 1:
        address, port = text, ""
    else:
        address, _, port = text.partition(":")
    address = address.partition("-")[0]
    if address:
        number(address)
    return address, port.partition("-")[0]


def _port(text: str) -> int:
    if not 0 < parse_number(text) < 65536:
        raise ValueError(f"{text!r} is no port")
    return parse_number(text)


def _mark(mark: int, options: Mapping[str, str]) -> int:
    """Apply the options of MARK; iptables-save prints only --set-xmark."""
    for option, value in options.items():
        bits, mask = mark_and_mask(value)
        match option:
            case "--set-xmark":
                return mark & ~mask ^ bits
            case "--set-mark":
                return mark & ~mask | bits
            case "--or-mark":
                return mark | bits
            case "--and-mark":
                return mark & bits
            case "--xor-mark":
                return mark ^ bits
    return mark


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

    def past(self, point: ChainKey | Step) -> "Passage":
        return Passage(self.probability, (point, self.trail), self.points + 1)


# The packets that one packet may become.
Flows = dict[Packet, Passage]


class Exit(msgspec.Struct, frozen=True):
    """A packet that left a table, and the step that decided."""

    packet: Packet
    passage: Passage
    end: End
    step: Step


class Walk:
    """The path of one packet from a built-in chain until it leaves the table.

    `exits` are the possible ends. `steps` are in the order of the path, alternatives one after the other; irrelevant
    rules are left out.
    """

    def __init__(
        self,
        chains: Chains,
        host: Host,
        start: ChainKey,
        packet: Packet,
        passage: Passage,
        limit: RuleLimit,
    ) -> None:
        self.exits: list[Exit] = []
        self.steps: list[Step] = []
        self._chains = chains
        self._host = host
        self._limit = limit
        self._destination = packet.destination
        self._port = packet.port
        policy = End.DROP if chains.drops(start) else End.ACCEPT
        step = Step(*start, f"policy {policy.value}", True, "no rule matched; the chain's policy applies")
        for through, left in self._chain(start, {packet: passage}).items():
            if policy is End.DROP:
                self.steps.append(step)
            self.exits.append(Exit(through, left.past(step) if policy is End.DROP else left, policy, step))

    def _chain(self, key: ChainKey, flows: Flows) -> Flows:
        """Send packets into a chain; return those that leave it again."""
        flows = {packet: passage.past(key) for packet, passage in flows.items()}
        returned: Flows = {}
        rules = self._chains.rules(key, self._destination, self._port)
        self._limit.enter(key, len(rules))
        for rule in map(compile_rule, rules):
            matches = [(packet, rule.match(packet, self._host)) for packet in flows]
            self._limit.count(len(flows))
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
                add(onward, [(packet, flows[packet].part(1 - match.probability))])
            if not match.probability:
                if match.relevant:
                    self._step(key, rule, False, match.reason)
                continue
            passage = flows[packet].part(match.probability)
            if rule.target and to in self._chains:
                step = self._step(key, rule, True, match.reason)
                add(returned if rule.goto else onward, self._chain(to, {packet: passage.past(step)}).items())
            elif rule.target == "RETURN":
                step = self._step(key, rule, True, match.reason)
                add(returned, [(packet, passage.past(step))])
            else:
                effect = apply_target(rule, packet)
                step = self._step(key, rule, True, "; ".join(filter(None, (match.reason, effect.remark))))
                if effect.end:
                    self.exits.append(Exit(effect.packet, passage.past(step), effect.end, step))
                else:
                    add(onward, [(effect.packet, passage.past(step))])
        return onward

    def _step(self, key: ChainKey, rule: CompiledRule, matched: bool, reason: str) -> Step:
        self._limit.count(_COST_OF_STEP)
        step = Step(key.table, key.chain, rule.text, matched, reason)
        self.steps.append(step)
        return step


def add(flows: Flows, more: Iterable[tuple[Packet, Passage]]) -> None:
    """Add packets to a flow; the probabilities of equal packets add up, and the first path stays."""
    for packet, passage in more:
        known = flows.get(packet)
        flows[packet] = (
            known._replace(probability=known.probability + passage.probability) if known else passage
        )
