"""The frame around objects in the API's answers: pages of a list and the lines of a watch."""

import time
from collections.abc import Iterator

import msgspec

from pykubeproxy.objects import Key, Kind
from pykubeproxy.sources.failures import Failure, of_status, one_line

# An object is at most some 1.5 MB in the API server's store, so this is no object but a fault.
LONGEST_LINE = 16 << 20
# The whole of a large cluster's EndpointSlices in one answer is some 200 MB.
LONGEST_LIST = 1 << 30


class Meta(msgspec.Struct, gc=False):
    name: str | None = None
    namespace: str | None = None
    resourceVersion: str | None = None  # noqa: N815

    def key(self, kind: Kind) -> Key:
        """The key the object has among those of its kind."""
        return Key("" if kind is Kind.NODE else self.namespace or "default", self.name or "?")


class _Object(msgspec.Struct, gc=False):
    metadata: Meta


class Event(msgspec.Struct, gc=False):
    """One line of a watch."""

    type: str
    object: msgspec.Raw


class _ListMeta(msgspec.Struct):
    resourceVersion: str | None = None  # noqa: N815
    next: str | None = msgspec.field(default=None, name="continue")


class Page(msgspec.Struct):
    """One page of a list; the items are not decoded yet and keep the whole answer in memory."""

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


_pages = msgspec.json.Decoder(Page)
_events = msgspec.json.Decoder(Event)
_objects = msgspec.json.Decoder(_Object)
_statuses = msgspec.json.Decoder(_Status)


def until(end: float, body: Iterator[bytes]) -> Iterator[bytes]:
    """The body, piece by piece. Raises Failure if it goes on after `end`, a time of the monotonic clock.

    Whoever sends a byte now and then is never silent, and may never come to an end.
    """
    for piece in body:
        if time.monotonic() >= end:
            raise Failure("the API server's answer takes too long: it was given up", doubtful=True)
        yield piece


def lines(body: Iterator[bytes], longest: int = LONGEST_LINE) -> Iterator[bytes]:
    """The lines of a body. Raises Failure for one that is too long or that ends in the middle."""
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
        if length > longest:
            raise Failure(f"the API server sent an event of more than {longest} bytes", doubtful=True)
    if begun:
        raise Failure("the API server's answer ended in the middle of an event")


def page(body: Iterator[bytes], kind: Kind, longest: int = LONGEST_LIST) -> Page:
    """Read a page of a list of this kind. Raises Failure if it is none."""
    text = bytearray()
    for piece in body:
        text += piece
        if len(text) > longest:
            raise Failure(f"the API server sent a list of more than {longest} bytes", doubtful=True)
    try:
        answer = _pages.decode(text)
    except (ValueError, RecursionError) as error:
        raise Failure(
            f"the API server's answer is no list of {kind.value}s: {error}", doubtful=True
        ) from None
    if answer.kind != f"{kind.value}List" or not answer.metadata.resourceVersion:
        what = one_line(repr(answer.kind))
        raise Failure(f"the API server's answer is no list of {kind.value}s but {what}", doubtful=True)
    return answer


def event(line: bytes) -> Event:
    """Decode one line of a watch. Raises Failure, also for an ERROR event."""
    try:
        it = _events.decode(line)
    except (ValueError, RecursionError) as error:
        raise Failure(f"the API server sent an event that cannot be read: {error}", doubtful=True) from None
    if it.type == "ERROR":
        raise _error(it.object)
    return it


def meta(raw: msgspec.Raw) -> Meta:
    """What identifies an object and its version; empty if it cannot be read."""
    try:
        return _objects.decode(raw).metadata
    except (ValueError, RecursionError):
        return Meta()


def _error(raw: msgspec.Raw) -> Failure:
    try:
        status = _statuses.decode(raw)
    except (ValueError, RecursionError):
        status = _Status()
    code = 410 if status.reason in ("Expired", "Gone") else status.code or 500
    wait = status.details.retryAfterSeconds if status.details else None
    failure = of_status(
        code, one_line(status.message or status.reason or ""), float(wait or 0), "these objects"
    )
    failure.doubtful = True
    return failure
