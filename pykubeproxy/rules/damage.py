"""What others did to our chains, told by what it took to put it right."""

import itertools
from collections import Counter
from collections.abc import Mapping

import msgspec

from pykubeproxy.rules.plan import Change
from pykubeproxy.rules.programmed import Difference
from pykubeproxy.rules.ruleset import Ruleset


class Damage(msgspec.Struct, frozen=True, rename="camel"):
    """What a repair found in one table: how many of our chains, rules and jumps were missing, and what was added.

    `chains` were gone as a whole, and all their rules are among `rules`; `foreign` are rules of others in our chains,
    `strange` chains under our names that we did not write. All zero: rules of ours stood in another order. What we keep in
    the kubelet's chain counts as ours.
    """

    table: str
    chains: int = 0
    rules: int = 0
    jumps: int = 0
    foreign: int = 0
    strange: int = 0

    def __str__(self) -> str:
        """Such as "2 chains, 7 rules gone; 1 rule added"."""
        gone = _counted((self.chains, "chain"), (self.rules, "rule"), (self.jumps, "jump"))
        added = _counted((self.foreign, "rule"), (self.strange, "chain"))
        parts = [f"{gone} gone"] if gone else []
        parts += [f"{added} added"] if added else []
        return "; ".join(parts) or "rules in another order"


def damages(live: Ruleset, found: Difference, jumps: Mapping[str, int], change: Change) -> tuple[Damage, ...]:
    """What was found in live tables, each table by itself; `change` is what puts them right."""
    written = itertools.chain(change.fixed, *change.services, change.shared)
    wanted = {chain.key: chain.rules for chain in written if chain.key in found.changed}
    # New chains, and rules at the end, are for the kubelet's chain alone.
    ensured = Counter((table, line[:2]) for table, lines in change.ensured.items() for line in lines)
    tables = {key.table for key in (*found.changed, *found.strange)} | jumps.keys() | change.ensured.keys()
    return tuple(
        Damage(
            table=table,
            chains=ensured[table, "-N"]
            + sum(key.table == table and key not in live.chains for key in found.changed),
            rules=ensured[table, "-A"]
            + sum(
                len(set(rules).difference(live.chains.get(key, ())))
                for key, rules in wanted.items()
                if key.table == table
            ),
            jumps=jumps.get(table, 0),
            foreign=sum(
                len(set(live.chains.get(key, ())).difference(rules))
                for key, rules in wanted.items()
                if key.table == table
            ),
            strange=sum(key.table == table for key in found.strange),
        )
        for table in sorted(tables)
    )


def _counted(*counts: tuple[int, str]) -> str:
    return ", ".join(f"{number} {word}{'' if number == 1 else 's'}" for number, word in counts if number)
