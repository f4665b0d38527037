"""The rules that packets meet after DNAT, and whether they tell endpoints from the destination that clients name."""

from collections.abc import Iterable

from pykubeproxy.inspect.meaning.sign_rule import SignedRule, sign_rule
from pykubeproxy.inspect.trace.packet import Host, Packet
from pykubeproxy.rules.ruleset import Ruleset

_POSTROUTING = ("POSTROUTING", "KUBE-POSTROUTING")


class TranslatedRules:
    """The rules of table filter and after routing that have conditions on the destination."""

    def __init__(self, ruleset: Ruleset) -> None:
        self._addresses: set[str] = set()
        self._ports: set[str] = set()
        self._others: list[SignedRule] = []
        for key, rules in ruleset.chains.items():
            if key.table == "filter" or key.chain in _POSTROUTING:
                self._add(map(sign_rule, rules))

    def differ(self, packet: Packet, endpoints: Iterable[str], host: Host) -> bool:
        """Return whether an endpoint may meet other rules than the packet's destination does."""
        for endpoint in endpoints:
            address, _, port = endpoint.rpartition(":")
            address = address.strip("[]")
            if address in self._addresses or port in self._ports:
                return True
            if self._others:
                there = Packet(packet.protocol, "", address, int(port) if port.isdecimal() else 0)
                if any(_meets(it, there, host) != _meets(it, packet, host) for it in self._others):
                    return True
        return False

    def _add(self, rules: Iterable[SignedRule]) -> None:
        for rule in rules:
            if rule.never or not rule.destination or not rule.target:
                continue
            values = {one.option: one.value for one in rule.destination if not one.negated}
            address, _, length = values.get("-d", "").partition("/")
            if address and length in ("", "128" if ":" in address else "32"):
                self._addresses.add(address)
            elif values.get("--dport", "").isdecimal():
                self._ports.add(values["--dport"])
            else:
                self._others.append(rule)


def _meets(rule: SignedRule, packet: Packet, host: Host) -> bool:
    try:
        return all(one.probability(packet, host) for one in rule.destination)
    except (ValueError, ArithmeticError):
        return False
