"""From what a client writes to what is stored: metadata that the server sets, and the parts a request may change."""

import secrets
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import msgspec

from pykubeproxy.lab.apiserver.errors import ApiError, conflict
from pykubeproxy.lab.apiserver.history import Stored
from pykubeproxy.lab.apiserver.resources import ENDPOINT_SLICES, PODS, SERVICES, JsonObject, Resource

#: What a write may change. At its own path a client changes the spec, at the status subresource the status.
Part = Literal["all", "spec", "status"]

_SERVER_SET = (
    "uid",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "generation",
    "resourceVersion",
    "managedFields",
)
_LASTING = (
    "name",
    "namespace",
    "uid",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "generation",
)
_SET_BY_WRITES = ("resourceVersion", "managedFields")
_ENVELOPE = ("kind", "apiVersion", "metadata")


def created(resource: Resource, given: JsonObject, part: Part, verbatim: bool) -> JsonObject:
    """Return a new object with its metadata. A verbatim one keeps its deletionTimestamp."""
    item = dict(given) if verbatim else _without_nulls(given)
    meta = _client_metadata(item, verbatim)
    if not meta.get("name") and meta.get("generateName"):
        meta["name"] = f"{meta['generateName']}{secrets.token_hex(3)[:5]}"
    meta["namespace"] = meta.get("namespace") or "default"
    if not resource.namespaced:
        del meta["namespace"]
    meta |= {"uid": str(uuid.uuid4()), "creationTimestamp": now()}
    if resource is ENDPOINT_SLICES:
        meta["generation"] = 1
    item["metadata"] = meta
    if part == "spec" and resource in (SERVICES, PODS):
        item.pop("status", None)  # clients cannot create these with a status
    return item


def replaced(resource: Resource, given: JsonObject, old: Stored, part: Part, verbatim: bool) -> JsonObject:
    """Return `old` with the changes of `given`. Raise a 409 if it names another version or uid."""
    item = dict(given) if verbatim else _without_nulls(given)
    before = decoded(old)
    requested, present = metadata_of(item), before["metadata"]
    if requested.get("resourceVersion", "") not in ("", present["resourceVersion"]):
        raise conflict(resource, old.name)
    if requested.get("uid", "") not in ("", present["uid"]):
        raise conflict(resource, old.name, "its uid differs: it was deleted and created again")
    meta = {field: present[field] for field in _LASTING if field in present}
    meta = _client_metadata(item, verbatim=False) | meta
    if verbatim and "deletionTimestamp" in requested:
        meta["deletionTimestamp"] = requested["deletionTimestamp"]
    if part == "status":
        return before | {"status": item.get("status", {})}
    if part == "spec" and resource.status:
        item["status"] = before.get("status", {})
    return item | {"metadata": meta}


def merged(target: Any, patch: Any) -> Any:
    """Return a value with a JSON merge patch (RFC 7396) applied; neither is changed."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), value)
    return result


def same(item: JsonObject, other: JsonObject) -> bool:
    """Return whether two versions of an object differ only in what each write sets."""
    first, second = (
        {name: value for name, value in one["metadata"].items() if name not in _SET_BY_WRITES}
        for one in (item, other)
    )
    return first == second and _content(item) == _content(other)


def with_generation(item: JsonObject, before: JsonObject) -> JsonObject:
    """Return an EndpointSlice with the next generation if more than its annotations changed."""
    first, second = (one["metadata"].get("labels") or {} for one in (item, before))
    if first != second or _content(item) != _content(before):
        item["metadata"]["generation"] = before["metadata"].get("generation", 0) + 1
    return item


def encoded(resource: Resource, item: JsonObject, version: int) -> Stored:
    """Return an object as it is stored; its managedFields tell only the time of this write."""
    given = item["metadata"] | {"managedFields": [{"operation": "Update", "time": now()}]}
    first = {field: given[field] for field in ("name", "namespace", "uid") if field in given}
    meta = first | {"resourceVersion": ""} | given | {"resourceVersion": str(version)}
    namespace, name = str(meta.get("namespace", "")), str(meta.get("name", ""))
    labels = meta.get("labels")
    return Stored(
        path=resource.path(namespace, name),
        namespace=namespace,
        name=name,
        version=version,
        body=msgspec.json.encode({"metadata": meta} | _content(item)),
        labels=labels if isinstance(labels, dict) else {},
        fields={"metadata.name": name, "metadata.namespace": namespace}
        | {field: _field(item, field) for field in resource.fields},
    )


def decoded(stored: Stored) -> JsonObject:
    """Return a stored object as a new dict, without kind and apiVersion."""
    return msgspec.json.decode(stored.body, type=JsonObject)


def metadata_of(item: JsonObject) -> JsonObject:
    """Return a copy of an object's metadata. Raise a 400 if it is no object."""
    meta = item.get("metadata") or {}
    if not isinstance(meta, dict):
        raise ApiError(400, "metadata must be an object")
    return dict(meta)


def now(later: int = 0) -> str:
    """Return the present time, or that some seconds later, as the API writes it."""
    return (datetime.now(UTC) + timedelta(seconds=later)).strftime("%Y-%m-%dT%H:%M:%SZ")


def grace_seconds(resource: Resource, item: JsonObject, requested: int | None) -> int:
    """Return how long a deleted object waits for its kubelet to confirm: 0 but for pods that run."""
    if resource is not PODS:
        return 0
    spec, phase = item.get("spec") or {}, (item.get("status") or {}).get("phase")
    if not spec.get("nodeName") or phase in ("Succeeded", "Failed"):
        return 0
    return int(spec.get("terminationGracePeriodSeconds", 30) if requested is None else requested)


def _without_nulls(value: Any) -> Any:
    """Return a deep copy without members that are null, which equal absent ones."""
    if isinstance(value, dict):
        return {name: _without_nulls(member) for name, member in value.items() if member is not None}
    return [_without_nulls(element) for element in value] if isinstance(value, list) else value


def _client_metadata(item: JsonObject, verbatim: bool) -> JsonObject:
    """Return the metadata that clients may set."""
    kept = ("deletionTimestamp",) if verbatim else ()
    return {
        name: value for name, value in metadata_of(item).items() if name not in _SERVER_SET or name in kept
    }


def _content(item: JsonObject) -> JsonObject:
    return {name: value for name, value in item.items() if name not in _ENVELOPE}


def _field(item: JsonObject, path: str) -> str:
    """Return a field as text for field selectors: "", or "false" for a boolean, if absent."""
    value: Any = item
    for step in path.split("."):
        value = value.get(step) if isinstance(value, dict) else None
    if path in ("spec.unschedulable", "spec.hostNetwork"):
        return "true" if value is True else "false"
    return value if isinstance(value, str) else ""
