"""What of a rule counts for first packets of connections: conditions that they may or may not meet, and the action."""

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import msgspec

from pykubeproxy.inspect.trace.packet import DNAT, NEW, SNAT, Host, Packet
from pykubeproxy.inspect.trace.rule import RuleCondition, compile_rule, mark_and_mask, unknown_module
from pykubeproxy.rules.parse import parse_options

# Versions of kube-proxy give probabilities with 5 to 11 decimals.
_DECIMALS = 5
_SOURCES = ("-s", "--src-range")
_PROTOCOLS = {"tcp": "6", "udp": "17", "sctp": "132"}
# Options of a rule that change nothing for a packet.
_WITHOUT_EFFECT = frozenset(("-m", "--comment", "--nfacct-name", "--random-fully"))
# Conditions on the destination do not depend on the host.
_NO_HOST = Host()
_ENDS = frozenset(("ACCEPT", "DROP", "REJECT", "RETURN", "DNAT"))


class _MarkCondition(NamedTuple):
    """A condition on the mark; it is met by marks with `bits` of those in the mask, or by others if negated."""

    text: str
    bits: int
    negated: bool


class SignedRule(msgspec.Struct, frozen=True, gc=False):
    """A rule whose conditions on the destination are apart from the others.

    - `protocols`: those that match; None for all
    - `never`: no first packet meets the conditions
    - `action`: the target with its options, without the name of a chain of the proxy
    - `sets`: the bits that it may set in the mark
    - `ends`: packets that match go no further in this chain
    """

    text: str
    destination: tuple[RuleCondition, ...]
    protocols: frozenset[str] | None
    never: bool
    marks: tuple[_MarkCondition, ...]
    others: str
    target: str
    goto: bool
    action: str
    endpoint: str
    sources: tuple[str, ...]
    sets: int
    ends: bool

    def meets(self, packet: Packet) -> bool:
        """Return whether a packet meets the conditions on the destination; none meets one with an unreadable value."""
        try:
            return all(one.probability(packet, _NO_HOST) for one in self.destination)
        except (ValueError, ArithmeticError):
            return False

    def possible(self, bits: int) -> bool:
        """Return whether a packet can match if no other bits of its mark may be set."""
        for it in self.marks:
            if it.bits & ~bits and not it.negated:
                return False
        return bool(self.target) and not self.never

    def conditions_for(self, bits: int) -> str:
        """Return the conditions that such a packet may or may not meet."""
        if not self.marks:
            return self.others
        open_ones = [it.text for it in self.marks if not it.bits & ~bits]
        return " ".join((*open_ones, self.others)) if self.others else " ".join(open_ones)


@lru_cache(maxsize=1 << 16)
def sign_rule(text: str) -> SignedRule:
    """Take a rule apart."""
    compiled = compile_rule(text)
    destination = tuple(
        one for one in compiled.conditions if one.condition.by_destination and one.option != "-p"
    )
    apart = {"-p", *(one.option for one in destination)}
    words: list[str] = []
    action: list[str] = []
    marks: list[_MarkCondition] = []
    sources: list[str] = []
    never = False
    for name, value, negated in parse_options(text):
        if name in _WITHOUT_EFFECT and not (name == "-m" and unknown_module(value)):
            continue
        if name in ("-j", "-g") or action:
            action += (name,) if name in ("-j", "-g") else (name, value)
        elif name in ("--ctstate", "--state") and (met := _of_first_packet(value, negated)) is not None:
            never |= not met
        elif name == "--mark" and (mark := _mark_condition(value, negated)):
            marks.append(mark)
        elif name not in apart:
            if name in _SOURCES:
                sources.append(value)
            value = _rounded(value) if name == "--probability" else value
            words += ("!", name, value) if negated else (name, value)
    target = compiled.target
    return SignedRule(
        text,
        destination,
        _protocols(text),
        never,
        tuple(marks),
        " ".join(words),
        target,
        compiled.goto,
        " ".join(action),
        compiled.options.get("--to-destination", "") if target == "DNAT" else "",
        tuple(sources),
        _bits_set(compiled.options) if target == "MARK" else 0,
        target in _ENDS,
    )


def _of_first_packet(value: str, negated: bool) -> bool | None:
    """Return whether first packets are in one of these states; None if it depends on address translation."""
    states = set(value.split(","))
    if NEW in states:
        return not negated
    return None if states & {DNAT, SNAT, "UNTRACKED"} else negated


def _mark_condition(value: str, negated: bool) -> _MarkCondition | None:
    try:
        bits, mask = mark_and_mask(value)
    except ValueError:
        return None
    return _MarkCondition(f"{'! ' if negated else ''}--mark {value}", bits & mask, negated)


def _bits_set(options: Mapping[str, str]) -> int:
    """Return the bits that the options of MARK may set; all if they are unreadable."""
    bits = 0
    try:
        for name, value in options.items():
            bits |= 0 if name == "--and-mark" else mark_and_mask(value)[0]
    except ValueError:
        return 0xFFFFFFFF
    return bits


def _protocols(text: str) -> frozenset[str] | None:
    """Return the protocols that the conditions of a rule admit, of those with ports; None for all."""
    found: set[str] | None = None
    for name, value, negated in parse_options(text):
        if name == "-p":
            named = {it for it, number in _PROTOCOLS.items() if value in ("all", it, number)}
            some = set(_PROTOCOLS) - named if negated else named
            found = some if found is None else found & some
    return None if found is None else frozenset(found)


def _rounded(probability: str) -> str:
    try:
        return f"{float(probability):.{_DECIMALS}f}"
    except ValueError:
        return probability
