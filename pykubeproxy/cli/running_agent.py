"""Ask the agent on this node for its objects, its configuration and its backend."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import click

from pykubeproxy.agent.observe import object_documents
from pykubeproxy.agent.observe.object_documents import Objects
from pykubeproxy.cli.client import DEFAULT_URL, Busy, NoAgent, NoAnswer, fetch
from pykubeproxy.cli.help import SOURCE, option
from pykubeproxy.cli.terminal import echo_line
from pykubeproxy.config import Config, ConfigError, load

# How often to ask an agent that is busy with a sync. It answers each time after 2 s.
_TRIES = 5

_Command = TypeVar("_Command", bound=Callable[..., Any])


def url_option(unless: str) -> Callable[[_Command], _Command]:
    """Add --url, the address of the agent to ask; `unless` names the options that rule out the default."""
    help_ = f"Metrics address of the agent to ask, on loopback.  [default: {DEFAULT_URL} without {unless}]"
    return option("--url", metavar="URL", help=help_, group=SOURCE)


class AgentState(NamedTuple):
    """The objects and the configuration of an agent, and its address."""

    objects: Objects
    config: Config
    url: str


class UnusableAnswer(click.ClickException):
    """An agent answers, but not with its state."""


def ask_agent(
    url: str | None, flags: Mapping[str, object], filename: str | None, **query: str
) -> AgentState | None:
    """Return the state of the agent on this node. `query` selects its Services, as for /servicez.

    Return None if -f or flags say where to read. Without an agent, print that to standard error and return None. Raises
    ClickException if there is none at `url`, or it gives no usable answer.
    """
    check_url(url, flags, filename)
    if filename is not None or flags:
        return None
    try:
        return agent_state(url, **query)
    except NoAgent as error:
        echo_line(f"Reading from the API server, with default settings: {error}.", err=True)
        return None


def check_url(url: str | None, flags: Mapping[str, object], filename: str | None = None) -> None:
    """Raise UsageError if both --url and others say where to read."""
    if url is not None and (filename is not None or flags):
        raise click.UsageError("--url cannot be combined with -f or flags of `run`; remove them")


def agent_state(url: str | None, **query: str) -> AgentState:
    """Return the state of the agent at `url`, by default that on this node.

    Raises NoAgent if there is none on this node. Raises ClickException if there is none at `url`, or it gives no usable
    answer.
    """
    address = url or DEFAULT_URL
    try:
        answer = object_documents.decode(fetch_patiently(address, "/servicez", **query))
        return AgentState(answer.objects, load(answer.config.encode(), {}).config, address)
    except NoAnswer as error:
        raise UnusableAnswer(f"{error}; retry, or pass --config instead of asking the agent") from None
    except NoAgent as error:
        if url is None:
            raise
        raise click.ClickException(f"{error}; correct --url, or use -f or flags of `run` instead") from None
    except (ValueError, ConfigError) as error:
        raise UnusableAnswer(
            f"{address} is not an agent of this pykubeproxy version: {error}; pass --config instead of asking the agent"
        ) from None


def agent_backend() -> str:
    """Return the backend that the agent on this node writes; "" if there is none."""
    from pykubeproxy.agent.observe import status  # most commands ask for objects only

    try:
        return status.decode(fetch(DEFAULT_URL, "/statusz", limit="0")).backend
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
