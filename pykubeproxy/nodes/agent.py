"""The agent on this node: its pages at the metrics address, and its objects, configuration and backend."""

import time
from typing import NamedTuple
from urllib.parse import quote, urlsplit

import urllib3

from pykubeproxy.config import Config, ConfigError, load
from pykubeproxy.inspect.node import ReadError
from pykubeproxy.pages import servicez
from pykubeproxy.pages.servicez import NodeObjects

DEFAULT_URL = "http://127.0.0.1:10249"
_LOOPBACK_ONLY = "on the agent's node, use --url with 127.0.0.1: an agent answers this over loopback only"
_TIMEOUT = urllib3.Timeout(connect=3, read=10)  # seconds
# Limits for a response, in bytes and seconds: any server may listen at the address.
_MAX_BYTES = 64 << 20
_MAX_SECONDS = 30.0
# How often to ask an agent that is busy with a sync. It answers each time after 2 s.
_TRIES = 5


class NoAgent(Exception):
    """No agent answers at an address; str() says why."""


class NoAnswer(NoAgent):
    """A server accepts the connection, but sends no complete answer in time."""


class Busy(NoAnswer):
    """An agent cannot answer now, because a sync is running."""


class UnusableAnswer(ReadError):
    """An agent answers, but not with its state."""


class AgentState(NamedTuple):
    """The objects and the configuration of an agent, and its address."""

    objects: NodeObjects
    config: Config
    url: str


def agent_state(url: str | None, **query: str) -> AgentState:
    """Return the state of the agent at `url`, by default that on this node; `query` selects Services, as for /servicez.

    Raises NoAgent if there is none on this node; ReadError if there is none at `url`, or it gives no usable answer.
    """
    address = url or DEFAULT_URL
    try:
        answer = servicez.decode(fetch_patiently(address, "/servicez", **query))
        return AgentState(answer.objects, load(answer.config.encode(), {}).config, address)
    except NoAnswer as error:
        raise UnusableAnswer(f"{error}; retry, or pass --config instead of asking the agent") from None
    except NoAgent as error:
        if url is None:
            raise
        raise ReadError(f"{error}; correct --url, or use -f or flags of `run` instead") from None
    except (ValueError, ConfigError) as error:
        raise UnusableAnswer(
            f"{address} is not an agent of this pykubeproxy version: {error}; pass --config instead of asking the agent"
        ) from None


def agent_backend() -> str:
    """Return the backend that the agent on this node writes; "" if there is none."""
    from pykubeproxy.pages import statusz  # most commands ask for objects only

    try:
        return statusz.decode(fetch(DEFAULT_URL, "/statusz", limit="0")).backend
    except (NoAgent, ValueError):
        return ""


def fetch_patiently(address: str, page: str, **query: str) -> bytes:
    """Return the agent's response for a page; retry while it is busy. Raises NoAgent."""
    for _ in range(_TRIES - 1):
        try:
            return fetch(address, page, **query)
        except Busy:
            continue
    return fetch(address, page, **query)


def fetch(url: str, page: str, **query: str) -> bytes:
    """Return the agent's response for a page such as "/statusz". Raises NoAgent, or ReadError for an invalid URL."""
    address = f"{_root(url)}{page}"
    fields = "&".join(f"{name}={quote(value, safe='/')}" for name, value in query.items())
    try:
        with urllib3.PoolManager() as pool:
            response = pool.request(
                "GET",
                f"{address}?{fields}" if fields else address,
                headers={"Accept": "application/json"},
                timeout=_TIMEOUT,
                retries=False,
                preload_content=False,
            )
            if response.status == 503:
                raise Busy(f"{address} returned status 503")
            if response.status != 200:
                raise NoAgent(f"{address} returned status {response.status}{_refused(url, response.status)}")
            try:
                return _body(response)
            except (urllib3.exceptions.HTTPError, OSError) as error:
                raise NoAnswer(f"cannot read the answer of {url}: {_reason(error)}") from None
    except urllib3.exceptions.ReadTimeoutError as error:
        raise NoAnswer(f"no answer from an agent at {url}: {_reason(error)}") from None
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise NoAgent(f"cannot reach an agent at {url}: {_reason(error)}") from None


def _body(response: urllib3.BaseHTTPResponse) -> bytes:
    """Return the undecoded body. Raises OSError if it exceeds the limits."""
    deadline, body = time.monotonic() + _MAX_SECONDS, bytearray()
    while chunk := response.read1(1 << 16, decode_content=False):
        body += chunk
        if len(body) > _MAX_BYTES or time.monotonic() > deadline:
            raise OSError("the response exceeds 64 MiB or 30 s")
    return bytes(body)


def _root(url: str) -> str:
    """Return a URL without its path. Raises ReadError if it is invalid."""
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return f"{parts.scheme}://{parts.netloc}"
    except ValueError:
        pass
    raise ReadError(f'"{url}" is not a URL such as http://address:port')


def _refused(url: str, status: int) -> str:
    """Say why a server at a URL refuses a page of the agent, "" if that is not known."""
    if status not in (404, 406):
        return ""
    if urlsplit(url).hostname in ("127.0.0.1", "::1", "localhost"):
        return "; another program answers there, such as kube-proxy"
    return f"; {_LOOPBACK_ONLY}"


def _reason(error: Exception) -> str:
    """Return the innermost cause, as the system's message if there is one."""
    while (inner := error.__cause__ or error.__context__) and isinstance(inner, Exception):
        error = inner
    return (error.strerror if isinstance(error, OSError) else "") or str(error) or type(error).__name__
