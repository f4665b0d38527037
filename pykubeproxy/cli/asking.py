"""Asking the agent of this node, at its metrics address."""

import time
from urllib.parse import quote, urlsplit

import click
import urllib3

DEFAULT_URL = "http://127.0.0.1:10249"
_TIMEOUT = urllib3.Timeout(connect=3, read=10)  # seconds
# What is read at most of what answers there, in bytes, and for how long, in seconds: it may be anything.
_LONGEST = 64 << 20
_PATIENCE = 30.0


class NoAnswer(Exception):
    """No agent answers at an address, or not as one does; `str()` says which and why."""


def ask(url: str, page: str, **query: str) -> bytes:
    """What the agent answers for a page such as "/statusz". Raises NoAnswer, and UsageError for what is no address."""
    address = f"{_root(url)}{page}"
    told = "&".join(f"{name}={quote(value, safe='/')}" for name, value in query.items())
    try:
        with urllib3.PoolManager() as pool:
            answer = pool.request(
                "GET",
                f"{address}?{told}" if told else address,
                headers={"Accept": "application/json"},
                timeout=_TIMEOUT,
                retries=False,
                preload_content=False,
            )
            if answer.status != 200:
                raise NoAnswer(f"{address} answers with status {answer.status}")
            return _body(answer)
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise NoAnswer(f"no agent answers at {url}: {_reason(error)}") from None


def _body(answer: urllib3.BaseHTTPResponse) -> bytes:
    """The body of an answer, as it was sent. Raises OSError, and what urllib3 raises, if it does not come to an end."""
    end, body = time.monotonic() + _PATIENCE, bytearray()
    while piece := answer.read1(1 << 16, decode_content=False):
        body += piece
        if len(body) > _LONGEST or time.monotonic() > end:
            raise OSError("the answer has no end")
    return bytes(body)


def _root(url: str) -> str:
    """An address without a path. Raises UsageError."""
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return f"{parts.scheme}://{parts.netloc}"
    except ValueError:
        pass
    raise click.UsageError(f'"{url}" is not of the form http://address:port')


def _reason(error: Exception) -> str:
    """The innermost reason, in the system's words where it has some."""
    while (inner := error.__cause__ or error.__context__) and isinstance(inner, Exception):
        error = inner
    return (error.strerror if isinstance(error, OSError) else "") or str(error) or type(error).__name__
