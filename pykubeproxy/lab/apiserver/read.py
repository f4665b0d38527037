"""Answer lists and watches: selectors, versions, pages with continue tokens, events as lines of JSON."""

import math
import re
import select
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import parse_qsl

import msgspec

from pykubeproxy.http import JSON, Response, Send
from pykubeproxy.lab.apiserver.resources import (
    ApiError,
    JsonObject,
    Resource,
    invalid_options,
    respond,
    too_new,
)
from pykubeproxy.lab.apiserver.store import Change, Cursor, Lagging, Snapshot, Store, Stored, decoded
from pykubeproxy.lab.apiserver.tables import table

_Test = Callable[[Mapping[str, str]], bool]

_KEY = r"[A-Za-z0-9](?:[-A-Za-z0-9_./]*[A-Za-z0-9])?"
_VALUE = r"(?:[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?)?"
_EXISTS = re.compile(rf"(!?)\s*({_KEY})")
_EQUALS = re.compile(rf"({_KEY})\s*(==|=|!=)\s*({_VALUE})")
_IN = re.compile(rf"({_KEY})\s+(in|notin)\s*\(([^()]*)\)")
_SEPARATOR = re.compile(r",(?![^()]*\))")  # a comma outside parentheses
_FORMAT = "meta.k8s.io/v1"
_ANY_VERSION = -1  # in a token: continue from the present state
_DEFAULT_SECONDS = 1800  # how long a watch lasts if the client does not say
_NO_WATCH_LIST = "a watch stream was requested by the client but the required storage feature RequestWatchProgress is disabled"


class UrlQuery:
    """The query of a URL. A parameter that is absent equals an empty one."""

    def __init__(self, text: str) -> None:
        self._pairs = parse_qsl(text, keep_blank_values=True)
        self._values = dict(self._pairs)

    def text(self, name: str) -> str:
        """Return a parameter, "" if absent."""
        return self._values.get(name, "")

    def texts(self, name: str) -> list[str]:
        """Return all values of a parameter in their order."""
        return [value for other, value in self._pairs if other == name]

    def flag(self, name: str) -> bool:
        """Return whether a parameter is true or 1."""
        return self.text(name).lower() in ("true", "1")

    def number(self, name: str) -> int:
        """Return a whole number, 0 if absent. Raise a 400 for anything else."""
        text = self.text(name)
        if text and not (text.isascii() and text.isdigit()):
            raise ApiError(400, f'{name}: Invalid value: "{text}": must be a whole number')
        return int(text or 0)


class Selector:
    """A namespace ("" for all), labels and fields to select by.

    Raise a 400 if a selector cannot be parsed or names a field that is not selectable.
    """

    def __init__(self, resource: Resource, namespace: str = "", labels: str = "", fields: str = "") -> None:
        self._namespace = namespace
        self._labels = [_label_test(term) for term in _terms(labels)]
        selectable = {"metadata.name", "metadata.namespace", *resource.fields}
        self._fields = [_field_test(term, selectable) for term in _terms(fields)]

    @property
    def selective(self) -> bool:
        """Whether it selects by more than a namespace."""
        return bool(self._labels or self._fields)

    def matches(self, stored: Stored) -> bool:
        if self._namespace and stored.namespace != self._namespace:
            return False
        return all(test(stored.labels) for test in self._labels) and all(
            test(stored.fields) for test in self._fields
        )


def _terms(text: str) -> list[str]:
    return [term.strip() for term in _SEPARATOR.split(text)] if text.strip() else []


def _label_test(term: str) -> _Test:
    if match := _EXISTS.fullmatch(term):
        negated, key = match.groups()
        return lambda labels: (key in labels) != bool(negated)
    if match := _EQUALS.fullmatch(term):
        key, operator, value = match.groups()
        return _value_test(key, {value}, operator == "!=")
    if match := _IN.fullmatch(term):
        key, operator, listed = match.groups()
        values = {value.strip() for value in listed.split(",")}
        if all(re.fullmatch(_VALUE, value) for value in values):
            return _value_test(key, values, operator == "notin")
    raise _unparsable("label", term)


def _field_test(term: str, selectable: set[str]) -> _Test:
    match = re.fullmatch(r"([^=!]+)(==|=|!=)(.*)", term)
    if match is None:
        raise _unparsable("field", term)
    key, operator, value = match.groups()
    if key not in selectable:
        raise ApiError(400, f"field label not supported: {key}; use one of {', '.join(sorted(selectable))}")
    return _value_test(key, {value}, operator == "!=")


def _value_test(key: str, values: set[str], negated: bool) -> _Test:
    """An object without the key fails `=` and `in` and passes `!=` and `notin`."""
    return lambda pairs: (pairs.get(key) in values) != negated


def _unparsable(kind: str, term: str) -> ApiError:
    return ApiError(400, f"unable to parse requirement: {term!r} is not a {kind} selector")


class _Token(msgspec.Struct):
    """Continues a list at the first path not before `start`, in the state of version `rv`."""

    v: str
    rv: int
    start: str

    def encode(self) -> str:
        """Return the token for clients: URL-safe base64 of JSON without padding."""
        return urlsafe_b64encode(msgspec.json.encode(self)).decode().rstrip("=")


def list_objects(
    store: Store, resource: Resource, selector: Selector, query: UrlQuery, *, as_table: bool = False
) -> Response:
    """Answer a list. Raise a 400, 410, 422 or 504."""
    _check_version_options(query)
    limit = query.number("limit")
    token = _parse_token(query.text("continue")) if query.text("continue") else None
    if token is not None and query.text("resourceVersion") not in ("", "0"):
        raise ApiError(400, "specifying resource version is not allowed when using continue")
    if token is None and query.text("resourceVersion") == "0":
        limit = 0  # from its cache, the real server lists everything at once
    snapshot = _continued(store, resource, token) if token else _fresh(store, resource, query, limit)
    start = token.start if token else ""
    selected = [stored for stored in snapshot.objects if stored.path >= start and selector.matches(stored)]
    meta: JsonObject = {"resourceVersion": str(snapshot.version)}
    if limit and len(selected) > limit:
        meta["continue"] = _Token(_FORMAT, snapshot.version, selected[limit - 1].path + "\0").encode()
        if not selector.selective:
            meta["remainingItemCount"] = len(selected) - limit
        selected = selected[:limit]
    if as_table:
        whole = query.text("includeObject") == "Object"
        return respond(table(resource, map(decoded, selected), meta, whole=whole))
    head = f'{{"kind":"{resource.kind}List","apiVersion":"{resource.api_version}","metadata":'.encode()
    items = b",".join([stored.body for stored in selected])
    return Response(b"".join((head, msgspec.json.encode(meta), b',"items":[', items, b"]}\n")), JSON)


def _check_version_options(query: UrlQuery) -> None:
    """Raise a 422 for a resourceVersionMatch that contradicts the other options."""
    match, version = query.text("resourceVersionMatch"), query.text("resourceVersion")
    if not match:
        return
    if match not in ("Exact", "NotOlderThan"):
        raise invalid_options("resourceVersionMatch", f'Unsupported value: "{match}": Exact, NotOlderThan')
    if query.text("continue"):
        raise invalid_options("resourceVersionMatch", "Forbidden: not together with continue")
    if not version:
        raise invalid_options("resourceVersionMatch", "Forbidden: not without a resourceVersion")
    if match == "Exact" and version == "0":
        raise invalid_options("resourceVersionMatch", 'Forbidden: not "Exact" with resourceVersion "0"')


def _parse_token(text: str) -> _Token:
    """Decode a continue token. Raise a 400 if this server did not make it."""
    problem = "invalid continue token: continue key is not valid"
    try:
        token = msgspec.json.decode(_unbase64(text), type=_Token)
    except (msgspec.DecodeError, ValueError) as error:
        raise ApiError(400, f"{problem}: {error}") from error
    if token.v != _FORMAT or not token.start or (token.rv <= 0 and token.rv != _ANY_VERSION):
        raise ApiError(400, f"{problem}: not a token of this server")
    return _Token(token.v, token.rv, token.start.removeprefix("/"))


def _unbase64(text: str) -> bytes:
    """Decode. Raises ValueError with the first bad byte, in the words of the real server."""
    bad = re.search(r"[^A-Za-z0-9_-]", text)
    if bad or len(text) % 4 == 1:
        position = bad.start() if bad else len(text) - 1
        raise ValueError(f"illegal base64 data at input byte {position}")
    return urlsafe_b64decode(text + "=" * (-len(text) % 4))


def _fresh(store: Store, resource: Resource, query: UrlQuery, limit: int) -> Snapshot:
    """Return the state a list starts in: the present one unless it requests an exact version.

    With a limit a version means exactly that one, without a limit any version not older.
    """
    version = query.number("resourceVersion")
    if version > store.version:
        raise too_new(version, store.version)
    match = query.text("resourceVersionMatch")
    exact = match == "Exact" or (limit and not match)
    return store.snapshot(resource, version if version and exact else None)


def _continued(store: Store, resource: Resource, token: _Token) -> Snapshot:
    if token.rv == _ANY_VERSION:
        return store.snapshot(resource)
    try:
        return store.snapshot(resource, token.rv)
    except ApiError as error:
        if error.code != 410:
            raise
        message = (
            f"the continue token is too old: version {token.rv} was compacted; start a new list, or use the "
            "token of this response and accept that objects may be missing or outdated"
        )
        inconsistent = _Token(_FORMAT, _ANY_VERSION, token.start).encode()
        raise ApiError(410, message, metadata={"continue": inconsistent}) from error


class WatchOptions(NamedTuple):
    """What all watches of a server share."""

    bookmark_seconds: float  # between two bookmarks
    watch_list: bool  # serve sendInitialEvents


class ServedWatch:
    """One client's watch. Raise a 400 or 422 for options that contradict each other."""

    def __init__(
        self,
        store: Store,
        resource: Resource,
        selector: Selector,
        query: UrlQuery,
        options: WatchOptions,
        *,
        as_table: bool = False,
    ) -> None:
        self._store = store
        self._resource = resource
        self._selector = selector
        self._options = options
        self._as_table = as_table
        self._whole = query.text("includeObject") == "Object"
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
        lines = [self._event("ADDED", stored.body) for stored in selected]
        cursor.initial = ()
        if self._initial_events and self._bookmarks:
            lines.append(self._bookmark(cursor.after, {"k8s.io/initial-events-end": "true"}))
        return lines

    def _lines(self, changes: Sequence[Change]) -> Iterator[bytes]:
        """Yield events: an object that leaves the selector is deleted, one that enters it is added."""
        for change in changes:
            matched = change.old is not None and self._selector.matches(change.old)
            if change.new is not None and self._selector.matches(change.new):
                yield self._event("MODIFIED" if matched else "ADDED", change.new.body)
            elif matched:
                yield self._event("DELETED", change.deleted_body)

    def _event(self, kind: str, body: bytes) -> bytes:
        if not self._as_table:
            return _line(kind, self._resource.typed(body))
        item = msgspec.json.decode(body, type=JsonObject)
        version = {"resourceVersion": item["metadata"]["resourceVersion"]}
        return _line(kind, msgspec.json.encode(table(self._resource, [item], version, whole=self._whole)))

    def _bookmark(self, version: int, annotations: dict[str, str] | None = None) -> bytes:
        meta: dict[str, object] = {"resourceVersion": str(version)}
        if annotations:
            meta["annotations"] = annotations
        blank = b"," + self._resource.blank[1:] if self._resource.blank != b"{}" else b"}"
        body = b'{"metadata":' + msgspec.json.encode(meta) + blank
        return _line("BOOKMARK", self._resource.typed(body))


def _line(kind: str, body: bytes) -> bytes:
    return b'{"type":"' + kind.encode() + b'","object":' + body + b"}\n"
