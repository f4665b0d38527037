"""Lists: which version is asked for, pages, and the tokens that continue them."""

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from bisect import bisect_left
from collections.abc import Sequence

import msgspec

from pykubeproxy.lab.apiserver.errors import ApiError, bad_request, invalid_options, too_new
from pykubeproxy.lab.apiserver.exchange import Query, Response
from pykubeproxy.lab.apiserver.history import Stored
from pykubeproxy.lab.apiserver.resources import JsonObject, Resource
from pykubeproxy.lab.apiserver.selectors import Selector
from pykubeproxy.lab.apiserver.store import Snapshot, Store

FORMAT = "meta.k8s.io/v1"
ANY_VERSION = -1  # in a token: go on from the present state, consistent or not


class Token(msgspec.Struct):
    """Where a list goes on: at the first path not before `start`, in the state of version `rv`."""

    v: str
    rv: int
    start: str

    def encode(self) -> str:
        """The token as clients get it, URL-safe base64 of JSON without padding."""
        return urlsafe_b64encode(msgspec.json.encode(self)).decode().rstrip("=")


def list_objects(store: Store, resource: Resource, selector: Selector, query: Query) -> Response:
    """Answer a list. Raises a 400, 410, 422 or 504."""
    check_version_options(query)
    limit = query.number("limit")
    token = parse_token(query.text("continue")) if query.text("continue") else None
    if token is not None and query.text("resourceVersion") not in ("", "0"):
        raise bad_request("specifying resource version is not allowed when using continue")
    if token is None and query.text("resourceVersion") == "0":
        limit = 0  # from its cache, the real server lists everything at once
    snapshot = _continued(store, resource, token) if token else _fresh(store, resource, query, limit)
    start = bisect_left(snapshot.objects, token.start, key=lambda stored: stored.path) if token else 0
    chosen = [stored for stored in snapshot.objects[start:] if selector.matches(stored)]
    meta = {"resourceVersion": str(snapshot.version)}
    if limit and len(chosen) > limit:
        meta["continue"] = Token(FORMAT, snapshot.version, chosen[limit - 1].path + "\0").encode()
        if not selector.selective:
            return _answer(resource, meta | {"remainingItemCount": len(chosen) - limit}, chosen[:limit])
        chosen = chosen[:limit]
    return _answer(resource, meta, chosen)


def check_version_options(query: Query) -> None:
    """Raises a 422 for a resourceVersionMatch that does not fit the rest."""
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
        raise invalid_options(
            "resourceVersionMatch", 'Forbidden: "Exact" does not go with resourceVersion "0"'
        )


def parse_token(text: str) -> Token:
    """Raises a 400 if a continue token is not one of ours."""
    problem = "continue key is not valid"
    try:
        token = msgspec.json.decode(_unbase64(text), type=Token)
    except (msgspec.DecodeError, ValueError) as error:
        raise bad_request(f"invalid continue token: {problem}: {error}") from error
    if token.v != FORMAT or not token.start or (token.rv <= 0 and token.rv != ANY_VERSION):
        raise bad_request(f"invalid continue token: {problem}: not a token of this server")
    return Token(token.v, token.rv, token.start.removeprefix("/"))


def _unbase64(text: str) -> bytes:
    """Raises ValueError naming the first byte that cannot be, in the words of the real server."""
    foreign = re.search(r"[^A-Za-z0-9_-]", text)
    if foreign:
        raise ValueError(f"illegal base64 data at input byte {foreign.start()}")
    if len(text) % 4 == 1:
        raise ValueError(f"illegal base64 data at input byte {len(text) - 1}")
    return urlsafe_b64decode(text + "=" * (-len(text) % 4))


def _fresh(store: Store, resource: Resource, query: Query, limit: int) -> Snapshot:
    """The state a list starts in: the present one, unless one version is asked for.

    A version with a limit means exactly that version, without one any version not older.
    """
    version = query.number("resourceVersion")
    if version > store.version:
        raise too_new(version, store.version)
    exact = query.text("resourceVersionMatch") == "Exact" or (
        limit and not query.text("resourceVersionMatch")
    )
    return store.snapshot(resource, version if version and exact else None)


def _continued(store: Store, resource: Resource, token: Token) -> Snapshot:
    if token.rv == ANY_VERSION:
        return store.snapshot(resource)
    try:
        return store.snapshot(resource, token.rv)
    except ApiError as error:
        if error.code != 410:
            raise
        onward = Token(FORMAT, ANY_VERSION, token.start).encode()
        message = (
            f"the continue token is too old: version {token.rv} is no longer known; start a new list without "
        )
        message += (
            "it, or go on with the token in this answer and accept that objects may be missing or outdated"
        )
        raise ApiError(410, message, metadata={"continue": onward}) from error


def _answer(resource: Resource, meta: JsonObject, chosen: Sequence[Stored]) -> Response:
    head = f'{{"kind":"{resource.kind}List","apiVersion":"{resource.api_version}","metadata":'.encode()
    items = b",".join([stored.body for stored in chosen])
    return Response(b"".join((head, msgspec.json.encode(meta), b',"items":[', items, b"]}\n")))
