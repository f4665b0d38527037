"""The wire format around objects: lists in pages, and the lines of a watch.

Objects are decoded while a page arrives, so memory never holds the text of a page.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TypeAlias

import msgspec

from pykubeproxy.objects import IDENTITY_BYTES, object_meta
from pykubeproxy.sources.failures import ApiStatus, Failure, from_status, one_line

# An object has at most 1.5 MB in etcd, and 9 MB as JSON, which writes "<" as "\u003c". Skip a larger one.
MAX_OBJECT = 16 << 20
# A comma outside of strings separates two values, each of which may take 150 bytes. A server's object has fewer.
_MAX_COMMAS = 1 << 19
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
# Decode items of a list when this many bytes have arrived.
_BATCH = 1 << 18
_ITEMS = b'"items":['
_LONGEST_FIELD = 64
_EVENT_TYPE = re.compile(rb'\{"type": ?"([A-Z]+)"')
_items = msgspec.json.Decoder(list[msgspec.Raw])
PAGE_SIZE = 500  # as in kube-proxy
# More objects of one kind than any cluster has: such a list never ends.
_MAX_OBJECTS = 1_000_000
# A server fills all pages but the last one. Accept this many that are not full, even empty ones.
_SHORT_PAGES = 20
Query: TypeAlias = dict[str, str | int]


class Truncated(bytes):
    """The beginning of an object, or of a watch line with an object, that is too long."""

    reason = f"it has more than {MAX_OBJECT >> 20} MiB"


class Nested(Truncated):
    """The beginning of an object that is nested too deeply to decode; users may nest `managedFields` like that."""

    reason = "it is nested too deeply"


Item = msgspec.Raw | Truncated


class WatchEvent(msgspec.Struct, gc=False):
    """One line of a watch. `object` is a Truncated if it is too long, or nested too deeply."""

    type: str
    object: msgspec.Raw


class ListMeta(msgspec.Struct):
    """The version of a list, and the token for its next page."""

    resourceVersion: str | None = None  # noqa: N815
    next: str | None = msgspec.field(default=None, name="continue")


class _ListPage(msgspec.Struct):
    kind: str
    metadata: ListMeta
    items: list[msgspec.Raw] | None


_pages = msgspec.json.Decoder(_ListPage)
_events = msgspec.json.Decoder(WatchEvent)
_statuses = msgspec.json.Decoder(ApiStatus)


def lines(body: Iterator[bytes], limit: int = MAX_OBJECT) -> Iterator[bytes]:
    """Yield the lines of a body: a Truncated for each one above `limit` bytes, an empty line for an empty piece.

    Raises Failure if the last line is incomplete.
    """
    begun: list[bytes] = []
    length = 0
    for piece in body:
        *ended, rest = piece.split(b"\n")
        if ended:
            whole = b"".join((*begun, ended[0]))
            ended[0] = Truncated(whole[:IDENTITY_BYTES]) if length + len(ended[0]) > limit else whole
            begun, length = [], 0
            yield from ended
        if not piece:
            yield b""
        if rest:
            begun.append(rest)
            length += len(rest)
        if length > limit:
            begun = [_truncated(b"".join(begun), limit)]
    if length:
        raise Failure("the API server's response ended in the middle of an event")


def _truncated(text: bytes | bytearray, limit: int) -> Truncated:
    """Return the beginning of a text above `limit`. Raises Failure if it is no object."""
    beginning = Truncated(text[:IDENTITY_BYTES])
    if not object_meta(beginning).name:
        raise Failure(f"the API server sent more than {limit} bytes that are no object", persistent=True)
    return beginning


def page(
    body: Iterator[bytes], kind: str, take: Callable[[list[Item]], None], limit: int = MAX_OBJECT
) -> ListMeta:
    """Read a page of a list of this kind, and pass its items to `take` in batches while the rest arrives.

    In place of an item above `limit` bytes or nested too deeply, pass a Truncated. Raises Failure if the text is no such
    page; `take` may have items by then.
    """
    text = _PageText(limit)
    for piece in body:
        if items := text.add(piece):
            take(items)
    try:
        try:
            decoded = _pages.decode(text.rest())
        except RecursionError:
            take(text.split())
            decoded = _pages.decode(text.rest())
    except (ValueError, RecursionError) as error:
        raise Failure(f"the API server sent no list of {kind}s: {error}", persistent=True) from None
    if decoded.kind != f"{kind}List" or not decoded.metadata.resourceVersion:
        other = one_line(repr(decoded.kind))
        raise Failure(f"the API server sent no list of {kind}s but {other}", persistent=True)
    if decoded.items:
        take([*decoded.items])
    return decoded.metadata


class _PageText:
    """Take complete items out of the text of a page while the rest arrives."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._head = b""  # the text before the first item; empty until a valid one has arrived
        self._text = bytearray()
        self._due = min(_BATCH, limit + 1)  # the length of the text at which to look for items
        self._border = b""  # what ends the truncated item at which the text begins

    def add(self, piece: bytes) -> list[Item]:
        """Add a piece, and return the complete items; none if too little text has arrived since the last ones."""
        self._text += piece
        if (self._border and not self._skip()) or len(self._text) < self._due:
            return []
        items: list[Item] = []
        if self._head or self._split_head():
            items += self._take()
        if len(self._text) > self._limit:
            items.append(self._truncate())
        # Look again when the text has doubled, so that a text without items is not read for each piece.
        self._due = min(max(_BATCH, 2 * len(self._text)), self._limit + 1)
        return items

    def rest(self) -> bytes:
        """Return the page without the items that other methods have returned."""
        if self._border and self._text.rstrip().endswith(b"}]}"):
            self._text[:] = b"]}"
        return self._head + self._text

    def split(self) -> list[Item]:
        """Return the items that are left in a complete text, one of which is nested too deeply. Raises ValueError."""
        border = self._find_border() if self._head or self._split_head() else b""
        end = self._text.rfind(b"]}") if border else 0
        items = _decoded(self._text[:end], border)
        del self._text[:end]
        return items

    def _split_head(self) -> bool:
        end = self._text.find(_ITEMS) + len(_ITEMS)
        head = bytes(self._text[:end])
        try:
            _pages.decode(head + b"]}")
        except (ValueError, RecursionError):
            return False
        self._head = head
        del self._text[:end]
        return True

    def _take(self) -> list[Item]:
        # If the border is part of an item, a bracket is open, and decoding fails.
        border = self._find_border()
        end = self._text.rfind(border) + 1 if border else 0
        try:
            items = _decoded(self._text[:end], border)
        except ValueError:
            return []
        if items:
            del self._text[: end + 1]
        return items

    def _find_border(self) -> bytes:
        """Return the text between two items, "" if unknown. All items begin with the same field."""
        field = self._text[: self._text.find(b":", 0, _LONGEST_FIELD) + 1]
        return b"}," + field if field else b""

    def _truncate(self) -> Truncated:
        """Return the beginning of the first item, and begin to skip it."""
        border = self._find_border()
        beginning = _truncated(self._text if self._head and border else b"", self._limit)
        self._border = border
        self._skip()
        return beginning

    def _skip(self) -> bool:
        """Drop the text of the truncated item. Return whether its end has arrived."""
        # No item holds a border: JSON escapes quotes in strings, and no field is a list of objects with metadata.
        if (end := self._text.find(self._border)) >= 0:
            del self._text[: end + len(b"},")]
            self._border = b""
            return True
        del self._text[: len(self._text) - len(self._border) + 1]  # the rest may begin a border
        return False


def _decoded(text: bytes | bytearray, border: bytes) -> list[Item]:
    """Return the items of a text, with `border` between them: a Nested for one nested too deeply. Raises ValueError."""
    try:
        return [*_items.decode(b"[%s]" % text)]
    except RecursionError:
        if not border:
            return [Nested(text[:IDENTITY_BYTES])]
    first, *others = text.replace(border, border[:1] + border).split(border)
    items = (first, *(border[2:] + other for other in others))
    return [decoded for item in items for decoded in _decoded(item, b"")]


def event(line: bytes) -> WatchEvent:
    """Decode one line of a watch. Raises Failure, also for an ERROR event."""
    if isinstance(line, Truncated) and (type_ := _EVENT_TYPE.match(line)):
        return WatchEvent(type_[1].decode(), line)  # type: ignore[arg-type]
    try:
        decoded = _events.decode(line)
    except (ValueError, RecursionError) as error:
        if isinstance(error, RecursionError) and not isinstance(line, Truncated):
            return event(Nested(line[:IDENTITY_BYTES]))
        raise Failure(f"the API server sent an invalid event: {error}", persistent=True) from None
    if decoded.type == "ERROR":
        raise _error(decoded.object)
    return decoded


def is_older(version: str, than: str) -> bool:
    """Return whether a version is older than another one.

    Versions of built-in kinds are increasing whole numbers (KEP-5504); others never count as older.
    """
    numbers = [int(text) for text in (version, than) if text.isascii() and text.isdigit() and len(text) < 20]
    return len(numbers) == 2 and numbers[0] < numbers[1]


def too_large(raw: Item) -> str:
    """Return why an object would take too much memory, "" if it would not."""
    if isinstance(raw, Truncated):
        return raw.reason
    text = memoryview(raw)
    if len(text) <= _MAX_COMMAS or bytes(text).count(b",") <= _MAX_COMMAS:
        return ""
    many = _STRING.sub(b"", text).count(b",") > _MAX_COMMAS
    return f"it has more than {_MAX_COMMAS} values" if many else ""


def _error(raw: msgspec.Raw) -> Failure:
    try:
        status = _statuses.decode(raw)
    except (ValueError, RecursionError):
        status = ApiStatus()
    code = 410 if status.reason in ("Expired", "Gone") else status.code or 500
    wait = status.details.retryAfterSeconds if status.details else None
    message = one_line(status.message or status.reason or "")
    failure = from_status(code, message, float(wait or 0), "these objects")
    failure.persistent = True
    return failure


def read_pages(
    ask: Callable[[Query], AbstractContextManager[Iterator[bytes]]],
    query: Query,
    kind: str,
    take: Callable[[list[Item]], None],
) -> ListMeta:
    """Pass all items of a list to `take`, and return the metadata of its last page. `ask` sends a request.

    Raises Failure; Expired if the server has dropped the rest of the list.
    """
    count = requests = 0

    def take_counted(items: list[Item]) -> None:
        nonlocal count
        count += len(items)
        if count > _MAX_OBJECTS:
            raise Failure(f"the API server's list has no end: more than {_MAX_OBJECTS} objects")
        take(items)

    while True:
        with ask(query) as body:
            meta = page(body, kind, take_counted)
        if not meta.next:
            return meta
        requests += 1
        if requests >= _SHORT_PAGES + count // PAGE_SIZE:
            raise Failure(f"the API server's list has no end: {requests} pages with {count} objects in all")
        query = {key: value for key, value in query.items() if key != "resourceVersion"}
        query |= {"limit": PAGE_SIZE, "continue": meta.next}
