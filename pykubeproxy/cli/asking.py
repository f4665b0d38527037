"""Asking the agent of this node, at its metrics address."""

from urllib.parse import quote, urlsplit

import click
import urllib3

DEFAULT_URL = "http://127.0.0.1:10249"
_TIMEOUT = urllib3.Timeout(connect=3, read=10)  # seconds
# What is read at most, in bytes, of what answers there.
_LONGEST = 64 << 20


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
            body: bytes = answer.read(_LONGEST)
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise NoAnswer(f"no agent answers at {url}: {_reason(error)}") from None
    if answer.status != 200:
        raise NoAnswer(f"{address} answers with status {answer.status}")
    return body


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
