"""The resources this API server serves, their discovery, and its errors as the Status objects of a real API server."""

from http import HTTPStatus
from typing import Any

import msgspec

from pykubeproxy import http

JsonObject = dict[str, Any]
_NODE_INFO = (
    "machineID systemUUID bootID kernelVersion osImage containerRuntimeVersion kubeletVersion kubeProxyVersion "
    "operatingSystem architecture"
)
#: The reasons that differ from the phrase of the HTTP status.
_REASONS = {
    410: "Expired",
    413: "RequestEntityTooLarge",
    422: "Invalid",
    500: "InternalError",
    504: "Timeout",
}
_OUTDATED = "the object has been modified; please apply your changes to the latest version and try again"


class Resource(msgspec.Struct, frozen=True, eq=False):
    """One kind of object and its path."""

    group: str  # "" for core/v1
    plural: str
    kind: str
    namespaced: bool = True
    short_name: str = ""
    fields: tuple[str, ...] = ()  # for field selectors, besides metadata.name and metadata.namespace
    blank: bytes = b"{}"  # zero values, as Go encodes them in the object of a bookmark
    status: bool = False  # has the status subresource
    options: str = ""  # the kind of the exec subresource's options; "" without that subresource

    @property
    def api_version(self) -> str:
        """The apiVersion of its objects, such as discovery.k8s.io/v1."""
        return f"{self.group}/v1" if self.group else "v1"

    @property
    def qualified(self) -> str:
        """The name in error messages, such as endpointslices.discovery.k8s.io."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def details(self, name: str) -> JsonObject:
        """Return what identifies one object in a Status."""
        group = {"group": self.group} if self.group else {}
        return {"name": name} | group | {"kind": self.plural}

    def typed(self, body: bytes) -> bytes:
        """Return an encoded object with kind and apiVersion in front; items of a list have neither."""
        return f'{{"kind":"{self.kind}","apiVersion":"{self.api_version}",'.encode() + body[1:]

    def path(self, namespace: str, name: str) -> str:
        """Return the key an object is stored and sorted under: `namespace/name`, or `name` alone."""
        return f"{namespace}/{name}" if self.namespaced else name


NODE_STATUS: JsonObject = {
    "daemonEndpoints": {"kubeletEndpoint": {"Port": 0}},
    "nodeInfo": dict.fromkeys(_NODE_INFO.split(), ""),
}

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
    blank=msgspec.json.encode({"spec": {}, "status": NODE_STATUS}),
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
PODS = Resource(
    "",
    "pods",
    "Pod",
    short_name="po",
    fields=(
        "spec.hostNetwork",
        "spec.nodeName",
        "spec.restartPolicy",
        "spec.schedulerName",
        "spec.serviceAccountName",
        "status.nominatedNodeName",
        "status.phase",
        "status.podIP",
    ),
    blank=b'{"spec":{"containers":null},"status":{}}',
    status=True,
    options="PodExecOptions",
)
NAMESPACES = Resource(
    "",
    "namespaces",
    "Namespace",
    namespaced=False,
    short_name="ns",
    fields=("status.phase",),
    blank=b'{"spec":{},"status":{}}',
    status=True,
)
SERVICE_CIDRS = Resource(
    "networking.k8s.io", "servicecidrs", "ServiceCIDR", namespaced=False, blank=b'{"spec":{},"status":{}}'
)

#: What clients ask a cluster for and this server does not have; discovery names these, so that clients get its answer.
_WORKLOADS = (
    Resource("apps", "deployments", "Deployment", short_name="deploy"),
    Resource("apps", "daemonsets", "DaemonSet", short_name="ds"),
    Resource("apps", "replicasets", "ReplicaSet", short_name="rs"),
    Resource("apps", "statefulsets", "StatefulSet", short_name="sts"),
)
# What does the same, by resource or subresource of pods.
_INSTEAD = {
    "log": "the logs of a lab are files; `pykubeproxy lab status` shows their folder",
    "portforward": "a lab forwards no ports; use `pykubeproxy lab exec client -- curl ADDRESS:PORT`",
    "attach": "a lab attaches to no process; use `kubectl exec`",
    **{
        one.plural: f"a lab has pods and no {one.plural}; use `pykubeproxy lab scale N`, or `kubectl delete pod`"
        for one in _WORKLOADS
    },
}

RESOURCES = (SERVICES, NODES, PODS, ENDPOINT_SLICES, EVENTS, CORE_EVENTS, NAMESPACES, SERVICE_CIDRS)


def find(api_version: str, plural: str) -> Resource | None:
    return next((r for r in RESOURCES if (r.api_version, r.plural) == (api_version, plural)), None)


def of(item: JsonObject) -> Resource:
    """Return the resource of an object. Raises ValueError for an unknown apiVersion and kind."""
    api_version, kind = item.get("apiVersion"), item.get("kind")
    for resource in RESOURCES:
        if (resource.api_version, resource.kind) == (api_version, kind):
            return resource
    raise ValueError(f"cannot serve objects of apiVersion {api_version!r} and kind {kind!r}")


def absent(plural: str, subresource: str) -> "ApiError | None":
    """Return a 405 that names what to use instead, for a resource that a cluster has and a lab does not."""
    instead = _INSTEAD.get(subresource if plural == PODS.plural and subresource else plural)
    return ApiError(405, instead) if instead else None


def discovery() -> dict[str, JsonObject]:
    """Return the documents that describe the server, its groups and resources, by path."""
    groups = sorted({resource.group for resource in (*RESOURCES, *_WORKLOADS) if resource.group})
    documents: dict[str, JsonObject] = {
        "/version": {"major": "1", "minor": "36", "gitVersion": "v1.36.0-lab", "platform": "linux/amd64"},
        "/api": {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []},
        "/api/v1": _resource_list("v1"),
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(name) for name in groups]},
    }
    for name in groups:
        documents[f"/apis/{name}"] = {"kind": "APIGroup", "apiVersion": "v1"} | _group(name)
        documents[f"/apis/{name}/v1"] = _resource_list(f"{name}/v1")
    return documents


def _resource_list(api_version: str) -> JsonObject:
    entries: list[JsonObject] = []
    for resource in (*RESOURCES, *_WORKLOADS):
        if resource.api_version != api_version:
            continue
        kind = {"kind": resource.kind, "namespaced": resource.namespaced}
        names = {"shortNames": [resource.short_name]} if resource.short_name else {}
        verbs = ("create", "delete", "get", "list", "patch", "update", "watch")
        entry = {"name": resource.plural, "singularName": resource.kind.lower(), "verbs": verbs}
        every = {"categories": ["all"]} if resource in (PODS, SERVICES) else {}  # `kubectl get all`
        entries.append(entry | kind | names | every)
        if resource.status:
            status = {"name": f"{resource.plural}/status", "singularName": ""}
            entries.append(status | kind | {"verbs": ("get", "patch", "update")})
        if resource.options:
            subresource = {"name": f"{resource.plural}/exec", "singularName": ""}
            entries.append(subresource | kind | {"kind": resource.options, "verbs": ("create", "get")})
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": api_version, "resources": entries}


def _group(name: str) -> JsonObject:
    version = {"groupVersion": f"{name}/v1", "version": "v1"}
    return {"name": name, "versions": [version], "preferredVersion": version}


_LIST_OPTIONS = Resource("meta.k8s.io", "", "ListOptions")


def respond(document: JsonObject, status: int = 200, *headers: tuple[str, str]) -> http.Response:
    """Return JSON with a newline at its end, as the real server sends it."""
    return http.Response(msgspec.json.encode(document) + b"\n", http.JSON, status, headers)


class ApiError(Exception):
    """A refused request: an HTTP status code, a reason in CamelCase and a message."""

    def __init__(
        self,
        code: int,
        message: str,
        *,
        reason: str = "",
        details: JsonObject | None = None,
        metadata: JsonObject | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self._reason = reason or _REASONS.get(code) or HTTPStatus(code).phrase.replace(" ", "")
        self._details = details
        self._metadata = metadata or {}

    def status(self) -> JsonObject:
        details = {} if self._details is None else {"details": self._details}
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": self._metadata,
            "status": "Failure",
            "message": str(self),
            "reason": self._reason,
            **details,
            "code": self.code,
        }

    def response(self) -> http.Response:
        """Return the HTTP response, with Retry-After if the details name it."""
        seconds = (self._details or {}).get("retryAfterSeconds")
        headers = () if seconds is None else (("Retry-After", str(seconds)),)
        return respond(self.status(), self.code, *headers)


def method_not_allowed() -> ApiError:
    """405."""
    return ApiError(405, "the server does not allow this method on the requested resource", details={})


def not_found(resource: Resource, name: str) -> ApiError:
    """404 for a missing object."""
    return ApiError(404, f'{resource.qualified} "{name}" not found', details=resource.details(name))


def conflict(resource: Resource, name: str, reason: str = _OUTDATED) -> ApiError:
    """409 for a write based on an outdated copy."""
    message = f'Operation cannot be fulfilled on {resource.qualified} "{name}": {reason}'
    return ApiError(409, message, details=resource.details(name))


def invalid(resource: Resource, name: str, field: str, reason: str) -> ApiError:
    """422 for the value of a field."""
    causes = [{"reason": "FieldValueInvalid", "message": reason, "field": field}]
    details = resource.details(name) | {"kind": resource.kind, "causes": causes}
    return ApiError(422, f'{resource.kind} "{name}" is invalid: {field}: {reason}', details=details)


def invalid_options(field: str, reason: str) -> ApiError:
    """422 for list or watch options that contradict each other."""
    return invalid(_LIST_OPTIONS, "", field, reason)


def too_old(version: int, oldest: int) -> ApiError:
    """410 for a version before `oldest`, the oldest in the history."""
    return ApiError(410, f"too old resource version: {version} ({oldest})")


def too_new(version: int, current: int) -> ApiError:
    """504 for a version after the current one."""
    cause = {"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}
    message = f"Timeout: Too large resource version: {version}, current: {current}"
    return ApiError(504, message, details={"causes": [cause], "retryAfterSeconds": 1})
