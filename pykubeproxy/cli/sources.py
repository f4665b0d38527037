"""Where a command on a node reads rules and objects: this node and its agent, files, a bundle, or an API server."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from pykubeproxy.cli.help import SOURCE, option
from pykubeproxy.cli.terminal import click_errors, echo_line
from pykubeproxy.inspect.limit import TooManyRules
from pykubeproxy.inspect.node import NodeSource, ReadError
from pykubeproxy.inspect.targets import ServiceFilter, parse_filter
from pykubeproxy.kernel import KernelError, NotPermitted

# Most commands read live rules, so only the functions that need others import the modules for them.
if TYPE_CHECKING:
    from pykubeproxy.bundle.read import Bundle
    from pykubeproxy.config import Config
    from pykubeproxy.nodes.agent import AgentState
    from pykubeproxy.nodes.objects import KnownObjects
    from pykubeproxy.sources import Client
    from pykubeproxy.sources.credentials import Kubeconfigs

Backend = Literal["auto", "nft", "legacy"]
_Command = TypeVar("_Command", bound=Callable[..., Any])

# The metrics address of an agent on this node.
AGENT_URL = "http://127.0.0.1:10249"
INFERRED = (
    "The bundle does not have the configuration of the proxy, so its settings are inferred from its rules."
)
# Seconds without an answer of an API server after which a command says so.
_SILENCE = 4.0
# Requests per second, as for kubectl.
_QPS, _BURST = 50.0, 300
bundle_option = option(
    "--bundle",
    "bundle_file",
    type=click.Path(allow_dash=True),
    metavar="FILE",
    help='Read the node from a file of `pykubeproxy bundle` or "-" instead of this node; this needs no root.',
    group=SOURCE,
)


def url_option(unless: str) -> Callable[[_Command], _Command]:
    """Add --url, the address of the agent to ask; `unless` names the options that rule out the default."""
    help_ = f"Metrics address of the agent to ask, on loopback.  [default: {AGENT_URL} without {unless}]"
    return option("--url", metavar="URL", help=help_, group=SOURCE)


def service_filter(service: str, namespace: str) -> ServiceFilter:
    """Parse an argument of the form [NAMESPACE/]NAME[:PORT]. Raises UsageError."""
    try:
        return parse_filter(service, namespace)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


@contextmanager
def read_errors() -> Iterator[None]:
    """Raise errors of sources as ClickException. Works as a decorator too."""
    with click_errors(ReadError, TooManyRules, KernelError):
        try:
            yield
        except NotPermitted:
            command = click.get_current_context().command_path
            raise ReadError(
                f"only root with CAP_NET_ADMIN can read the rules of this node: sudo {command}, or use --rules or --bundle"
            ) from None


def opened(path: str | None) -> "Bundle | None":
    """Read the bundle at a path, with "-" from standard input; None for no path. Raises ReadError."""
    if path is None:
        return None
    from pykubeproxy.nodes.saved import open_bundle

    return open_bundle(path)


def node_source(
    files: Sequence[str], bundle: "Bundle | None", backend: Backend, addresses: tuple[str, ...] = ()
) -> NodeSource:
    """Return the rules in files or in a bundle, or without both the live rules. Raises ReadError, UsageError."""
    if files and bundle:
        raise click.UsageError("--bundle cannot be combined with --rules; remove one of them")
    if bundle:
        from pykubeproxy.nodes.saved import bundled_node

        return bundled_node(bundle, backend, addresses)
    if files:
        from pykubeproxy.nodes.saved import saved_node

        return saved_node(files, backend, addresses)
    if addresses:
        raise click.UsageError(
            "--node-address has no effect on live rules; remove it, or add --rules or --bundle"
        )
    from pykubeproxy.nodes.live import LiveNode

    return LiveNode(backend)


def check_url(url: str | None, flags: Mapping[str, object], filename: str | None = None) -> None:
    """Raise UsageError if both --url and others say where to read."""
    if url is not None and (filename is not None or flags):
        raise click.UsageError("--url cannot be combined with -f or flags of `run`; remove them")


def ask_agent(
    url: str | None, flags: Mapping[str, object], filename: str | None, **query: str
) -> "AgentState | None":
    """Return the state of the agent on this node. `query` selects its Services, as for /servicez.

    Return None if -f or flags say where to read. Without an agent, print that to standard error and return None. Raises
    ReadError if there is none at `url`, or it gives no usable answer.
    """
    check_url(url, flags, filename)
    if filename is not None or flags:
        return None
    from pykubeproxy.nodes.agent import NoAgent, agent_state

    try:
        return agent_state(url, **query)
    except NoAgent as error:
        echo_line(f"Reading from the API server, with default settings: {error}.", err=True)
        return None


def objects_in_files(path: str, config: "Config", settings: str = "") -> "KnownObjects":
    """Return the objects in a file, a folder or "-", and the node that the configuration names. Raises ReadError."""
    from pykubeproxy.nodes.objects import manifest_objects, read_manifests

    return manifest_objects(path, read_manifests(path), config, settings)


def objects_on_server(
    config: "Config", settings: str = "", query: ServiceFilter | None = None, nodes: Sequence[str] = ()
) -> "KnownObjects":
    """Return the objects of the configured API server. See `server_objects`."""
    from pykubeproxy.cli import logs
    from pykubeproxy.nodes.objects import server_objects

    logs.set_up(config.logging.format)
    return server_objects(config, settings, query, nodes)


def user_client(kubeconfigs: "Kubeconfigs | None", seconds: float) -> "Client":
    """Return a client of the API server that kubectl would ask, with a limit for each answer; warn if it is silent.

    Log lines go to standard error. Raises SourceError.
    """
    from pykubeproxy.cli import logs
    from pykubeproxy.config import LogFormat
    from pykubeproxy.sources import Client

    logs.set_up(LogFormat.TEXT)
    client = Client(kubeconfigs or "", qps=_QPS, burst=_BURST, longest_answer=seconds)
    threading.Thread(target=_warn_of_silence, args=(client, seconds), name="silence", daemon=True).start()
    return client


def _warn_of_silence(client: "Client", longest: float) -> None:
    """Say so once if a request has no answer for some seconds."""
    while client.unanswered() < _SILENCE:
        time.sleep(_SILENCE / 8)
    echo_line(
        f"{client.server} has not answered for {_SILENCE:.0f} s; waiting up to {longest:.0f} s (--request-timeout)",
        err=True,
    )
