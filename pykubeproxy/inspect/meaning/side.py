"""One of the two states that are compared: its destinations, and the signatures of its rules."""

from collections.abc import Iterator

from pykubeproxy.inspect.meaning.outcomes import Destination
from pykubeproxy.inspect.meaning.signature import SharedSignatures, Signature, Signer
from pykubeproxy.inspect.meaning.translated import TranslatedRules
from pykubeproxy.inspect.meaning.walk import AFTER_DNAT, BEFORE_DNAT
from pykubeproxy.inspect.routes import rejecting_rules, serving_rules
from pykubeproxy.inspect.trace.chains import Chains
from pykubeproxy.inspect.trace.packet import Packet
from pykubeproxy.objects import Protocol
from pykubeproxy.rules.parse import parse_rule
from pykubeproxy.rules.ruleset import Ruleset

_PROTOCOLS = frozenset(it.value for it in Protocol)


class Side:
    """The signatures of one of the two states, and what else is known about its rules.

    `frontends` are the destinations and their titles, with ANY_LOCAL as the address of node ports; `interfaces` those that
    rules name.
    """

    def __init__(self, ruleset: Ruleset, shared: SharedSignatures) -> None:
        self.ruleset = ruleset
        self.frontends = tuple(_frontends(ruleset))
        self.interfaces = frozenset(_interfaces(ruleset))
        self._signer = Signer(Chains(ruleset), shared)
        self._translated = TranslatedRules(ruleset)
        self._later: dict[tuple[tuple[bool, ...], int, str], list[Signature]] = {}
        self._known: dict[Packet, tuple[Signature, ...] | None] = {}

    def signature(self, packet: Packet) -> tuple[Signature, ...] | None:
        """Return signatures with numbers that are equal only if the same happens to packets; None if they cannot tell."""
        if packet not in self._known:
            self._known[packet] = self._sign(packet)
        return self._known[packet]

    def _sign(self, packet: Packet) -> tuple[Signature, ...] | None:
        first = [self._signer.sign(key, packet) for key in BEFORE_DNAT]
        bits, endpoints = 0, frozenset[str]()
        for it in first:
            bits |= it.bits
            endpoints |= it.endpoints
        later = [*self._sign_later(packet, bits)]
        for there in self._translated.elsewhere(packet, endpoints):
            later += self._sign_later(there, bits)
        if any(it.bits & ~bits or it.endpoints for it in later):
            return None
        return (*first, *later)

    def _sign_later(self, packet: Packet, bits: int) -> list[Signature]:
        """Return the signatures after DNAT; they are the same for destinations that meet the same rules."""
        met = self._translated.met(packet)
        if met is None:
            return [self._signer.sign(key, packet, bits) for key in AFTER_DNAT]
        case = (met, bits, packet.protocol)
        if (known := self._later.get(case)) is None:
            known = self._later[case] = [self._signer.sign(key, packet, bits) for key in AFTER_DNAT]
        return known


def _interfaces(ruleset: Ruleset) -> Iterator[str]:
    for rules in ruleset.chains.values():
        for rule in rules:
            if "-i " in rule:
                yield parse_rule(rule).options.get("-i", "").removeprefix("! ").removesuffix("+")


def _frontends(ruleset: Ruleset) -> Iterator[tuple[Destination, str]]:
    for rule in (*serving_rules(ruleset), *rejecting_rules(ruleset)):
        if rule.protocol in _PROTOCOLS:
            yield Destination(rule.protocol, rule.frontend.address, rule.frontend.port), rule.title
