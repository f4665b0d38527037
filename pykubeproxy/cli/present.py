"""What commands have in common that look at the objects there are now, in manifests or on an API server."""

import socket
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import click

from pykubeproxy.cli.manifests import read_objects
from pykubeproxy.config import Config
from pykubeproxy.inspect.wanted import Wanted
from pykubeproxy.objects import Listed, Node
from pykubeproxy.services.cluster import Cluster

# The Kubernetes client comes along with them: half a second that those who ask an agent need not wait.
if TYPE_CHECKING:
    from pykubeproxy.sources import Client

filename_option = click.option(
    "-f",
    "--filename",
    metavar="PATH",
    help='Take the objects from a YAML or JSON file, a folder, or "-" instead of an API server.',
)


def host_name() -> str:
    """This machine's name as nodes are named."""
    return socket.gethostname().lower()


def all_objects(config: Config) -> tuple[Cluster, Node]:
    """All that an API server has for this node's proxy, and this node. Raises ClickException."""
    from pykubeproxy.sources import api_watches

    def ask(client: "Client", name: str) -> Iterable[Listed]:
        return (listed for watch in api_watches(client, name) for listed in watch.once())

    return _asked(config, ask)


def objects_of(
    wanted: Wanted, filename: str | None, config: Config, nodes: Iterable[str]
) -> tuple[Cluster, Node]:
    """The objects that concern a Service, or more than those, and this node; `nodes` are known to the Cluster too.

    Raises ClickException.
    """
    if filename is not None:
        return read_objects(filename, config)
    from pykubeproxy.sources import service_objects

    return _asked(
        config, lambda client, name: service_objects(client, wanted.name, wanted.namespace, (name, *nodes))
    )


def _asked(config: Config, ask: Callable[["Client", str], Iterable[Listed]]) -> tuple[Cluster, Node]:
    from pykubeproxy.cli import logs
    from pykubeproxy.sources import Client, SourceError

    # Sources log what they pass over; that is not to get among the output.
    logs.set_up(config.logging.format)
    to, name = config.client, config.hostname_override or host_name()
    cluster = Cluster()
    try:
        for listed in ask(Client(to.kubeconfig, to.master, to.qps, to.burst), name):
            cluster.apply(listed)
    except SourceError as error:
        raise click.ClickException(f"{error}; with -f the objects are taken from files") from None
    node = cluster.node(name)
    if node is None:
        click.echo(f"The API server has no Node {name}; --hostname-override names another.", err=True)
    return cluster, node or Node(name)
