"""A client of one API server: single requests, renewed credentials and a rate limit."""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import urlencode

import urllib3
from kubernetes.client.api_client import ApiClient

from pykubeproxy import __version__
from pykubeproxy.sources import credentials, failures
from pykubeproxy.sources.watch import SourceError

# Read credentials from files again after this many seconds: the kubelet renews a token minutes before it expires.
_FRESH = 60.0
_CONNECT_TIMEOUT = 5.0
_MAX_CREATED = 1 << 20  # bytes of the response to a new object
_PIECE = 1 << 16


class Client:
    """Send requests to one API server; thread-safe.

    `kubeconfig` is a path and `master` a URL, as in --kubeconfig and --master; without both, use the pod's service
    account. `qps` and `burst` limit requests per second. Raises SourceError for unusable settings.
    """

    def __init__(self, kubeconfig: str = "", master: str = "", qps: float = 5.0, burst: int = 10) -> None:
        self._settings = (kubeconfig, master)
        self._plugin = credentials.uses_plugin(kubeconfig)
        self._bucket = TokenBucket(qps, burst)
        self._lock = threading.Lock()
        self._renew()

    @property
    def server(self) -> str:
        """The URL of the server without user and password."""
        return failures.without_password(str(self._api.configuration.host))

    def get(
        self, path: str, query: Mapping[str, str | int], *, resource: str, idle: float
    ) -> urllib3.BaseHTTPResponse:
        """Send a GET and return the response, its body not yet read.

        Times out after `idle` seconds without data. Messages name the `resource`. Raises Failure unless the status is 200.
        """
        response = self._send("GET", f"{path}?{urlencode(query)}", None, idle)
        if response.status == 200:
            return response
        raise self._failure(response, resource, "list and watch of")

    @contextmanager
    def stream(
        self, path: str, query: Mapping[str, str | int], *, resource: str, idle: float
    ) -> Iterator[Iterator[bytes]]:
        """Send a GET, as `get` does, and yield the pieces of the body as they arrive."""
        response = self.get(path, query, resource=resource, idle=idle)
        try:
            yield _pieces(response)
        finally:
            response.close()
            response.release_conn()

    def post(self, path: str, body: Mapping[str, object], *, resource: str, idle: float) -> bytes:
        """Create an object and return the body of the response, empty if the connection breaks and limited to 1 MiB.

        Raises Failure if the server does not accept the object.
        """
        response = self._send("POST", path, body, idle)
        if response.status not in (200, 201, 202):
            raise self._failure(response, resource, "new")
        try:
            return response.read(_MAX_CREATED, decode_content=False)
        except (urllib3.exceptions.HTTPError, OSError):
            return b""
        finally:
            response.close()
            response.release_conn()

    def _send(
        self, method: str, target: str, body: Mapping[str, object] | None, idle: float
    ) -> urllib3.BaseHTTPResponse:
        server = self.server
        headers = {"Accept": "application/json"} | ({"Content-Type": "application/json"} if body else {})
        try:
            self._bucket.wait()
            with self._lock:
                if self._stale():
                    self._renew()
                api, server = self._api, self.server
                method, url, headers, content, *_ = api.param_serialize(
                    method, target, header_params=headers, body=body, auth_settings=["BearerToken"]
                )
            response: urllib3.BaseHTTPResponse = api.call_api(
                method, url, headers, content, _request_timeout=(_CONNECT_TIMEOUT, idle)
            ).response
        except SourceError as error:
            raise failures.Failure(str(error)) from None
        except Exception as error:
            # The client and its credential plugins raise nearly anything.
            raise failures.from_exception(error, server) from None
        return response

    def _failure(self, response: urllib3.BaseHTTPResponse, resource: str, verbs: str) -> failures.Failure:
        failure = failures.from_response(response, resource, verbs)
        response.close()
        if isinstance(failure, failures.Unauthorized):
            self._rejected = True
        return failure

    def _stale(self) -> bool:
        # The kubernetes client renews a plugin's token; only a 401 shows that its certificate has expired.
        return self._rejected or (not self._plugin and time.monotonic() - self._loaded >= _FRESH)

    def _renew(self) -> None:
        # A new ApiClient has a new pool, so connections with an old certificate are not reused.
        api = ApiClient(credentials.load(*self._settings))
        api.user_agent = f"pykubeproxy/{__version__}"
        self._api, self._loaded, self._rejected = api, time.monotonic(), False


def _pieces(response: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
    try:
        # Do not decode: a few bytes of compressed data may expand to gigabytes.
        while data := response.read1(_PIECE, decode_content=False):
            yield data
    except Exception as error:
        raise failures.from_exception(error, "the API server") from None


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
