"""Compare live tables with the known ones, and count what a repair restores."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

import msgspec

from pykubeproxy.rules.digests import CHAIN_ENTRIES, comparable, digest
from pykubeproxy.rules.known import KnownTables
from pykubeproxy.rules.options import RuleOptions
from pykubeproxy.rules.ownership import FOREIGN_CHAINS, ensured_lines, is_ours, missing_jumps
from pykubeproxy.rules.ruleset import BUILT_IN, ChainKey, Rules, Ruleset
from pykubeproxy.rules.text import Chain
from pykubeproxy.wording import counted

# Foreign rules at either end of a chain leave ours in place; recognise up to this many.
_MOST_ADDED = 1000
_LINE_ENTRIES = {"-D": -1, "-N": CHAIN_ENTRIES}


class Drift(msgspec.Struct, frozen=True):
    """The difference between live and known tables.

    - `live`: the chains that were read: all of `tables`, and some others
    - `changed`: chains of ours that are gone or have other rules
    - `unknown`: chains under our names that we did not write
    - `missing_jumps`: how many of our jumps the built-in chains lack, by table
    - `ensured`: the lines that restore our rules in foreign chains, by table
    - `missing`: rules of ours are missing or in another order, unlike if foreign ones were added at an end
    - `since`: when it was first suspected, on the loop's clock
    - `writers`: the programs that may have caused it
    """

    live: Ruleset
    tables: frozenset[str]
    changed: frozenset[ChainKey]
    unknown: frozenset[ChainKey]
    missing_jumps: Mapping[str, int]
    ensured: Mapping[str, tuple[str, ...]]
    missing: bool
    since: float = 0.0
    writers: tuple[str, ...] = ()


class TableDrift(msgspec.Struct, frozen=True, rename="camel"):
    """What a repair restored in one table. If all numbers are 0, our rules were in another order.

    - `chains`: our chains that were missing
    - `rules`: our rules that were missing, those of missing chains and in the kubelet's chain too
    - `jumps`: our jumps from built-in chains that were missing
    - `foreign_rules`: rules of others in our chains
    - `foreign_chains`: chains under our names that we did not write
    """

    table: str
    chains: int = 0
    rules: int = 0
    jumps: int = 0
    foreign_rules: int = 0
    foreign_chains: int = 0

    def __str__(self) -> str:
        """Return a summary such as "2 chains, 7 rules missing; 1 rule added"."""
        missing = _list_counts((self.chains, "chain"), (self.rules, "rule"), (self.jumps, "jump"))
        added = _list_counts((self.foreign_rules, "rule"), (self.foreign_chains, "chain"))
        parts = [f"{missing} missing"] if missing else []
        parts += [f"{added} added"] if added else []
        return "; ".join(parts) or "rules in another order"


def compare(
    known: KnownTables,
    live: Ruleset,
    tables: Collection[str],
    chains: Collection[ChainKey],
    options: RuleOptions,
) -> Drift | None:
    """Compare live tables with the known ones; `live` holds these tables and chains as far as they exist.

    Returns None if all our chains and rules are as written.
    """
    digests = {key: number for key, number in known.digests() if key.table in tables or key in chains}
    changed = frozenset(
        key
        for key, number in digests.items()
        if (rules := live.chains.get(key)) is None or digest(key, rules) != number
    )
    unknown = frozenset(
        key
        for key, rules in live.chains.items()
        if key not in digests and key not in known.doubtful and is_ours(key)
        if rules or not known.can_only_be_emptied(key)
    )
    shared = frozenset(key for key in FOREIGN_CHAINS if key.table in tables or key in chains)
    ensured = ensured_lines(live, options, shared)
    if not (changed or unknown or ensured):
        return None
    missing = bool(ensured) or any(
        not _holds(comparable(key, live.chains.get(key, ())), digests[key]) for key in changed
    )
    return Drift(live, frozenset(tables), changed, unknown, missing_jumps(live, shared), ensured, missing)


def _holds(rules: Rules, known: int) -> bool:
    """Return whether the comparable rules with this digest are among `rules`, after or before a few others."""
    added = range(1, min(_MOST_ADDED, len(rules)) + 1)
    return any(known in (hash(rules[count:]), hash(rules[:-count])) for count in added)


class DriftCounter:
    """Count what a plan restores of a Drift while its chains are written; `ensured` are the lines that it adds."""

    def __init__(self, drift: Drift, ensured: Mapping[str, Iterable[str]]) -> None:
        self._drift = drift
        self._ensured = ensured
        self._rules: Counter[str] = Counter()
        self._foreign: Counter[str] = Counter()

    def add(self, chains: Iterable[Chain]) -> None:
        """Count chains that were written."""
        for key, rules in chains:
            if key not in self._drift.changed:
                continue
            ours = set(comparable(key, rules))
            live = set(comparable(key, self._drift.live.chains.get(key, ())))
            self._rules[key.table] += len(ours - live)
            self._foreign[key.table] += len(live - ours)

    def report(self) -> tuple[TableDrift, ...]:
        """Return what was restored, by table."""
        drift = self._drift
        # Lines with -N and -A concern the kubelet's chain only.
        ensured = Counter((table, line[:2]) for table, lines in self._ensured.items() for line in lines)
        gone = Counter(key.table for key in drift.changed if key not in drift.live.chains)
        tables = {key.table for key in (*drift.changed, *drift.unknown)}
        tables |= drift.missing_jumps.keys() | self._ensured.keys()
        return tuple(
            TableDrift(
                table=table,
                chains=ensured[table, "-N"] + gone[table],
                rules=ensured[table, "-A"] + self._rules[table],
                jumps=drift.missing_jumps.get(table, 0),
                foreign_rules=self._foreign[table],
                foreign_chains=sum(key.table == table for key in drift.unknown),
            )
            for table in sorted(tables)
        )


def other_entries(live: Ruleset, tables: Iterable[str]) -> dict[str, int]:
    """Return how many entries foreign chains take in these tables; a built-in chain has only those of its rules."""
    count = dict.fromkeys(tables, 0)
    for key, rules in live.chains.items():
        if key.table in count and not is_ours(key):
            count[key.table] += len(rules) + (0 if key.chain in BUILT_IN else CHAIN_ENTRIES)
    return count


def added_entries(lines: Mapping[str, Iterable[str]]) -> dict[str, int]:
    """Return how many entries lines such as `-I INPUT …` add to foreign chains, by table."""
    return {table: sum(_LINE_ENTRIES.get(line[:2], 1) for line in added) for table, added in lines.items()}


def _list_counts(*counts: tuple[int, str]) -> str:
    return ", ".join(counted(number, noun) for number, noun in counts if number)
