"""Patches of objects: JSON patch, JSON merge patch and strategic merge patch."""

from collections.abc import Callable, Sequence
from typing import Any

from pykubeproxy.lab.apiserver.resources import ApiError, JsonObject

_TYPES = tuple(f"application/{name}+json" for name in ("json-patch", "merge-patch", "strategic-merge-patch"))
# The keys by which a strategic patch merges lists, as the API's types declare them; "" for lists of plain values.
# A patch replaces all other lists.
_MERGE_KEYS = {
    "metadata.finalizers": "",
    "metadata.ownerReferences": "uid",
    "spec.containers": "name",
    "spec.containers.env": "name",
    "spec.containers.ports": "containerPort",
    "spec.containers.volumeMounts": "mountPath",
    "spec.initContainers": "name",
    "spec.podCIDRs": "",
    "spec.ports": "port",
    "spec.volumes": "name",
    "status.addresses": "type",
    "status.conditions": "type",
    "status.hostIPs": "ip",
    "status.podIPs": "ip",
}
_DIRECTIVE = "$patch"
_ORDER, _REMOVED = "$setElementOrder/", "$deleteFromPrimitiveList/"

Patch = Callable[[JsonObject], JsonObject]


def patch_of(content_type: str, body: object) -> Patch:
    """Return a function from an object to its patched copy, which raises ApiError (422). Raise a 400 or 415."""
    match content_type, body:
        case "application/json-patch+json", list():
            return lambda item: _json_patched(item, body)
        case "application/merge-patch+json", dict():
            return lambda item: dict(merged(item, body))
        case "application/strategic-merge-patch+json", dict():
            return lambda item: _strategic_patched(item, body)
    if content_type in _TYPES:
        raise ApiError(400, f"the body of the request is no patch of type {content_type}")
    raise ApiError(
        415,
        f"the body of the request was in an unknown format - accepted media types include: {', '.join(_TYPES)}",
    )


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


def _json_patched(item: JsonObject, operations: list[Any]) -> JsonObject:
    import jsonpatch  # most requests need no patches

    try:
        return dict(jsonpatch.apply_patch(item, operations))
    except (jsonpatch.JsonPatchException, jsonpatch.JsonPointerException, TypeError, KeyError) as error:
        raise ApiError(
            422, f"the server rejected our request due to an error in our request: {error}"
        ) from None


def _strategic_patched(item: JsonObject, patch: JsonObject) -> JsonObject:
    try:
        return _strategic(item, patch, "")
    except (AttributeError, TypeError) as error:  # a list of other values than the type of the object has
        raise ApiError(400, f"unable to apply the strategic merge patch: {error}") from None


def _strategic(target: JsonObject, patch: JsonObject, path: str) -> JsonObject:
    """Return an object with a strategic merge patch applied. `path` tells where it is, without positions in lists."""
    directive = patch.get(_DIRECTIVE)
    if directive == "delete":
        return {}
    result = {} if directive == "replace" else dict(target)
    for name, value in patch.items():
        if name.startswith(_REMOVED):
            field = name.removeprefix(_REMOVED)
            result[field] = [one for one in result.get(field) or () if one not in value]
        elif name.startswith("$"):
            continue
        elif value is None:
            result.pop(name, None)
        else:
            result[name] = _field(result.get(name), value, f"{path}.{name}" if path else name)
    for name, order in patch.items():
        if name.startswith(_ORDER):
            field = name.removeprefix(_ORDER)
            result[field] = _ordered(result.get(field) or [], order, f"{path}.{field}" if path else field)
    return result


def _field(present: Any, value: Any, path: str) -> Any:
    if isinstance(value, dict):
        return _strategic(present if isinstance(present, dict) else {}, value, path)
    if not isinstance(value, list) or path not in _MERGE_KEYS:
        return value
    known = list(present) if isinstance(present, list) else []
    key = _MERGE_KEYS[path]
    if not key:
        return known + [one for one in value if one not in known]
    if any(one.get(_DIRECTIVE) == "replace" for one in value):
        return [one for one in value if _DIRECTIVE not in one]
    for one in value:
        place = next((number for number, old in enumerate(known) if old.get(key) == one.get(key)), None)
        if one.get(_DIRECTIVE) == "delete":
            known = [old for old in known if old.get(key) != one.get(key)]
        elif place is None:
            known.append(_strategic({}, one, path))
        else:
            known[place] = _strategic(known[place], one, path)
    return known


def _ordered(items: list[Any], order: Sequence[Any], path: str) -> list[Any]:
    """Return a list in the order of a directive; elements that it does not name come last."""
    key = _MERGE_KEYS.get(path, "")
    places = [one.get(key) if key else one for one in order]
    last = len(places)

    def place(item: Any) -> int:
        name = item.get(key) if key else item
        return places.index(name) if name in places else last

    return sorted(items, key=place)
