"""A client of one API server: requests with time limits, renewed credentials and a rate limit."""

import math
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlencode

import msgspec
import urllib3
from urllib3 import HTTPHeaderDict

from pykubeproxy import __version__
from pykubeproxy.sources import failures
from pykubeproxy.sources.contact import Contact
from pykubeproxy.sources.credential_store import CredentialStore
from pykubeproxy.sources.credentials import Credentials
from pykubeproxy.sources.failures import Failure, ResponseTimeout, TooSlow, Unauthorized, Unreachable
from pykubeproxy.sources.transport import (
    Deadline,
    Keepalive,
    LimitedSocket,
    ServerAddresses,
    Transport,
    arrives,
    content,
)
from pykubeproxy.sources.watch import SourceError
from pykubeproxy.wording import without_password

if TYPE_CHECKING:
    from pykubeproxy.sources.kubeconfig import Kubeconfigs

# The longest time to the header of a response, in seconds: the API server's own limit for a request.
_LONGEST_ANSWER = 60.0
_MAX_CREATED = 1 << 20  # bytes of the response to a new object

_JSON = "application/json"
# Ask for objects without managedFields (kubernetes/kubernetes#139561). API servers that do not know this ignore it.
ESSENTIAL_JSON = f"{_JSON};drop=metadata.managedFields"

# Yield pieces of what a server sends over a new connection; the arguments are the connection, the URL of the server and
# the headers that authenticate a request.
Conversation = Callable[[LimitedSocket, str, HTTPHeaderDict], Generator[bytes, None, None]]


class _ApiRequest(msgspec.Struct, frozen=True):
    """`resource` and `verbs` are for messages, such as "list and watch of" services."""

    method: str
    target: str
    resource: str
    verbs: str
    body: Mapping[str, object] | None = None
    compressible: bool = False
    accept: str = _JSON


class Client:
    """Send requests to one API server; thread-safe.

    `kubeconfig` is a path or several to merge, and `master` a URL, as in --kubeconfig and --master; without both, use the
    pod's service account. `qps` and `burst` limit requests per second. Raises SourceError for unusable settings.

    The header of a response must arrive within `idle` seconds, at most `longest_answer`; that includes the connection and
    TLS, but not a credential plugin. Then each piece of the body must arrive within `idle` seconds. `keepalive` says when
    a connection without any packets breaks; `contact` records when the server last sent something.
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
        self._waiting: float | None = None  # since when a request has had no answer
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
        accept: str = _JSON,
    ) -> Iterator[Iterator[bytes]]:
        """Send a GET and yield the pieces of the body as they arrive, until `end` on the monotonic clock.

        Messages name the `resource`, and the `verbs` if a permission is missing. If `compressible`, ask for gzip, unless
        the kubeconfig disables it. The pieces are unpacked and have at most 64 KiB. Raises Failure unless the status is
        200.
        """
        target = f"{path}?{urlencode(query)}"
        request = _ApiRequest("GET", target, resource, verbs, None, compressible, accept)
        with self._sent(request, idle) as response:
            yield response.pieces(idle, end)

    @contextmanager
    def connection(
        self, conversation: Conversation, *, idle: float, end: float = math.inf
    ) -> Iterator[Iterator[bytes]]:
        """Open a connection for another protocol and yield the pieces of the conversation, with limits as for `stream`.

        The first piece must arrive within `idle` seconds, at most a minute. Raises Failure, as the conversation may.
        """
        with self._failing():
            credentials = self._authenticated()
            deadline = self._deadline(idle)
            connection = self._transport_for(credentials).connect(deadline)
        with closing(connection):
            deadline.expect("response from")
            pieces = conversation(connection, self.server, _headers(credentials))
            with self._failing():
                next(pieces)
            self._answered()
            yield ApiResponse(self, pieces, deadline).pieces(idle, end)

    @contextmanager
    def watch(
        self, path: str, query: Mapping[str, str | int], *, resource: str, answer: float, seconds: float
    ) -> Iterator["ApiResponse"]:
        """Send a GET and yield its response, whose header must arrive within `answer` seconds.

        The server must end it within `seconds`. Raises Failure.
        """
        target = f"{path}?{urlencode(query)}"
        request = _ApiRequest("GET", target, resource, "list and watch of", accept=ESSENTIAL_JSON)
        with self._sent(request, answer) as response:
            response.end, response.answer = time.monotonic() + seconds, answer
            yield response

    def check(self, seconds: float) -> None:
        """Ask the server for its version, which it must send within some seconds. Raises Failure without an answer."""
        try:
            with self.stream("/version", {}, resource="its version", verbs="get of", idle=seconds) as body:
                for _ in body:
                    pass
        except Failure as failure:
            if not failure.answered:
                raise
            self.contact.answered()

    def delete(self, path: str, query: Mapping[str, str | int], *, resource: str, idle: float) -> None:
        """Delete an object. Raises Failure, also if there is no such object."""
        request = _ApiRequest("DELETE", f"{path}?{urlencode(query)}", resource, "delete of")
        with self._sent(request, idle):
            pass

    def post(self, path: str, body: Mapping[str, object], *, resource: str, idle: float) -> bytes:
        """Create an object and return the body of the response, empty if the connection breaks and limited to 1 MiB.

        Raises Failure if the server does not accept the object.
        """
        request = _ApiRequest("POST", path, resource, "new", body)
        with self._sent(request, idle) as response:
            received = b""
            try:
                for piece in response.pieces(idle, time.monotonic() + idle):
                    received += piece
                    if len(received) >= _MAX_CREATED:
                        break
            except Failure:
                return b""
            return received[:_MAX_CREATED]

    def unanswered(self) -> float:
        """Return for how many seconds a request has had no answer."""
        waiting = self._waiting  # read once: other threads replace it
        return 0.0 if waiting is None else time.monotonic() - waiting

    @contextmanager
    def _sent(self, request: _ApiRequest, answer: float) -> Iterator["ApiResponse"]:
        """Send a request and yield its response. Raises Failure, also for a status that is no success."""
        with self._failing():
            credentials = self._authenticated()
            headers = _headers(credentials) | {"Accept": request.accept}
            if request.compressible and credentials.compression:
                headers["Accept-Encoding"] = "gzip"
            body = None
            if request.body:
                headers["Content-Type"] = _JSON
                body = msgspec.json.encode(request.body)
            deadline = self._deadline(answer)
            response = self._transport_for(credentials).send(
                request.method, request.target, headers, body, deadline
            )
        try:
            pieces = content(response)
            with self._failing():
                if response.status not in (200, 201, 202):
                    failure = failures.from_response(response, pieces, request.resource, request.verbs)
                    if isinstance(failure, Unauthorized):
                        self._credentials.reject(credentials)
                    if not failure.server_wide:
                        self._answered()
                    raise failure
            self._answered()
            yield ApiResponse(self, pieces, deadline, response)
        finally:
            response.close()
            response.release_conn()

    def _authenticated(self) -> Credentials:
        """Wait until the next request is allowed, and return credentials. Raises SourceError."""
        self._bucket.wait()
        credentials = self._credentials.get()
        if self._waiting is None:
            self._waiting = time.monotonic()
        return credentials

    def _deadline(self, answer: float) -> Deadline:
        return Deadline(self.server, min(answer, self._longest_answer))

    def _answered(self) -> None:
        self._waiting = None
        self.contact.answered()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Turn all exceptions into Failures."""
        try:
            yield
        except SourceError as error:
            raise Failure(str(error)) from None
        except Exception as error:
            # The client and its identity providers raise nearly anything.
            failure = failures.from_exception(error, self.server)
            if isinstance(failure, Unreachable):
                # Idle connections may be dead too.
                self._transport.drop_idle()
            raise failure from None

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
    """The body of a response."""

    def __init__(
        self,
        client: Client,
        body: Iterator[bytes],
        deadline: Deadline,
        response: urllib3.BaseHTTPResponse | None = None,
    ) -> None:
        self.end, self.answer = math.inf, 0.0  # of a watch
        self._client, self._body, self._deadline, self._response = client, body, deadline, response

    def read(self, seconds: float) -> bytes | None:
        """Return the next piece of a watch, b"" if none arrives within `seconds`, None at the end. Raises Failure."""
        assert self._response
        with self._client._failing():
            self._deadline.end = self.end
            self._deadline.failure = ResponseTimeout("the API server did not end a watch in time")
            self._deadline.left()
            if not arrives(self._response, seconds):
                return b""
            # The rest of what has begun to arrive.
            self._deadline.end = min(self.end, time.monotonic() + self.answer)
            self._deadline.failure = self._silent()
            return self._next()

    def pieces(self, idle: float, end: float) -> Iterator[bytes]:
        """Yield the pieces, each of which must arrive within `idle` seconds, and all until `end`. Raises Failure."""
        while True:
            silent = time.monotonic() + idle
            self._deadline.end = min(silent, end)
            self._deadline.failure = (
                TooSlow("the API server's response takes too long") if end <= silent else self._silent()
            )
            with self._client._failing():
                self._deadline.left()
                piece = self._next()
            if piece is None:
                return
            yield piece

    def _next(self) -> bytes | None:
        piece = next(self._body, None)
        if piece is not None:
            self._client.contact.heard()
        return piece

    def _silent(self) -> Failure:
        return ResponseTimeout(f"no data from {self._client.server} for too long")


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
