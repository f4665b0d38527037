"""Watches: the events of a resource, filtered by a selector, one line of JSON each."""

import math
import select
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from pykubeproxy.http import Send
from pykubeproxy.lab.apiserver.errors import ApiError, invalid_options
from pykubeproxy.lab.apiserver.history import Change, Cursor, Lagging
from pykubeproxy.lab.apiserver.query import Query, Selector
from pykubeproxy.lab.apiserver.resources import Resource
from pykubeproxy.lab.apiserver.store import Store

_DEFAULT_SECONDS = 1800  # how long a watch lasts if the client does not say
_NO_WATCH_LIST = "a watch stream was requested by the client but the required storage feature RequestWatchProgress is disabled"


class WatchOptions(NamedTuple):
    """What all watches of a server share."""

    bookmark_seconds: float  # between two bookmarks
    watch_list: bool  # serve sendInitialEvents


class Watch:
    """One client's watch. Raise a 400 or 422 for options that contradict each other."""

    def __init__(
        self, store: Store, resource: Resource, selector: Selector, query: Query, options: WatchOptions
    ) -> None:
        self._store = store
        self._resource = resource
        self._selector = selector
        self._options = options
        self._after = query.number("resourceVersion") or None
        self._seconds = query.number("timeoutSeconds") or _DEFAULT_SECONDS
        self._bookmarks = query.flag("allowWatchBookmarks")
        self._initial_events = query.flag("sendInitialEvents")
        match = query.text("resourceVersionMatch")
        if query.text("sendInitialEvents") and match != "NotOlderThan":
            reason = "Forbidden: sendInitialEvents needs resourceVersionMatch NotOlderThan"
            raise invalid_options("resourceVersionMatch", reason)
        if match and not query.text("sendInitialEvents"):
            raise invalid_options("resourceVersionMatch", "Forbidden: on a watch it needs sendInitialEvents")

    def stream(self, send: Send, client: int) -> None:
        """Send events until the time is up or `client`, the connection's descriptor, is readable."""
        try:
            if self._initial_events and not self._options.watch_list:
                raise ApiError(500, _NO_WATCH_LIST)
            cursor = self._store.watch(self._resource, None if self._initial_events else self._after)
        except ApiError as error:
            send(_line("ERROR", msgspec.json.encode(error.status())))
            return
        try:
            send(b"")  # the client gets the headers, and from now on all events
            self._follow(cursor, send, client)
        except Lagging:
            pass
        finally:
            self._store.unwatch(self._resource, cursor)

    def _follow(self, cursor: Cursor, send: Send, client: int) -> None:
        poll = select.poll()
        poll.register(cursor, select.POLLIN)
        poll.register(client, select.POLLIN)
        lines = self._initial_lines(cursor)
        now = time.monotonic()
        deadline, bookmark_due = now + self._seconds, now + self._options.bookmark_seconds
        while now < deadline:
            ready = poll.poll(math.ceil((min(deadline, bookmark_due) - now) * 1000))
            if any(descriptor == client for descriptor, _ in ready):
                return
            cursor.clear()
            version, changes = self._store.changes(self._resource, cursor)
            lines += self._lines(changes)
            now = time.monotonic()
            if now >= min(deadline, bookmark_due):
                bookmark_due = now + self._options.bookmark_seconds
                if self._bookmarks and version > cursor.start:
                    lines.append(self._bookmark(version))
            if lines:
                send(b"".join(lines))
                lines = []

    def _initial_lines(self, cursor: Cursor) -> list[bytes]:
        """Return the events of the objects that were present when the watch began."""
        selected = (stored for stored in cursor.initial if self._selector.matches(stored))
        lines = [_line("ADDED", self._resource.typed(stored.body)) for stored in selected]
        cursor.initial = ()
        if self._initial_events and self._bookmarks:
            lines.append(self._bookmark(cursor.after, {"k8s.io/initial-events-end": "true"}))
        return lines

    def _lines(self, changes: Sequence[Change]) -> Iterator[bytes]:
        """Yield events: an object that leaves the selector is deleted, one that enters it is added."""
        for change in changes:
            matched = change.old is not None and self._selector.matches(change.old)
            if change.new is not None and self._selector.matches(change.new):
                yield _line("MODIFIED" if matched else "ADDED", self._resource.typed(change.new.body))
            elif matched:
                yield _line("DELETED", self._resource.typed(change.deleted_body))

    def _bookmark(self, version: int, annotations: dict[str, str] | None = None) -> bytes:
        meta: dict[str, object] = {"resourceVersion": str(version)}
        if annotations:
            meta["annotations"] = annotations
        blank = b"," + self._resource.blank[1:] if self._resource.blank != b"{}" else b"}"
        body = b'{"metadata":' + msgspec.json.encode(meta) + blank
        return _line("BOOKMARK", self._resource.typed(body))


def _line(kind: str, body: bytes) -> bytes:
    return b'{"type":"' + kind.encode() + b'","object":' + body + b"}\n"
