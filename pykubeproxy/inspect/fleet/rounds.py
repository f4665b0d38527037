"""Read nodes that differ again, with fresh objects, before calling them stale: objects change while nodes are read."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from pykubeproxy.inspect.fleet.model import FleetComparison, NodeResult, NodeVerdict
from pykubeproxy.inspect.limit import TooManyRules
from pykubeproxy.inspect.node_tables import NodeTables
from pykubeproxy.objects import EndpointSlice, Key, Node, Service
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.ports import ApiServers

# How many times a node is read at most.
_MOST_ROUNDS = 4
# Between two readings, even of Services that changed long ago: seconds.
_PAUSE = 2.0
# A machine's clock may differ so many seconds from those of the cluster.
_CLOCK_ERROR = 60.0
# Stands for all Services of a node that lacks the rules of a family.
_ALL = Key("", "")


class UnknownTables(NamedTuple):
    """A node whose tables are not known, and why; with `other_proxy`, no fault is the cause.

    `proxy` and `pod` are as in NodeResult.
    """

    node: Node
    reason: str
    other_proxy: bool = False
    proxy: str = ""
    pod: str = ""


class FleetSource(Protocol):
    """Where objects and tables come from."""

    def objects(self) -> Cluster:
        """List all objects."""

    def tables(self, nodes: Sequence[Node]) -> Iterable[NodeTables | UnknownTables]:
        """Read nodes, in any order."""

    def last_changes(self, services: Sequence[Key]) -> Mapping[Key, float]:
        """Return when objects of Services last changed, in seconds since 1970, as far as known."""


class Clock(NamedTuple):
    """The time in seconds since 1970, and how to wait for some seconds."""

    now: Callable[[], float]
    sleep: Callable[[float], None]


class _Seen(NamedTuple):
    """The objects with which a Service was first seen wrong on a node, and when."""

    objects: tuple[Service | None, tuple[EndpointSlice, ...], str]
    at: float


class _History:
    """Tells Services that stay wrong from those that changed so lately that a proxy may still update their rules."""

    def __init__(self, source: FleetSource, sync_period: float) -> None:
        self._source = source
        self._sync_period = sync_period
        self._seen: dict[tuple[str, Key], _Seen] = {}
        self._changes: dict[Key, float] = {}
        self._asked: set[Key] = set()

    def judge(self, result: NodeResult, cluster: Cluster, now: float) -> NodeResult:
        """Return the result with the Services that stay wrong, or the verdict that the node is catching up."""
        if result.verdict is not NodeVerdict.DIFFERS:
            return result
        node = cluster.node(result.node)
        zone = node.zone if node else ""
        stale: list[Key] = []
        for key in _keys(result):
            objects = cluster.service(key), cluster.all_slices_of(key), zone
            known = self._seen.get((result.node, key))
            if known is None or known.objects != objects:
                self._seen[result.node, key] = _Seen(objects, now)
            elif self._is_stale(key, known, now):
                stale.append(key)
        if stale:
            since = [self._changes[it] for it in stale if it in self._changes]
            wrong = tuple(it for it in result.wrong if it.key in stale)
            return msgspec.structs.replace(result, wrong=wrong, since=min(since, default=None))
        return msgspec.structs.replace(result, verdict=NodeVerdict.CATCHING_UP)

    def pause(self, suspects: Iterable[NodeResult], now: float) -> float:
        """Return for how long to wait until it is known whether these nodes are stale."""
        wrong = {key for one in suspects for key in _keys(one)}
        if unknown := sorted(wrong - self._asked - {_ALL}):
            self._asked.update(unknown)
            self._changes |= self._source.last_changes(unknown)
        if all(self._changed_long_ago(it, now) for it in wrong):
            return _PAUSE
        first = max((seen.at for (_, key), seen in self._seen.items() if key in wrong), default=now)
        return max(_PAUSE, first + self._sync_period - now)

    def _is_stale(self, service: Key, seen: _Seen, now: float) -> bool:
        return now - seen.at >= self._sync_period or self._changed_long_ago(service, now)

    def _changed_long_ago(self, service: Key, now: float) -> bool:
        changed = self._changes.get(service)
        return changed is not None and now - changed >= self._sync_period + _CLOCK_ERROR


def _keys(result: NodeResult) -> Sequence[Key]:
    """Return the Services that are wrong on a node."""
    return [*(it.key for it in result.wrong), *([_ALL] if result.reason else [])]


def compare_fleet(
    source: FleetSource,
    nodes: Sequence[Node],
    clock: Clock,
    sync_period: float,
    api_servers: ApiServers = frozenset(),
) -> Iterator[NodeResult]:
    """Yield a result for each node, in the order in which they are certain.

    A node differs if a Service stays wrong for `sync_period` seconds while its objects stay the same, or if these changed
    long before. `api_servers` are addresses of API servers that the objects do not name.
    """
    history = _History(source, sync_period)
    comparison = FleetComparison(source.objects(), api_servers=api_servers)
    suspects: dict[str, NodeResult] = {}
    for result in _results(source, nodes, comparison):
        judged = history.judge(result, comparison.cluster, clock.now())
        if judged.verdict is NodeVerdict.CATCHING_UP:
            suspects[judged.node] = judged
        else:
            yield judged
    for _ in range(_MOST_ROUNDS - 1):
        if not suspects:
            return
        clock.sleep(history.pause(suspects.values(), clock.now()))
        comparison = FleetComparison(source.objects(), comparison.comparison, api_servers)
        again = [comparison.cluster.node(it.name) or it for it in nodes if it.name in suspects]
        for result in _results(source, again, comparison):
            judged = history.judge(result, comparison.cluster, clock.now())
            if judged.verdict is NodeVerdict.CATCHING_UP:
                suspects[judged.node] = judged
            else:
                suspects.pop(judged.node, None)
                yield judged
    yield from suspects.values()


def _results(source: FleetSource, nodes: Sequence[Node], comparison: FleetComparison) -> Iterator[NodeResult]:
    for one in source.tables(nodes):
        if isinstance(one, UnknownTables):
            yield NodeResult(
                one.node.name, NodeVerdict.NOT_COMPARED, one.proxy, one.pod, one.reason, one.other_proxy
            )
            continue
        try:
            yield comparison.compare(one)
        except TooManyRules as error:
            yield NodeResult(one.node.name, NodeVerdict.NOT_COMPARED, one.proxy, one.pod, str(error))
