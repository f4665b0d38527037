"""Read nodes that differ again, with fresh objects, before calling them stale: objects change while nodes are read."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple, Protocol

import msgspec

from pykubeproxy.inspect.diff.comparison import NodeComparison
from pykubeproxy.inspect.diff.report import NodeResult, NodeVerdict
from pykubeproxy.inspect.limit import TooManyRules
from pykubeproxy.inspect.meaning.comparison import MeaningComparison
from pykubeproxy.inspect.node import NodeState, UnknownNode
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


class RepeatedSource(Protocol):
    """Where objects and nodes come from, which can be read again."""

    def objects(self) -> Cluster:
        """List all objects."""

    def nodes(self, wanted: Sequence[Node]) -> Iterable[NodeState | UnknownNode]:
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


class _ServiceHistory:
    """Tells Services that stay wrong from those that changed so lately that a proxy may still update their rules."""

    def __init__(self, source: RepeatedSource, sync_period: float) -> None:
        self._source = source
        self._sync_period = sync_period
        self._seen: dict[tuple[str, Key], _Seen] = {}
        self._changes: dict[Key, float] = {}
        self._asked: set[Key] = set()

    def judge(self, result: NodeResult, cluster: Cluster, now: float) -> NodeResult:
        """Return the result with the Services that stay wrong, or the verdict that the node is catching up."""
        if result.verdict is not NodeVerdict.DIFFERS:
            return result
        node = cluster.node(result.name)
        zone = node.zone if node else ""
        stale: list[Key] = []
        for key in _keys(result):
            objects = cluster.service(key), cluster.all_slices_of(key), zone
            known = self._seen.get((result.name, key))
            if known is None or known.objects != objects:
                self._seen[result.name, key] = _Seen(objects, now)
            elif self._is_stale(key, known, now):
                stale.append(key)
        if stale:
            changed = [self._changes[key] for key in stale if key in self._changes]
            wrong = tuple(service for service in result.wrong if service.key in stale)
            return msgspec.structs.replace(
                result, wrong=wrong, objects_changed=_time(max(changed, default=None))
            )
        return msgspec.structs.replace(result, verdict=NodeVerdict.CATCHING_UP)

    def pause(self, suspects: Iterable[NodeResult], now: float) -> float:
        """Return for how long to wait until it is known whether these nodes are stale."""
        wrong = {key for one in suspects for key in _keys(one)}
        if unknown := sorted(wrong - self._asked - {_ALL}):
            self._asked.update(unknown)
            self._changes |= self._source.last_changes(unknown)
        if all(self._changed_long_ago(key, now) for key in wrong):
            return _PAUSE
        first = max((seen.at for (_, key), seen in self._seen.items() if key in wrong), default=now)
        return max(_PAUSE, first + self._sync_period - now)

    def _is_stale(self, service: Key, seen: _Seen, now: float) -> bool:
        return now - seen.at >= self._sync_period or self._changed_long_ago(service, now)

    def _changed_long_ago(self, service: Key, now: float) -> bool:
        changed = self._changes.get(service)
        return changed is not None and now - changed >= self._sync_period + _CLOCK_ERROR


def _time(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(int(seconds), UTC)


def _keys(result: NodeResult) -> Sequence[Key]:
    return [*(service.key for service in result.wrong), *([_ALL] if result.reason else [])]


def compare_nodes(
    source: RepeatedSource,
    nodes: Sequence[Node],
    clock: Clock,
    sync_period: float,
    api_servers: ApiServers = frozenset(),
    *,
    with_clients: bool = False,
) -> Iterator[NodeResult]:
    """Yield a result for each node, in the order in which they are certain.

    A node differs if a Service stays wrong for `sync_period` seconds while its objects stay the same, or if these changed
    long before. `api_servers` are addresses of API servers that the objects do not name.
    """
    history = _ServiceHistory(source, sync_period)
    meanings = MeaningComparison()
    suspects: dict[str, NodeResult] = {}
    wanted = nodes
    for rounds_left in reversed(range(_MOST_ROUNDS)):
        cluster = source.objects()
        comparison = NodeComparison(cluster, meanings, api_servers, with_clients=with_clients)
        if suspects:
            wanted = [cluster.node(node.name) or node for node in wanted if node.name in suspects]
        for result in _results(source, wanted, comparison):
            judged = history.judge(result, cluster, clock.now())
            suspects.pop(judged.name, None)
            if judged.verdict is NodeVerdict.CATCHING_UP:
                suspects[judged.name] = judged
            else:
                yield judged
        if not suspects:
            return
        if rounds_left:
            clock.sleep(history.pause(suspects.values(), clock.now()))
    yield from suspects.values()


def _results(
    source: RepeatedSource, wanted: Sequence[Node], comparison: NodeComparison
) -> Iterator[NodeResult]:
    for state in source.nodes(wanted):
        if isinstance(state, UnknownNode):
            yield not_compared(state)
            continue
        try:
            yield comparison.compare(state)
        except TooManyRules as error:
            yield not_compared(
                UnknownNode(state.node, str(error), proxy=state.origin.proxy, pod=state.origin.pod)
            )


def not_compared(node: UnknownNode) -> NodeResult:
    """Return the result for a node without known rules."""
    return NodeResult(
        node.name,
        NodeVerdict.NOT_COMPARED,
        proxy=node.proxy or None,
        pod=node.pod or None,
        reason=node.reason,
        other_proxy=node.by_design,
    )
