"""Objects from an API server: list, then watch, then watch again from where it ended."""

import random
import time
from collections.abc import Iterator

import msgspec
import urllib3

from pykubeproxy.objects import Event, Key, Kind, Listed, Object
from pykubeproxy.sources import wire
from pykubeproxy.sources.backoff import Backoff, Troubles, log
from pykubeproxy.sources.client import Client
from pykubeproxy.sources.exchange import Exchange, Stopped
from pykubeproxy.sources.failures import Expired, Failure
from pykubeproxy.sources.intake import Intake
from pykubeproxy.sources.watch import Emit, SourceError, Trouble, Watch

_PAGE = 500  # objects in a page of a list, as kube-proxy asks for
# More objects of one kind than any cluster has: a list that goes on after that has no end.
_MOST = 1_000_000


class Timing(msgspec.Struct, frozen=True):
    """Seconds. What suits a real server; tests take less.

    A server sends a bookmark about once a minute, so one that is silent for `idle` is gone, whatever TCP thinks.
    """

    idle: float = 180.0
    answer: float = 60.0  # how long a list may keep silent
    list: float = 600.0  # how long all its pages may take together
    watch: tuple[int, int] = (300, 600)  # how long a watch is asked to last, drawn between the two
    steady: float = 1.0  # a watch open for this long works
    first_pause: float = 0.2
    longest_pause: float = 30.0


class Selection(msgspec.Struct, frozen=True):
    """Which objects of a kind are asked for."""

    kind: Kind
    path: str
    selectors: dict[str, str]

    @property
    def plural(self) -> str:
        """The name of the kind's objects in the API, such as endpointslices."""
        return self.path.rpartition("/")[2]


def api_watches(client: Client, node_name: str, timing: Timing | None = None) -> tuple[Watch, ...]:
    """Watches of all that a node's proxy needs; the server leaves out headless Services and those of other proxies."""
    return tuple(
        ApiWatch(client, selection, timing or Timing())
        for selection in (
            Selection(
                Kind.SERVICE,
                "/api/v1/services",
                {
                    "labelSelector": "!service.kubernetes.io/service-proxy-name",
                    "fieldSelector": "spec.clusterIP!=None",
                },
            ),
            Selection(
                Kind.ENDPOINT_SLICE,
                "/apis/discovery.k8s.io/v1/endpointslices",
                {"labelSelector": "!service.kubernetes.io/headless"},
            ),
            Selection(Kind.NODE, "/api/v1/nodes", {"fieldSelector": f"metadata.name={node_name}"}),
        )
    )


class ApiWatch:
    """Watches the objects of one selection; a Watch.

    What it knows between two requests: the version it has seen, what it has told of it, and how the last ones went.
    """

    def __init__(self, client: Client, selection: Selection, timing: Timing) -> None:
        self.name = f"watch-{selection.plural}"
        self._client, self._selection, self._timing = client, selection, timing
        self._intake = Intake(selection.kind)
        self._exchange = Exchange(self.name)
        self._backoff = Backoff(timing.first_pause, timing.longest_pause)
        self._troubles = Troubles(selection.plural)
        self._version: str | None = None
        self._listed_before = False
        self._doubts = 0  # failures in a row that suggest that going on from this version is pointless
        self._expiries = 0  # 410s in a row
        self._opened: float | None = None  # when the present watch was answered
        self._delivered = False  # whether it brought anything

    @property
    def trouble(self) -> Trouble | None:
        """What stands in its way at this moment."""
        return self._troubles.present()

    def stop(self) -> None:
        """Make `run` return."""
        self._exchange.stop()

    def once(self) -> tuple[Listed, ...]:
        """List. Raises SourceError."""
        try:
            return (self._list(),)
        except (Failure, Stopped) as failure:
            raise SourceError(f"{self._selection.plural} cannot be listed: {failure}") from None

    def run(self, emit: Emit) -> None:
        """List, then watch, for ever: until `stop`."""
        self._version = None
        try:
            while True:
                self._opened, self._delivered = None, False
                try:
                    self._list_then_watch(emit)
                    pause = self._after_end()
                except Failure as failure:
                    pause = self._after(failure)
                self._exchange.pause(pause)
        except Stopped:
            return

    def _list_then_watch(self, emit: Emit) -> None:
        """Make one watch last as long as the server lets it, after a list if no version is known to go on from."""
        if self._version is None:
            emit(self._list())
        seconds = random.randint(*self._timing.watch)  # noqa: S311
        self._intake.watching()
        log.debug("watching", objects=self._selection.plural, version=self._version, seconds=seconds)
        query: dict[str, str | int] = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version or "0",
            "timeoutSeconds": seconds,
        }
        for event in self._events(query, seconds + self._timing.idle):
            emit(event)

    def _list(self) -> Listed:
        """The complete state.

        The very first list may come from the server's cache (resourceVersion 0): cheap when every node starts at once.
        Later ones must not go back behind what was seen, so they ask for the latest.
        """
        query: dict[str, str | int] = {"limit": _PAGE}
        if not self._listed_before:
            query["resourceVersion"] = "0"
        try:
            objects, version, refused = self._pages(query)
        except Expired:
            # The rest of the list was forgotten by the server meanwhile.
            objects, version, refused = self._pages({"limit": _PAGE})
        self._listed_before = True
        self._version = version
        log.debug("listed", objects=self._selection.plural, count=len(objects), version=version)
        return self._intake.listed(tuple(objects), refused)

    def _pages(self, query: dict[str, str | int]) -> tuple[list[Object], str, dict[Key, str]]:
        objects: list[Object] = []
        refused: dict[Key, str] = {}
        end = time.monotonic() + self._timing.list
        while True:
            page = self._page(query, end)
            objects += self._intake.objects(page.items or (), refused)
            if not page.metadata.next:
                return objects, page.metadata.resourceVersion or "", refused
            if page.metadata.next == query.get("continue"):
                raise Failure("the API server sends the same page of a list again and again")
            if len(objects) + len(refused) > _MOST:
                raise Failure(f"the API server's list has no end: {_MOST} objects, and more to come")
            query = {"limit": _PAGE, "continue": page.metadata.next}

    def _page(self, query: dict[str, str | int], end: float) -> wire.Page:
        with self._exchange.answer(lambda: self._get(query, self._timing.answer)) as pieces:
            return wire.page(wire.until(end, pieces), self._selection.kind)

    def _events(self, query: dict[str, str | int], longest: float) -> Iterator[Event]:
        """The events of a single watch request, until the server ends it or should have."""
        with self._exchange.answer(lambda: self._get(query, self._timing.idle)) as pieces:
            self._opened = time.monotonic()
            if not self._doubts:
                self._troubles.over()
            for line in wire.lines(wire.until(self._opened + longest, pieces)):
                if not line:
                    continue
                event = self._event(line)
                if event is not None:
                    yield event

    def _event(self, line: bytes) -> Event | None:
        """What one line of a watch means for those who listen; None if nothing. Moves the version."""
        it = wire.event(line)
        meta = wire.meta(it.object)
        key, version = meta.key(self._selection.kind), meta.resourceVersion or ""
        event: Event | None = None
        if self._intake.is_overtaken(key, version):
            log.debug("an event came too late", objects=self._selection.plural, key=key, version=version)
            return None
        match it.type:
            case "ADDED" | "MODIFIED":
                event = self._intake.changed(it.object, key)
            case "DELETED":
                event = self._intake.gone(key)
            case "BOOKMARK":
                pass
            case _:
                log.debug("unknown type of event", objects=self._selection.plural, type=it.type)
                return None
        if version:
            self._version = version
        self._delivered, self._doubts = True, 0
        self._troubles.over()
        return event

    def _get(self, query: dict[str, str | int], idle: float) -> urllib3.BaseHTTPResponse:
        selection = self._selection
        return self._client.get(
            selection.path, selection.selectors | query, asked=selection.plural, idle=idle
        )

    def _after_end(self) -> float:
        """Seconds to wait after the server has ended a watch, which is normal unless it does so at once."""
        if not self._steady():
            return self._after(Failure("the API server ends the watch at once", doubtful=True))
        self._backoff.reset()
        self._doubts = self._expiries = 0
        return self._rest()

    def _after(self, failure: Failure) -> float:
        """Seconds to wait after a failure; decides whether to list again."""
        if isinstance(failure, Expired):
            return self._after_expiry(failure)
        if self._steady():
            self._backoff.reset()
            self._expiries = 0
        if failure.doubtful and not self._delivered:
            self._doubts += 1
        if self._doubts >= 2:
            self._version = None
        pause = max(self._backoff.next(), failure.retry_after, self._rest())
        self._troubles.failed(str(failure), pause)
        return pause

    def _after_expiry(self, failure: Failure) -> float:
        """List again: at once the first time, for this is how a long interruption ends; then ever more slowly."""
        self._version = None
        self._expiries += 1
        if self._expiries == 1:
            log.debug("listing again", objects=self._selection.plural, reason=str(failure))
            return 0.0
        pause = self._backoff.next()
        self._troubles.failed(str(failure), pause)
        return pause

    def _steady(self) -> bool:
        return self._delivered or self._open_for() >= self._timing.steady

    def _open_for(self) -> float:
        return time.monotonic() - self._opened if self._opened is not None else 0.0

    def _rest(self) -> float:
        """What is missing to a second since the watch began: no server can make this a hot loop."""
        return max(0.0, self._timing.steady - self._open_for()) if self._opened is not None else 0.0
