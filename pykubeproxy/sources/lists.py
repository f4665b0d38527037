"""Lists, page by page. Objects are decoded while a page arrives, so memory never holds the text of a page."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TypeAlias, TypeVar

import msgspec

from pykubeproxy.sources import wire
from pykubeproxy.sources.client import Client
from pykubeproxy.sources.failures import Expired, Failure

PAGE_SIZE = 500  # as in kube-proxy
# More objects of one kind than any cluster has: such a list never ends.
_MAX_OBJECTS = 1_000_000
# A server fills all pages but the last one. Accept this many that are not full, even empty ones.
_SHORT_PAGES = 20
_ANSWER, _LIST = 60.0, 300.0  # seconds of silence, and for all pages together

Query: TypeAlias = dict[str, str | int]
_Item = TypeVar("_Item")


def read_pages(
    ask: Callable[[Query], AbstractContextManager[Iterator[bytes]]],
    query: Query,
    kind: str,
    take: Callable[[list[wire.Item]], None],
) -> wire.ListMeta:
    """Pass all items of a list to `take`, and return the metadata of its last page. `ask` sends a request.

    Raises Failure; Expired if the server has dropped the rest of the list.
    """
    count = requests = 0

    def take_counted(items: list[wire.Item]) -> None:
        nonlocal count
        count += len(items)
        if count > _MAX_OBJECTS:
            raise Failure(f"the API server's list has no end: more than {_MAX_OBJECTS} objects")
        take(items)

    while True:
        with ask(query) as body:
            meta = wire.page(body, kind, take_counted)
        if not meta.next:
            return meta
        if meta.next == query.get("continue"):
            raise Failure("the API server sends the same page of a list again and again")
        requests += 1
        if requests >= _SHORT_PAGES + count // PAGE_SIZE:
            raise Failure(f"the API server's list has no end: {requests} pages with {count} objects in all")
        query = {key: value for key, value in query.items() if key != "resourceVersion"}
        query |= {"limit": PAGE_SIZE, "continue": meta.next}


def list_items(
    client: Client,
    path: str,
    kind: str,
    selectors: Mapping[str, str],
    decode: Callable[[msgspec.Raw], _Item],
    *,
    seconds: float = _LIST,
) -> tuple[_Item, ...]:
    """Return what `decode` makes of each object of this kind at a path of the API.

    Skip objects for which it raises ValueError, and those that are too large. Start again once if the server drops the
    rest of the list. Raises Failure.
    """
    end = time.monotonic() + seconds
    try:
        return _list_once(client, path, kind, selectors, decode, end)
    except Expired:
        return _list_once(client, path, kind, selectors, decode, end)


def _list_once(
    client: Client,
    path: str,
    kind: str,
    selectors: Mapping[str, str],
    decode: Callable[[msgspec.Raw], _Item],
    end: float,
) -> tuple[_Item, ...]:
    found: list[_Item] = []

    def ask(query: Query) -> AbstractContextManager[Iterator[bytes]]:
        resource = path.rpartition("/")[2]
        return client.stream(
            path, query, resource=resource, verbs="get and list of", idle=_ANSWER, end=end, compressible=True
        )

    def take(items: list[wire.Item]) -> None:
        for raw in items:
            try:
                if not isinstance(raw, wire.Truncated):
                    found.append(decode(raw))
            except (ValueError, RecursionError):
                continue

    read_pages(ask, {**selectors, "limit": PAGE_SIZE}, kind, take)
    return tuple(found)
