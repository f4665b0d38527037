"""What others did to our chains, found by holding live tables against what was written."""

from collections.abc import Mapping
from typing import NamedTuple

from pykubeproxy.agent.drift.reading import Reading
from pykubeproxy.kernel import TABLES
from pykubeproxy.rules import entries
from pykubeproxy.rules.context import RuleContext
from pykubeproxy.rules.damage import Damage, damages
from pykubeproxy.rules.jumps import SHARED_GROUND, ensured_lines, missing_jumps
from pykubeproxy.rules.plan import Change
from pykubeproxy.rules.programmed import Difference, Programmed
from pykubeproxy.rules.ruleset import ChainKey, Ruleset


class Finding(NamedTuple):
    """What is otherwise in `live`, which is all of `tables` and some chains; `asked` are those that are not ours alone."""

    live: Ruleset
    tables: frozenset[str]
    difference: Difference
    jumps: Mapping[str, int]
    asked: frozenset[ChainKey]

    def lines(self, terms: RuleContext) -> dict[str, tuple[str, ...]]:
        """Lines for what is missing in chains that are not ours alone, by table."""
        return ensured_lines(self.live, terms.options, self.asked)

    def damages(self, change: Change) -> tuple[Damage, ...]:
        """What a change has put right of it."""
        return damages(self.live, self.difference, self.jumps, change)

    def others(self) -> dict[str, int]:
        """The entries of others in each table that was looked at as a whole."""
        count = entries.of_others(self.live)
        return {table: count[table] for table in self.tables}


def find(reading: Reading, programmed: Programmed, terms: RuleContext | None) -> Finding | None:
    """What is otherwise than it was written; None if nothing is."""
    live, tables, chains, _ = reading
    asked = frozenset(key for key in SHARED_GROUND if key.table in tables or key in chains)
    difference = programmed.differing(live, tables, chains)
    found = Finding(live, tables, difference, missing_jumps(live, asked), asked)
    return found if any(difference) or (terms and found.lines(terms)) else None


def others(live: Ruleset | None, found: Finding | None) -> Mapping[str, int]:
    """The entries of others in tables that were read before a sync."""
    if live is not None:
        return {**dict.fromkeys(TABLES, 0), **entries.of_others(live)}
    return found.others() if found else {}
