"""Live tables, as far as iptables can show them.

With one rule that was made with nft in a built-in chain, iptables shows nothing of the whole table. We need not see it to
keep our own rules in order.
"""

from collections.abc import Collection
from typing import NamedTuple

import structlog

from pykubeproxy.kernel import Tables, Unreadable
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.jumps import SHARED_GROUND
from pykubeproxy.rules.ruleset import ChainKey, Ruleset

log = structlog.get_logger()

# What is looked at, chain by chain, in a table that cannot be shown: all but the chains of single services.
_ALWAYS = frozenset((*SHARED_GROUND, *skeleton.SHARED, *skeleton.FIXED))


class Reading(NamedTuple):
    """What was read: these tables as a whole, and these chains; `hidden` are tables that cannot be shown as a whole.

    Of a built-in chain that cannot be shown there are only our jumps.
    """

    live: Ruleset
    tables: frozenset[str]
    chains: frozenset[ChainKey]
    hidden: frozenset[str] = frozenset()


class Reader:
    """Reads the tables of one family, and tells in the log when iptables cannot show some of them any more."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._hidden: frozenset[str] = frozenset()

    def read(self, whole: Collection[str], chains: Collection[ChainKey] = ()) -> Reading:
        """Whole tables with all those of the chains, or just chains if no table is asked for. Raises KernelError."""
        reading = _read(self._tables, whole, frozenset(chains))
        if new := reading.hidden - self._hidden:
            log.warning(
                "iptables cannot show some rules, perhaps made with nft: only our shared chains are looked at there",
                family=self._tables.family.value,
                tables=", ".join(sorted(new)),
            )
        self._hidden = reading.hidden if whole else self._hidden | new
        return reading


def _read(tables: Tables, whole: Collection[str], chains: frozenset[ChainKey]) -> Reading:
    wanted = frozenset((*whole, *(key.table for key in chains))) if whole else frozenset()
    try:
        live = tables.save(wanted) if wanted else tables.chains(chains)
    except Unreadable:
        return _in_parts(tables, wanted, chains)
    return Reading(live, wanted, chains)


def _in_parts(tables: Tables, wanted: frozenset[str], chains: frozenset[ChainKey]) -> Reading:
    found: dict[ChainKey, tuple[str, ...]] = {}
    shown = set()
    for table in wanted:
        try:
            found.update(tables.save({table}).chains)
            shown.add(table)
        except Unreadable:
            chains |= {key for key in _ALWAYS if key.table == table}
    hidden = set(wanted - shown)
    for key in sorted(it for it in chains if it.table not in shown):
        try:
            found.update(tables.chains([key]).chains)
        except Unreadable:
            hidden.add(key.table)
            found[key] = tuple(it for it in skeleton.JUMPS.get(key, ()) if tables.has_rule(key, it))
    return Reading(Ruleset(tables.family, found), frozenset(shown), chains, frozenset(hidden))
