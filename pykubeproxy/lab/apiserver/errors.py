"""JSON responses, and errors as the Status objects of a real API server."""

from http import HTTPStatus

import msgspec

from pykubeproxy import http
from pykubeproxy.lab.apiserver.resources import JsonObject, Resource

#: The reasons that differ from the phrase of the HTTP status.
_REASONS = {
    410: "Expired",
    413: "RequestEntityTooLarge",
    422: "Invalid",
    500: "InternalError",
    504: "Timeout",
}
_LIST_OPTIONS = Resource("meta.k8s.io", "", "ListOptions")
_OUTDATED = "the object has been modified; please apply your changes to the latest version and try again"


def respond(document: JsonObject, status: int = 200, *headers: tuple[str, str]) -> http.Response:
    """Return JSON with a newline at its end, as the real server sends it."""
    return http.Response(msgspec.json.encode(document) + b"\n", http.JSON, status, headers)


class ApiError(Exception):
    """A refused request: an HTTP status code, a reason in CamelCase and a message."""

    def __init__(
        self,
        code: int,
        message: str,
        *,
        reason: str = "",
        details: JsonObject | None = None,
        metadata: JsonObject | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self._reason = reason or _REASONS.get(code) or HTTPStatus(code).phrase.replace(" ", "")
        self._details = details
        self._metadata = metadata or {}

    def status(self) -> JsonObject:
        details = {} if self._details is None else {"details": self._details}
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": self._metadata,
            "status": "Failure",
            "message": str(self),
            "reason": self._reason,
            **details,
            "code": self.code,
        }

    def response(self) -> http.Response:
        """Return the HTTP response, with Retry-After if the details name it."""
        seconds = (self._details or {}).get("retryAfterSeconds")
        headers = () if seconds is None else (("Retry-After", str(seconds)),)
        return respond(self.status(), self.code, *headers)


def method_not_allowed() -> ApiError:
    """405."""
    return ApiError(405, "the server does not allow this method on the requested resource", details={})


def not_found(resource: Resource, name: str) -> ApiError:
    """404 for a missing object."""
    return ApiError(404, f'{resource.qualified} "{name}" not found', details=resource.details(name))


def conflict(resource: Resource, name: str, reason: str = _OUTDATED) -> ApiError:
    """409 for a write based on an outdated copy."""
    message = f'Operation cannot be fulfilled on {resource.qualified} "{name}": {reason}'
    return ApiError(409, message, details=resource.details(name))


def invalid(resource: Resource, name: str, field: str, reason: str) -> ApiError:
    """422 for the value of a field."""
    causes = [{"reason": "FieldValueInvalid", "message": reason, "field": field}]
    details = resource.details(name) | {"kind": resource.kind, "causes": causes}
    return ApiError(422, f'{resource.kind} "{name}" is invalid: {field}: {reason}', details=details)


def invalid_options(field: str, reason: str) -> ApiError:
    """422 for list or watch options that contradict each other."""
    return invalid(_LIST_OPTIONS, "", field, reason)


def too_old(version: int, oldest: int) -> ApiError:
    """410 for a version before `oldest`, the oldest in the history."""
    return ApiError(410, f"too old resource version: {version} ({oldest})")


def too_new(version: int, current: int) -> ApiError:
    """504 for a version after the current one."""
    cause = {"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}
    message = f"Timeout: Too large resource version: {version}, current: {current}"
    return ApiError(504, message, details={"causes": [cause], "retryAfterSeconds": 1})
