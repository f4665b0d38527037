"""The wire format around objects: pages of a list and lines of a watch."""

from collections.abc import Callable, Iterator

import msgspec

from pykubeproxy.objects import Key, Kind
from pykubeproxy.sources.failures import Failure, TooLarge, from_status, one_line

# An object has at most 1.5 MB in etcd.
MAX_LINE = 16 << 20
# Ten times as much as 10,000 EndpointSlices of 10 endpoints take in one response.
MAX_LIST = 1 << 28
# A comma separates two values. Each may take 75 bytes of memory, even if it is only a digit.
MAX_LIST_COMMAS = 1 << 22
# Decode items of a list when this many bytes have arrived.
_BATCH = 1 << 18
_ITEMS = b'"items":['
_LONGEST_FIELD = 64


class ObjectMeta(msgspec.Struct, gc=False):
    """The identity and version of an object."""

    name: str | None = None
    namespace: str | None = None
    resourceVersion: str | None = None  # noqa: N815

    def key(self, kind: Kind) -> Key:
        """Return the key of the object among those of its kind."""
        return Key("" if kind is Kind.NODE else self.namespace or "default", self.name or "?")


class _Object(msgspec.Struct, gc=False):
    metadata: ObjectMeta


class WatchEvent(msgspec.Struct, gc=False):
    """One line of a watch."""

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


class _Details(msgspec.Struct):
    retryAfterSeconds: int | None = None  # noqa: N815


class _Status(msgspec.Struct):
    code: int | None = None
    reason: str | None = None
    message: str | None = None
    details: _Details | None = None


_pages = msgspec.json.Decoder(_ListPage)
_items = msgspec.json.Decoder(list[msgspec.Raw])
_events = msgspec.json.Decoder(WatchEvent)
_objects = msgspec.json.Decoder(_Object)
_statuses = msgspec.json.Decoder(_Status)


def lines(body: Iterator[bytes], limit: int = MAX_LINE) -> Iterator[bytes]:
    """Yield the lines of a body, and an empty one for an empty piece.

    Raises Failure for a line that is too long or incomplete.
    """
    begun: list[bytes] = []
    length = 0
    for piece in body:
        *ended, rest = piece.split(b"\n")
        if ended:
            ended[0] = b"".join((*begun, ended[0]))
            begun, length = [], 0
            yield from ended
        if not piece:
            yield b""
        if rest:
            begun.append(rest)
            length += len(rest)
        if length > limit:
            raise Failure(f"the API server sent an event of more than {limit} bytes", persistent=True)
    if begun:
        raise Failure("the API server's response ended in the middle of an event")


def page(
    body: Iterator[bytes],
    kind: Kind,
    take: Callable[[list[msgspec.Raw]], None],
    limit: int = MAX_LIST,
    max_commas: int = MAX_LIST_COMMAS,
) -> ListMeta:
    """Read a page of a list of this kind, and pass its items to `take` in batches while the rest arrives.

    Raises TooLarge above `limit` bytes or `max_commas`, and Failure if it is no such page; `take` may have items by then.
    """
    text = _PageText()
    for piece in _limited(body, limit, max_commas):
        if items := text.add(piece):
            take(items)
    try:
        decoded = _pages.decode(text.rest())
    except (ValueError, RecursionError) as error:
        raise Failure(f"the API server sent no list of {kind.value}s: {error}", persistent=True) from None
    if decoded.kind != f"{kind.value}List" or not decoded.metadata.resourceVersion:
        other = one_line(repr(decoded.kind))
        raise Failure(f"the API server sent no list of {kind.value}s but {other}", persistent=True)
    if decoded.items:
        take(decoded.items)
    return decoded.metadata


class _PageText:
    """Take complete items out of the text of a page while the rest arrives."""

    def __init__(self) -> None:
        self._head = b""  # the text before the first item; empty until a valid one has arrived
        self._text = bytearray()
        self._due = _BATCH  # the length of the text at which to look for items

    def add(self, piece: bytes) -> list[msgspec.Raw]:
        """Add a piece, and return the complete items; none if too little text has arrived since the last ones."""
        self._text += piece
        # An object is shorter than MAX_LINE, so a longer text has no items to find: do not copy it.
        if not self._due <= len(self._text) <= MAX_LINE:
            return []
        items = self._take() if self._head or self._split_head() else []
        # Look again when the text has doubled, so that a text without items is not read for each piece.
        self._due = max(_BATCH, 2 * len(self._text))
        return items

    def rest(self) -> bytearray:
        """Return the page without the items that `add` has returned. Call it last."""
        self._text[:0] = self._head
        return self._text

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

    def _take(self) -> list[msgspec.Raw]:
        # All items begin with the same field. If this is text inside an item, a bracket is open, and decoding fails.
        field = self._text[: self._text.find(b":", 0, _LONGEST_FIELD) + 1]
        end = self._text.rfind(b"}," + field) + 1 if field else 0
        try:
            items = _items.decode(b"".join((b"[", self._text[:end], b"]")))
        except (ValueError, RecursionError):
            return []
        if items:
            del self._text[: end + 1]
        return items


def _limited(body: Iterator[bytes], limit: int, max_commas: int) -> Iterator[bytes]:
    """Yield the pieces of a list. Raises TooLarge."""
    length = commas = 0
    for piece in body:
        length += len(piece)
        commas += piece.count(b",")
        if length > limit:
            raise TooLarge(f"the API server sent a list of more than {limit} bytes", persistent=True)
        if commas > max_commas:
            raise TooLarge(f"the API server sent a list with more than {max_commas} commas", persistent=True)
        yield piece


def event(line: bytes) -> WatchEvent:
    """Decode one line of a watch. Raises Failure, also for an ERROR event."""
    try:
        decoded = _events.decode(line)
    except (ValueError, RecursionError) as error:
        raise Failure(f"the API server sent an invalid event: {error}", persistent=True) from None
    if decoded.type == "ERROR":
        raise _error(decoded.object)
    return decoded


def is_older(version: str, than: str) -> bool:
    """Return whether a version is older than another one.

    Versions of built-in kinds are increasing whole numbers (KEP-5504); others never count as older.
    """
    numbers = [int(it) for it in (version, than) if it.isascii() and it.isdigit() and len(it) < 20]
    return len(numbers) == 2 and numbers[0] < numbers[1]


def meta(raw: msgspec.Raw) -> ObjectMeta:
    """Return the identity and version of an object, empty if it cannot be decoded."""
    try:
        return _objects.decode(raw).metadata
    except (ValueError, RecursionError):
        return ObjectMeta()


def _error(raw: msgspec.Raw) -> Failure:
    try:
        status = _statuses.decode(raw)
    except (ValueError, RecursionError):
        status = _Status()
    code = 410 if status.reason in ("Expired", "Gone") else status.code or 500
    wait = status.details.retryAfterSeconds if status.details else None
    message = one_line(status.message or status.reason or "")
    failure = from_status(code, message, float(wait or 0), "these objects")
    failure.persistent = True
    return failure
