"""When the objects of Services last changed, as the API server noted."""

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from urllib.parse import quote

import msgspec

from pykubeproxy.objects import Key
from pykubeproxy.sources.client import Client
from pykubeproxy.sources.failures import Failure
from pykubeproxy.sources.lists import list_items

# More tell nothing new, and each takes two requests.
_MOST_SERVICES = 50
_SECONDS = 15.0


class _ManagedFields(msgspec.Struct):
    time: datetime | None = None


class _Metadata(msgspec.Struct):
    creationTimestamp: datetime | None = None  # noqa: N815
    managedFields: list[_ManagedFields] | None = None  # noqa: N815


class _Object(msgspec.Struct):
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)


_objects = msgspec.json.Decoder(_Object)


def last_changes(client: Client, services: Iterable[Key]) -> Mapping[Key, float]:
    """Return when a Service or one of its EndpointSlices last changed, in seconds since 1970.

    Leave out Services for which the API server does not tell, as for objects without managedFields, and those after the
    first fifty.
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
        (
            f"/api/v1/namespaces/{namespace}/services",
            "Service",
            {"fieldSelector": f"metadata.name={name}"},
        ),
        (
            f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices",
            "EndpointSlice",
            {"labelSelector": f"kubernetes.io/service-name={name}"},
        ),
    )
    for path, kind, selector in selectors:
        for one in list_items(client, path, kind, selector, _objects.decode, seconds=_SECONDS):
            metadata = one.metadata
            if not metadata.managedFields:  # it may have changed since its creation
                raise Failure(f"an object of Service {key} has no managedFields")
            times = [metadata.creationTimestamp, *(it.time for it in metadata.managedFields)]
            yield from (it.timestamp() for it in times if it and it.tzinfo)
