"""Watches: the events of a resource, as seen through a selector, one line of JSON each."""

import math
import select
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from pykubeproxy.lab.apiserver.errors import ApiError, invalid_options
from pykubeproxy.lab.apiserver.exchange import Query
from pykubeproxy.lab.apiserver.history import Change, Cursor, Lagging
from pykubeproxy.lab.apiserver.resources import Resource
from pykubeproxy.lab.apiserver.selectors import Selector
from pykubeproxy.lab.apiserver.store import Store

Send = Callable[[bytes], None]

DEFAULT_SECONDS = 1800  # how long a watch lasts if the client does not say
_NO_WATCH_LIST = "a watch stream was requested by the client but the required storage feature RequestWatchProgress is disabled"


class Switch:
    """Ends, freezes and thaws all watches of a server."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cursors: set[Cursor] = set()
        self._round = 0
        self.frozen = False

    @property
    def running(self) -> int:
        """How many watches there are."""
        return len(self._cursors)

    def enter(self, cursor: Cursor) -> int:
        """Take part; returns what to ask `ended` with."""
        with self._lock:
            self._cursors.add(cursor)
            return self._round

    def leave(self, cursor: Cursor) -> None:
        """No longer take part. Comes before the cursor is closed."""
        with self._lock:
            self._cursors.discard(cursor)

    def ended(self, entered: int) -> bool:
        """Whether a watch that entered then is to end."""
        return entered != self._round

    def end_all(self) -> None:
        """End every running watch, properly, as a server does that has had enough of it."""
        with self._lock:
            self._round += 1
            self._wake()

    def freeze(self, frozen: bool) -> None:
        """Let watches say nothing at all, or go on and catch up."""
        with self._lock:
            self.frozen = frozen
            self._wake()

    def _wake(self) -> None:
        for cursor in self._cursors:
            cursor.wake()


class Terms(NamedTuple):
    """What all watches of a server have in common."""

    store: Store
    switch: Switch
    bookmark_seconds: float  # between two bookmarks
    watch_list: bool  # whether initial events can be asked for


class Watch:
    """What a client wants to watch. Raises a 400 or 422 for options that make no sense."""

    def __init__(self, resource: Resource, selector: Selector, query: Query) -> None:
        self.resource = resource
        self.selector = selector
        self.after = query.number("resourceVersion") or None
        self.seconds = query.number("timeoutSeconds") or DEFAULT_SECONDS
        self.bookmarks = query.flag("allowWatchBookmarks")
        self.initial_events = query.flag("sendInitialEvents")
        _check_options(query)

    def run(self, terms: Terms, send: Send, client: int, truncate: bool = False) -> None:
        """Send events until the time is up, the watch is ended or the client is gone.

        `client` is the descriptor of the client's connection. `truncate` ends the watch in the middle of an event.
        """
        try:
            if self.initial_events and not terms.watch_list:
                raise ApiError(500, _NO_WATCH_LIST)
            cursor = terms.store.watch(self.resource, None if self.initial_events else self.after)
        except ApiError as error:
            send(_line("ERROR", msgspec.json.encode(error.status())))
            return
        entered = terms.switch.enter(cursor)
        try:
            send(b"")  # from now on the client misses nothing
            self._follow(terms, cursor, entered, _Cutting(send) if truncate else send, client)
        except _Cut:
            pass
        finally:
            terms.switch.leave(cursor)
            terms.store.unwatch(self.resource, cursor)

    def _follow(self, terms: Terms, cursor: Cursor, entered: int, send: Send, client: int) -> None:
        poll = select.poll()
        poll.register(cursor, select.POLLIN)
        poll.register(client, select.POLLIN)  # readable: the client has closed the connection
        lines = self._opening(cursor)
        now = time.monotonic()
        deadline, bookmark_due = now + self.seconds, now + terms.bookmark_seconds
        while now < deadline:
            pause = None if terms.switch.frozen else math.ceil((min(deadline, bookmark_due) - now) * 1000)
            ready = [descriptor for descriptor, _ in poll.poll(pause)]
            cursor.settle()
            if client in ready or terms.switch.ended(entered):
                return
            if terms.switch.frozen:
                continue
            try:
                version, changes = terms.store.changes(self.resource, cursor)
            except Lagging:
                return
            lines += self._lines(changes)
            now = time.monotonic()
            if now >= min(deadline, bookmark_due):
                bookmark_due = now + terms.bookmark_seconds
                if self.bookmarks and version >= cursor.after:
                    lines.append(self._bookmark(version))
            if lines:
                send(b"".join(lines))
                lines = []

    def _opening(self, cursor: Cursor) -> list[bytes]:
        """The events of what was there when the watch began, if it asked for them."""
        chosen = (stored for stored in cursor.initial if self.selector.matches(stored))
        lines = [_line("ADDED", self.resource.typed(stored.body)) for stored in chosen]
        cursor.initial = ()
        if self.initial_events and self.bookmarks:
            lines.append(self._bookmark(cursor.after, initial_end=True))
        return lines

    def _lines(self, changes: Iterable[Change]) -> Iterable[bytes]:
        """The events that a selector makes of changes: what leaves it is deleted, what enters it is added."""
        for change in changes:
            was = change.old is not None and self.selector.matches(change.old)
            if change.new is not None and self.selector.matches(change.new):
                yield _line("MODIFIED" if was else "ADDED", self.resource.typed(change.new.body))
            elif was:
                yield _line("DELETED", self.resource.typed(change.farewell()))

    def _bookmark(self, version: int, initial_end: bool = False) -> bytes:
        meta: dict[str, object] = {"resourceVersion": str(version)}
        if initial_end:
            meta["annotations"] = {"k8s.io/initial-events-end": "true"}
        blank = b"," + self.resource.blank[1:] if self.resource.blank != b"{}" else b"}"
        body = b'{"metadata":' + msgspec.json.encode(meta) + blank
        return _line("BOOKMARK", self.resource.typed(body))


def _check_options(query: Query) -> None:
    match = query.text("resourceVersionMatch")
    if query.text("sendInitialEvents"):
        if match != "NotOlderThan":
            why = "Forbidden: sendInitialEvents needs resourceVersionMatch NotOlderThan"
            raise invalid_options("resourceVersionMatch", why)
    elif match:
        raise invalid_options("resourceVersionMatch", "Forbidden: on a watch it needs sendInitialEvents")


def _line(kind: str, body: bytes) -> bytes:
    return b'{"type":"' + kind.encode() + b'","object":' + body + b"}\n"


class _Cut(Exception):
    """The stream was cut short on purpose."""


class _Cutting:
    """Sends all but the second half of the last line, then ends the watch."""

    def __init__(self, send: Send) -> None:
        self._send = send

    def __call__(self, data: bytes) -> None:
        last = len(data) - (data.rfind(b"\n", 0, -1) + 1)
        self._send(data[: len(data) - last // 2])
        raise _Cut


class Echoing:
    """Sends every line a second time, after the line that follows it."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._last = b""

    def __call__(self, data: bytes) -> None:
        """Send whole lines."""
        sent = []
        for line in data.splitlines(keepends=True):
            sent += [line, self._last]
            self._last = line
        self._send(b"".join(sent))
