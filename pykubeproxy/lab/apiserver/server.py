"""The API server as a value for labs and tests, and the way from a request to its response."""

import gzip
import hmac
import re
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Self, TypeVar
from urllib.parse import unquote

import msgspec

from pykubeproxy.config import yaml
from pykubeproxy.http import JSON, Handler, Limits, Request, Response, text
from pykubeproxy.http.server import Server
from pykubeproxy.lab.apiserver.kubelet import Kubelet, Runtime, execute, no_runtime
from pykubeproxy.lab.apiserver.patches import patch_of
from pykubeproxy.lab.apiserver.read import Selector, ServedWatch, UrlQuery, WatchOptions, list_objects
from pykubeproxy.lab.apiserver.resources import (
    NAMESPACES,
    PODS,
    RESOURCES,
    SERVICES,
    ApiError,
    JsonObject,
    Resource,
    absent,
    discovery,
    find,
    method_not_allowed,
    respond,
)
from pykubeproxy.lab.apiserver.store import Part, Store, decoded, metadata_of
from pykubeproxy.lab.apiserver.tables import table, wants_table
from pykubeproxy.objects import address_and_port

_HEALTH = ("/healthz", "/livez", "/readyz")
_PUBLIC = (*_HEALTH, "/version")  # need no token, as on a real server
_PAGES = dict.fromkeys(_HEALTH, text("ok")) | {path: respond(page) for path, page in discovery().items()}
# An empty document: kubectl checks no object against it.
_PAGES["/openapi/v2"] = Response(b"", "application/com.github.proto-openapi.spec.v2.v1.0+protobuf")
_LONG = 128 * 1024  # compress responses of more bytes, as the real server does
_PATH = re.compile(
    r"/(?:api/(v1)|apis/([^/]+/[^/]+))(?:/namespaces/([^/]+)(?=/[^/]))?/([^/]+)(?:/([^/]+)(?:/([a-z]+))?)?/?"
)
_T = TypeVar("_T")
_LIMITS = Limits(
    connections=1024,
    head_bytes=64 * 1024,
    headers=100,
    body_bytes=3 * 1024 * 1024,  # as on a real server
    request_seconds=60.0,
    response_seconds=None,
    idle_seconds=None,
)


class RequestTarget(msgspec.Struct, frozen=True):
    """The part of the API that a path names."""

    resource: Resource
    namespace: str = ""
    name: str = ""
    subresource: str = ""


def locate(path: str) -> RequestTarget | None:
    """Return the target of /api/v1/… or /apis/GROUP/VERSION/…; None if it is not served. Raises ApiError (405)."""
    match = _PATH.fullmatch(unquote(path))
    if match is None:
        return None
    core, group, namespace, plural, name, subresource = (part or "" for part in match.groups())
    if instead := absent(plural, subresource):
        raise instead
    resource = find(core or group, plural)
    if resource is None or (namespace and not resource.namespaced):
        return None
    subresources = {"": True, "status": resource.status, "exec": resource.options}
    if not subresources.get(subresource, False):
        return None
    if resource.namespaced and name and not namespace:
        return None
    return RequestTarget(resource, namespace, name, subresource)


def verb_of(request: Request, target: RequestTarget | None) -> str:
    """Return the verb as in access rules: get, list, watch, create, update, patch, delete."""
    if request.method == "GET" and target is not None and not target.name:
        return "watch" if UrlQuery(request.query).flag("watch") else "list"
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

    def _answer(self, request: Request, target: RequestTarget) -> Response:
        resource, query = target.resource, UrlQuery(request.query)
        key = (resource, target.namespace, target.name)
        if query.text("dryRun"):
            raise ApiError(400, "this API server does not support dryRun")
        if target.subresource == "exec":
            return self._exec(request, target)
        part: Part = "status" if target.subresource else "spec"
        match verb_of(request, target):
            case "list":
                return list_objects(
                    self._store, resource, _selector(target, query), query, as_table=wants_table(request)
                )
            case "watch":
                watch = ServedWatch(
                    self._store,
                    resource,
                    _selector(target, query),
                    query,
                    self._watches,
                    as_table=wants_table(request),
                )
                return Response(content_type=JSON, stream=watch.stream)
            case "create" if not target.name and (target.namespace or not resource.namespaced):
                self._check_namespace(target.namespace)
                return respond(self._store.create(_object(request, target), part="spec"), 201)
            case "get":
                stored = self._store.read(*key)
                if wants_table(request):
                    version = {"resourceVersion": str(stored.version)}
                    whole = query.text("includeObject") == "Object"
                    return respond(table(resource, [decoded(stored)], version, whole=whole))
                return Response(resource.typed(stored.body) + b"\n", JSON)
            case "update" if target.name:
                return respond(self._store.replace(_object(request, target), part=part))
            case "patch" if target.name:
                patch = patch_of(_content_type(request), _decode(request.body, object))
                return respond(self._store.patch(*key, patch, part=part))
            case "delete" if target.name and not target.subresource:
                return self._delete(request, target)
        raise method_not_allowed()

    def _check_namespace(self, name: str) -> None:
        """Raise a 404 for a namespace that is missing. A server without any Namespace accepts all names."""
        if name and self._store.snapshot(NAMESPACES).objects:
            self._store.read(NAMESPACES, "", name)

    def _exec(self, request: Request, target: RequestTarget) -> Response:
        if request.method not in ("GET", "POST"):
            raise method_not_allowed()
        pod = decoded(self._store.read(target.resource, target.namespace, target.name))
        return execute(request, pod, self._runtime, self._store)

    def _delete(self, request: Request, target: RequestTarget) -> Response:
        options = _decode(request.body, JsonObject) if request.body else {}
        conditions = options.get("preconditions") or {}
        query = UrlQuery(request.query)
        grace = query.number("gracePeriodSeconds") if query.text("gracePeriodSeconds") else None
        grace = options.get("gracePeriodSeconds", grace)
        if not isinstance(grace, int | None):
            raise ApiError(400, "gracePeriodSeconds must be a whole number")
        uid, version = str(conditions.get("uid") or ""), str(conditions.get("resourceVersion") or "")
        if target.resource is NAMESPACES:
            self._empty_namespace(target.name)
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

    def _empty_namespace(self, name: str) -> None:
        """Delete all objects of a namespace. Raise a 403 for one that a cluster always has."""
        if name in ("default", "kube-system"):
            reason = "this namespace may not be deleted"
            raise ApiError(
                403, f'namespaces "{name}" is forbidden: {reason}', details=NAMESPACES.details(name)
            )
        for resource in filter(lambda one: one.namespaced, RESOURCES):
            for stored in self._store.snapshot(resource).objects:
                if stored.namespace == name:
                    self._store.delete(resource, name, stored.name, grace=0)

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


def _selector(target: RequestTarget, query: UrlQuery) -> Selector:
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


def _content_type(request: Request) -> str:
    return request.headers.get("content-type", "").split(";")[0].strip()


def _json(request: Request) -> JsonObject:
    """Return the body of a write. Raise a 415 for another content type, a 400 for bad JSON."""
    if _content_type(request) not in (JSON, ""):
        expected = f"accepted media types include: {JSON}; with kubectl, use `create -f FILE`"
        raise ApiError(415, f"the body of the request was in an unknown format - {expected}")
    return _decode(request.body, JsonObject)


def _decode(body: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body of the request is not a JSON object: {error}") from error


def _object(request: Request, target: RequestTarget) -> JsonObject:
    """Return the object in the body, completed from the path. Raise a 400 if they contradict each other."""
    item = _json(request)
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


class ApiServer:
    """A small Kubernetes API server on threads of this process.

    A context manager: it listens from `start` to `stop` and can be started again, on the same port and with the same
    objects. `token`, which may change at any time, is the bearer token that requests must carry. `tls` is a
    certificate and its key (PEM files). Without `watch_list`, watches with sendInitialEvents are refused, as by a
    real server on an old etcd. `middleware` wraps the handler of all requests.
    With a `runtime`, which tells where the commands of pods run, it serves exec and runs the pods that clients create
    on its nodes.
    """

    def __init__(
        self,
        address: str = "127.0.0.1",
        port: int = 0,
        *,
        token: str | None = None,
        bookmark_seconds: float = 60.0,
        watch_list: bool = False,
        tls: tuple[Path, Path] | None = None,
        store: Store | None = None,
        runtime: Runtime = no_runtime,
        middleware: Callable[[Handler], Handler] = lambda handler: handler,
    ) -> None:
        self.address = address
        self.port = port
        self.token = token
        self.store = store or Store()
        self._tls = tls
        self._server: Server | None = None
        self._kubelet: Kubelet | None = None
        self._runs_pods = runtime is not no_runtime
        watches = WatchOptions(bookmark_seconds, watch_list)
        self._handler = middleware(Routes(self.store, watches, lambda: self.token, runtime).handle)

    @property
    def url(self) -> str:
        """The URL, such as http://127.0.0.1:40123."""
        return f"{'https' if self._tls else 'http'}://{address_and_port(self.address, self.port)}"

    def start(self) -> Self:
        """Listen. Raises OSError if the bind fails."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER) if self._tls else None
        if context and self._tls:
            context.load_cert_chain(*self._tls)
        self._server = Server("apiserver", _LIMITS)
        try:
            self._server.listen(self.address, self.port, self._handler, context)
        except OSError:
            self.stop()
            raise
        ((_, self.port),) = self._server.addresses()
        if self._runs_pods:
            self._kubelet = Kubelet(self.store)
        return self

    def stop(self) -> None:
        """Close the port and all connections. The objects stay."""
        if self._kubelet is not None:
            self._kubelet.stop()
            self._kubelet = None
        if self._server is not None:
            self._server.close()
            self._server = None

    def drop_connections(self) -> None:
        """Close all connections; keep listening."""
        if self._server is not None:
            self._server.drop_connections()

    def kubeconfig(self, path: Path) -> Path:
        """Write a kubeconfig with the server's token and certificate, and return its path."""
        path.touch(mode=0o600)
        path.write_text(kubeconfig(self.url, self.token, self._tls[0] if self._tls else None))
        return path

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def kubeconfig(url: str, token: str | None = None, certificate: Path | None = None) -> str:
    """Return a kubeconfig for a server."""
    cluster = {"server": url} | ({"certificate-authority": str(certificate.resolve())} if certificate else {})
    return yaml.dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "lab", "cluster": cluster}],
            "users": [{"name": "lab", "user": {"token": token} if token else {}}],
            "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "lab"}}],
            "current-context": "lab",
        }
    )
