"""Read live tables, as far as iptables can show them.

A rule made with nft in a built-in chain prevents iptables from showing the whole table. Our own chains can still be read
one by one.
"""

from collections.abc import Collection
from typing import NamedTuple

import structlog

from pykubeproxy.kernel import Tables, Unreadable
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.ownership import FOREIGN_CHAINS
from pykubeproxy.rules.ruleset import ChainKey, Ruleset

log = structlog.get_logger()

# The chains to read in a table that iptables cannot show as a whole: all except those of single services.
_ALWAYS = frozenset((*FOREIGN_CHAINS, *skeleton.SHARED, *skeleton.FIXED))


class Reading(NamedTuple):
    """Live tables: `tables` as a whole, and some chains. `hidden` are tables that iptables cannot show as a whole.

    Of a built-in chain that iptables cannot show, `live` holds our jumps only.
    """

    live: Ruleset
    tables: frozenset[str]
    chains: frozenset[ChainKey]
    hidden: frozenset[str] = frozenset()


class TableReader:
    """Read the tables of one family, and log once when iptables cannot show some of them any more."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._hidden: frozenset[str] = frozenset()

    def read(self, whole: Collection[str], chains: Collection[ChainKey] = ()) -> Reading:
        """Read `whole` tables and those of `chains` completely; without `whole`, read only the chains.

        Raises KernelError.
        """
        reading = _read(self._tables, whole, frozenset(chains))
        if new := reading.hidden - self._hidden:
            log.warning(
                "tables not readable as a whole, checking shared chains only",
                family=self._tables.family.value,
                tables=", ".join(sorted(new)),
                likely_reason="rules made with nft",
            )
        self._hidden = reading.hidden if whole else self._hidden | new
        return reading


def _read(tables: Tables, whole: Collection[str], chains: frozenset[ChainKey]) -> Reading:
    names = frozenset((*whole, *(key.table for key in chains))) if whole else frozenset()
    try:
        live = tables.save(names) if names else tables.chains(chains)
    except Unreadable:
        return _read_in_parts(tables, names, chains)
    return Reading(live, names, chains)


def _read_in_parts(tables: Tables, names: frozenset[str], chains: frozenset[ChainKey]) -> Reading:
    live: dict[ChainKey, tuple[str, ...]] = {}
    shown = set()
    for table in names:
        try:
            live.update(tables.save({table}).chains)
            shown.add(table)
        except Unreadable:
            chains |= {key for key in _ALWAYS if key.table == table}
    hidden = set(names - shown)
    for key in sorted(key for key in chains if key.table not in shown):
        try:
            live.update(tables.chains([key]).chains)
        except Unreadable:
            hidden.add(key.table)
            live[key] = tuple(rule for rule in skeleton.JUMPS.get(key, ()) if tables.has_rule(key, rule))
    return Reading(Ruleset(tables.family, live), frozenset(shown), chains, frozenset(hidden))
