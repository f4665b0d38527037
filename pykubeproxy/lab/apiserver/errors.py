"""Refusals, as the Status objects that a real API server answers."""

from typing import Any

from pykubeproxy.lab.apiserver.resources import JsonObject, Resource

REASONS = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    405: "MethodNotAllowed",
    406: "NotAcceptable",
    409: "Conflict",
    410: "Expired",
    413: "RequestEntityTooLarge",
    415: "UnsupportedMediaType",
    422: "Invalid",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
    504: "Timeout",
}


class ApiError(Exception):
    """A request that is refused: an HTTP status code, a reason in CamelCase and a message for people."""

    def __init__(
        self,
        code: int,
        message: str,
        *,
        reason: str | None = None,
        details: JsonObject | None = None,
        metadata: JsonObject | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.reason = REASONS.get(code, "") if reason is None else reason
        self.details = details
        self.metadata = metadata or {}

    @property
    def retry_after(self) -> int | None:
        """Seconds after which the client should ask again, if it should."""
        return (self.details or {}).get("retryAfterSeconds")

    def status(self) -> JsonObject:
        """The Status object, ready to be encoded."""
        status: dict[str, Any] = {"kind": "Status", "apiVersion": "v1", "metadata": self.metadata}
        status |= {"status": "Failure", "message": self.message, "reason": self.reason}
        if self.details is not None:
            status["details"] = self.details
        return status | {"code": self.code}


def bad_request(message: str) -> ApiError:
    """400: the request cannot be understood."""
    return ApiError(400, message)


def no_such_path() -> ApiError:
    """404 for a path or resource that is not served."""
    return ApiError(404, "the server could not find the requested resource", details={})


def method_not_allowed() -> ApiError:
    """405 for a path that is served, but not with this method."""
    return ApiError(405, "the server does not allow this method on the requested resource", details={})


def not_found(resource: Resource, name: str) -> ApiError:
    """404 for an object that is not there."""
    return ApiError(404, f'{resource.qualified} "{name}" not found', details=_subject(resource, name))


def already_exists(resource: Resource, name: str) -> ApiError:
    """409 for creating an object that is there already."""
    message = f'{resource.qualified} "{name}" already exists'
    return ApiError(409, message, reason="AlreadyExists", details=_subject(resource, name))


def conflict(resource: Resource, name: str, why: str = "") -> ApiError:
    """409 for changing an object on the grounds of an outdated copy of it."""
    why = why or "the object has been modified; please apply your changes to the latest version and try again"
    message = f'Operation cannot be fulfilled on {resource.qualified} "{name}": {why}'
    return ApiError(409, message, details=_subject(resource, name))


def invalid(kind: str, group: str, name: str, field: str, why: str) -> ApiError:
    """422 for a value that a field must not have."""
    causes = [{"reason": "FieldValueInvalid", "message": why, "field": field}]
    details = {"name": name} | ({"group": group} if group else {}) | {"kind": kind, "causes": causes}
    return ApiError(422, f'{kind} "{name}" is invalid: {field}: {why}', details=details)


def invalid_options(field: str, why: str) -> ApiError:
    """422 for list or watch options that contradict each other."""
    return invalid("ListOptions", "meta.k8s.io", "", field, why)


def too_old(version: int, oldest: int) -> ApiError:
    """410: the version asked for is no longer known; `oldest` is the oldest one that is."""
    return ApiError(410, f"too old resource version: {version} ({oldest})")


def too_new(version: int, current: int) -> ApiError:
    """504: the version asked for has not been reached."""
    cause = {"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}
    message = f"Timeout: Too large resource version: {version}, current: {current}"
    return ApiError(504, message, details={"causes": [cause], "retryAfterSeconds": 1})


def _subject(resource: Resource, name: str) -> JsonObject:
    group = {"group": resource.group} if resource.group else {}
    return {"name": name} | group | {"kind": resource.plural}
