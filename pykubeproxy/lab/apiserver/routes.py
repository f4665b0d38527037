"""From a request to its answer: who may ask, what the path means, which operation it is. Knows nothing of sockets."""

import hmac
from collections.abc import Callable

import msgspec

from pykubeproxy.lab.apiserver import discovery
from pykubeproxy.lab.apiserver.errors import ApiError, bad_request, method_not_allowed, no_such_path
from pykubeproxy.lab.apiserver.exchange import (
    Query,
    Request,
    Response,
    Stream,
    Target,
    as_json,
    check_accept,
    check_content_type,
    locate,
    refusal,
    verb_of,
)
from pykubeproxy.lab.apiserver.faults import Faults, Order
from pykubeproxy.lab.apiserver.journal import Entry, Journal
from pykubeproxy.lab.apiserver.listing import list_objects
from pykubeproxy.lab.apiserver.resources import SERVICES, JsonObject
from pykubeproxy.lab.apiserver.selectors import Selector
from pykubeproxy.lab.apiserver.store import Store
from pykubeproxy.lab.apiserver.watching import Echoing, Terms, Watch
from pykubeproxy.lab.apiserver.writing import Part


class Routes:
    """Answers requests from a store, with the faults ordered."""

    def __init__(
        self,
        store: Store,
        faults: Faults,
        journal: Journal,
        terms: Terms,
        token: str | None,
    ) -> None:
        self.token = token  # that requests must carry, if any
        self._store = store
        self._faults = faults
        self._journal = journal
        self._terms = terms

    def answer(self, request: Request) -> Response | Stream:
        """The answer to a request, a refusal included. Takes as long as the faults ordered make it."""
        try:
            if request.path.startswith("/_lab/"):
                self._check_token(request)
                return self._control(request)
            return self._api(request)
        except ApiError as error:
            return refusal(error)

    def _api(self, request: Request) -> Response | Stream:
        target = locate(request.path)
        verb = verb_of(request, target)
        self._record(request, verb, target)
        orders = self._faults.meet(verb, request.path)
        for order in orders:
            if order.do == "error":
                raise _ordered(order)
        ordered = {order.do for order in orders}
        truncate = "truncate" in ordered
        page = discovery.about(request.path)
        if page is None or request.path.rstrip("/") not in discovery.PUBLIC:
            self._check_token(request)
        if page is not None:
            if request.method != "GET":
                raise method_not_allowed()
            return page
        if target is None:
            raise no_such_path()
        check_accept(request)
        if "drip" in ordered:
            return Stream(lambda send, _: self._faults.endless(send))
        if verb == "watch":
            return self._watch(request, target, truncate, "echo" in ordered)
        answer = self._operation(verb, target)(request, target)
        return (
            msgspec.structs.replace(answer, body=answer.body[: len(answer.body) // 2]) if truncate else answer
        )

    def _operation(self, verb: str, target: Target) -> Callable[[Request, Target], Response]:
        on_object = {"get": self._get, "update": self._update, "patch": self._patch}
        if target.subresource:
            operation = on_object.get(verb)
        elif target.name:
            operation = (on_object | {"delete": self._delete}).get(verb)
        elif target.resource.namespaced and not target.namespace:
            operation = {"list": self._list}.get(verb)
        else:
            operation = {"list": self._list, "create": self._create}.get(verb)
        if operation is None:
            raise method_not_allowed()
        return operation

    def _list(self, request: Request, target: Target) -> Response:
        query = Query(request.query)
        return list_objects(self._store, target.resource, _selector(target, query), query)

    def _watch(self, request: Request, target: Target, truncate: bool, echo: bool) -> Stream:
        query = Query(request.query)
        watch = Watch(target.resource, _selector(target, query), query)

        def run(send: Callable[[bytes], None], client: int) -> None:
            watch.run(self._terms, Echoing(send) if echo else send, client, truncate)

        return Stream(run)

    def _get(self, _: Request, target: Target) -> Response:
        stored = self._store.read(target.resource, target.namespace, target.name)
        return Response(target.resource.typed(stored.body) + b"\n")

    def _create(self, request: Request, target: Target) -> Response:
        check_content_type(request)
        item = _incoming(request, target)
        # A node comes with its status, as from its kubelet; a service gets its own later.
        return as_json(self._store.create(item, part="spec"), 201)

    def _update(self, request: Request, target: Target) -> Response:
        check_content_type(request)
        return as_json(self._store.replace(_incoming(request, target), part=_part(target)))

    def _patch(self, request: Request, target: Target) -> Response:
        check_content_type(request)
        _refuse_dry_run(request)
        patch = request.json()
        return as_json(
            self._store.merge_patch(target.resource, target.namespace, target.name, patch, part=_part(target))
        )

    def _delete(self, request: Request, target: Target) -> Response:
        _refuse_dry_run(request)
        options = request.json() if request.body else {}
        conditions = options.get("preconditions") or {}
        uid, version = str(conditions.get("uid") or ""), str(conditions.get("resourceVersion") or "")
        last = self._store.delete(target.resource, target.namespace, target.name, uid=uid, version=version)
        if target.resource is SERVICES or "deletionTimestamp" in last["metadata"]:
            return as_json(last)
        group = {"group": target.resource.group} if target.resource.group else {}
        details = (
            {"name": target.name} | group | {"kind": target.resource.plural, "uid": last["metadata"]["uid"]}
        )
        done = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}
        return as_json(done)

    def _control(self, request: Request) -> Response:
        """The server's own paths, for tests that run it as a process."""
        match request.method, request.path:
            case "POST", "/_lab/faults":
                try:
                    self._faults.carry_out(msgspec.json.decode(request.body, type=Order))
                except msgspec.DecodeError as error:
                    raise bad_request(f"not an order for a fault: {error}") from error
                return as_json({})
            case "GET", "/_lab/requests":
                return as_json({"counts": self._journal.counts(), "requests": self._journal.entries()})
            case "DELETE", "/_lab/requests":
                self._journal.clear()
                return as_json({})
        raise no_such_path()

    def _record(self, request: Request, verb: str, target: Target | None) -> None:
        qualified, namespace, name = "", "", ""
        if target is not None:
            qualified, namespace, name = target.resource.qualified, target.namespace, target.name
        self._journal.record(
            Entry(verb, qualified, request.path, request.query, request.user_agent, namespace, name)
        )

    def _check_token(self, request: Request) -> None:
        if self.token is None:
            return
        scheme, _, token = request.authorization.partition(" ")
        # As the real one, and as HTTP says: the name of the scheme in any case.
        if scheme.lower() != "bearer" or not hmac.compare_digest(token.encode(), self.token.encode()):
            raise ApiError(401, "Unauthorized")


def _selector(target: Target, query: Query) -> Selector:
    fields = query.text("fieldSelector")
    return Selector(target.resource, target.namespace, query.text("labelSelector"), fields)


def _part(target: Target) -> Part:
    return "status" if target.subresource else "spec"


def _ordered(order: Order) -> ApiError:
    details = None if order.retry_after is None else {"retryAfterSeconds": order.retry_after}
    return ApiError(order.status, "this error was ordered", details=details)


def _refuse_dry_run(request: Request) -> None:
    if Query(request.query).text("dryRun"):
        raise bad_request("this API server has no dryRun")


def _incoming(request: Request, target: Target) -> JsonObject:
    """An object from a request's body, made to agree with the path. Raises a 400 if it cannot."""
    _refuse_dry_run(request)
    item = request.json()
    resource = target.resource
    expected = {"apiVersion": resource.api_version, "kind": resource.kind}
    for field, value in expected.items():
        if item.get(field) not in (None, "", value):
            raise bad_request(
                f"the {field} in the data ({item[field]}) does not match the expected one ({value})"
            )
    meta = item.get("metadata") or {}
    if not isinstance(meta, dict):
        raise bad_request("metadata must be an object")
    if resource.namespaced:
        if meta.get("namespace") not in (None, "", target.namespace):
            raise bad_request(
                "the namespace of the provided object does not match the namespace sent on the request"
            )
        meta = meta | {"namespace": target.namespace}
    if target.name and meta.get("name", target.name) != target.name:
        why = f"the name of the object ({meta['name']}) does not match the name on the URL ({target.name})"
        raise bad_request(why)
    return item | expected | {"metadata": meta | ({"name": target.name} if target.name else {})}
