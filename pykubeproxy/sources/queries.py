"""Questions that commands ask an API server once: objects, when they changed, its version, and permissions.

The agent imports none of this.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from datetime import datetime
from typing import TypeVar

import msgspec

from pykubeproxy.objects import Key, Kind, Listed, Node, Service
from pykubeproxy.sources import wire
from pykubeproxy.sources.api import ApiWatch, ResourceSelector, Timing, api_watches, node_of, resource_of
from pykubeproxy.sources.client import Client
from pykubeproxy.sources.failures import Expired, Failure, Forbidden
from pykubeproxy.sources.watch import SourceError
from pykubeproxy.sources.wire import PAGE_SIZE, Query, read_pages

_ANSWER, _LIST = 60.0, 300.0  # seconds of silence, and for all pages together
_Item = TypeVar("_Item")
# More tell nothing new, and each takes two requests.
_MOST_SERVICES = 50
_CHANGES_SECONDS = 15.0
_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_TIMEOUT = 10.0  # seconds for the version and for each permission


def service_objects(
    client: Client, name: str, namespace: str, node_names: Iterable[str]
) -> tuple[Listed, ...]:
    """Return the Services of a name, in all namespaces if `namespace` is empty, their EndpointSlices, and these Nodes.

    Headless Services and those of other proxies are included; a missing Node is left out. A Service with session affinity
    comes with all of its namespace: they may decide whether it keeps that. Raises SourceError.
    """
    resources = (*_service_resources(name, namespace), *map(node_of, dict.fromkeys(node_names)))
    lists = [listed for resource in resources for listed in ApiWatch(client, resource, Timing()).once()]
    services = [found for listed in lists for found in listed.objects if isinstance(found, Service)]
    for shared in {service.namespace for service in services if service.affinity_seconds is not None}:
        lists += [list_kind(client, kind, shared) for kind in (Kind.SERVICE, Kind.ENDPOINT_SLICE)]
    return tuple(
        Listed(kind, tuple(object_ for listed in lists if listed.kind is kind for object_ in listed.objects))
        for kind in Kind
    )


def _service_resources(name: str, namespace: str) -> tuple[ResourceSelector, ...]:
    return (
        resource_of(Kind.SERVICE, namespace, fieldSelector=f"metadata.name={name}"),
        resource_of(Kind.ENDPOINT_SLICE, namespace, labelSelector=f"kubernetes.io/service-name={name}"),
    )


def list_kind(client: Client, kind: Kind, namespace: str = "", name: str = "") -> Listed:
    """Return the objects of a kind, of all namespaces if `namespace` is empty, of all names if `name` is.

    Raises SourceError.
    """
    selectors = {"fieldSelector": f"metadata.name={name}"} if name else {}
    (listed,) = ApiWatch(client, resource_of(kind, namespace, **selectors), Timing()).once()
    return listed


def all_objects(client: Client) -> tuple[Listed, ...]:
    """Return the objects that the proxies of all nodes need. Raises SourceError."""
    services, slices, _ = api_watches(client, "")
    return (*services.once(), *slices.once(), list_kind(client, Kind.NODE))


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
    resource = path.rpartition("/")[2]

    def ask(query: Query) -> AbstractContextManager[Iterator[bytes]]:
        return client.stream(
            path, query, resource=resource, verbs="get and list of", idle=_ANSWER, end=end, compressible=True
        )

    def read() -> tuple[_Item, ...]:
        found: list[_Item] = []

        def take(items: list[wire.Item]) -> None:
            for raw in items:
                with suppress(ValueError, RecursionError):
                    if not isinstance(raw, wire.Truncated):
                        found.append(decode(raw))

        read_pages(ask, {**selectors, "limit": PAGE_SIZE}, kind, take)
        return tuple(found)

    try:
        return read()
    except Expired:
        return read()


class _Image(msgspec.Struct):
    names: list[str] = []


class _ImagesStatus(msgspec.Struct):
    images: list[_Image] = []


class _NodeImages(msgspec.Struct):
    status: _ImagesStatus = msgspec.field(default_factory=_ImagesStatus)


def node_images(client: Client, node: str) -> tuple[str, ...]:
    """Return an image of each kind that a node holds, with a tag if it has one. Raises Failure."""
    decoder = msgspec.json.Decoder(_NodeImages)
    found = list_items(
        client, "/api/v1/nodes", "Node", {"fieldSelector": f"metadata.name={node}"}, decoder.decode
    )
    names = (image.names for one in found for image in one.status.images if image.names)
    return tuple(min(some, key=lambda name: "@" in name) for some in names)


class _ManagedFields(msgspec.Struct):
    time: datetime | None = None


class _Dates(msgspec.Struct):
    creationTimestamp: datetime | None = None  # noqa: N815
    managedFields: list[_ManagedFields] | None = None  # noqa: N815


class _Dated(msgspec.Struct):
    metadata: _Dates = msgspec.field(default_factory=_Dates)


_dated = msgspec.json.Decoder(_Dated)


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
    for kind, path, selectors in _service_resources(key.name, key.namespace):
        for one in list_items(client, path, kind.value, selectors, _dated.decode, seconds=_CHANGES_SECONDS):
            metadata = one.metadata
            if not metadata.managedFields:  # it may have changed since its creation
                raise Failure(f"an object of Service {key} has no managedFields")
            times = [metadata.creationTimestamp, *(field.time for field in metadata.managedFields)]
            yield from (date.timestamp() for date in times if date and date.tzinfo)


class _VersionInfo(msgspec.Struct):
    gitVersion: str  # noqa: N815


def server_version(client: Client) -> str:
    """Return a version such as v1.36.1. Raises Failure."""
    with client.stream("/version", {}, resource="its version", verbs="get of", idle=_TIMEOUT) as body:
        text = b"".join(body)
    try:
        return msgspec.json.decode(text, type=_VersionInfo).gitVersion
    except (ValueError, RecursionError) as error:
        raise Failure(f"the API server sent an invalid version: {error}") from None


class Permission(msgspec.Struct, frozen=True):
    """A verb on a resource, such as "list" on "endpointslices" of group "discovery.k8s.io"."""

    verb: str
    resource: str
    group: str = ""

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}"


NEEDED = tuple(
    Permission(verb, kind.plural, kind.api_version.rpartition("/")[0])
    for kind in Kind
    for verb in ("list", "watch")
)
"""The permissions a proxy needs."""
EVENTS = Permission("create", "events", "events.k8s.io")
"""The permission to create events."""


class ServerAccess(msgspec.Struct, frozen=True):
    """The Node object and the missing permissions.

    `node_error` is why listing the Node failed, or ""; `node` is None if it does not exist. `review_error` is why the
    permissions are unknown, or "". `answers` is False if the server answers neither request, or accepts no credentials.
    `verified` is False if the kubeconfig disables the verification of the server.
    """

    server: str
    node_error: str
    node: Node | None
    denied: tuple[Permission, ...] = ()
    review_error: str = ""
    answers: bool = True
    verified: bool = True


def server_access(client: Client, node_name: str) -> ServerAccess:
    """List the Node and review each permission that a proxy needs, in eight requests."""
    node_error, node = "", None
    try:
        *_, nodes = api_watches(client, node_name, Timing(answer=_TIMEOUT))
        (listed,) = nodes.once()
        node = next((node for node in listed.objects if isinstance(node, Node)), None)
    except SourceError as error:
        node_error = str(error)
    denied: tuple[Permission, ...] = ()
    review_error, answers = "", True
    try:
        denied = tuple(permission for permission in (*NEEDED, EVENTS) if not _is_granted(client, permission))
    except Failure as failure:
        review_error = str(failure)
        answers = not node_error or isinstance(failure, Forbidden)
    return ServerAccess(
        client.server, node_error, node, denied, review_error, answers, client.verifies_server
    )


class _ReviewStatus(msgspec.Struct):
    allowed: bool = False


class _Review(msgspec.Struct):
    status: _ReviewStatus


def _is_granted(client: Client, permission: Permission) -> bool:
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": msgspec.structs.asdict(permission)},
    }
    review = client.post(_REVIEWS, body, resource="access reviews", idle=_TIMEOUT)
    try:
        return msgspec.json.decode(review, type=_Review).status.allowed
    except (ValueError, RecursionError) as error:
        raise Failure(f"the API server sent an invalid access review: {error}") from None
