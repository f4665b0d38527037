"""A Ruleset: the chains of one family as a value, in the words of iptables-save."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from pykubeproxy.objects import Family

# The chains that tables have by themselves, each some of them.
BUILT_IN = frozenset(("PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"))


class ChainKey(NamedTuple):
    """A chain's place: the table and the name."""

    table: str
    chain: str


class Ruleset(msgspec.Struct, frozen=True):
    """Chains and their rules, each rule the text that iptables-save prints after `-A CHAIN `.

    The order of the chains is the order of writing. Built-in chains may be among them; `policies` has what becomes
    of packets at the end of those where that is not ACCEPT.
    """

    family: Family
    chains: Mapping[ChainKey, tuple[str, ...]]
    policies: Mapping[ChainKey, str] = {}

    def tables(self) -> tuple[str, ...]:
        """The names of the tables, in order of appearance."""
        return tuple(dict.fromkeys(key.table for key in self.chains))

    def of_table(self, table: str) -> Iterator[tuple[str, tuple[str, ...]]]:
        """The chains of one table, as (name, rules)."""
        return ((key.chain, rules) for key, rules in self.chains.items() if key.table == table)

    def __len__(self) -> int:
        return sum(len(rules) for rules in self.chains.values())


# Chains of one's own have "-" for a policy.
NO_POLICY = ("-", "ACCEPT")
# A counter pair such as [12:3456] stands before a rule under `iptables-save -c`.
_RULE = re.compile(r"(?:\[\d+:\d+\] )?-A (\S+) ?(.*)")


def parse(family: Family, text: str) -> Ruleset:
    """Read what iptables-save printed, with or without counters.

    Raises ValueError with the line when the text is of another form.
    """
    chains: dict[ChainKey, list[str]] = {}
    policies: dict[ChainKey, str] = {}
    table = ""
    for number, line in enumerate(text.split("\n"), 1):
        if not line or line.startswith("#") or line == "COMMIT":
            continue
        if line.startswith("*"):
            table = line[1:].strip()
        elif line.startswith(":") and table:
            name, _, after = line[1:].partition(" ")
            chains.setdefault(ChainKey(table, name), [])
            if (policy := after.partition(" ")[0] or "-") not in NO_POLICY:
                policies[ChainKey(table, name)] = policy
        elif table and (match := _RULE.match(line)):
            chains.setdefault(ChainKey(table, match[1]), []).append(match[2])
        else:
            raise ValueError(f"line {number} is not of the form iptables-save prints: {line!r}")
    return Ruleset(family, {key: tuple(rules) for key, rules in chains.items()}, policies)


def without(rules: Iterable[str], others: Iterable[str]) -> tuple[str, ...]:
    """Those of some rules that are not among others, in their order."""
    known = frozenset(others)
    return tuple(rule for rule in rules if rule not in known)


class Count(NamedTuple):
    """How often a rule matched since it was written: packets and their bytes."""

    packets: int = 0
    bytes: int = 0


# The counts of a chain's rules, in their order.
Counters = Mapping[ChainKey, tuple[Count, ...]]
