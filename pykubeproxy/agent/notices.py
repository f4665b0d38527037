"""What the reconcile loop tells its observers: one value for each thing that happened."""

from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from pykubeproxy.kernel import TableCounts
from pykubeproxy.objects import Event, Family, Key, Node
from pykubeproxy.pages.servicez import Quarantined
from pykubeproxy.rules.drift import TableDrift
from pykubeproxy.services.cluster import ChangedServices
from pykubeproxy.services.flows import NodePortAddresses
from pykubeproxy.services.ports import PortName
from pykubeproxy.services.selection import ResolvedPort


class EventApplied(msgspec.Struct, frozen=True):
    """An event was applied to the cluster, with these changes. `node` is this node as last seen, None while unknown."""

    event: Event
    changes: ChangedServices
    node: Node | None = None


class SyncQueued(msgspec.Struct, frozen=True):
    """A change that arrived at `since` requires a sync, and only the rate limiter delays it. On the loop's clock."""

    family: Family
    since: float


class SyncFailure(msgspec.Struct, frozen=True):
    """The sync of one family failed after `seconds`; `restore_failed`: because of iptables-restore."""

    family: Family
    full: bool
    seconds: float
    restore_failed: bool
    reason: str


class RulesMissing(msgspec.Struct, frozen=True):
    """Rules of one family have been missing since this time on the loop's clock; None if they are in place."""

    family: Family
    since: float | None


class DriftRepaired(msgspec.Struct, frozen=True):
    """A sync repaired drift, `seconds` after it was detected.

    `writers` are the processes that may have caused it, if known. `contested`: the drift keeps coming back.
    """

    family: Family
    drift: tuple[TableDrift, ...]
    writers: tuple[str, ...]
    seconds: float
    contested: bool


class DriftCalm(msgspec.Struct, frozen=True):
    """No other program changed the rules of one family for a while."""

    family: Family


class SyncsEnded(msgspec.Struct, frozen=True):
    """The loop ends a round of syncs, or one between rounds. `in_sync`: a round wrote all changes, but for what waits."""

    in_sync: bool
    node: Node | None


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
    - `local_addresses`: those of this node's interfaces, needed only with nodePortAddresses
    - `node_ports`: where node ports are served
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
    local_addresses: tuple[str, ...] = ()
    node_ports: NodePortAddresses = NodePortAddresses()


Notice: TypeAlias = (
    EventApplied
    | SyncQueued
    | SyncReport
    | SyncFailure
    | RulesMissing
    | DriftRepaired
    | DriftCalm
    | SyncsEnded
)
