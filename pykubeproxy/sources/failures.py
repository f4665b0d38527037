"""How a request to the API server can fail, each with a reason for people in one line."""

import http.client
import json
import re
import ssl

import urllib3
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import (
    ConnectTimeoutError,
    NameResolutionError,
    NewConnectionError,
    ProtocolError,
    ReadTimeoutError,
)

# A server that asks for more patience than this, in seconds, is asked again nevertheless.
_LONGEST_RETRY_AFTER = 120.0
_LONGEST_MESSAGE = 300
_USER = re.compile(r"//[^/\s]*@")


class Failure(Exception):
    """A request that did not succeed; str() is one line.

    `retry_after` is the time in seconds that the server asks for. `doubtful` means that the server is there but does not
    do what was asked, so that asking the same again may never succeed.
    """

    def __init__(self, reason: str, *, retry_after: float = 0.0, doubtful: bool = False) -> None:
        super().__init__(without_password(one_line(reason)))
        self.retry_after = min(retry_after, _LONGEST_RETRY_AFTER)
        self.doubtful = doubtful


class Expired(Failure):
    """The version, or the rest of a list, that was asked for is no longer known to the server."""


class Unauthorized(Failure):
    """The credentials are not accepted."""


def without_password(text: str) -> str:
    """Text without the user and the password that a URL in it may have."""
    return _USER.sub("//", text)


def one_line(text: str) -> str:
    """Text from elsewhere, made fit for a line of a log."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= _LONGEST_MESSAGE else line[:_LONGEST_MESSAGE] + "…"


def of_status(
    code: int, message: str, retry_after: float, asked: str, verbs: str = "list and watch of"
) -> Failure:
    """The failure that an HTTP status, or the code of an ERROR event, stands for.

    `asked` names what was asked for, and `verbs` what was to be done with it.
    """
    told = f" ({code}: {message})" if message else f" ({code})"
    match code:
        case 401:
            return Unauthorized(
                f"the API server does not accept the credentials{told}: check token or certificate"
            )
        case 403:
            return Failure(f"{verbs} {asked} are not permitted{told}: a ClusterRole must grant them")
        case 404:
            return Failure(
                f"the API server does not serve {asked}{told}: is its URL right, and is it 1.21 or later?"
            )
        case 410:
            return Expired(f"the version asked for is too old{told}")
        case 429:
            return Failure(f"the API server asks for fewer requests{told}", retry_after=retry_after)
        case 400 | 422 | 504:
            return Failure(
                f"the API server refuses the request{told}", retry_after=retry_after, doubtful=True
            )
    return Failure(f"the API server failed{told}", retry_after=retry_after)


def of_response(response: urllib3.BaseHTTPResponse, asked: str, verbs: str = "list and watch of") -> Failure:
    """The failure that an answer other than a success stands for; reads a little of its body."""
    try:
        body = response.read(1 << 16, decode_content=False)
    except (urllib3.exceptions.HTTPError, OSError):
        body = b""
    try:
        message = str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        message = response.reason or ""
    seconds = response.headers.get("Retry-After", "")
    retry_after = float(seconds) if seconds.isascii() and seconds.isdigit() else 0.0
    return of_status(response.status, one_line(message), retry_after, asked, verbs)


def of_exception(error: Exception, server: str) -> Failure:
    """The failure that an exception of the HTTP client stands for. `server` is its URL."""
    match error:
        case Failure():
            return error
        case NameResolutionError():
            return Failure(f"the name in {server} cannot be resolved{_cause(error)}")
        case NewConnectionError():
            return Failure(f"no connection to {server}{_cause(error)}")
        case ConnectTimeoutError():
            return Failure(f"{server} does not answer: no connection in time")
        case ReadTimeoutError():
            # It may also be waiting for a version it has yet to reach, after its store was restored from a backup.
            return Failure(
                f"nothing was heard from {server} for too long: the connection counts as dead", doubtful=True
            )
        case ApiException() if error.status == 0:
            return Failure(f"no TLS connection to {server}: {error.reason}")
        case urllib3.exceptions.SSLError() | ssl.SSLError():
            return Failure(f"no TLS connection to {server}: {error}")
        case ProtocolError() | http.client.HTTPException() | ConnectionError():
            return Failure(f"the connection to {server} broke{_cause(error)}")
    return Failure(f"the request to {server} failed: {type(error).__name__}: {error}")


def _cause(error: BaseException) -> str:
    """What the operating system said, if it did: the deepest OSError among the causes and arguments."""
    while True:
        inner = error.__cause__ or next((a for a in error.args if isinstance(a, BaseException)), None)
        if inner is None:
            break
        error = inner
    return f": {error.strerror}" if isinstance(error, OSError) and error.strerror else ""
