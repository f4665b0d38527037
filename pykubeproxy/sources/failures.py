"""Failures of requests to the API server, each with a reason in one line."""

import http.client
import json
import ssl
from collections.abc import Iterator, Mapping

import msgspec
import urllib3
from urllib3.exceptions import (
    ConnectTimeoutError,
    NameResolutionError,
    NewConnectionError,
    ProtocolError,
    ReadTimeoutError,
)

from pykubeproxy.wording import one_line, without_password

_MAX_RETRY_AFTER = 120.0  # seconds
_MAX_STATUS = 1 << 16  # bytes


class Failure(Exception):
    """A failed request; str() is one line.

    `retry_after` is the pause in seconds that the server requests. `persistent`: the server answers, but the same
    request may never succeed; listing again may help. `server_wide`: other requests would most likely fail too.
    `refused`: the server answered with an error, or nothing listens at its address.
    """

    def __init__(
        self,
        reason: str,
        *,
        retry_after: float = 0.0,
        persistent: bool = False,
        server_wide: bool = False,
        refused: bool = False,
    ) -> None:
        super().__init__(without_password(one_line(reason)))
        self.retry_after = min(retry_after, _MAX_RETRY_AFTER)
        self.persistent = persistent
        self.server_wide = server_wide
        self.refused = refused

    @property
    def answered(self) -> bool:
        """Whether an API server answered, not a load balancer without one."""
        return self.refused and not self.server_wide


class Unreachable(Failure):
    """The server cannot be reached, or sends no complete response."""

    def __init__(self, reason: str, *, refused: bool = False) -> None:
        super().__init__(reason, server_wide=True, refused=refused)


class ResponseTimeout(Unreachable):
    """The next part of a response did not arrive in time."""


class TooSlow(Failure):
    """A response takes too long in all."""


class Expired(Failure):
    """The server no longer has the requested version or the rest of a list."""


class Overloaded(Failure):
    """The server asks for fewer requests."""

    answered = True


class Unauthorized(Failure):
    """The server does not accept the credentials."""


class NotFound(Failure):
    """The server has no such object, or does not serve its kind."""


class Forbidden(Failure):
    """The server knows the account, which lacks a permission."""


class _StatusCause(msgspec.Struct):
    reason: str = ""
    message: str = ""


class _StatusDetails(msgspec.Struct):
    retryAfterSeconds: int | None = None  # noqa: N815
    causes: list[_StatusCause] | None = None


class ApiStatus(msgspec.Struct):
    """A Status object: an ERROR event of a watch, or the end of a command in a pod, of which Success is exit code 0."""

    status: str | None = None
    code: int | None = None
    reason: str | None = None
    message: str | None = None
    details: _StatusDetails | None = None


# The kind, the text and the flags of the failure for an HTTP status.
_REFUSALS: Mapping[int, tuple[type[Failure], str, Mapping[str, bool]]] = {
    401: (Unauthorized, "the API server does not accept the credentials{}: check token or certificate", {}),
    403: (Forbidden, "{verbs} {resource} are not permitted{}: a role must grant them", {}),
    404: (
        NotFound,
        "the API server does not serve {resource}{}: check its URL, and that its version is 1.21 or later",
        {},
    ),
    410: (Expired, "the requested version is too old{}", {}),
    429: (Overloaded, "the API server asks for fewer requests{}", {"server_wide": True}),
    **dict.fromkeys((400, 422, 504), (Failure, "the API server rejects the request{}", {"persistent": True})),
    # A load balancer without a server answers these.
    **dict.fromkeys((502, 503), (Failure, "the API server failed{}", {"server_wide": True})),
}
_REFUSAL: tuple[type[Failure], str, Mapping[str, bool]] = (Failure, "the API server failed{}", {})


def from_status(
    code: int, message: str, retry_after: float, resource: str, verbs: str = "list and watch of"
) -> Failure:
    """Return the failure for an HTTP status or the code of an ERROR event."""
    kind, text, flags = _REFUSALS.get(code, _REFUSAL)
    detail = f" ({code}: {message})" if message else f" ({code})"
    reason = text.format(detail, verbs=verbs, resource=resource)
    return kind(reason, retry_after=retry_after, refused=True, **flags)


def from_response(
    response: urllib3.BaseHTTPResponse, body: Iterator[bytes], resource: str, verbs: str
) -> Failure:
    """Return the failure for an unsuccessful response; read a little of its body."""
    text = b""
    try:
        while len(text) < _MAX_STATUS and (piece := next(body, b"")):
            text += piece
    except (Failure, urllib3.exceptions.HTTPError, OSError):
        text = b""
    message = status_message(text) or response.reason or ""
    seconds = response.headers.get("Retry-After", "")
    retry_after = float(seconds) if seconds.isascii() and seconds.isdigit() else 0.0
    return from_status(response.status, one_line(message), retry_after, resource, verbs)


def status_message(text: bytes) -> str:
    """Return the message of a response that refuses a request, "" if it has none."""
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


def from_exception(error: Exception, server: str) -> Failure:
    """Return the failure for an exception of the HTTP client. `server` is a URL."""
    if isinstance(error, Failure):
        return error
    match error:
        case NameResolutionError():
            return Unreachable(f"cannot resolve the name in {server}{_cause(error)}")
        case NewConnectionError():
            refused = isinstance(error.__cause__, ConnectionRefusedError)
            return Unreachable(f"no connection to {server}{_cause(error)}", refused=refused)
        case ConnectTimeoutError():
            return Unreachable(f"connecting to {server} timed out")
        case ReadTimeoutError() | TimeoutError():
            # The kernel gave the connection up: the peer acknowledged nothing.
            return Unreachable(f"the connection to {server} broke{_cause(error)}")
        case urllib3.exceptions.SSLError() | ssl.SSLError():
            return Unreachable(f"no TLS connection to {server}: {error}")
        case ProtocolError() | http.client.HTTPException() | ConnectionError():
            return Unreachable(f"the connection to {server} broke{_cause(error)}")
    return Unreachable(f"the request to {server} failed: {type(error).__name__}: {error}")


def _cause(error: BaseException) -> str:
    """Return the message of the innermost OSError among causes and arguments, or ""."""
    while True:
        inner = error.__cause__ or next((a for a in error.args if isinstance(a, BaseException)), None)
        if inner is None:
            break
        error = inner
    return f": {error.strerror}" if isinstance(error, OSError) and error.strerror else ""
