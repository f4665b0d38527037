"""From a request to its response: authentication, the meaning of the path, the operation."""

import hmac
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

import msgspec

from pykubeproxy.http import JSON, Request, Response
from pykubeproxy.lab.apiserver.discovery import PUBLIC, discover
from pykubeproxy.lab.apiserver.errors import ApiError, bad_request, method_not_allowed, no_such_path
from pykubeproxy.lab.apiserver.list import list_objects
from pykubeproxy.lab.apiserver.query import Query, Selector
from pykubeproxy.lab.apiserver.resources import SERVICES, JsonObject, Resource, find
from pykubeproxy.lab.apiserver.store import Store
from pykubeproxy.lab.apiserver.watch import Watch, WatchOptions
from pykubeproxy.lab.apiserver.write import Part

_MERGE_PATCH = "application/merge-patch+json"


class Target(msgspec.Struct, frozen=True):
    """The part of the API that a path names."""

    resource: Resource
    namespace: str = ""
    name: str = ""
    subresource: str = ""


def locate(path: str) -> Target | None:
    """Return the target of /api/v1/… or /apis/GROUP/VERSION/…; None if it is not served."""
    steps = unquote(path).strip("/").split("/")
    if steps[:2] == ["api", "v1"]:
        api_version, rest = "v1", steps[2:]
    elif steps[0] == "apis" and len(steps) > 2:
        api_version, rest = "/".join(steps[1:3]), steps[3:]
    else:
        return None
    namespace = ""
    if rest[:1] == ["namespaces"] and len(rest) > 2:
        namespace, rest = rest[1], rest[2:]
    resource = find(api_version, rest[0]) if 1 <= len(rest) <= 3 else None
    if resource is None or (namespace and not resource.namespaced):
        return None
    name, subresource = [*rest[1:], "", ""][:2]
    if resource.namespaced and name and not namespace:
        return None
    if subresource and not (subresource == "status" and resource.status):
        return None
    return Target(resource, namespace, name, subresource)


def verb_of(request: Request, target: Target | None) -> str:
    """Return the verb as in access rules: get, list, watch, create, update, patch, delete."""
    if request.method == "GET" and target is not None and not target.name:
        return "watch" if Query(request.query).flag("watch") else "list"
    return {"POST": "create", "PUT": "update"}.get(request.method, request.method.lower())


class Routes:
    """Answers requests from a store. `token` returns the bearer token that requests must carry, or None."""

    def __init__(self, store: Store, watches: WatchOptions, token: Callable[[], str | None]) -> None:
        self._store = store
        self._watches = watches
        self._token = token

    def handle(self, request: Request) -> Response:
        """Return the response, which may be a Status of failure."""
        try:
            return self._handle(request)
        except ApiError as error:
            return error.response()

    def _handle(self, request: Request) -> Response:
        page = discover(request.path)
        if page is None or request.path.rstrip("/") not in PUBLIC:
            self._check_token(request)
        if page is not None:
            if request.method != "GET":
                raise method_not_allowed()
            return page
        target = locate(request.path)
        if target is None:
            raise no_such_path()
        _check_accept(request)
        return self._operation(verb_of(request, target), target)(request, target)

    def _operation(self, verb: str, target: Target) -> Callable[[Request, Target], Response]:
        operations = {"get": self._get, "update": self._update, "patch": self._patch}
        if target.name and not target.subresource:
            operations["delete"] = self._delete
        elif not target.name:
            operations = {"list": self._list, "watch": self._watch}
            if target.namespace or not target.resource.namespaced:
                operations["create"] = self._create
        if verb not in operations:
            raise method_not_allowed()
        return operations[verb]

    def _list(self, request: Request, target: Target) -> Response:
        query = Query(request.query)
        return list_objects(self._store, target.resource, _selector(target, query), query)

    def _watch(self, request: Request, target: Target) -> Response:
        query = Query(request.query)
        watch = Watch(self._store, target.resource, _selector(target, query), query, self._watches)
        return Response(content_type=JSON, stream=watch.stream)

    def _get(self, _: Request, target: Target) -> Response:
        stored = self._store.read(target.resource, target.namespace, target.name)
        return Response(target.resource.typed(stored.body) + b"\n", JSON)

    def _create(self, request: Request, target: Target) -> Response:
        return _response(self._store.create(_object(request, target), part="spec"), 201)

    def _update(self, request: Request, target: Target) -> Response:
        return _response(self._store.replace(_object(request, target), part=_part(target)))

    def _patch(self, request: Request, target: Target) -> Response:
        patch = _json(request, _MERGE_PATCH)
        return _response(
            self._store.merge_patch(target.resource, target.namespace, target.name, patch, part=_part(target))
        )

    def _delete(self, request: Request, target: Target) -> Response:
        _refuse_dry_run(request)
        conditions = _decode(request.body).get("preconditions") or {} if request.body else {}
        uid, version = str(conditions.get("uid") or ""), str(conditions.get("resourceVersion") or "")
        last = self._store.delete(target.resource, target.namespace, target.name, uid=uid, version=version)
        if target.resource is SERVICES or "deletionTimestamp" in last["metadata"]:
            return _response(last)
        group = {"group": target.resource.group} if target.resource.group else {}
        kind = {"kind": target.resource.plural, "uid": last["metadata"]["uid"]}
        status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
        return _response(status | {"details": {"name": target.name} | group | kind})

    def _check_token(self, request: Request) -> None:
        token = self._token()
        if token is None:
            return
        scheme, _, presented = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(presented.encode(), token.encode()):
            raise ApiError(401, "Unauthorized")


def _response(value: JsonObject, status: int = 200) -> Response:
    """Return JSON with a newline at its end, as the real server sends it."""
    return Response(msgspec.json.encode(value) + b"\n", JSON, status)


def _selector(target: Target, query: Query) -> Selector:
    labels, fields = query.text("labelSelector"), query.text("fieldSelector")
    return Selector(target.resource, target.namespace, labels, fields)


def _part(target: Target) -> Part:
    return "status" if target.subresource else "spec"


def _check_accept(request: Request) -> None:
    """Raise a 406 if the client accepts no plain JSON."""
    ranges = [entry.strip() for entry in request.headers.get("accept", "").split(",") if entry.strip()]
    for entry in ranges:
        kind, *parameters = [part.strip() for part in entry.split(";")]
        as_other = any(parameter.startswith(("as=", "g=")) for parameter in parameters)
        if kind in (JSON, "application/*", "*/*") and not as_other:
            return
    if ranges:
        raise ApiError(406, f"only the following media types are accepted: {JSON}")


def _refuse_dry_run(request: Request) -> None:
    if Query(request.query).text("dryRun"):
        raise bad_request("this API server has no dryRun")


def _json(request: Request, accepted: str) -> JsonObject:
    """Return the body of a write. Raise a 415 for another content type, a 400 for dryRun or bad JSON."""
    kind = request.headers.get("content-type", "").split(";")[0].strip()
    if kind != accepted and (kind or accepted != JSON):
        message = (
            f"the body of the request was in an unknown format - accepted media types include: {accepted}"
        )
        raise ApiError(415, message)
    _refuse_dry_run(request)
    return _decode(request.body)


def _decode(body: bytes) -> JsonObject:
    try:
        return msgspec.json.decode(body, type=JsonObject)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"the body of the request is not a JSON object: {error}") from error


def _object(request: Request, target: Target) -> JsonObject:
    """Return the object in the body, completed from the path. Raise a 400 if they contradict each other."""
    item = _json(request, JSON)
    resource = target.resource
    implied = {"apiVersion": resource.api_version, "kind": resource.kind}
    meta: dict[str, Any] = item.get("metadata") or {}
    if not isinstance(meta, dict):
        raise bad_request("metadata must be an object")
    implied_meta = {"namespace": target.namespace} if resource.namespaced else {}
    if target.name:
        implied_meta["name"] = target.name
    for given, expected in ((item, implied), (meta, implied_meta)):
        for field, value in expected.items():
            if given.get(field) not in (None, "", value):
                raise bad_request(
                    f"the {field} in the data ({given[field]}) does not match the expected one ({value})"
                )
    return item | implied | {"metadata": meta | implied_meta}
