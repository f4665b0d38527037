"""The wire format around objects: pages of a list and lines of a watch."""

import mmap
from collections.abc import Iterator

import msgspec

from pykubeproxy.objects import Key, Kind
from pykubeproxy.sources.failures import Failure, TooLarge, from_status, one_line

# An object has at most 1.5 MB in etcd.
MAX_LINE = 16 << 20
# Ten times as much as 10,000 EndpointSlices of 10 endpoints take in one response.
MAX_LIST = 1 << 28
# A comma separates two values. Each may take 75 bytes of memory, even if it is only a digit.
MAX_LIST_COMMAS = 1 << 22


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


class _ListMeta(msgspec.Struct):
    resourceVersion: str | None = None  # noqa: N815
    next: str | None = msgspec.field(default=None, name="continue")


class ListPage(msgspec.Struct):
    """One page of a list, its items not decoded; each of them keeps the whole page in memory."""

    kind: str
    metadata: _ListMeta
    items: list[msgspec.Raw] | None


class _Details(msgspec.Struct):
    retryAfterSeconds: int | None = None  # noqa: N815


class _Status(msgspec.Struct):
    code: int | None = None
    reason: str | None = None
    message: str | None = None
    details: _Details | None = None


_pages = msgspec.json.Decoder(ListPage)
_events = msgspec.json.Decoder(WatchEvent)
_objects = msgspec.json.Decoder(_Object)
_statuses = msgspec.json.Decoder(_Status)


def lines(body: Iterator[bytes], limit: int = MAX_LINE) -> Iterator[bytes]:
    """Yield the lines of a body. Raises Failure for one that is too long or incomplete."""
    begun: list[bytes] = []
    length = 0
    for piece in body:
        *ended, rest = piece.split(b"\n")
        if ended:
            ended[0] = b"".join((*begun, ended[0]))
            begun, length = [], 0
            yield from ended
        if rest:
            begun.append(rest)
            length += len(rest)
        if length > limit:
            raise Failure(f"the API server sent an event of more than {limit} bytes", persistent=True)
    if begun:
        raise Failure("the API server's response ended in the middle of an event")


def page(
    body: Iterator[bytes], kind: Kind, limit: int = MAX_LIST, max_commas: int = MAX_LIST_COMMAS
) -> ListPage:
    """Read a page of a list of this kind. Raises TooLarge, and Failure if it is not one."""
    text = _whole(body, limit, max_commas)
    try:
        decoded = _pages.decode(text)
    except (ValueError, RecursionError) as error:
        raise Failure(f"the API server sent no list of {kind.value}s: {error}", persistent=True) from None
    if decoded.kind != f"{kind.value}List" or not decoded.metadata.resourceVersion:
        other = one_line(repr(decoded.kind))
        raise Failure(f"the API server sent no list of {kind.value}s but {other}", persistent=True)
    return decoded


def _whole(body: Iterator[bytes], limit: int, max_commas: int) -> memoryview:
    # Outside the heap, which would keep the memory after use.
    text = mmap.mmap(-1, 1 << 20, mmap.MAP_PRIVATE)
    length = commas = 0
    for piece in body:
        begin, length = length, length + len(piece)
        commas += piece.count(b",")
        if length > limit:
            raise TooLarge(f"the API server sent a list of more than {limit} bytes", persistent=True)
        if commas > max_commas:
            raise TooLarge(f"the API server sent a list with more than {max_commas} commas", persistent=True)
        if length > len(text):
            text.resize(2 * length)
        text[begin:length] = piece
    return memoryview(text)[:length]


def event(line: bytes) -> WatchEvent:
    """Decode one line of a watch. Raises Failure, also for an ERROR event."""
    try:
        decoded = _events.decode(line)
    except (ValueError, RecursionError) as error:
        raise Failure(f"the API server sent an invalid event: {error}", persistent=True) from None
    if decoded.type == "ERROR":
        raise _error(decoded.object)
    return decoded


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
