"""Lists: versions, pages and continue tokens."""

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode

import msgspec

from pykubeproxy.http import JSON, Response
from pykubeproxy.lab.apiserver.errors import ApiError, invalid_options, too_new
from pykubeproxy.lab.apiserver.query import Query, Selector
from pykubeproxy.lab.apiserver.resources import JsonObject, Resource
from pykubeproxy.lab.apiserver.store import Snapshot, Store

_FORMAT = "meta.k8s.io/v1"
_ANY_VERSION = -1  # in a token: continue from the present state


class _Token(msgspec.Struct):
    """Continues a list at the first path not before `start`, in the state of version `rv`."""

    v: str
    rv: int
    start: str

    def encode(self) -> str:
        """Return the token for clients: URL-safe base64 of JSON without padding."""
        return urlsafe_b64encode(msgspec.json.encode(self)).decode().rstrip("=")


def list_objects(store: Store, resource: Resource, selector: Selector, query: Query) -> Response:
    """Answer a list. Raise a 400, 410, 422 or 504."""
    _check_version_options(query)
    limit = query.number("limit")
    token = _parse_token(query.text("continue")) if query.text("continue") else None
    if token is not None and query.text("resourceVersion") not in ("", "0"):
        raise ApiError(400, "specifying resource version is not allowed when using continue")
    if token is None and query.text("resourceVersion") == "0":
        limit = 0  # from its cache, the real server lists everything at once
    snapshot = _continued(store, resource, token) if token else _fresh(store, resource, query, limit)
    start = token.start if token else ""
    selected = [stored for stored in snapshot.objects if stored.path >= start and selector.matches(stored)]
    meta: JsonObject = {"resourceVersion": str(snapshot.version)}
    if limit and len(selected) > limit:
        meta["continue"] = _Token(_FORMAT, snapshot.version, selected[limit - 1].path + "\0").encode()
        if not selector.selective:
            meta["remainingItemCount"] = len(selected) - limit
        selected = selected[:limit]
    head = f'{{"kind":"{resource.kind}List","apiVersion":"{resource.api_version}","metadata":'.encode()
    items = b",".join([stored.body for stored in selected])
    return Response(b"".join((head, msgspec.json.encode(meta), b',"items":[', items, b"]}\n")), JSON)


def _check_version_options(query: Query) -> None:
    """Raise a 422 for a resourceVersionMatch that contradicts the other options."""
    match, version = query.text("resourceVersionMatch"), query.text("resourceVersion")
    if not match:
        return
    if match not in ("Exact", "NotOlderThan"):
        raise invalid_options("resourceVersionMatch", f'Unsupported value: "{match}": Exact, NotOlderThan')
    if query.text("continue"):
        raise invalid_options("resourceVersionMatch", "Forbidden: not together with continue")
    if not version:
        raise invalid_options("resourceVersionMatch", "Forbidden: not without a resourceVersion")
    if match == "Exact" and version == "0":
        raise invalid_options("resourceVersionMatch", 'Forbidden: not "Exact" with resourceVersion "0"')


def _parse_token(text: str) -> _Token:
    """Decode a continue token. Raise a 400 if this server did not make it."""
    problem = "invalid continue token: continue key is not valid"
    try:
        token = msgspec.json.decode(_unbase64(text), type=_Token)
    except (msgspec.DecodeError, ValueError) as error:
        raise ApiError(400, f"{problem}: {error}") from error
    if token.v != _FORMAT or not token.start or (token.rv <= 0 and token.rv != _ANY_VERSION):
        raise ApiError(400, f"{problem}: not a token of this server")
    return _Token(token.v, token.rv, token.start.removeprefix("/"))


def _unbase64(text: str) -> bytes:
    """Decode. Raises ValueError with the first bad byte, in the words of the real server."""
    bad = re.search(r"[^A-Za-z0-9_-]", text)
    if bad or len(text) % 4 == 1:
        position = bad.start() if bad else len(text) - 1
        raise ValueError(f"illegal base64 data at input byte {position}")
    return urlsafe_b64decode(text + "=" * (-len(text) % 4))


def _fresh(store: Store, resource: Resource, query: Query, limit: int) -> Snapshot:
    """Return the state a list starts in: the present one unless it requests an exact version.

    With a limit a version means exactly that one, without a limit any version not older.
    """
    version = query.number("resourceVersion")
    if version > store.version:
        raise too_new(version, store.version)
    match = query.text("resourceVersionMatch")
    exact = match == "Exact" or (limit and not match)
    return store.snapshot(resource, version if version and exact else None)


def _continued(store: Store, resource: Resource, token: _Token) -> Snapshot:
    if token.rv == _ANY_VERSION:
        return store.snapshot(resource)
    try:
        return store.snapshot(resource, token.rv)
    except ApiError as error:
        if error.code != 410:
            raise
        message = (
            f"the continue token is too old: version {token.rv} was compacted; start a new list, or use the "
            "token of this response and accept that objects may be missing or outdated"
        )
        inconsistent = _Token(_FORMAT, _ANY_VERSION, token.start).encode()
        raise ApiError(410, message, metadata={"continue": inconsistent}) from error
