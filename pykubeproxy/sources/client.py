"""A client of one API server: requests with time limits, renewed credentials and a rate limit."""

import math
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlencode

import msgspec
from urllib3 import HTTPHeaderDict

from pykubeproxy import __version__
from pykubeproxy.sources import failures
from pykubeproxy.sources.attempt import Attempt, OutOfTime, current
from pykubeproxy.sources.contact import Contact
from pykubeproxy.sources.credential_store import CredentialStore
from pykubeproxy.sources.credentials import Credentials
from pykubeproxy.sources.failures import Failure, Unreachable
from pykubeproxy.sources.transport import Keepalive, ServerAddresses, Transport, content
from pykubeproxy.sources.watch import SourceError
from pykubeproxy.wording import without_password

if TYPE_CHECKING:
    from pykubeproxy.sources.kubeconfig import Kubeconfigs

# The longest time to the header of a response, in seconds: the API server's own limit for a request.
_LONGEST_ANSWER = 60.0
_MAX_CREATED = 1 << 20  # bytes of the response to a new object
# How often to call `meanwhile`, in seconds.
_TURN = 0.1
# Socket timeouts come this much later, in seconds: they end a thread whose caller has timed out.
_LATER = 1.0

_JSON = "application/json"
# Ask for objects without managedFields (kubernetes/kubernetes#139561). API servers that do not know this ignore it.
ESSENTIAL_JSON = f"{_JSON};drop=metadata.managedFields"

# Yield pieces of what a server sends over a new connection; the arguments are the connection, the URL of the server and
# the headers that authenticate a request.
Conversation = Callable[[socket.socket, str, HTTPHeaderDict], Generator[bytes, None, None]]
_Exchange = Callable[[Transport, Credentials], Generator[bytes, None, None]]


class _ApiRequest(msgspec.Struct, frozen=True):
    """`resource` and `verbs` are for messages, such as "list and watch of" services."""

    method: str
    target: str
    resource: str
    verbs: str
    idle: float
    body: Mapping[str, object] | None = None
    compressible: bool = False
    accept: str = _JSON


class Client:
    """Send requests to one API server; thread-safe.

    `kubeconfig` is a path or several to merge, and `master` a URL, as in --kubeconfig and --master; without both, use the
    pod's service account. `qps` and `burst` limit requests per second. Raises SourceError for unusable settings.

    The header of a response must arrive within `idle` seconds, at most `longest_answer`; that includes the credentials,
    the connection and TLS. Then each piece of the body must arrive within `idle` seconds. `keepalive` says when a
    connection without any packets breaks; `contact` records when the server last sent something.
    """

    def __init__(
        self,
        kubeconfig: "str | Kubeconfigs" = "",
        master: str = "",
        qps: float = 5.0,
        burst: int = 10,
        keepalive: Keepalive | None = None,
        contact: Contact | None = None,
        longest_answer: float = _LONGEST_ANSWER,
    ) -> None:
        self.contact = contact or Contact()
        self._longest_answer = longest_answer
        self._bucket = TokenBucket(qps, burst)
        self._keepalive = keepalive or Keepalive()
        self._credentials = CredentialStore(kubeconfig, master)
        self._addresses = ServerAddresses()
        self._transport = Transport(self._credentials.server, self._keepalive, self._addresses)
        self._checked: Credentials | None = None  # the credentials that fit the transport
        self._lock = threading.Lock()

    @property
    def server(self) -> str:
        """The URL of the server without user and password."""
        return without_password(self._credentials.server.url)

    @property
    def verifies_server(self) -> bool:
        """Whether the server's certificate is verified; without TLS, there is none."""
        return self._credentials.server.verify

    def server_addresses(self) -> frozenset[tuple[str, int]]:
        """Return each IP address and port of the server, or of the proxy in front of it, that this client has found.

        Returns at once. A name is resolved for each new connection; all its addresses are kept, at most 64.
        """
        return self._addresses.known

    @contextmanager
    def stream(
        self,
        path: str,
        query: Mapping[str, str | int],
        *,
        resource: str,
        idle: float,
        end: float = math.inf,
        compressible: bool = False,
        verbs: str = "list and watch of",
        meanwhile: Callable[[], None] | None = None,
        accept: str = _JSON,
    ) -> Iterator[Iterator[bytes]]:
        """Send a GET and yield the pieces of the body as they arrive, until `end` on the monotonic clock.

        Messages name the `resource`, and the `verbs` if a permission is missing. If `compressible`, ask for gzip, unless
        the kubeconfig disables it. The pieces are unpacked and have at most 64 KiB. Call `meanwhile` often while waiting.
        Raises Failure unless the status is 200.
        """
        target = f"{path}?{urlencode(query)}"
        request = _ApiRequest("GET", target, resource, verbs, idle, None, compressible, accept)
        with self._opened(partial(self._exchange, request), idle, meanwhile) as response:
            yield response.pieces(idle, end, meanwhile)

    @contextmanager
    def connection(
        self, conversation: Conversation, *, idle: float, end: float = math.inf
    ) -> Iterator[Iterator[bytes]]:
        """Open a connection for another protocol and yield the pieces of the conversation, with limits as for `stream`.

        The first piece must arrive within `idle` seconds, at most a minute. Raises Failure, as the conversation may.
        """
        with self._opened(partial(self._converse, conversation), idle) as response:
            yield response.pieces(idle, end)

    def delete(self, path: str, query: Mapping[str, str | int], *, resource: str, idle: float) -> None:
        """Delete an object. Raises Failure, also if there is no such object."""
        request = _ApiRequest("DELETE", f"{path}?{urlencode(query)}", resource, "delete of", idle)
        with self._opened(partial(self._exchange, request), idle):
            pass

    def post(self, path: str, body: Mapping[str, object], *, resource: str, idle: float) -> bytes:
        """Create an object and return the body of the response, empty if the connection breaks and limited to 1 MiB.

        Raises Failure if the server does not accept the object.
        """
        request = _ApiRequest("POST", path, resource, "new", idle, body)
        with self._opened(partial(self._exchange, request), idle) as response:
            received = b""
            try:
                for piece in response.pieces(idle, time.monotonic() + idle):
                    received += piece
                    if len(received) >= _MAX_CREATED:
                        break
            except Failure:
                return b""
            return received[:_MAX_CREATED]

    def watch(
        self, path: str, query: Mapping[str, str | int], *, resource: str, answer: float, seconds: float
    ) -> "ApiResponse":
        """Send a GET and return its response, which has yet to arrive: within `answer` seconds, at most a minute.

        The response must end `seconds` after that. Close it. Raises Failure.
        """
        target, limit = f"{path}?{urlencode(query)}", seconds + answer
        request = _ApiRequest("GET", target, resource, "list and watch of", limit, accept=ESSENTIAL_JSON)
        return self._start(partial(self._exchange, request), answer, seconds)

    @contextmanager
    def _opened(
        self, exchange: _Exchange, idle: float, meanwhile: Callable[[], None] | None = None
    ) -> Iterator["ApiResponse"]:
        with closing(self._start(exchange, idle, math.inf)) as response:
            while response.opened is None:
                if meanwhile:
                    meanwhile()
                response.read(_TURN if meanwhile else idle)
            yield response

    def _start(self, exchange: _Exchange, answer: float, seconds: float) -> "ApiResponse":
        self._bucket.wait()
        self.contact.requested()
        try:
            attempt = Attempt(partial(self._authenticated, exchange))
        except RuntimeError as error:
            raise Failure(f"the request to {self.server} failed: {error}") from None
        return ApiResponse(attempt, self, min(answer, self._longest_answer), seconds)

    def failed(self, failure: Failure, acknowledged: float) -> None:
        """Record the failure of a request, and when its peer last acknowledged a packet."""
        self.contact.failed(failure, acknowledged)
        if isinstance(failure, Unreachable):
            # Idle connections may be dead too.
            self._transport.drop_idle()

    def _authenticated(self, exchange: _Exchange) -> Generator[bytes, None, None]:
        """Yield the parts of an exchange; turn all exceptions into Failures."""
        try:
            current().missing = "credentials for"
            credentials = self._credentials.get()
            try:
                yield from exchange(self._transport_for(credentials), credentials)
            except Failure as failure:
                if isinstance(failure, failures.Unauthorized):
                    self._credentials.reject(credentials)
                if not failure.server_wide:
                    self.contact.heard()
                raise
        except SourceError as error:
            raise Failure(str(error)) from None
        except Exception as error:
            # The client and its identity providers raise nearly anything.
            raise failures.from_exception(error, self.server) from None

    def _exchange(
        self, request: _ApiRequest, transport: Transport, credentials: Credentials
    ) -> Generator[bytes, None, None]:
        """Yield an empty part for the header of the response, then the pieces of its body."""
        headers = _headers(credentials) | {"Accept": request.accept}
        if request.compressible and credentials.compression:
            headers["Accept-Encoding"] = "gzip"
        body = None
        if request.body:
            headers["Content-Type"] = _JSON
            body = msgspec.json.encode(request.body)
        response = transport.send(request.method, request.target, headers, body, request.idle + _LATER)
        try:
            pieces = content(response)
            if response.status not in (200, 201, 202):
                raise failures.from_response(response, pieces, request.resource, request.verbs)
            self.contact.heard()
            yield b""
            yield from pieces
        finally:
            response.close()
            response.release_conn()

    def _converse(
        self, conversation: Conversation, transport: Transport, credentials: Credentials
    ) -> Generator[bytes, None, None]:
        with closing(transport.connect()) as connection:
            current().missing = "response from"
            pieces = conversation(connection, self.server, _headers(credentials))
            yield next(pieces)
            self.contact.heard()
            yield from pieces

    def _transport_for(self, credentials: Credentials) -> Transport:
        with self._lock:
            if self._checked is not credentials:
                if not self._transport.fits(credentials.server):
                    # Do not reuse connections with an old certificate.
                    self._transport.drop_idle()
                    self._transport = Transport(credentials.server, self._keepalive, self._addresses)
                self._checked = credentials
            return self._transport


class ApiResponse:
    """The response to a request; it may have yet to arrive. Close it."""

    def __init__(self, attempt: Attempt, client: Client, answer: float, seconds: float) -> None:
        self.opened: float | None = None  # when the header arrived, monotonic
        self._attempt, self._client = attempt, client
        self._answer, self._seconds = answer, seconds
        self._end = time.monotonic() + answer  # of the wait for the header, then of the response

    @property
    def acknowledged(self) -> float:
        """When the peer of a connection that has ended acknowledged its last packet, monotonic."""
        return self._attempt.acknowledged

    def read(self, seconds: float) -> bytes | None:
        """Return the next piece; it is empty if none arrives in time or only the header does, None at the end.

        Raises Failure.
        """
        try:
            piece = self._attempt.take(min(seconds, self._end - time.monotonic()))
        except OutOfTime as missing:
            if time.monotonic() < self._end:
                return b""
            raise self._failed(self._unanswered(str(missing))) from None
        except Failure as failure:
            raise self._failed(failure) from None
        if self.opened is None:
            self.opened = time.monotonic()
            self._end = self.opened + self._seconds
            self._client.contact.opened(self._attempt)
        else:
            self._client.contact.heard()
        return piece

    def pieces(self, idle: float, end: float, meanwhile: Callable[[], None] | None = None) -> Iterator[bytes]:
        """Yield the pieces, each of which must arrive within `idle` seconds, and all until `end`. Raises Failure."""
        silent = time.monotonic() + idle  # when to give up without another piece
        while True:
            if meanwhile:
                meanwhile()
            left = min(silent, end) - time.monotonic()
            if left <= 0:
                break
            piece = self.read(min(left, _TURN) if meanwhile else left)
            if piece is None:
                return
            if piece:
                yield piece
                silent = time.monotonic() + idle
        if end <= silent:
            raise self._failed(Failure("the API server's response takes too long", persistent=True))
        reason = f"no data from {self._client.server} for too long"
        raise self._failed(Unreachable(reason, persistent=True))

    def close(self) -> None:
        """End the request."""
        self._client.contact.closed(self._attempt)
        self._attempt.cancel()

    def _unanswered(self, missing: str) -> Failure:
        if self.opened is not None:
            return Unreachable("the API server did not end a watch in time", persistent=True)
        reason = f"no {missing} {self._client.server} within {self._answer:.0f} s"
        if missing == "credentials for":
            return Failure(reason)
        return Unreachable(reason, persistent=missing == "response from")

    def _failed(self, failure: Failure) -> Failure:
        self._client.failed(failure, self._attempt.acknowledged)
        return failure


def _headers(credentials: Credentials) -> HTTPHeaderDict:
    headers = credentials.headers()
    headers["User-Agent"] = f"pykubeproxy/{__version__}"
    return headers


class TokenBucket:
    """Limit requests: `burst` at once, then `qps` per second; no limit if `qps` is 0 or less."""

    def __init__(self, qps: float, burst: int) -> None:
        self._interval = 1 / qps if qps > 0 else 0.0
        self._slack = self._interval * max(burst - 1, 0)
        self._lock = threading.Lock()
        self._next = time.monotonic() - self._slack

    def wait(self) -> None:
        """Block until the next request is allowed."""
        with self._lock:
            now = time.monotonic()
            self._next = max(self._next, now - self._slack)
            pause = self._next - now
            self._next += self._interval
        if pause > 0:
            time.sleep(pause)
