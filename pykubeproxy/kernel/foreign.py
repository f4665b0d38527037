"""What others write, as far as it is known, and what there has to be in the tables if they wrote nothing."""

from collections.abc import Mapping

import msgspec

from pykubeproxy.objects import Family
from pykubeproxy.rules.ruleset import ChainKey

# The tables that are used.
TABLES = ("mangle", "filter", "nat")


class ExternalWrite(msgspec.Struct, frozen=True):
    """Somebody wrote into a family's tables: into these chains, or it is not known where in these tables.

    The chains are those named KUBE-… and those that lost a rule which leads there. `writer` is who it was, such as
    `"iptables" (process 4711)`, or "" where the kernel does not tell; the number is that of the first process namespace.
    """

    family: Family
    tables: frozenset[str] = frozenset()
    chains: frozenset[ChainKey] = frozenset()
    writer: str = ""

    @classmethod
    def anywhere(cls, family: Family) -> "ExternalWrite":
        """Nothing is known but that somebody may have written."""
        return cls(family, frozenset(TABLES))


class TableCounts(msgspec.Struct, frozen=True):
    """How many entries a family's tables hold after a write, by table: one for a rule, two for a chain.

    `ours` are those of our chains. `others` are those of others in tables that were read before it; in the rest they are
    as many as after the last write. `added` is by how many the write has changed that.
    """

    ours: Mapping[str, int] = {}
    others: Mapping[str, int] = {}
    added: Mapping[str, int] = {}
