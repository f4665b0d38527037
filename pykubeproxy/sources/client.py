"""One API server: single requests, with credentials that renew and no more of them than allowed."""

import threading
import time
from collections.abc import Callable, Mapping
from urllib.parse import urlencode

import urllib3
from kubernetes.client.api_client import ApiClient

from pykubeproxy import __version__
from pykubeproxy.sources import credentials, failures
from pykubeproxy.sources.watch import SourceError

# Credentials in files are read again when they are older than this, in seconds; kubelet renews a token minutes
# before it ends.
_FRESH = 60.0
_CONNECT_TIMEOUT = 5.0
_LONGEST_ANSWER = 1 << 20  # bytes of what is answered to a new object


class Client:
    """Asks one API server. Any thread may use it.

    `kubeconfig` is a path and `master` a URL, as --kubeconfig and --master are; with neither it is the service account
    of the pod. `qps` and `burst` limit the requests a second. Raises SourceError if these lead to no server.
    """

    def __init__(self, kubeconfig: str = "", master: str = "", qps: float = 5.0, burst: int = 10) -> None:
        self._where = (kubeconfig, master)
        self._plugin = credentials.uses_plugin(kubeconfig)
        self._pace = TokenBucket(qps, burst)
        self._lock = threading.Lock()
        self._renew()

    @property
    def server(self) -> str:
        """The URL of the server, without user and password."""
        return failures.without_password(str(self._api.configuration.host))

    def get(
        self, path: str, query: Mapping[str, str | int], *, asked: str, idle: float
    ) -> urllib3.BaseHTTPResponse:
        """The answer to a GET, its body not yet read.

        `idle` is how long in seconds the server may be silent, `asked` names the objects in messages. Raises Failure
        for anything but status 200.
        """
        response = self._ask("GET", f"{path}?{urlencode(query)}", None, idle)
        if response.status == 200:
            return response
        raise self._failure(response, asked, "list and watch of")

    def post(self, path: str, body: Mapping[str, object], *, asked: str, idle: float) -> bytes:
        """Create an object, given as it is to be encoded in JSON, and return the body of the answer.

        It is empty if it breaks off, and cut off if it is too long: done is done. Raises Failure unless the server does
        it or accepts to.
        """
        response = self._ask("POST", path, body, idle)
        if response.status not in (200, 201, 202):
            raise self._failure(response, asked, "new")
        try:
            return response.read(_LONGEST_ANSWER, decode_content=False)
        except (urllib3.exceptions.HTTPError, OSError):
            return b""
        finally:
            response.close()
            response.release_conn()

    def _ask(
        self, method: str, target: str, body: Mapping[str, object] | None, idle: float
    ) -> urllib3.BaseHTTPResponse:
        server = self.server
        headers = {"Accept": "application/json"} | ({"Content-Type": "application/json"} if body else {})
        try:
            self._pace.wait()
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
            # Whatever the client, its credential plugins or the network raise, this request has failed.
            raise failures.of_exception(error, server) from None
        return response

    def _failure(self, response: urllib3.BaseHTTPResponse, asked: str, verbs: str) -> failures.Failure:
        failure = failures.of_response(response, asked, verbs)
        response.close()
        if isinstance(failure, failures.Unauthorized):
            self._rejected = True
        return failure

    def _stale(self) -> bool:
        # A plugin's token is renewed by the kubernetes client when it ends; its certificates are not, so a 401 tells.
        return self._rejected or (not self._plugin and time.monotonic() - self._loaded >= _FRESH)

    def _renew(self) -> None:
        # A new ApiClient has a new pool: a connection of an old certificate is not used again.
        api = ApiClient(credentials.load(*self._where))
        api.user_agent = f"pykubeproxy/{__version__}"
        self._api, self._loaded, self._rejected = api, time.monotonic(), False


class TokenBucket:
    """A token bucket: `burst` requests at once, `qps` a second after that; no limit if `qps` is not above 0."""

    def __init__(
        self,
        qps: float,
        burst: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._interval = 1 / qps if qps > 0 else 0.0
        self._slack = self._interval * max(burst - 1, 0)
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._next = clock() - self._slack

    def wait(self) -> None:
        """Block until one more request is allowed."""
        with self._lock:
            now = self._clock()
            self._next = max(self._next, now - self._slack)
            pause = self._next - now
            self._next += self._interval
        if pause > 0:
            self._sleep(pause)
