"""From what a client wrote to what is stored: metadata that only the server sets, and the parts a request may change."""

import secrets
import uuid
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from pykubeproxy.lab.apiserver.defaults import without_nulls
from pykubeproxy.lab.apiserver.errors import bad_request, conflict
from pykubeproxy.lab.apiserver.history import Stored
from pykubeproxy.lab.apiserver.resources import ENDPOINT_SLICES, SERVICES, JsonObject, Resource

Part = Literal["all", "spec", "status"]

_SERVER_SET = (
    "uid",
    "creationTimestamp",
    "deletionTimestamp",
    "generation",
    "resourceVersion",
    "managedFields",
)
_LASTING = ("name", "namespace", "uid", "creationTimestamp", "deletionTimestamp", "generation")


def created(resource: Resource, given: JsonObject, part: Part, verbatim: bool) -> JsonObject:
    """A new object with its metadata stamped. A verbatim one may bring its own deletionTimestamp."""
    item = dict(given) if verbatim else without_nulls(given)
    meta = _metadata(item)
    ours = {field: meta.pop(field) for field in _SERVER_SET if field in meta}
    if not meta.get("name") and meta.get("generateName"):
        meta["name"] = f"{meta['generateName']}{secrets.token_hex(3)[:5]}"
    meta["namespace"] = meta.get("namespace") or "default"
    if not resource.namespaced:
        del meta["namespace"]
    meta |= {"uid": str(uuid.uuid4()), "creationTimestamp": now()}
    if verbatim and "deletionTimestamp" in ours:
        meta["deletionTimestamp"] = ours["deletionTimestamp"]
    if resource is ENDPOINT_SLICES:
        meta["generation"] = 1
    item["metadata"] = meta
    if part == "spec" and resource is SERVICES:
        item.pop("status", None)  # whoever creates a service cannot give it a status
    return item


def replaced(resource: Resource, given: JsonObject, old: Stored, part: Part, verbatim: bool) -> JsonObject:
    """The object that `given` makes of `old`. Raises a 409 if it names another version or uid."""
    item = dict(given) if verbatim else without_nulls(given)
    before = decoded(old)
    meta, was = _metadata(item), before["metadata"]
    if meta.get("resourceVersion", "") not in ("", was["resourceVersion"]):
        raise conflict(resource, old.name)
    if meta.get("uid", "") not in ("", was["uid"]):
        raise conflict(resource, old.name, "its uid is another one: it has been deleted and created again")
    ours = {field: meta.pop(field) for field in _SERVER_SET if field in meta}
    meta |= {field: was[field] for field in _LASTING if field in was}
    if verbatim and "deletionTimestamp" in ours:
        meta["deletionTimestamp"] = ours["deletionTimestamp"]
    if part == "status":
        return before | {"status": item.get("status", {})}
    if part == "spec" and resource.status:
        item["status"] = before.get("status", {})
    return item | {"metadata": meta}


def merged(target: Any, patch: Any) -> Any:
    """A JSON merge patch (RFC 7396) applied to a value; neither is changed."""
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
    """Whether two versions of an object differ in nothing but their version."""
    return _comparable(item) == _comparable(other)


def with_generation(item: JsonObject, before: JsonObject) -> JsonObject:
    """An EndpointSlice with the next generation, if more than its annotations changed."""
    content = [
        {name: value for name, value in one.items() if name not in _ENVELOPE} for one in (item, before)
    ]
    labels = [one["metadata"].get("labels") or {} for one in (item, before)]
    if content[0] != content[1] or labels[0] != labels[1]:
        item["metadata"]["generation"] = before["metadata"].get("generation", 0) + 1
    return item


def encoded(resource: Resource, item: JsonObject, version: int) -> Stored:
    """An object in the form it is kept in, bearing its version."""
    given = item["metadata"]
    first = {field: given[field] for field in ("name", "namespace", "uid") if field in given}
    meta = first | {"resourceVersion": str(version)} | {k: v for k, v in given.items() if k not in first}
    meta["resourceVersion"] = str(version)
    rest = {name: value for name, value in item.items() if name not in _ENVELOPE}
    namespace, name = str(meta.get("namespace", "")), str(meta.get("name", ""))
    labels = meta.get("labels")
    return Stored(
        path=resource.path(namespace, name),
        namespace=namespace,
        name=name,
        version=version,
        body=msgspec.json.encode({"metadata": meta} | rest),
        labels=labels if isinstance(labels, dict) else {},
        fields={"metadata.name": name, "metadata.namespace": namespace}
        | {field: _field(item, field) for field in resource.fields},
    )


def decoded(stored: Stored) -> JsonObject:
    """A stored object as a dict of its own, without kind and apiVersion."""
    return msgspec.json.decode(stored.body, type=JsonObject)


def now() -> str:
    """The present time as the API writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


_ENVELOPE = ("kind", "apiVersion", "metadata")


def _metadata(item: JsonObject) -> JsonObject:
    meta = item.get("metadata") or {}
    if not isinstance(meta, dict):
        raise bad_request("metadata must be an object")
    return dict(meta)


def _comparable(item: JsonObject) -> JsonObject:
    meta = {name: value for name, value in item["metadata"].items() if name != "resourceVersion"}
    return {name: value for name, value in item.items() if name not in _ENVELOPE} | {"metadata": meta}


def _field(item: JsonObject, path: str) -> str:
    """The value of a field as a field selector sees it: text, and "" or "false" for what is absent."""
    value: Any = item
    for step in path.split("."):
        value = value.get(step) if isinstance(value, dict) else None
    if path == "spec.unschedulable":
        return "true" if value is True else "false"
    return value if isinstance(value, str) else ""
