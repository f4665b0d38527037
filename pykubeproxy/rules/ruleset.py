"""The chains of one family as a value, with rules as iptables-save prints them."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from pykubeproxy.objects import Family

IPTABLES_TABLES = ("raw", "mangle", "nat", "filter", "security")
# The built-in chains of all tables.
BUILT_IN = frozenset(("PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"))


Rules = tuple[str, ...]


class ChainKey(NamedTuple):
    """The table and name of a chain."""

    table: str
    chain: str


# Rules in shared chains, by chain.
Entries = tuple[tuple[ChainKey, Rules], ...]


class Ruleset(msgspec.Struct, frozen=True):
    """Chains and their rules, each rule as iptables-save prints it after `-A CHAIN `.

    Chains are in the order of writing and may include built-in ones. `policies` holds the policies other than ACCEPT.
    """

    family: Family
    chains: Mapping[ChainKey, tuple[str, ...]]
    policies: Mapping[ChainKey, str] = {}

    def tables(self) -> tuple[str, ...]:
        """Return the names of the tables, in order of appearance."""
        return tuple(dict.fromkeys(key.table for key in self.chains))

    def of_table(self, table: str) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield the chains of one table, as (name, rules)."""
        return ((key.chain, rules) for key, rules in self.chains.items() if key.table == table)

    def __len__(self) -> int:
        return sum(len(rules) for rules in self.chains.values())


# The kubelet's own chains, which show the backend that it uses (KEP-3178).
KUBELET_HINTS = (ChainKey("mangle", "KUBE-IPTABLES-HINT"), ChainKey("mangle", "KUBE-KUBELET-CANARY"))


def without(rules: Iterable[str], others: Iterable[str]) -> tuple[str, ...]:
    """Return the rules that are not among others, in order."""
    excluded = frozenset(others)
    return tuple(rule for rule in rules if rule not in excluded)


class Count(NamedTuple):
    """The packets and bytes that a rule has matched."""

    packets: int = 0
    bytes: int = 0


# The counts of each chain, in the order of its rules.
Counters = Mapping[ChainKey, tuple[Count, ...]]
