"""The chains of a Ruleset, indexed, so that a packet meets few rules of a long chain."""

import re
from collections.abc import Iterable, Sequence

from pykubeproxy.rules.parse import without_comment
from pykubeproxy.rules.ruleset import ChainKey, Ruleset

# Shorter chains are searched from their first rule to their last.
_LONG = 16
# iptables-save prints the addresses before all other conditions.
_DESTINATION = re.compile(r"(?:(?:! )?-s \S+ )?-d ([^\s/]+)(?:/32|/128)? ")
_PORT = re.compile(r"(?<!!) --dport (\d+)(?:\s|$)")

Positions = list[int]


class _Index:
    """Where the rules of a chain are that a packet to a destination and port can meet."""

    def __init__(self, rules: Iterable[str]) -> None:
        self.by_address: dict[str, Positions] = {}
        self.by_port: dict[int, Positions] = {}
        self._others: Positions = []
        for position, text in enumerate(rules):
            if found := _DESTINATION.match(text):
                self.by_address.setdefault(found[1], []).append(position)
            elif found := _PORT.search(without_comment(text)):
                self.by_port.setdefault(int(found[1]), []).append(position)
            else:
                self._others.append(position)

    def positions(self, destination: str, port: int) -> Positions:
        """Return the positions in the order of the chain."""
        return sorted([*self._others, *self.by_address.get(destination, ()), *self.by_port.get(port, ())])


class Chains:
    """The chains of a Ruleset."""

    def __init__(self, ruleset: Ruleset) -> None:
        self._chains = ruleset.chains
        self._policies = ruleset.policies
        self._indexes: dict[ChainKey, _Index] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._chains

    def drops(self, key: ChainKey) -> bool:
        """Return whether a built-in chain drops the packets that no rule decides on."""
        return self._policies.get(key) == "DROP"

    def is_long(self, key: ChainKey) -> bool:
        """Return whether `rules` may leave out rules of the chain."""
        return len(self._chains.get(key, ())) > _LONG

    def rules(self, key: ChainKey, destination: str, port: int) -> Sequence[str]:
        """Return the rules that a packet can match, in order, and perhaps others; none if the chain is missing.

        A rule that is left out is for another address or port.
        """
        rules = self._chains.get(key, ())
        if len(rules) <= _LONG:
            return rules
        return [rules[position] for position in self._index(key, rules).positions(destination, port)]

    def _index(self, key: ChainKey, rules: Iterable[str]) -> _Index:
        if key not in self._indexes:
            self._indexes[key] = _Index(rules)
        return self._indexes[key]
