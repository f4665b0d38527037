"""Values that describe writes of other programs to the tables we use."""

from collections.abc import Mapping

import msgspec

from pykubeproxy.objects import Family
from pykubeproxy.rules.ruleset import ChainKey

# The tables that the proxy uses.
TABLES = ("mangle", "filter", "nat")


class ExternalWrite(msgspec.Struct, frozen=True):
    """Another program wrote to a family's tables: to `chains`, or somewhere in `tables` if the chains are not known.

    `chains` are named KUBE-…, or lost a rule that jumps to such a chain. `writer` is the program, such as
    `"iptables" (process 4711)`, or "" if the kernel does not report it; the number is from the initial pid namespace.
    """

    family: Family
    tables: frozenset[str] = frozenset()
    chains: frozenset[ChainKey] = frozenset()
    writer: str = ""

    @classmethod
    def anywhere(cls, family: Family) -> "ExternalWrite":
        """Return a write to unknown tables of a family."""
        return cls(family, frozenset(TABLES))


class TableCounts(msgspec.Struct, frozen=True):
    """How many entries a family's tables hold after a write, by table: one for a rule, two for a chain.

    `ours` are those of our chains. `others` are those of foreign chains, in the tables that were read before the write;
    the numbers for other tables are those after the last write. `added` is by how many the write changed `others`.
    """

    ours: Mapping[str, int] = {}
    others: Mapping[str, int] = {}
    added: Mapping[str, int] = {}
