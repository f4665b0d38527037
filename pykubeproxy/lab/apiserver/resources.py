"""The resources this API server knows: their names, what can be selected on, and how they look when empty."""

from collections.abc import Mapping
from typing import Any

import msgspec

JsonObject = dict[str, Any]


class Resource(msgspec.Struct, frozen=True, eq=False):
    """One kind of object and the path it is served under."""

    group: str  # "" for core/v1
    plural: str
    kind: str
    namespaced: bool = True
    short_name: str = ""
    fields: tuple[
        str, ...
    ] = ()  # that a field selector may name, besides metadata.name and metadata.namespace
    blank: bytes = (
        b"{}"  # what a bookmark carries besides its metadata, as the Go types encode their zero values
    )
    status: bool = False  # has the status subresource

    @property
    def api_version(self) -> str:
        """The apiVersion of its objects, such as discovery.k8s.io/v1."""
        return f"{self.group}/v1" if self.group else "v1"

    @property
    def qualified(self) -> str:
        """The name that error messages use, such as endpointslices.discovery.k8s.io."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def type_meta(self) -> bytes:
        """The two members that a single object has and an item of a list has not."""
        return f'"kind":"{self.kind}","apiVersion":"{self.api_version}"'.encode()

    def typed(self, body: bytes) -> bytes:
        """An object's encoded body with its kind and apiVersion in front."""
        return b"{" + self.type_meta + b"," + body[1:]

    def path(self, namespace: str, name: str) -> str:
        """The key an object is stored and sorted under: `namespace/name`, or `name` alone."""
        return f"{namespace}/{name}" if self.namespaced else name


SERVICES = Resource(
    "",
    "services",
    "Service",
    short_name="svc",
    fields=("spec.clusterIP", "spec.type"),
    blank=b'{"spec":{},"status":{"loadBalancer":{}}}',
    status=True,
)
NODES = Resource(
    "",
    "nodes",
    "Node",
    namespaced=False,
    short_name="no",
    fields=("spec.unschedulable",),
    blank=b'{"spec":{},"status":{"daemonEndpoints":{"kubeletEndpoint":{"Port":0}},"nodeInfo":{"machineID":"",'
    b'"systemUUID":"","bootID":"","kernelVersion":"","osImage":"","containerRuntimeVersion":"","kubeletVersion":"",'
    b'"kubeProxyVersion":"","operatingSystem":"","architecture":""}}}',
    status=True,
)
ENDPOINT_SLICES = Resource(
    "discovery.k8s.io",
    "endpointslices",
    "EndpointSlice",
    blank=b'{"addressType":"","endpoints":null,"ports":null}',
)
EVENTS = Resource(
    "events.k8s.io",
    "events",
    "Event",
    short_name="ev",
    fields=("reason", "type", "regarding.kind", "regarding.name"),
    blank=b'{"eventTime":null}',
)
CORE_EVENTS = Resource(
    "",
    "events",
    "Event",
    short_name="ev",
    fields=("reason", "type", "involvedObject.kind", "involvedObject.name"),
    blank=b'{"involvedObject":{},"source":{},"firstTimestamp":null,"lastTimestamp":null}',
)
SERVICE_CIDRS = Resource(
    "networking.k8s.io",
    "servicecidrs",
    "ServiceCIDR",
    namespaced=False,
    blank=b'{"spec":{},"status":{}}',
)

RESOURCES = (SERVICES, NODES, ENDPOINT_SLICES, EVENTS, CORE_EVENTS, SERVICE_CIDRS)
_BY_PATH: Mapping[tuple[str, str], Resource] = {(r.api_version, r.plural): r for r in RESOURCES}
_BY_KIND: Mapping[tuple[str, str], Resource] = {(r.api_version, r.kind): r for r in RESOURCES}


def find(api_version: str, plural: str) -> Resource | None:
    """The resource served under this apiVersion and plural, if any."""
    return _BY_PATH.get((api_version, plural))


def of(item: JsonObject) -> Resource:
    """The resource an object belongs to, by its apiVersion and kind. Raises ValueError for an unknown one."""
    api_version, kind = item.get("apiVersion"), item.get("kind")
    resource = _BY_KIND.get((str(api_version), str(kind)))
    if resource is None:
        raise ValueError(
            f"this API server does not serve objects of apiVersion {api_version!r} and kind {kind!r}"
        )
    return resource
