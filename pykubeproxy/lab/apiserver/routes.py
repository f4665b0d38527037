"""From a request to its response: authentication, the meaning of the path, the operation."""

import gzip
import hmac
import re
from collections.abc import Callable
from urllib.parse import unquote

import msgspec

from pykubeproxy.http import JSON, Request, Response, text
from pykubeproxy.lab.apiserver.errors import ApiError, method_not_allowed, respond
from pykubeproxy.lab.apiserver.exec import Runtime, execute
from pykubeproxy.lab.apiserver.list import list_objects
from pykubeproxy.lab.apiserver.query import Query, Selector
from pykubeproxy.lab.apiserver.resources import PODS, SERVICES, JsonObject, Resource, discovery, find
from pykubeproxy.lab.apiserver.store import Store
from pykubeproxy.lab.apiserver.watch import Watch, WatchOptions
from pykubeproxy.lab.apiserver.write import Part, decoded, metadata_of

_HEALTH = ("/healthz", "/livez", "/readyz")
_PUBLIC = (*_HEALTH, "/version")  # need no token, as on a real server
_PAGES = dict.fromkeys(_HEALTH, text("ok")) | {path: respond(page) for path, page in discovery().items()}
_MERGE_PATCH = "application/merge-patch+json"
_LONG = 128 * 1024  # compress responses of more bytes, as the real server does
_PATH = re.compile(
    r"/(?:api/(v1)|apis/([^/]+/[^/]+))(?:/namespaces/([^/]+)(?=/[^/]))?/([^/]+)(?:/([^/]+)(?:/(status|exec))?)?/?"
)


class Target(msgspec.Struct, frozen=True):
    """The part of the API that a path names."""

    resource: Resource
    namespace: str = ""
    name: str = ""
    subresource: str = ""


def locate(path: str) -> Target | None:
    """Return the target of /api/v1/… or /apis/GROUP/VERSION/…; None if it is not served."""
    match = _PATH.fullmatch(unquote(path))
    if match is None:
        return None
    core, group, namespace, plural, name, subresource = (part or "" for part in match.groups())
    resource = find(core or group, plural)
    if resource is None or (namespace and not resource.namespaced):
        return None
    if (subresource == "status" and not resource.status) or (subresource == "exec" and not resource.options):
        return None
    if resource.namespaced and name and not namespace:
        return None
    return Target(resource, namespace, name, subresource)


def verb_of(request: Request, target: Target | None) -> str:
    """Return the verb as in access rules: get, list, watch, create, update, patch, delete."""
    if request.method == "GET" and target is not None and not target.name:
        return "watch" if Query(request.query).flag("watch") else "list"
    return {"POST": "create", "PUT": "update"}.get(request.method, request.method.lower())


class Routes:
    """Answers requests from a store.

    `token` returns the bearer token that requests must carry, or None. `runtime` tells where commands of pods run.
    """

    def __init__(
        self, store: Store, watches: WatchOptions, token: Callable[[], str | None], runtime: Runtime
    ) -> None:
        self._store = store
        self._watches = watches
        self._token = token
        self._runtime = runtime

    def handle(self, request: Request) -> Response:
        """Return the response, which may be a Status of failure."""
        try:
            return _compressed(request, self._handle(request))
        except ApiError as error:
            return error.response()

    def _handle(self, request: Request) -> Response:
        path = request.path.rstrip("/")
        if path not in _PUBLIC:
            self._check_token(request)
        page = _PAGES.get(path)
        if page is not None:
            if request.method != "GET":
                raise method_not_allowed()
            return page
        target = locate(request.path)
        if target is None:
            raise ApiError(404, "the server could not find the requested resource", details={})
        _check_accept(request)
        return self._answer(request, target)

    def _answer(self, request: Request, target: Target) -> Response:
        resource, query = target.resource, Query(request.query)
        key = (resource, target.namespace, target.name)
        if query.text("dryRun"):
            raise ApiError(400, "this API server does not support dryRun")
        if target.subresource == "exec":
            return self._exec(request, target)
        part: Part = "status" if target.subresource else "spec"
        match verb_of(request, target):
            case "list":
                return list_objects(self._store, resource, _selector(target, query), query)
            case "watch":
                watch = Watch(self._store, resource, _selector(target, query), query, self._watches)
                return Response(content_type=JSON, stream=watch.stream)
            case "create" if not target.name and (target.namespace or not resource.namespaced):
                return respond(self._store.create(_object(request, target), part="spec"), 201)
            case "get":
                return Response(resource.typed(self._store.read(*key).body) + b"\n", JSON)
            case "update" if target.name:
                return respond(self._store.replace(_object(request, target), part=part))
            case "patch" if target.name:
                return respond(self._store.merge_patch(*key, _json(request, _MERGE_PATCH), part=part))
            case "delete" if target.name and not target.subresource:
                return self._delete(request, target)
        raise method_not_allowed()

    def _exec(self, request: Request, target: Target) -> Response:
        if request.method not in ("GET", "POST"):
            raise method_not_allowed()
        pod = decoded(self._store.read(target.resource, target.namespace, target.name))
        return execute(request, pod, self._runtime, self._store)

    def _delete(self, request: Request, target: Target) -> Response:
        options = _decode(request.body) if request.body else {}
        conditions = options.get("preconditions") or {}
        query = Query(request.query)
        grace = query.number("gracePeriodSeconds") if query.text("gracePeriodSeconds") else None
        grace = options.get("gracePeriodSeconds", grace)
        if not isinstance(grace, int | None):
            raise ApiError(400, "gracePeriodSeconds must be a whole number")
        uid, version = str(conditions.get("uid") or ""), str(conditions.get("resourceVersion") or "")
        last = self._store.delete(
            target.resource,
            target.namespace,
            target.name,
            uid=uid,
            version=version,
            grace=grace,
        )
        if target.resource in (SERVICES, PODS) or "deletionTimestamp" in last["metadata"]:
            return respond(last)
        status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
        details = target.resource.details(target.name) | {"uid": last["metadata"]["uid"]}
        return respond(status | {"details": details})

    def _check_token(self, request: Request) -> None:
        token = self._token()
        if token is None:
            return
        scheme, _, presented = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(presented.encode(), token.encode()):
            raise ApiError(401, "Unauthorized")


def _compressed(request: Request, response: Response) -> Response:
    """Compress a long response if the client accepts gzip. Watches are streams, which are never compressed."""
    accepted = [coding.strip() for coding in request.headers.get("accept-encoding", "").split(",")]
    if "gzip" not in accepted or len(response.body) <= _LONG:
        return response
    headers = (*response.headers, ("Content-Encoding", "gzip"), ("Vary", "Accept-Encoding"))
    body = gzip.compress(response.body, compresslevel=1, mtime=0)
    return msgspec.structs.replace(response, body=body, headers=headers)


def _selector(target: Target, query: Query) -> Selector:
    labels, fields = query.text("labelSelector"), query.text("fieldSelector")
    return Selector(target.resource, target.namespace, labels, fields)


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


def _json(request: Request, accepted: str) -> JsonObject:
    """Return the body of a write. Raise a 415 for another content type, a 400 for bad JSON."""
    kind = request.headers.get("content-type", "").split(";")[0].strip()
    if kind != accepted and (kind or accepted != JSON):
        expected = f"accepted media types include: {accepted}"
        raise ApiError(415, f"the body of the request was in an unknown format - {expected}")
    return _decode(request.body)


def _decode(body: bytes) -> JsonObject:
    try:
        return msgspec.json.decode(body, type=JsonObject)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body of the request is not a JSON object: {error}") from error


def _object(request: Request, target: Target) -> JsonObject:
    """Return the object in the body, completed from the path. Raise a 400 if they contradict each other."""
    item = _json(request, JSON)
    resource = target.resource
    implied = {"apiVersion": resource.api_version, "kind": resource.kind}
    meta = metadata_of(item)
    implied_meta = {"namespace": target.namespace} if resource.namespaced else {}
    implied_meta |= {"name": target.name} if target.name else {}
    for given, expected in ((item, implied), (meta, implied_meta)):
        for field, value in expected.items():
            if given.get(field) not in (None, "", value):
                conflict = f"the {field} in the data ({given[field]}) does not match"
                raise ApiError(400, f"{conflict} the expected one ({value})")
    return item | implied | {"metadata": meta | implied_meta}
