"""Pods from an API server. The agent reads none."""

import time
from collections.abc import Iterator
from urllib.parse import quote

import msgspec

from pykubeproxy.objects.pods import KnownPod, decode_pod
from pykubeproxy.sources.client import Client
from pykubeproxy.sources.failures import Failure, Forbidden
from pykubeproxy.sources.watch import SourceError

_PAGE_SIZE = 500
_ANSWER, _LIST = 60.0, 300.0  # seconds of silence, and for all pages together
_MAX_PAGE = 64 << 20  # bytes


class PodsForbidden(SourceError):
    """The account may not list pods."""


class _ListMeta(msgspec.Struct):
    next: str | None = msgspec.field(default=None, name="continue")


class _PodList(msgspec.Struct):
    metadata: _ListMeta
    items: list[msgspec.Raw] | None = None


def find_pods(client: Client, namespace: str = "", name: str = "", address: str = "") -> tuple[KnownPod, ...]:
    """Return the Pods of a namespace or of all, with this name and primary IP if given; skip unreadable ones.

    Raises SourceError, PodsForbidden.
    """
    fields = {"metadata.name": name, "status.podIP": address}
    selector = ",".join(f"{field}={value}" for field, value in fields.items() if value)
    try:
        return tuple(_pods(client, namespace, selector))
    except Forbidden as failure:
        raise PodsForbidden(f"cannot list pods: {failure}") from None
    except Failure as failure:
        raise SourceError(f"cannot list pods: {failure}") from None


def _pods(client: Client, namespace: str, selector: str) -> Iterator[KnownPod]:
    inside = f"/namespaces/{quote(namespace, safe='')}" if namespace else ""
    path = f"/api/v1{inside}/pods"
    query: dict[str, str | int] = {"limit": _PAGE_SIZE}
    if selector:
        query["fieldSelector"] = selector
    end = time.monotonic() + _LIST
    while True:
        with client.stream(path, query, resource="pods", idle=_ANSWER, end=end, compressible=True) as body:
            page = _page(body)
        for raw in page.items or ():
            try:
                yield decode_pod(raw)
            except ValueError:
                continue
        if not page.metadata.next or page.metadata.next == query.get("continue"):
            return
        query["continue"] = page.metadata.next


def _page(body: Iterator[bytes]) -> _PodList:
    text = bytearray()
    for piece in body:
        text += piece
        if len(text) > _MAX_PAGE:
            raise Failure("the API server sent a list of pods that is too long")
    try:
        return msgspec.json.decode(text, type=_PodList)
    except (ValueError, RecursionError) as error:
        raise Failure(f"the API server sent no list of pods: {error}") from None
