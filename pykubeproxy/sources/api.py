"""Objects from an API server: list, then watch until the server ends the watch, then watch from the last version."""

import math
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, NoReturn
from urllib.parse import quote

import msgspec
import structlog

from pykubeproxy.objects import Event, Key, Kind, Listed, Object, object_meta
from pykubeproxy.sources import wire
from pykubeproxy.sources.client import ESSENTIAL_JSON, ApiResponse, Client
from pykubeproxy.sources.contact import OutageLog
from pykubeproxy.sources.failures import Expired, Failure, Forbidden
from pykubeproxy.sources.tracker import ObjectTracker
from pykubeproxy.sources.watch import Emit, Outage, SourceError, Watch
from pykubeproxy.sources.wire import PAGE_SIZE, Query, read_pages

# List again after this many persistent failures in a row: the version may be the reason.
_MAX_PERSISTENT = 2
# The bytes of an object that takes milliseconds to decode.
_LARGE = 1 << 14
# How many bytes of such objects may wait, and the pause in seconds after which one is decoded.
_MOST_LARGE = 1 << 25
_PAUSE = 0.02

log = structlog.get_logger()


class Timing(msgspec.Struct, frozen=True):
    """Timeouts in seconds. A watch ends after a random time from `watch`; the next one begins at its last version."""

    watch: tuple[int, int] = (300, 600)  # as in kube-proxy
    answer: float = 30.0  # until the header of a response, and silence within a list
    list: float = 600.0  # all pages of a list together
    steady: float = 1.0  # a watch open for this long works
    # A watch of objects that do not change is silent. If nothing arrives from the server for `quiet` seconds, the agent
    # sends a request, which must have an answer within `check` seconds.
    quiet: float = 30.0
    check: float = 15.0
    first_pause: float = 2.0  # ceiling of the first random pause after a failure
    longest_pause: float = 30.0


class Backoff:
    """Exponential backoff with full jitter: each pause is drawn from 0 to a ceiling between `first` and `longest` seconds.

    The jitter prevents all agents of a cluster from reconnecting to a server at once.
    """

    def __init__(self, first: float, longest: float) -> None:
        self._first, self._longest = first, longest
        self.failures = 0

    def next(self, spread: float = 0.0) -> float:
        """Return the seconds to wait after one more failure. The ceiling is at least `spread`, at most the longest."""
        ceiling = min(max(self._first * 2.0 ** min(self.failures, 32), spread), self._longest)
        self.failures += 1
        return random.uniform(0.0, ceiling)  # noqa: S311

    def reset(self) -> None:
        """Start over after a success."""
        self.failures = 0


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
    watches = tuple(ApiWatch(client, resource, timing or Timing()) for resource in resources)
    for watch in watches:
        watch.siblings = watches
    return watches


class ListForbidden(SourceError):
    """The account may not list objects of a kind."""


class ApiWatch:
    """Watch one resource. Implements Watch. docs/design.md lists the states of a watch."""

    def __init__(self, client: Client, resource: ResourceSelector, timing: Timing) -> None:
        self.name = f"watch-{resource.kind.plural}"
        self._client, self._resource, self._timing = client, resource, timing
        self._contact = client.contact
        self._tracker = ObjectTracker(resource.kind)
        self._outages = OutageLog(resource.kind.plural, client.contact)
        self._backoff = Backoff(timing.first_pause, timing.longest_pause)
        # Objects that wait to be decoded, and when the next one must be, however many others arrive.
        self._large: dict[Key, wire.Item] = {}
        self._large_due = 0.0
        self._version = ""  # the last one seen
        self._must_list = True
        self._restores = 0  # as in Contact, at the last list
        self._persistent = 0  # persistent failures in a row
        self._expired = 0  # 410s in a row
        self._opened: float | None = None  # when the server answered the current request for a watch
        self._works = False  # whether that watch delivered an event or is open long enough
        self._next_check = 0.0
        self._list_failure: tuple[float, str] | None = None  # since when, and why the last one failed
        self.siblings: tuple[ApiWatch, ...] = (self,)  # all watches of objects in the same database

    @property
    def list_outage(self) -> Outage | None:
        """How long and why lists have failed although the server answers."""
        failed = self._list_failure  # read once: the watch's thread replaces it
        if failed is None or self._contact.outage():
            return None
        return Outage(self._resource.kind.plural, time.monotonic() - failed[0], failed[1])

    @property
    def outage(self) -> Outage | None:
        """The current outage."""
        return self._outages.outage()

    def once(self) -> tuple[Listed, ...]:
        """List. Raises SourceError, ListForbidden."""
        try:
            return (self._list("get and list of"),)
        except Failure as failure:
            kind = ListForbidden if isinstance(failure, Forbidden) else SourceError
            raise kind(f"cannot list {self._resource.kind.plural}: {failure}") from None

    def run(self, emit: Emit) -> NoReturn:
        """List, then watch, again and again; never return."""
        while True:
            self._opened, self._works = None, False
            try:
                self._list_if_needed(emit)
                pause = self._watch(emit)
            except Failure as failure:
                pause = self._failed(failure)
            time.sleep(pause)

    def _list_if_needed(self, emit: Emit) -> None:
        """List at the start, if the last version is of no use, and each time the Node.

        A list of one object is cheap, and shows whether versions went back: a watch from a later version is silent.
        """
        is_node = self._resource.kind is Kind.NODE
        if is_node and self._version:
            for other in self.siblings:
                if wire.is_older(self._version, other._version):
                    self._version = other._version
        if not (self._must_list or is_node or self._restores != self._contact.restores):
            return
        before = self._version
        listed = self._list("list and watch of")
        self._outages.answered()
        emit(listed)
        for skipped in self._tracker.too_large():
            emit(skipped)
        self._must_list = False
        if wire.is_older(self._version, before):
            self._contact.restored()
        self._restores = self._contact.restores

    def _watch(self, emit: Emit) -> float:
        """Emit the events of a watch until it ends; return the pause in seconds before the next one. Raises Failure."""
        seconds = math.ceil(random.uniform(*self._timing.watch))  # noqa: S311
        query: Query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": seconds,
        }
        path, resource = self._resource.path, self._resource.kind.plural
        self._outages.requested()
        answer = self._timing.answer
        with (
            self._client.watch(
                path,
                self._resource.selectors | query,
                resource=resource,
                answer=answer,
                seconds=seconds + answer,
            ) as response,
            self._contact.open_watch(),
        ):
            self._opened = time.monotonic()
            self._outages.answered()
            renewals = self._contact.renewals
            try:
                for line in wire.lines(self._pieces(response)):
                    self._receive(line, emit)
                    if self._contact.renewals != renewals or self._contact.restores != self._restores:
                        return 0.0
            finally:
                self._emit_large(emit, 0)
        return self._ended(seconds)

    def _pieces(self, response: ApiResponse) -> Iterator[bytes]:
        """Yield what arrives; an empty piece if nothing does for some time."""
        while (piece := response.read(self._wait())) is not None:
            yield piece
            if not piece:
                self._check_if_silent()

    def _wait(self) -> float:
        """Return how long to wait for data, in seconds."""
        if self._large:
            return _PAUSE
        if not self._works:
            return self._timing.steady
        if self._resource.kind is not Kind.NODE:
            return self._timing.quiet
        return max(self._until_check(), _PAUSE)

    def _until_check(self) -> float:
        """Return the seconds until the watch of the Node checks the server: after some silence, or again if in doubt."""
        left = 0.0 if self._contact.in_doubt else self._timing.quiet - self._contact.silence()
        return max(left, self._next_check - time.monotonic())

    def _check_if_silent(self) -> None:
        """Send a request if nothing has arrived from the server for some time. Only the watch of the Node does so.

        Without an answer, watches go on: only new connections may fail. They begin anew with the next answer.
        """
        now = time.monotonic()
        if self._resource.kind is not Kind.NODE or self._until_check() > 0:
            return
        try:
            self._client.check(self._timing.check)
        except Failure as failure:
            pause = self._backoff.next()
            self._next_check = time.monotonic() + pause
            self._contact.check_failed(failure, now)
        else:
            self._backoff.reset()

    def _receive(self, line: bytes, emit: Emit) -> None:
        """Emit the event of a line, which is empty if nothing has arrived.

        Large objects take long to decode, so they wait for a pause of the watch, or for a fifth of the time.
        """
        if line and (event := self._event(line)):
            emit(event)
        if line or time.monotonic() - (self._opened or 0.0) >= self._timing.steady:
            self._succeeded()
        if self._large and (not line or time.monotonic() >= self._large_due or self._is_full()):
            begun = time.monotonic()
            self._emit_large(emit, len(self._large) - 1)
            now = time.monotonic()
            self._large_due = now + 4 * (now - begun)

    def _is_full(self) -> bool:
        return sum(memoryview(item).nbytes for item in self._large.values()) > _MOST_LARGE

    def _emit_large(self, emit: Emit, most: int) -> None:
        """Decode the large objects that wait the longest, and emit their events, until at most so many wait."""
        while len(self._large) > most:
            key = next(iter(self._large))
            if event := self._tracker.updated(self._large.pop(key), key):
                emit(event)

    def _event(self, line: bytes) -> Event | None:
        """Return the event for one line of a watch, None if nothing changed. Advance the version."""
        event = wire.event(line)
        meta = object_meta(event.object)
        key, version = meta.key(self._resource.kind), meta.resourceVersion or ""
        if wire.is_older(version, self._version):
            # Events come in the order of their versions: this one was repeated.
            return None
        change: Event | None = None
        match event.type:
            case "ADDED" | "MODIFIED" if len(line) > _LARGE:
                self._large[key] = event.object
            case "ADDED" | "MODIFIED":
                self._large.pop(key, None)
                change = self._tracker.updated(event.object, key)
            case "DELETED":
                self._large.pop(key, None)
                change = self._tracker.deleted(key)
            case "BOOKMARK":
                pass
            case _:
                return None
        self._version = version or self._version
        return change

    def _succeeded(self) -> None:
        """Record that the watch works."""
        if not self._works:
            self._works = True
            self._backoff.reset()
            self._persistent = self._expired = 0
            self._outages.recovered()

    def _ended(self, seconds: int) -> float:
        """Record that the server ended a watch of some seconds; return the pause before the next one. Raises Failure."""
        if not self._works and self._rest():
            raise Failure("the API server ends the watch at once", persistent=True)
        self._succeeded()
        # A server that stops ends the watches of all agents.
        is_early = time.monotonic() - (self._opened or 0.0) < seconds - self._timing.steady
        return self._backoff.next() if is_early else 0.0

    def _failed(self, failure: Failure) -> float:
        """Record a failure; return the pause in seconds before the next attempt."""
        if isinstance(failure, Expired):
            self._must_list = True
            self._expired += 1
        elif failure.persistent and not self._works:
            self._persistent += 1
            self._must_list |= self._persistent >= _MAX_PERSISTENT
        pause = self._backoff.next(spread=failure.retry_after)
        if isinstance(failure, Expired) and self._expired == 1:
            # This is normal after a long interruption; more of them in a row are a fault.
            return pause
        pause += max(failure.retry_after, self._rest())
        if failure.server_wide and self._contact.silence() >= self._timing.quiet:
            # As good as a check that failed: the watch of the Node may not be open to send one.
            self._contact.in_doubt = True
        self._outages.failed(failure, pause)
        return pause

    def _rest(self) -> float:
        """Return the rest of `steady` seconds since the watch was opened, to prevent a hot loop."""
        if self._opened is None:
            return 0.0
        return max(0.0, self._opened + self._timing.steady - time.monotonic())

    def _list(self, verbs: str) -> Listed:
        """Return the complete state. If a permission is missing, messages name these `verbs`."""
        try:
            listed = self._cached_or_latest(verbs)
        except Failure as failure:
            if not failure.server_wide:
                since = self._list_failure[0] if self._list_failure else time.monotonic()
                self._list_failure = since, str(failure)
            raise
        self._list_failure = None
        return listed

    def _cached_or_latest(self, verbs: str) -> Listed:
        """List from the server's cache, else the latest state.

        The cache is cheap when all nodes list at once. Read it first at any version (resourceVersion 0), later at a
        version that is not older than emitted events. But the cache of Nodes may be older than other objects' versions.
        """
        latest: Query = {"limit": PAGE_SIZE}
        if self._version and self._resource.kind is Kind.NODE:
            return self._pages(latest, verbs)
        # With a limit, most servers read a list at a version from etcd.
        cached: Query = (
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

    def _pages(self, query: Query, verbs: str) -> Listed:
        objects: list[Object] = []
        rejected: dict[Key, str] = {}
        end = time.monotonic() + self._timing.list

        @contextmanager
        def ask(query: Query) -> Iterator[Iterator[bytes]]:
            self._outages.requested()
            with self._client.stream(
                self._resource.path,
                self._resource.selectors | query,
                resource=self._resource.kind.plural,
                idle=self._timing.answer,
                end=end,
                compressible=True,
                verbs=verbs,
                accept=ESSENTIAL_JSON,
            ) as body:
                yield self._arriving(body)

        def take(items: list[wire.Item]) -> None:
            objects.extend(self._tracker.decode_page(items, rejected))

        meta = read_pages(ask, query, self._resource.kind.value, take)
        self._version = meta.resourceVersion or ""
        return self._tracker.listed(tuple(objects), rejected)

    def _arriving(self, body: Iterator[bytes]) -> Iterator[bytes]:
        for piece in body:
            self._outages.requested()
            yield piece
