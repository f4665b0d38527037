"""Objects from an API server: list, then watch, then watch again from the last version."""

import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import NamedTuple, NoReturn
from urllib.parse import quote

import structlog

from pykubeproxy.objects import Event, Key, Kind, Listed, Object, object_meta
from pykubeproxy.sources import wire
from pykubeproxy.sources.client import ESSENTIAL_JSON, ApiResponse, Client
from pykubeproxy.sources.connection import ConnectionState, Lifetime, Reconnection, Timing
from pykubeproxy.sources.failures import Expired, Failure, Forbidden
from pykubeproxy.sources.tracker import ObjectTracker
from pykubeproxy.sources.watch import Emit, Outage, SourceError, Watch
from pykubeproxy.sources.wire import PAGE_SIZE, Query, read_pages

# How long to wait for one of two watches before reading the other one, in seconds.
_TURN = 0.1
# How long to wait for an event before looking whether the server was restored from a backup, in seconds.
_LONGEST_WAIT = 30.0
# The bytes of an object that takes milliseconds to decode, how many may wait for that, and the pause in seconds after
# which one is decoded.
_LARGE, _MOST_LARGE, _PAUSE = 1 << 14, 1 << 25, 0.02

log = structlog.get_logger()


class ResourceSelector(NamedTuple):
    """A selection of objects of one kind on the API server."""

    kind: Kind
    path: str
    selectors: dict[str, str]


def resource_of(kind: Kind, namespace: str = "", **selectors: str) -> ResourceSelector:
    prefix = "/apis" if "/" in kind.api_version else "/api"
    inside = f"/namespaces/{quote(namespace, safe='')}" if namespace else ""
    return ResourceSelector(kind, f"{prefix}/{kind.api_version}{inside}/{kind.plural}", selectors)


def node_of(name: str) -> ResourceSelector:
    return resource_of(Kind.NODE, fieldSelector=f"metadata.name={name}")


def api_watches(client: Client, node_name: str, timing: Timing | None = None) -> tuple[Watch, ...]:
    """Return watches of all objects a node's proxy needs, without headless Services and those of other proxies."""
    resources = (
        resource_of(
            Kind.SERVICE,
            labelSelector="!service.kubernetes.io/service-proxy-name",
            fieldSelector="spec.clusterIP!=None",
        ),
        resource_of(Kind.ENDPOINT_SLICE, labelSelector="!service.kubernetes.io/headless"),
        node_of(node_name),
    )
    timing = timing or Timing()
    reconnection = Reconnection(timing.first_pause, timing.longest_pause)
    watches = tuple(ApiWatch(client, resource, timing, reconnection) for resource in resources)
    for watch in watches:
        watch.siblings = watches
    return watches


class ListForbidden(SourceError):
    """The account may not list objects of a kind."""


class _OpenWatch:
    def __init__(self, number: int, response: ApiResponse, lifetime: Lifetime) -> None:
        self.number, self.response, self.lifetime = number, response, lifetime
        self._seconds = 0.0
        self._lines = wire.lines(self._pieces())

    def next(self, seconds: float) -> bytes | None:
        """Return the next line; it is empty if none arrives within `seconds`, None at the end. Raises Failure."""
        self._seconds = seconds
        return next(self._lines, None)

    def _pieces(self) -> Iterator[bytes]:
        while (piece := self.response.read(self._seconds)) is not None:
            yield piece


class ApiWatch:
    """Watch one resource. Implements Watch."""

    def __init__(
        self,
        client: Client,
        resource: ResourceSelector,
        timing: Timing,
        reconnection: Reconnection | None = None,
    ) -> None:
        self.name = f"watch-{resource.kind.plural}"
        self._client, self._resource, self._timing = client, resource, timing
        self._tracker = ObjectTracker(resource.kind)
        self._reconnection = reconnection or Reconnection(timing.first_pause, timing.longest_pause)
        self._connection = ConnectionState(resource.kind.plural, self._reconnection, timing, client.contact)
        self._numbers = itertools.count()  # of watch requests
        # Objects of a watch that wait to be decoded, and when the next one must be, however many others arrive.
        self._large: dict[Key, wire.Item] = {}
        self._large_due = 0.0
        self._version = self._base = ""  # the last version seen, and the one from which watches begin
        self.siblings: tuple[
            ApiWatch, ...
        ] = ()  # other watches of objects in the same database, and this one
        self._list_failure: tuple[float, str] | None = None  # since when, and why the last one failed

    @property
    def list_outage(self) -> Outage | None:
        """How long and why lists have failed although the server answers."""
        failed = self._list_failure  # read once: the watch's thread replaces it
        if failed is None or self._client.contact.outage():
            return None
        return Outage(self._resource.kind.plural, time.monotonic() - failed[0], failed[1])

    @property
    def outage(self) -> Outage | None:
        """The current outage."""
        return self._connection.outages.outage()

    def once(self) -> tuple[Listed, ...]:
        """List. Raises SourceError, ListForbidden."""
        try:
            return (self._list("get and list of"),)
        except Failure as failure:
            kind = ListForbidden if isinstance(failure, Forbidden) else SourceError
            raise kind(f"cannot list {self._resource.kind.plural}: {failure}") from None

    def run(self, emit: Emit) -> NoReturn:
        """List, then watch; never return."""
        while True:
            self._connection.connecting()
            if self._resource.kind is Kind.NODE:
                self._expect_newest()
            try:
                self._list_if_needed(emit)
                self._rebase()
                pause = self._connection.ended(self._watch(emit))
            except Failure as failure:
                pause = self._connection.failed(failure)
            self._reconnection.wait(pause)

    def _expect_newest(self) -> None:
        """List next. A list of one object is cheap, and shows whether versions went back while no watch was open."""
        self._connection.must_list = True
        if self._version:
            for other in self.siblings:
                if wire.is_older(self._version, other._version):
                    self._version = other._version

    def _list_if_needed(self, emit: Emit, meanwhile: Callable[[], None] | None = None) -> None:
        if self._connection.must_list or self._connection.notices_restore():
            self._emit_large(emit, 0)
            before = self._version
            emit(self._list("list and watch of", meanwhile))
            for skipped in self._tracker.too_large():
                emit(skipped)
            self._connection.listed(wire.is_older(self._version, before))
            self._rebase()

    def _rebase(self) -> None:
        self._base = self._version
        self._tracker.rebased(self._base)

    def _watch(self, emit: Emit) -> int:
        """Emit the events of a watch and of its successors, until the server ends one; return its time limit.

        A watch stays open until its successor works. Until then, both are read, and the successor repeats what the open
        watch has delivered since the check began.
        """
        current: _OpenWatch | None = None
        successor: _OpenWatch | None = self._open()
        due = math.inf  # when to open the next successor
        try:
            while True:
                if current:
                    seconds = _TURN if successor else min(due - time.monotonic(), _LONGEST_WAIT)
                    try:
                        goes_on = self._read(current, emit, seconds) is not None
                    except Failure:
                        self._connection.outages.heard(current.response.acknowledged)
                        if not successor:
                            raise
                        goes_on = False
                    if not goes_on:
                        if not successor:
                            return current.lifetime.end
                        current.response.close()
                        current = None
                if current and not successor and self._tracker.is_full:
                    self._rebase()
                if not successor and time.monotonic() < due and not self._connection.notices_restore():
                    continue
                try:
                    if not successor:
                        if self._connection.checking():
                            self._rebase()
                        self._list_if_needed(emit, partial(self._read_on, current, emit) if current else None)
                        successor = self._open()
                    elif self._read(successor, emit, 0.0 if current else _TURN) is None:
                        if not current:
                            return successor.lifetime.end
                        raise Failure("the API server ends the watch at once", refused=True)
                    elif self._connection.is_steady(successor.response.opened):
                        self._connection.works()
                        if current:
                            current.response.close()
                        current, successor = successor, None
                        due = time.monotonic() + current.lifetime.check
                except Failure as failure:
                    if not current:
                        raise
                    if successor:
                        successor.response.close()
                        successor = None
                    self._connection.opened(current.response.opened)
                    due = time.monotonic() + self._connection.check_failed(failure)
        finally:
            for watch in (current, successor):
                if watch:
                    watch.response.close()

    def _open(self) -> "_OpenWatch":
        lifetime = self._connection.lifetime()
        query: Query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._base,
            "timeoutSeconds": lifetime.end,
        }
        resource, answer = self._resource, self._timing.answer
        response = self._client.watch(
            resource.path,
            resource.selectors | query,
            resource=resource.kind.plural,
            answer=answer,
            seconds=lifetime.end + answer,
        )
        return _OpenWatch(next(self._numbers), response, lifetime)

    def _read(self, watch: "_OpenWatch", emit: Emit, seconds: float) -> bytes | None:
        """Emit the next event of a watch, if one arrives within `seconds`. Return its line as `_OpenWatch.next` does.

        Large objects take long to decode, so they wait for a pause of the watch, or for a fifth of the time.
        """
        waiting = watch.response.opened is None
        line = None
        try:
            line = watch.next(min(seconds, _PAUSE) if self._large else seconds)
            if waiting and watch.response.opened is not None:
                self._connection.opened()
            if line and (event := self._event(line, watch.number)):
                emit(event)
        finally:
            if line is None:
                self._emit_large(emit, 0)
            elif self._large and (not line or time.monotonic() >= self._large_due or self._is_full()):
                begun = time.monotonic()
                self._emit_large(emit, len(self._large) - 1)
                now = time.monotonic()
                self._large_due = now + 4 * (now - begun)
        return line

    def _is_full(self) -> bool:
        return sum(memoryview(item).nbytes for item in self._large.values()) > _MOST_LARGE

    def _emit_large(self, emit: Emit, most: int) -> None:
        """Decode the large objects that wait the longest, and emit their events, until at most so many wait."""
        while len(self._large) > most:
            key = next(iter(self._large))
            if event := self._tracker.updated(self._large.pop(key), key):
                emit(event)

    def _read_on(self, watch: "_OpenWatch", emit: Emit) -> None:
        """Emit events of a watch that have arrived; the next read finds its end."""
        end = time.monotonic() + _TURN
        with suppress(Failure):
            while self._read(watch, emit, 0.0) and time.monotonic() < end:
                pass
        self._emit_large(emit, 0)

    def _event(self, line: bytes, watch: int) -> Event | None:
        """Return the event for one line of a watch, None if nothing changed. Advance the version."""
        event = wire.event(line)
        self._connection.outages.heard()
        meta = object_meta(event.object)
        key, version = meta.key(self._resource.kind), meta.resourceVersion or ""
        if self._tracker.is_stale(key, version, watch):
            return None
        match event.type:
            case "ADDED" | "MODIFIED" if len(line) > _LARGE:
                self._large[key], change = event.object, None
            case "ADDED" | "MODIFIED":
                self._large.pop(key, None)
                change = self._tracker.updated(event.object, key)
            case "DELETED":
                self._large.pop(key, None)
                change = self._tracker.deleted(key)
            case "BOOKMARK":
                change = None
            case _:
                return None
        if version and not wire.is_older(version, self._version):
            self._version = version
        self._connection.delivered()
        return change

    def _list(self, verbs: str, meanwhile: Callable[[], None] | None = None) -> Listed:
        """Return the complete state. If a permission is missing, messages name these `verbs`."""
        try:
            listed = self._cached_or_latest(verbs, meanwhile)
        except Failure as failure:
            if not failure.server_wide:
                since = self._list_failure[0] if self._list_failure else time.monotonic()
                self._list_failure = since, str(failure)
            raise
        self._list_failure = None
        return listed

    def _cached_or_latest(self, verbs: str, meanwhile: Callable[[], None] | None) -> Listed:
        """List from the server's cache, else the latest state.

        The cache is cheap when all nodes list at once. Read it first at any version (resourceVersion 0), later at a
        version that is not older than emitted events. But the cache of Nodes may be older than other objects' versions.
        """
        latest: Query = {"limit": PAGE_SIZE}
        if self._version and self._resource.kind is Kind.NODE:
            return self._pages(latest, verbs, meanwhile)
        # With a limit, most servers read a list at a version from etcd.
        cached: Query = (
            {"resourceVersion": self._version} if self._version else latest | {"resourceVersion": "0"}
        )
        try:
            return self._pages(cached, verbs, meanwhile)
        except Failure as failure:
            # The server may not have the version, as after a restore from a backup.
            rejected = self._version and failure.persistent and not failure.server_wide
            if not rejected and not isinstance(failure, Expired):
                raise
        try:
            return self._pages(latest, verbs, meanwhile)
        except Expired:
            # The server dropped the rest of the list.
            return self._pages(latest, verbs, meanwhile)

    def _pages(self, query: Query, verbs: str, meanwhile: Callable[[], None] | None) -> Listed:
        objects: list[Object] = []
        rejected: dict[Key, str] = {}
        before, end = self._version, time.monotonic() + self._timing.list

        @contextmanager
        def ask(query: Query) -> Iterator[Iterator[bytes]]:
            with self._client.stream(
                self._resource.path,
                self._resource.selectors | query,
                resource=self._resource.kind.plural,
                idle=self._timing.answer,
                end=end,
                compressible=True,
                verbs=verbs,
                accept=ESSENTIAL_JSON,
                meanwhile=meanwhile,
            ) as body:
                yield self._connection.listing(body)

        def take(items: list[wire.Item]) -> None:
            objects.extend(self._tracker.decode_page(items, rejected))

        meta = read_pages(ask, query, self._resource.kind.value, take)
        self._version = meta.resourceVersion or ""
        if wire.is_older(self._version, before):
            self._tracker.restored()
        return self._tracker.listed(tuple(objects), rejected, self._version)
