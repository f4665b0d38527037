"""Rules compiled for tracing: their conditions, and for each condition whether a packet meets it, and why.

An unknown option counts as not met. Packets are the first of their connection.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple

import msgspec

from pykubeproxy.inspect.trace.packet import Host, Packet, contains, number
from pykubeproxy.rules.parse import parse_options, parse_probability

# Starts the reason of a step that trace cannot evaluate.
NOT_KNOWN = "trace does not know"
# The reason of a rule without conditions.
EVERY_PACKET = "every packet matches"
# Returns the probability that such a packet meets a condition: 1, 0 or, by chance, something between.
Probability = Callable[[str, Packet, Host], float]
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


def _address(what: str, get: Callable[[Packet], str], by_destination: bool) -> Condition:
    def describe(value: str, packet: Packet, met: bool) -> str:
        address, _, length = value.partition("/")
        if length in ("", "128" if ":" in address else "32"):
            return f"its {what} is {address}" if met else f"its {what} {get(packet)} is not {address}"
        return f"its {what} {get(packet)} is {'' if met else 'not '}in {value}"

    return Condition(lambda value, packet, _: contains(value, get(packet)), describe, by_destination)


def _range(what: str, get: Callable[[Packet], str], by_destination: bool) -> Condition:
    def probability(value: str, packet: Packet, _: Host) -> float:
        first, _dash, last = value.partition("-")
        return number(first) <= number(get(packet)) <= number(last or first)

    def describe(value: str, packet: Packet, met: bool) -> str:
        return f"its {what} {get(packet)} is {'' if met else 'not '}in {value}"

    return Condition(probability, describe, by_destination)


def _address_type(what: str, get: Callable[[Packet], str]) -> Condition:
    def describe(value: str, packet: Packet, met: bool) -> str:
        kind = "an address of this node" if value == "LOCAL" else f"of type {value}"
        return f"its {what} {get(packet)} is {'' if met else 'not '}{kind}"

    return Condition(lambda value, packet, host: host.address_type(get(packet)) in value.split(","), describe)


def _interface(direction: str, get: Callable[[Packet], str]) -> Condition:
    def probability(value: str, packet: Packet, _: Host) -> float:
        if value.endswith("+"):
            return bool(get(packet)) and get(packet).startswith(value[:-1])
        return get(packet) == value

    def describe(value: str, packet: Packet, met: bool) -> str:
        if met:
            return f"it {direction} by {get(packet)}"
        return f"it {direction} by {get(packet) or 'an unknown interface'}, not {value}"

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


def _protocol(value: str, packet: Packet, _: Host) -> float:
    return value in ("all", packet.protocol, _PROTOCOL_NUMBERS[packet.protocol])


def _mark(value: str, packet: Packet, _: Host) -> float:
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


def _tcp_flags(value: str, packet: Packet, _: Host) -> float:
    """Evaluate "mask flags" for a first TCP packet, which has SYN alone."""
    mask, _space, flags = value.partition(" ")
    present = {"SYN"} & (set(mask.split(",")) if mask != "ALL" else {"SYN"})
    return packet.protocol == "tcp" and present == set(flags.split(",")) - {"NONE"}


def _states(value: str, packet: Packet, _: Host) -> float:
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
    ("iprange", "--src-range"): _range("source", lambda packet: packet.source, False),
    ("iprange", "--dst-range"): _range("destination", lambda packet: packet.destination, True),
    ("addrtype", "--src-type"): _address_type("source", lambda packet: packet.source),
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
            return Match(0.0, f"cannot parse a value in the rule: {error}", True)

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
        return Match(total, ", ".join(facts) or EVERY_PACKET, True)


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
                conditions.append(RuleCondition("", found, "", False))
        elif found := condition(module if name.startswith("--") else "", name):
            conditions.append(RuleCondition(name, found, value, negated and found.known))
    return CompiledRule(text, tuple(conditions), target, goto, options)
