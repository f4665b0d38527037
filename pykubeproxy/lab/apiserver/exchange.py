"""A request and its answer as values, and how they are written down."""

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from pykubeproxy.lab.apiserver.errors import ApiError, bad_request
from pykubeproxy.lab.apiserver.resources import JsonObject, Resource, find

JSON = "application/json"
MERGE_PATCH = "application/merge-patch+json"


class Query:
    """The query part of a URL. A parameter that is absent and one that is empty are the same."""

    def __init__(self, text: str) -> None:
        self._values = dict(parse_qsl(text, keep_blank_values=True))

    def text(self, name: str) -> str:
        """A parameter as it is, "" if absent."""
        return self._values.get(name, "")

    def flag(self, name: str) -> bool:
        """Whether a parameter is true or 1."""
        return self.text(name).lower() in ("true", "1")

    def number(self, name: str) -> int:
        """A parameter that is a whole number, 0 if absent. Raises a 400 if it is anything else."""
        text = self.text(name)
        if not text:
            return 0
        if not (text.isascii() and text.isdigit()):
            raise bad_request(f'{name}: Invalid value: "{text}": must be a whole number')
        return int(text)


class Request(msgspec.Struct, frozen=True):
    """What a client asks."""

    method: str
    path: str
    query: str = ""
    accept: str = ""
    content_type: str = ""
    authorization: str = ""
    user_agent: str = ""
    body: bytes = b""

    def json(self) -> JsonObject:
        """The body. Raises a 400 if it is not a JSON object."""
        try:
            return msgspec.json.decode(self.body, type=JsonObject)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise bad_request(f"the body of the request is not a JSON object: {error}") from error


class Response(msgspec.Struct, frozen=True):
    """A whole answer."""

    body: bytes
    code: int = 200
    content_type: str = JSON
    headers: Mapping[str, str] = {}


class Stream(msgspec.Struct, frozen=True):
    """An answer sent as it happens. `run` takes a function that sends a piece (and before the first one, which may
    be empty, the headers) and the descriptor of the connection; it returns at the end of the stream.
    """

    run: Callable[[Callable[[bytes], None], int], None]


class Target(msgspec.Struct, frozen=True):
    """The part of the API that a path names."""

    resource: Resource
    namespace: str = ""
    name: str = ""
    subresource: str = ""


def as_json(value: Any, code: int = 200) -> Response:
    """An answer of JSON with a newline at its end, as the real server sends it."""
    return Response(msgspec.json.encode(value) + b"\n", code)


def refusal(error: ApiError) -> Response:
    """A refused request's answer."""
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    return Response(msgspec.json.encode(error.status()) + b"\n", error.code, headers=headers)


def verb_of(request: Request, target: Target | None) -> str:
    """The verb as in access rules: get, list, watch, create, update, patch, delete."""
    if request.method == "GET" and target is not None and not target.name:
        return "watch" if Query(request.query).flag("watch") else "list"
    return {"POST": "create", "PUT": "update"}.get(request.method, request.method.lower())


def locate(path: str) -> Target | None:
    """What a path names: /api/v1/… or /apis/GROUP/VERSION/…; None if that is not served."""
    steps = path.strip("/").split("/")
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


def check_accept(request: Request) -> None:
    """Raises a 406 if the client takes no JSON: protobuf, tables and the rest are not offered."""
    ranges = [entry.strip() for entry in request.accept.split(",") if entry.strip()]
    for entry in ranges:
        kind, *parameters = [part.strip() for part in entry.split(";")]
        if kind in (JSON, "application/*", "*/*") and not any(
            p.startswith(("as=", "g=")) for p in parameters
        ):
            return
    if ranges:
        raise ApiError(406, f"only the following media types are accepted: {JSON}")


def check_content_type(request: Request) -> None:
    """Raises a 415 if a body is written in something that is not understood here."""
    kind = request.content_type.split(";")[0].strip()
    accepted = MERGE_PATCH if request.method == "PATCH" else JSON
    if kind != accepted and (kind or request.method == "PATCH"):
        known = f"accepted media types include: {accepted}"
        raise ApiError(415, f"the body of the request was in an unknown format - {known}")
