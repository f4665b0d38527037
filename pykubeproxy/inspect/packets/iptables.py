"""The rules of iptables for packets: their tables, conditions and targets.

An unknown condition counts as not met. Packets are the first of their connection.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec

from pykubeproxy.inspect.packets.addresses import (
    Addresses,
    contains,
    intersection,
    number,
    parse_addresses,
    subtract,
)
from pykubeproxy.inspect.packets.packet import (
    DNAT,
    LO,
    LOCAL,
    SNAT,
    UNTRACKED,
    AffinityList,
    NodeNetwork,
    Packet,
)
from pykubeproxy.inspect.packets.rule_set import (
    EVERY_PACKET,
    NO_INTERFACE,
    NOT_KNOWN,
    BaseChain,
    Hook,
    RuleEffect,
    RuleEnd,
    Split,
)
from pykubeproxy.objects import family_of
from pykubeproxy.rules.iptables_save import (
    parse_number,
    parse_options,
    parse_probability,
    parse_rule,
    without_comment,
)
from pykubeproxy.rules.ruleset import ChainKey, Ruleset

# Returns the probability that such a packet meets a condition: 1, 0 or, by chance, something between.
Probability = Callable[[str, Packet, NodeNetwork], float]
# Returns the sources that meet a condition, for packets of many clients; None if it does not concern the source.
Sources = Callable[[str, Packet, NodeNetwork], Addresses | None]
# Describes a packet that meets the condition (True) or does not (False); "" if nothing is worth saying.
Describe = Callable[[str, Packet, bool], str]


class Condition(NamedTuple):
    """A kind of condition.

    `by_destination`: it concerns destination, port or protocol. `known`: False if this module cannot evaluate it; then
    it is not met, even if negated.
    """

    probability: Probability
    describe: Describe
    by_destination: bool = False
    known: bool = True
    sources: Sources | None = None


def _address(what: str, get: Callable[[Packet], str], by_destination: bool) -> Condition:
    """Return a condition that names an address, a network or, as "first-last", a range."""

    def probability(value: str, packet: Packet, _: NodeNetwork) -> float:
        first, dash, last = value.partition("-")
        if dash:
            return number(first) <= number(get(packet)) <= number(last)
        return contains(value, get(packet))

    def describe(value: str, packet: Packet, met: bool) -> str:
        address, _, length = value.partition("/")
        if "-" not in value and length in ("", "128" if ":" in address else "32"):
            return f"its {what} is {address}" if met else f"its {what} {get(packet)} is not {address}"
        return f"its {what} {get(packet)} is {'' if met else 'not '}in {value}"

    return Condition(
        probability, describe, by_destination, sources=None if by_destination else _named_sources
    )


def _named_sources(value: str, _: Packet, __: NodeNetwork) -> Addresses:
    return parse_addresses(value)


def _own_sources(value: str, packet: Packet, network: NodeNetwork) -> Addresses | None:
    return network.own_addresses(family_of(packet.destination)) if value == LOCAL else None


def _address_type(what: str, get: Callable[[Packet], str]) -> Condition:
    def describe(value: str, packet: Packet, met: bool) -> str:
        kind = "an address of this node" if value == "LOCAL" else f"of type {value}"
        return f"its {what} {get(packet)} is {'' if met else 'not '}{kind}"

    return Condition(
        lambda value, packet, network: network.address_type(get(packet)) in value.split(","), describe
    )


def _interface(direction: str, get: Callable[[Packet], str]) -> Condition:
    def probability(value: str, packet: Packet, _: NodeNetwork) -> float:
        if value.endswith("+"):
            return bool(get(packet)) and get(packet).startswith(value[:-1])
        return get(packet) == value

    def describe(value: str, packet: Packet, met: bool) -> str:
        if met:
            return f"it {direction} by {get(packet)}"
        if not get(packet) and value != LO and not (packet.starts_here and direction == "came in"):
            return f"{NO_INTERFACE} by which it {direction} and assumes that is not {value}"
        return f"it {direction} by {get(packet) or 'another interface'}, not {value}"

    return Condition(probability, describe)


def _ports(text: str, port: int) -> bool:
    """Return whether "80", "8000:8999" or a list of these, with commas, contains a port."""
    for part in text.split(","):
        first, colon, last = part.partition(":")
        if int(first or 0) <= port <= int((last or 65535) if colon else first):
            return True
    return False


def _describe_port(value: str, packet: Packet, met: bool) -> str:
    if value.isdecimal():
        return f"its port is {packet.port}" if met else f"its port {packet.port} is not {value}"
    return f"its port {packet.port} is {'' if met else 'not '}in {value}"


def _protocol(value: str, packet: Packet, _: NodeNetwork) -> float:
    return value in ("all", packet.protocol, _PROTOCOL_NUMBERS[packet.protocol])


def _mark(value: str, packet: Packet, _: NodeNetwork) -> float:
    bits, mask = mark_and_mask(value)
    return packet.mark & mask == bits


def _describe_mark(value: str, packet: Packet, met: bool) -> str:
    bits, mask = mark_and_mask(value)
    if bits == mask:
        return f"it {'has' if met else 'does not have'} the mark {bits:#x}"
    return f"its mark {packet.mark:#x} is {'' if met else 'not '}{value}"


def mark_and_mask(text: str) -> tuple[int, int]:
    """Parse "0x4000/0x4000"; without a mask all 32 bits count."""
    bits, _, mask = text.partition("/")
    return int(bits, 0), int(mask, 0) if mask else 0xFFFFFFFF


def _tcp_flags(value: str, packet: Packet, _: NodeNetwork) -> float:
    """Evaluate "mask flags" for a first TCP packet, which has SYN alone."""
    mask, _space, flags = value.partition(" ")
    present = {"SYN"} & (set(mask.split(",")) if mask != "ALL" else {"SYN"})
    return packet.protocol == "tcp" and present == set(flags.split(",")) - {"NONE"}


def _states(value: str, packet: Packet, _: NodeNetwork) -> float:
    return not set(packet.states).isdisjoint(value.split(","))


def _describe_states(value: str, packet: Packet, met: bool) -> str:
    states = value.split(",")
    if met:
        return f"its state is {' and '.join(state for state in packet.states if state in states)}"
    return f"its state is not {' or '.join(states)}"


def _constant(probability: float, description: str) -> Condition:
    return Condition(lambda _, __, ___: probability, lambda _, __, ___: description)


def _chance(parse: Callable[[str], float]) -> Condition:
    def describe(value: str, _: Packet, met: bool) -> str:
        taken = parse(value) if met else 1 - parse(value)
        return f"a random {100 * taken:.4g}% of the packets that get here match"

    return Condition(lambda value, _, __: parse(value), describe)


_PROTOCOL_NUMBERS = {"tcp": "6", "udp": "17", "sctp": "132"}
_PORT = Condition(lambda value, packet, _: _ports(value, packet.port), _describe_port, True)
_SOURCE_PORT = _constant(0, "its source port is unknown")
_STATE = Condition(_states, _describe_states)
_FIRST_CONNECTION = _constant(0, "the client is assumed to be new, without affinity to an endpoint")

# By module, "" for options of no module, and option.
_CONDITIONS: Mapping[tuple[str, str], Condition] = {
    ("", "-s"): _address("source", lambda packet: packet.source, False),
    ("", "-d"): _address("destination", lambda packet: packet.destination, True),
    ("", "-i"): _interface("came in", lambda packet: packet.received_by),
    ("", "-o"): _interface("goes out", lambda packet: packet.sent_by),
    ("", "-p"): Condition(
        _protocol,
        lambda value, packet, met: (
            f"it is {packet.protocol.upper()}{'' if met else f', not {value.upper()}'}"
        ),
        True,
    ),
    ("", "-f"): _constant(0, "it is no fragment"),
    **{(module, "--dport"): _PORT for module in _PROTOCOL_NUMBERS},
    **{(module, "--sport"): _SOURCE_PORT for module in _PROTOCOL_NUMBERS},
    ("tcp", "--tcp-flags"): Condition(
        _tcp_flags, lambda value, _, met: f"its flag SYN {'meets' if met else 'does not meet'} {value}"
    ),
    ("multiport", "--dports"): _PORT,
    ("multiport", "--ports"): _PORT,
    ("multiport", "--sports"): _SOURCE_PORT,
    ("iprange", "--src-range"): _address("source", lambda packet: packet.source, False),
    ("iprange", "--dst-range"): _address("destination", lambda packet: packet.destination, True),
    ("addrtype", "--src-type"): _address_type("source", lambda packet: packet.source)._replace(
        sources=_own_sources
    ),
    ("addrtype", "--dst-type"): _address_type("destination", lambda packet: packet.destination),
    ("conntrack", "--ctstate"): _STATE,
    ("state", "--state"): _STATE,
    ("mark", "--mark"): Condition(_mark, _describe_mark),
    ("statistic", "--probability"): _chance(parse_probability),
    ("statistic", "--every"): _chance(lambda every: 1 / max(int(every), 1)),
    ("recent", "--rcheck"): _FIRST_CONNECTION,
    ("recent", "--update"): _FIRST_CONNECTION,
    ("recent", "--remove"): _FIRST_CONNECTION,
    ("recent", "--set"): _constant(1, "the client gets affinity from now on"),
    ("limit", "--limit"): _constant(1, "a first packet is within any limit"),
}
# By module, options that only qualify another one; includes modules that match every packet.
_DETAILS: Mapping[str, frozenset[str]] = {
    "statistic": frozenset({"--mode", "--packet"}),
    "recent": frozenset(
        {"--seconds", "--reap", "--hitcount", "--rttl", "--name", "--mask", "--rsource", "--rdest"}
    ),
    "limit": frozenset({"--limit-burst"}),
    "comment": frozenset({"--comment"}),
    "nfacct": frozenset({"--nfacct-name"}),
}
_MODULES = {module for module, _ in _CONDITIONS} | set(_DETAILS)


def condition(module: str, option: str) -> Condition | None:
    """Return the condition of a module's option; None if the option only qualifies another one."""
    if option in _DETAILS.get(module, ()):
        return None
    return _CONDITIONS.get((module, option)) or _unknown(f"-m {module} {option}" if module else option)


def unknown_module(module: str) -> Condition | None:
    """Return a condition for an unknown module, which may have no option; None for known modules."""
    return None if module in _MODULES else _unknown(f"-m {module}")


def _unknown(text: str) -> Condition:
    return _constant(0, f"{NOT_KNOWN} {text} and assumes no match")._replace(known=False)


class RuleCondition(NamedTuple):
    """A condition with its option and value in a rule; an unknown module has no option."""

    option: str
    condition: Condition
    value: str
    negated: bool

    def probability(self, packet: Packet, network: NodeNetwork) -> float:
        """Return the probability that such a packet passes."""
        met = self.condition.probability(self.value, packet, network)
        return 1.0 - met if self.negated else met

    def sources(self, packet: Packet, network: NodeNetwork) -> Addresses | None:
        """Return the sources that the option names; None if it does not concern the source."""
        return self.condition.sources(self.value, packet, network) if self.condition.sources else None

    def describe(self, packet: Packet, passes: bool) -> str:
        """Return why the packet passes, or why not."""
        return self.condition.describe(self.value, packet, passes is not self.negated)


# What a rule without target, and each of these targets, does to the packet: it counts, logs, or changes fields that no
# known condition reads.
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
_ENDS = {end.value: end for end in RuleEnd}


class CompiledRule(msgspec.Struct, frozen=True):
    """A rule; after a jump with `goto` packets do not return. `options` are the target's."""

    text: str
    conditions: tuple[RuleCondition, ...]
    target: str
    goto: bool
    options: Mapping[str, str]
    comment: str = ""

    @property
    def affinity(self) -> int:
        if not any(one.option == "--rcheck" for one in self.conditions):
            return 0
        return parse_number(parse_rule(self.text).options.get("--seconds", ""))

    def split(self, packet: Packet, network: NodeNetwork) -> Split:
        """Divide packets into those that match and the others; a rule with an unreadable value matches none."""
        try:
            return self._split(packet, network)
        except (ValueError, ArithmeticError) as error:
            return Split((), ((packet, 1.0),), error=_unreadable(error))

    def _effect(self, packet: Packet) -> RuleEffect:
        """Return what the target does to a packet that matches."""
        try:
            return _applied(self.target, self.goto, self.options, packet)
        except ValueError as error:
            return RuleEffect(packet, remark=_unreadable(error))

    def reason(self, packet: Packet, network: NodeNetwork, split: Split) -> str:
        """Return why packets match, or why not; "" if the rule is for another destination, protocol or port."""
        if split.error:
            return split.error
        try:
            if split.matched:
                facts = [fact for one in self.conditions if (fact := one.describe(packet, True))]
                return ", ".join(facts) or EVERY_PACKET
            relevant = all(
                one.probability(packet, network)
                for one in self.conditions[split.failed :]
                if one.condition.by_destination
            )
            return self.conditions[split.failed].describe(packet, False) if relevant else ""
        except (ValueError, ArithmeticError) as error:
            return _unreadable(error)

    def _split(self, packet: Packet, network: NodeNetwork) -> Split:
        share, clients = 1.0, packet.clients
        remembered_in, recalled = packet.remembered_in, packet.recalled
        for position, one in enumerate(self.conditions):
            sources = one.sources(packet, network) if clients and not packet.source else None
            if sources is not None:
                clients = subtract(clients, sources) if one.negated else intersection(clients, sources)
            elif packet.clients and one.option == "--rcheck":
                share *= packet.recalled in (None, affinity_list(self.text))
                recalled = affinity_list(self.text)
            elif packet.clients and one.option == "--set":
                remembered_in = affinity_list(self.text).name
            else:
                share *= one.probability(packet, network)
            if not share or (packet.clients and not clients):
                return Split((), ((packet, 1.0),), position)
        if not packet.clients:
            missed_part = ((packet, 1 - share),) if share < 1 else ()
            return Split(((self._effect(packet), share),), missed_part)
        narrowed = msgspec.structs.replace(packet, clients=clients)
        matched = msgspec.structs.replace(narrowed, remembered_in=remembered_in, recalled=recalled)
        if recalled != packet.recalled:  # a client is known or new: this is no part of the new ones
            return Split(((self._effect(matched), share),), ((packet, 1.0),))
        missed = [(narrowed, 1 - share)] if share < 1 else []
        if others := subtract(packet.clients, clients):
            missed.append((msgspec.structs.replace(packet, clients=others), 1.0))
        return Split(((self._effect(matched), share),), tuple(missed))


def _unreadable(error: Exception) -> str:
    return f"cannot parse a value in the rule: {error}"


@lru_cache(maxsize=65536)
def affinity_list(text: str) -> AffinityList:
    """Return the list that a rule with `-m recent` names. Raises ValueError."""
    options = parse_rule(text).options
    return AffinityList(options.get("--name", ""), int(options.get("--seconds", "0")))


@lru_cache(maxsize=65536)
def compile_rule(text: str) -> CompiledRule:
    """Compile a rule, the text that iptables-save prints after `-A CHAIN `."""
    conditions: list[RuleCondition] = []
    options: dict[str, str] = {}
    module = target = comment = ""
    goto = False
    for name, value, negated in parse_options(text):
        if target:
            options[name] = value
        elif name in ("-j", "-g"):
            target, goto = value, name == "-g"
        elif name == "-m":
            module = value
            if found := unknown_module(module):
                conditions.append(RuleCondition("", found, "", False))
        elif name == "--comment":
            comment = value
        elif found := condition(module if name.startswith("--") else "", name):
            conditions.append(RuleCondition(name, found, value, negated and found.known))
    return CompiledRule(text, tuple(conditions), target, goto, options, comment)


def _applied(target: str, goto: bool, options: Mapping[str, str], packet: Packet) -> RuleEffect:
    if end := _ENDS.get(target):
        return RuleEffect(packet, end)
    if target == "DNAT":
        return RuleEffect(_dnat(packet, options.get("--to-destination", "")), RuleEnd.ACCEPT)
    if target in ("MASQUERADE", "SNAT"):
        return RuleEffect(_snat(packet, options.get("--to-source", "")), RuleEnd.ACCEPT)
    if target == "MARK":
        return RuleEffect(msgspec.structs.replace(packet, mark=_marked(packet.mark, options)))
    if target == "NOTRACK" or (target == "CT" and "--notrack" in options):
        remark = "the connection is not tracked and skips table nat"
        return RuleEffect(msgspec.structs.replace(packet, states=(UNTRACKED,)), remark=remark)
    return RuleEffect(packet, jump="" if target in _NO_EFFECT else target, goto=goto)


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


def _marked(mark: int, options: Mapping[str, str]) -> int:
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


# The tables with a chain at each hook, with its priority (linux/netfilter_ipv4.h, NF_IP_PRI_*).
_TABLES: Mapping[Hook, Mapping[str, int]] = {
    Hook.PREROUTING: {"raw": -300, "mangle": -150, "nat": -100},
    Hook.OUTPUT: {"raw": -300, "mangle": -150, "nat": -100, "filter": 0, "security": 50},
    Hook.FORWARD: {"mangle": -150, "filter": 0, "security": 50},
    Hook.INPUT: {"mangle": -150, "filter": 0, "security": 50, "nat": 100},
    Hook.POSTROUTING: {"mangle": -150, "nat": 100},
}
# Shorter chains are searched from their first rule to their last.
_LONG = 16
# iptables-save prints the addresses before all other conditions.
_DESTINATION = re.compile(r"(?:(?:! )?-s \S+ )?-d ([^\s/]+)(?:/32|/128)? ")
_PORT_OPTION = re.compile(r"(?<!!) --dport (\d+)(?:\s|$)")


class _Index:
    """The positions of the rules that a packet can meet in a long chain, by destination and by port."""

    def __init__(self, rules: Iterable[str]) -> None:
        self.by_address: dict[str, list[int]] = {}
        self.by_port: dict[int, list[int]] = {}
        self._others: list[int] = []
        for position, text in enumerate(rules):
            if found := _DESTINATION.match(text):
                self.by_address.setdefault(found[1], []).append(position)
            elif found := _PORT_OPTION.search(without_comment(text)):
                self.by_port.setdefault(int(found[1]), []).append(position)
            else:
                self._others.append(position)

    def positions(self, packet: Packet) -> list[int]:
        """Return the positions in the order of the chain."""
        return sorted(
            [*self._others, *self.by_address.get(packet.destination, ()), *self.by_port.get(packet.port, ())]
        )


class IptablesRules:
    """The tables of iptables for one family. A chain is read when a packet first gets there."""

    def __init__(self, ruleset: Ruleset) -> None:
        self.family = ruleset.family
        self._chains = ruleset.chains
        self._policies = ruleset.policies
        self._short: dict[ChainKey, Sequence[CompiledRule]] = {}
        self._long: dict[ChainKey, tuple[tuple[str, ...], _Index]] = {}

    def base_chains(self, hook: Hook) -> Sequence[BaseChain]:
        """Return the built-in chains of the tables at a hook."""
        keys = {ChainKey(table, hook.value): priority for table, priority in _TABLES[hook].items()}
        return [
            BaseChain(key, priority, key.table == "nat", self._policies.get(key) == "DROP")
            for key, priority in keys.items()
            if key in self._chains
        ]

    def met(self, chain: ChainKey, packet: Packet) -> Sequence[CompiledRule]:
        """Return the rules of a chain that a packet can match, in order; none if the chain is missing."""
        if (short := self._short.get(chain)) is not None:
            return short
        if chain not in self._long:
            texts = self._chains.get(chain, ())
            if len(texts) <= _LONG:
                rules = self._short[chain] = [compile_rule(text) for text in texts]
                return rules
            self._long[chain] = (texts, _Index(texts))
        texts, index = self._long[chain]
        return [compile_rule(texts[position]) for position in index.positions(packet)]

    def texts(self, chain: ChainKey) -> tuple[str, ...]:
        """Return all rules of a chain as iptables-save prints them; none if the chain is missing."""
        return self._chains.get(chain, ())

    def is_long(self, chain: ChainKey) -> bool:
        """Return whether `met` may leave out rules of a chain."""
        return len(self.texts(chain)) > _LONG

    def jump(self, chain: ChainKey, target: str) -> ChainKey | None:
        """Return the chain to which a rule of this chain with a target jumps; None if the target is no chain."""
        to = ChainKey(chain.table, target)
        return to if target and to in self._chains else None
