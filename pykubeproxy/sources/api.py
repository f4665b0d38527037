"""Objects from an API server: list, then watch, then watch again from the last version."""

import random
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple, NoReturn
from urllib.parse import quote

import msgspec
import structlog

from pykubeproxy.objects import Event, Key, Kind, Listed, Object, Service
from pykubeproxy.sources import wire
from pykubeproxy.sources.backoff import Reconnection
from pykubeproxy.sources.client import Client
from pykubeproxy.sources.connection import ConnectionState, Timing
from pykubeproxy.sources.failures import Expired, Failure, Forbidden, TooLarge
from pykubeproxy.sources.tracker import ObjectTracker
from pykubeproxy.sources.watch import Emit, Outage, SourceError, Watch

_PAGE_SIZE = 500  # as in kube-proxy
# More objects of one kind than any cluster has: such a list never ends.
_MAX_OBJECTS = 1_000_000
# What the server must permit.
_LISTED, _WATCHED = "get and list of", "list and watch of"

log = structlog.get_logger()


# The path prefix and the plural of each kind.
_API = {
    Kind.SERVICE: ("/api/v1", "services"),
    Kind.ENDPOINT_SLICE: ("/apis/discovery.k8s.io/v1", "endpointslices"),
    Kind.NODE: ("/api/v1", "nodes"),
}


_Query = dict[str, str | int]


class ResourceSelector(NamedTuple):
    """A selection of objects of one kind on the API server; `plural` is its name in the API, such as endpointslices."""

    kind: Kind
    plural: str
    path: str
    selectors: dict[str, str]


def _resource(kind: Kind, namespace: str = "", **selectors: str) -> ResourceSelector:
    prefix, plural = _API[kind]
    inside = f"/namespaces/{quote(namespace, safe='')}" if namespace else ""
    return ResourceSelector(kind, plural, f"{prefix}{inside}/{plural}", selectors)


def _node(name: str) -> ResourceSelector:
    return _resource(Kind.NODE, fieldSelector=f"metadata.name={name}")


def api_watches(client: Client, node_name: str, timing: Timing | None = None) -> tuple[Watch, ...]:
    """Return watches of all objects a node's proxy needs, without headless Services and those of other proxies."""
    resources = (
        _resource(
            Kind.SERVICE,
            labelSelector="!service.kubernetes.io/service-proxy-name",
            fieldSelector="spec.clusterIP!=None",
        ),
        _resource(Kind.ENDPOINT_SLICE, labelSelector="!service.kubernetes.io/headless"),
        _node(node_name),
    )
    timing = timing or Timing()
    reconnection = Reconnection(timing.first_pause, timing.longest_pause)
    return tuple(ApiWatch(client, resource, timing, reconnection) for resource in resources)


def service_objects(
    client: Client, name: str, namespace: str, node_names: Iterable[str]
) -> tuple[Listed, ...]:
    """Return the Services of a name, in all namespaces if `namespace` is empty, their EndpointSlices, and these Nodes.

    Headless Services and those of other proxies are included; a missing Node is left out. A Service with session affinity
    comes with all of its namespace: they may decide whether it keeps that. Raises SourceError.
    """
    resources = [
        _resource(Kind.SERVICE, namespace, fieldSelector=f"metadata.name={name}"),
        _resource(Kind.ENDPOINT_SLICE, namespace, labelSelector=f"kubernetes.io/service-name={name}"),
        *map(_node, dict.fromkeys(node_names)),
    ]
    lists = [listed for resource in resources for listed in ApiWatch(client, resource, Timing()).once()]
    found = [it for listed in lists for it in listed.objects if isinstance(it, Service)]
    for shared in {it.namespace for it in found if it.affinity_seconds is not None}:
        lists += [list_kind(client, kind, shared) for kind in (Kind.SERVICE, Kind.ENDPOINT_SLICE)]
    return tuple(
        Listed(kind, tuple(object_ for listed in lists if listed.kind is kind for object_ in listed.objects))
        for kind in Kind
    )


def list_kind(client: Client, kind: Kind, namespace: str = "", name: str = "") -> Listed:
    """Return the objects of a kind, of all namespaces if `namespace` is empty, of all names if `name` is.

    Raises SourceError.
    """
    selectors = {"fieldSelector": f"metadata.name={name}"} if name else {}
    (listed,) = ApiWatch(client, _resource(kind, namespace, **selectors), Timing()).once()
    return listed


def all_objects(client: Client) -> tuple[Listed, ...]:
    """Return the objects that the proxies of all nodes need. Raises SourceError."""
    services, slices, _ = api_watches(client, "")
    return (*services.once(), *slices.once(), list_kind(client, Kind.NODE))


class ListForbidden(SourceError):
    """The account may not list objects of a kind."""


class _Page(NamedTuple):
    """The valid objects of one page of a list, and the versions of the others."""

    meta: wire.ListMeta
    objects: list[Object]
    rejected: dict[Key, str]


class ApiWatch:
    """Watch one resource. Implements Watch."""

    def __init__(
        self,
        client: Client,
        resource: ResourceSelector,
        timing: Timing,
        reconnection: Reconnection | None = None,
    ) -> None:
        self.name = f"watch-{resource.plural}"
        self._client, self._resource, self._timing = client, resource, timing
        self._tracker = ObjectTracker(resource.kind)
        reconnection = reconnection or Reconnection(timing.first_pause, timing.longest_pause)
        self._connection = ConnectionState(resource.plural, reconnection, timing, client.contact)
        self._version = ""

    @property
    def outage(self) -> Outage | None:
        """The current outage."""
        return self._connection.outage()

    def once(self) -> tuple[Listed, ...]:
        """List. Raises SourceError, ListForbidden."""
        try:
            return (self._list(_LISTED),)
        except Forbidden as failure:
            raise ListForbidden(f"cannot list {self._resource.plural}: {failure}") from None
        except Failure as failure:
            raise SourceError(f"cannot list {self._resource.plural}: {failure}") from None

    def run(self, emit: Emit) -> NoReturn:
        """List, then watch; never return."""
        while True:
            self._connection.connecting()
            try:
                if self._connection.must_list:
                    emit(self._list(_WATCHED))
                    self._connection.must_list = False
                seconds = random.randint(*self._timing.watch)  # noqa: S311
                for event in self._watch(seconds):
                    emit(event)
                pause = self._connection.ended(seconds)
            except Failure as failure:
                pause = self._connection.failed(failure)
            self._connection.wait(pause)

    def _watch(self, seconds: int) -> Iterator[Event]:
        """Yield the events of one watch request, until the server ends it or should have."""
        query: _Query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": seconds,
        }
        log.debug("watching", resource=self._resource.plural, version=self._version, seconds=seconds)
        self._tracker.watch_started()
        end = time.monotonic() + seconds + self._timing.idle
        with self._stream(query, self._timing.idle, end, _WATCHED) as body:
            self._connection.opened()
            for line in wire.lines(self._connection.watching(body)):
                if line and (event := self._event(line)):
                    yield event

    def _event(self, line: bytes) -> Event | None:
        """Return the event for one line of a watch, None if nothing changed. Advance the version."""
        event = wire.event(line)
        self._connection.heard()
        meta = wire.meta(event.object)
        key, version = meta.key(self._resource.kind), meta.resourceVersion or ""
        if self._tracker.is_stale(key, version):
            log.debug("stale event", resource=self._resource.plural, key=key, version=version)
            return None
        match event.type:
            case "ADDED" | "MODIFIED":
                change = self._tracker.updated(event.object, key)
            case "DELETED":
                change = self._tracker.deleted(key)
            case "BOOKMARK":
                change = None
            case _:
                log.debug("unknown event type", resource=self._resource.plural, type=event.type)
                return None
        self._version = version or self._version
        self._connection.delivered()
        return change

    def _list(self, verbs: str) -> Listed:
        """Return the complete state. If a permission is missing, messages name these `verbs`.

        Read it from the server's cache, which is cheap when all nodes list at once: first at any version
        (resourceVersion 0), later at a version that is not older than emitted events.
        """
        latest: _Query = {"limit": _PAGE_SIZE}
        # With a limit, most servers read a list at a version from etcd.
        cached: _Query = (
            {"resourceVersion": self._version} if self._version else latest | {"resourceVersion": "0"}
        )
        try:
            return self._pages(cached, verbs)
        except Failure as failure:
            # The server may not have the version, as after a restore from a backup.
            rejected = self._version and failure.persistent and not failure.server_wide
            if not rejected and not isinstance(failure, Expired):
                raise
        try:
            return self._pages(latest, verbs)
        except Expired:
            # The server dropped the rest of the list.
            return self._pages(latest, verbs)

    def _pages(self, query: _Query, verbs: str) -> Listed:
        objects: list[Object] = []
        rejected: dict[Key, str] = {}
        end = time.monotonic() + self._timing.list
        while True:
            try:
                page = self._page(query, verbs, end)
            except TooLarge:
                if not (smaller := _smaller(query)):
                    raise
                query = smaller
                continue
            objects += page.objects
            rejected |= page.rejected
            token = page.meta.next
            if not token:
                self._version = page.meta.resourceVersion or ""
                log.debug("listed", resource=self._resource.plural, count=len(objects), version=self._version)
                return self._tracker.listed(tuple(objects), rejected)
            if token == query.get("continue"):
                raise Failure("the API server sends the same page of a list again and again")
            if len(objects) + len(rejected) > _MAX_OBJECTS:
                raise Failure(f"the API server's list has no end: more than {_MAX_OBJECTS} objects")
            limit = int(query.get("limit", _PAGE_SIZE))
            query = {"limit": min(2 * limit, _PAGE_SIZE), "continue": token}

    def _page(self, query: _Query, verbs: str, end: float) -> _Page:
        objects: list[Object] = []
        rejected: dict[Key, str] = {}

        def take(items: list[msgspec.Raw]) -> None:
            objects.extend(self._tracker.decode_page(items, rejected))

        with self._stream(query, self._timing.answer, end, verbs, compressible=True) as body:
            meta = wire.page(self._connection.listing(body), self._resource.kind, take)
        return _Page(meta, objects, rejected)

    def _stream(
        self, query: _Query, idle: float, end: float, verbs: str, *, compressible: bool = False
    ) -> AbstractContextManager[Iterator[bytes]]:
        resource = self._resource
        return self._client.stream(
            resource.path,
            resource.selectors | query,
            resource=resource.plural,
            idle=idle,
            end=end,
            compressible=compressible,
            verbs=verbs,
        )


def _smaller(query: _Query) -> _Query | None:
    """Return the query for a smaller page at the same place of a list, None if a page cannot be smaller."""
    if "resourceVersion" in query:
        return {"limit": _PAGE_SIZE}  # from its cache, a server lists everything at once
    limit = int(query["limit"]) // 10
    return {**query, "limit": limit} if limit else None
