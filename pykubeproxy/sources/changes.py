"""When the objects of Services last changed, as the API server noted."""

import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from urllib.parse import quote

import msgspec

from pykubeproxy.objects import Key
from pykubeproxy.sources.client import Client
from pykubeproxy.sources.failures import Failure

# More tell nothing new, and each takes two requests.
_MOST_SERVICES = 50
_IDLE = 15.0
_MOST_BYTES = 16 * 1024 * 1024


class _Change(msgspec.Struct):
    time: datetime | None = None


class _Metadata(msgspec.Struct):
    creationTimestamp: datetime | None = None  # noqa: N815
    managedFields: list[_Change] | None = None  # noqa: N815


class _Object(msgspec.Struct):
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)


class _List(msgspec.Struct):
    items: list[_Object] | None = None


def last_changes(client: Client, services: Iterable[Key]) -> Mapping[Key, float]:
    """Return when a Service or one of its EndpointSlices last changed, in seconds since 1970.

    Leave out Services for which the API server does not tell, and those after the first fifty.
    """
    found: dict[Key, float] = {}
    for key in [*services][:_MOST_SERVICES]:
        try:
            if times := [*_times(client, key)]:
                found[key] = max(times)
        except Failure:
            continue
    return found


def _times(client: Client, key: Key) -> Iterator[float]:
    name, namespace = key.name, quote(key.namespace, safe="")
    selectors = (
        (f"/api/v1/namespaces/{namespace}/services", {"fieldSelector": f"metadata.name={name}"}),
        (
            f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices",
            {"labelSelector": f"kubernetes.io/service-name={name}"},
        ),
    )
    for path, selector in selectors:
        for metadata in _listed(client, path, selector):
            times = [metadata.creationTimestamp, *(it.time for it in metadata.managedFields or ())]
            yield from (it.timestamp() for it in times if it and it.tzinfo)


def _listed(client: Client, path: str, selector: Mapping[str, str]) -> Iterator[_Metadata]:
    resource, received = path.rpartition("/")[2], b""
    with client.stream(path, selector, resource=resource, idle=_IDLE, end=time.monotonic() + _IDLE) as body:
        for piece in body:
            received += piece
            if len(received) > _MOST_BYTES:
                raise Failure(f"the list of {resource} is too large")
    try:
        return iter([it.metadata for it in msgspec.json.decode(received, type=_List).items or ()])
    except (ValueError, RecursionError) as error:
        raise Failure(f"the API server sent an invalid list of {resource}: {error}") from None
