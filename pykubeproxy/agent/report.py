"""What one sync did, and the service ports that it left in quarantine."""

from collections.abc import Mapping

import msgspec

from pykubeproxy.kernel import TableCounts
from pykubeproxy.objects import Family, Key
from pykubeproxy.pages.servicez import Quarantined
from pykubeproxy.rules.drift import TableDrift
from pykubeproxy.services.ports import PortName
from pykubeproxy.services.selection import ResolvedPort


class SyncReport(msgspec.Struct, frozen=True):
    """What one sync of one family did.

    - `full`: it read the live tables and went through all Services
    - `services`, `endpoints`: how many have rules now
    - `rules`: how many rules of ours each table holds now; `rules_written`: how many of them this sync wrote
    - `seconds`: the time of each phase: read, choose, render, restore
    - `resolved`, `gone`: the service ports it went through, and those that no longer exist
    - `deferred`: the Services with changes that wait for a later sync
    - `wrote`: whether anything was written or deleted
    - `installed`: the UDP frontends that a full sync found in the tables
    - `quarantined`: all quarantined service ports of the family
    - `held`: how many suspect ports keep the rules that they have, until tries have decided
    - `rejected_tree`: why iptables rejects the dispatch tree, so that a flat chain takes its place; "" if it does not
    - `drift`: the drift that it repaired, by table
    - `table_counts`: for `TableWatch.synced`
    """

    family: Family
    full: bool
    services: int
    endpoints: int
    chains_written: int
    chains_deleted: int
    rules_written: Mapping[str, int]
    rules: Mapping[str, int]
    seconds: Mapping[str, float]
    resolved: tuple[ResolvedPort, ...]
    gone: tuple[PortName, ...]
    wrote: bool
    deferred: frozenset[Key] = frozenset()
    installed: frozenset[tuple[str, int]] = frozenset()
    quarantined: tuple[Quarantined, ...] = ()
    held: int = 0
    rejected_tree: str = ""
    drift: tuple[TableDrift, ...] = ()
    table_counts: TableCounts = TableCounts()
