"""Lists of objects that only commands read: page by page, each page dropped when it is decoded."""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import msgspec

from pykubeproxy.sources.client import Client
from pykubeproxy.sources.failures import Expired, Failure

_PAGE_SIZE = 500
_ANSWER, _LIST = 60.0, 300.0  # seconds of silence, and for all pages together
_MAX_PAGE = 256 << 20  # bytes

_Item = TypeVar("_Item")


class _ListMeta(msgspec.Struct):
    next: str | None = msgspec.field(default=None, name="continue")


class _Page(msgspec.Struct):
    metadata: _ListMeta = msgspec.field(default_factory=_ListMeta)
    items: list[msgspec.Raw] | None = None


def list_items(
    client: Client,
    path: str,
    selectors: Mapping[str, str],
    decode: Callable[[msgspec.Raw], _Item],
    *,
    seconds: float = _LIST,
) -> tuple[_Item, ...]:
    """Return what `decode` makes of each object at a path of the API; skip those for which it raises ValueError.

    Start again once if the server drops the rest of the list. Raises Failure.
    """
    end = time.monotonic() + seconds
    try:
        return tuple(_items(client, path, selectors, decode, end))
    except Expired:
        return tuple(_items(client, path, selectors, decode, end))


def _items(
    client: Client,
    path: str,
    selectors: Mapping[str, str],
    decode: Callable[[msgspec.Raw], _Item],
    end: float,
) -> Iterator[_Item]:
    resource = path.rpartition("/")[2]
    query: dict[str, str | int] = {**selectors, "limit": _PAGE_SIZE}
    while True:
        with client.stream(
            path, query, resource=resource, verbs="get and list of", idle=_ANSWER, end=end, compressible=True
        ) as body:
            page = _page(body, resource)
        for raw in page.items or ():
            try:
                yield decode(raw)
            except (ValueError, RecursionError):
                continue
        if not page.metadata.next:
            return
        if page.metadata.next == query.get("continue"):
            raise Failure("the API server sends the same page of a list again and again")
        query["continue"] = page.metadata.next


def _page(body: Iterator[bytes], resource: str) -> _Page:
    text = bytearray()
    for piece in body:
        text += piece
        if len(text) > _MAX_PAGE:
            raise Failure(f"the API server sent a list of {resource} of more than {_MAX_PAGE >> 20} MiB")
    try:
        return msgspec.json.decode(text, type=_Page)
    except (ValueError, RecursionError) as error:
        raise Failure(f"the API server sent no list of {resource}: {error}") from None
