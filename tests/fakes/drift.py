"""Scopes of drift checks, for tests that start one themselves."""

from collections.abc import Collection

from pykubeproxy.agent.drift import DriftScope
from pykubeproxy.kernel import TABLES
from pykubeproxy.rules.ruleset import ChainKey


def scope(tables: Collection[str] = TABLES, chains: Collection[ChainKey] = ()) -> DriftScope:
    """Return a scope of these tables and chains; of everything by default."""
    return DriftScope(0.0, frozenset(tables), frozenset(chains))
