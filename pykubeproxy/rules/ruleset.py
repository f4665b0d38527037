"""A Ruleset: the chains of one family as a value, in the words of iptables-save."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from pykubeproxy.objects import Family


class ChainKey(NamedTuple):
    """A chain's place: the table and the name."""

    table: str
    chain: str


class Ruleset(msgspec.Struct, frozen=True):
    """Chains and their rules, each rule the text that iptables-save prints after `-A CHAIN `.

    The order of the chains is the order of writing. Built-in chains may be among them.
    """

    family: Family
    chains: Mapping[ChainKey, tuple[str, ...]]

    def tables(self) -> tuple[str, ...]:
        """The names of the tables, in order of appearance."""
        return tuple(dict.fromkeys(key.table for key in self.chains))

    def of_table(self, table: str) -> Iterator[tuple[str, tuple[str, ...]]]:
        """The chains of one table, as (name, rules)."""
        return ((key.chain, rules) for key, rules in self.chains.items() if key.table == table)

    def __len__(self) -> int:
        return sum(len(rules) for rules in self.chains.values())


# A counter pair such as [12:3456] stands before a rule under `iptables-save -c`.
_RULE = re.compile(r"(?:\[\d+:\d+\] )?-A (\S+) ?(.*)")


def parse(family: Family, text: str) -> Ruleset:
    """Read what iptables-save printed, with or without counters.

    Raises ValueError with the line when the text is of another form.
    """
    chains: dict[ChainKey, list[str]] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if not line or line.startswith("#") or line == "COMMIT":
            continue
        if line.startswith("*"):
            table = line[1:].strip()
        elif line.startswith(":") and table:
            chains.setdefault(ChainKey(table, line[1:].split(" ", 1)[0]), [])
        elif table and (match := _RULE.match(line)):
            chains.setdefault(ChainKey(table, match[1]), []).append(match[2])
        else:
            raise ValueError(f"line {number} is not of the form iptables-save prints: {line!r}")
    return Ruleset(family, {key: tuple(rules) for key, rules in chains.items()})


def restore_text(chains: Iterable[tuple[ChainKey, Iterable[str]]]) -> str:
    """The input for iptables-restore --noflush that creates or replaces exactly these chains, one block a table."""
    tables: dict[str, tuple[list[str], list[str]]] = {}
    for (table, chain), rules in chains:
        names, lines = tables.setdefault(table, ([], []))
        names.append(f":{chain} - [0:0]")
        lines.extend(f"-A {chain} {rule}" for rule in rules)
    return "".join(
        f"*{table}\n" + "\n".join([*names, *lines, "COMMIT\n"]) for table, (names, lines) in tables.items()
    )
