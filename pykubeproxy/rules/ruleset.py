"""The chains of one family as a value, with rules as iptables-save prints them."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from pykubeproxy.objects import Family

# The built-in chains of all tables.
BUILT_IN = frozenset(("PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"))


class ChainKey(NamedTuple):
    """The table and name of a chain."""

    table: str
    chain: str


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
# Chains that are not built in have the policy "-".
NO_POLICY = ("-", "ACCEPT")
# A line of iptables-save: a rule with its chain, a chain with its policy, a table, something to ignore, or anything else.
# With counters, a rule starts with a pair such as [12:3456].
_LINE = re.compile(
    r"^(?:(?:\[\d+:\d+\] )?-A (\S+) ?(.*)|:([^ \n]*) ?([^ \n]*).*|\*(.*)|#.*|COMMIT|(.+)|)$", re.MULTILINE
)


def parse(family: Family, text: str) -> Ruleset:
    """Parse the output of iptables-save, with or without counters. Raises ValueError with the line that is invalid."""
    chains: dict[ChainKey, list[str]] = {}
    policies: dict[ChainKey, str] = {}
    table, of_table = "", dict[str, list[str]]()
    for line in _LINE.finditer(text):
        chain, rule, declared, policy, header, other = line.groups()
        if header is not None:
            table, of_table = header.strip(), {}
        elif other is not None or (not table and (chain or declared is not None)):
            number = text.count("\n", 0, line.start()) + 1
            raise ValueError(f"line {number} is not of the form iptables-save prints: {line[0]!r}")
        elif chain:
            if chain not in of_table:
                of_table[chain] = chains.setdefault(ChainKey(table, chain), [])
            of_table[chain].append(rule)
        elif declared is not None:
            of_table[declared] = chains.setdefault(ChainKey(table, declared), [])
            if (policy or "-") not in NO_POLICY:
                policies[ChainKey(table, declared)] = policy
    return Ruleset(family, {key: tuple(rules) for key, rules in chains.items()}, policies)


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
