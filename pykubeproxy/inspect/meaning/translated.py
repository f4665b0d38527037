"""The rules that packets meet after DNAT, and whether they tell endpoints from the destination that clients name."""

from collections.abc import Iterable
from functools import lru_cache

from pykubeproxy.inspect.meaning.sign_rule import SignedRule, sign_rule
from pykubeproxy.inspect.trace.packet import Packet
from pykubeproxy.rules.parse import parse_number
from pykubeproxy.rules.ruleset import Ruleset

_POSTROUTING = ("POSTROUTING", "KUBE-POSTROUTING")


class TranslatedRules:
    """The rules of table filter and after routing that have conditions on the destination."""

    def __init__(self, ruleset: Ruleset) -> None:
        self._addresses: set[str] = set()
        self._ports: set[int] = set()
        self._others: list[SignedRule] = []
        for key, rules in ruleset.chains.items():
            if key.table == "filter" or key.chain in _POSTROUTING:
                self._add(map(sign_rule, rules))

    def met(self, packet: Packet) -> tuple[bool, ...] | None:
        """Return which of these rules a packet meets; None if one of them names its destination or port."""
        if packet.destination in self._addresses or packet.port in self._ports:
            return None
        return tuple([it.meets(packet) for it in self._others])

    def elsewhere(self, packet: Packet, endpoints: frozenset[str]) -> tuple[Packet, ...]:
        """Return the packet as it is after DNAT, for each endpoint, if one may meet other rules than before DNAT."""
        if not endpoints or not (self._addresses or self._ports or self._others):
            return ()
        met = self.met(packet)
        there = [_translated(packet.protocol, it) for it in sorted(endpoints)]
        return tuple(there) if met is None or any(self.met(it) != met for it in there) else ()

    def _add(self, rules: Iterable[SignedRule]) -> None:
        for rule in rules:
            if rule.never or not rule.destination or not rule.target:
                continue
            values = {one.option: one.value for one in rule.destination if not one.negated}
            address, _, length = values.get("-d", "").partition("/")
            if address and length in ("", "128" if ":" in address else "32"):
                self._addresses.add(address)
            elif port := parse_number(values.get("--dport", "")):
                self._ports.add(port)
            else:
                self._others.append(rule)


@lru_cache(maxsize=1 << 14)
def _translated(protocol: str, endpoint: str) -> Packet:
    address, _, port = endpoint.rpartition(":")
    return Packet(protocol, "", address.strip("[]"), int(port) if port.isdecimal() else 0)
