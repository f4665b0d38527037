"""Where commands read from: objects in files or on an API server, and the tables of one backend."""

import socket
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal, NamedTuple

import click

from pykubeproxy import kernel
from pykubeproxy.cli.terminal import click_errors, echo_line
from pykubeproxy.config import Config
from pykubeproxy.inspect.filter import ServiceFilter, parse_filter
from pykubeproxy.objects import Family, Kind, Listed, Node
from pykubeproxy.rules.skeleton import NAT_SERVICES
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.ports import ApiServers

# Only the functions that need these import them, because that takes long.
if TYPE_CHECKING:
    from pykubeproxy.agent.observe.object_documents import Objects
    from pykubeproxy.rules.context import RuleContext
    from pykubeproxy.sources import Client
    from pykubeproxy.sources.manifests import Manifests


class Source(NamedTuple):
    """Objects, this node, and the addresses at which the reader reached an API server; none for files."""

    cluster: Cluster
    node: Node
    api_servers: ApiServers = frozenset()


def service_filter(service: str, namespace: str) -> ServiceFilter:
    """Parse an argument of the form [NAMESPACE/]NAME[:PORT]. Raises UsageError."""
    try:
        return parse_filter(service, namespace)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def host_name() -> str:
    """Return the name of this machine, spelled like a Node name."""
    return socket.gethostname().lower()


def read_objects(path: str, config: Config) -> tuple[Cluster, Node]:
    """Read objects from a file, a folder or "-"; return them with the node that the configuration names.

    Print skipped objects to standard error. Raises ClickException.
    """
    return objects_in(read_manifests(path), config)


def read_manifests(path: str) -> "Manifests":
    """Read objects from a file, a folder or "-", and print skipped ones to standard error. Raises ClickException."""
    from pykubeproxy.sources import SourceError
    from pykubeproxy.sources.manifests import load_manifests

    with click_errors(SourceError):
        manifests = load_manifests(path)
    for line in manifests.warnings:
        echo_line(line, err=True)
    if not manifests.objects and not manifests.pods:
        name = "standard input" if path == "-" else path
        raise click.ClickException(
            f"{name} has no Services, EndpointSlices or Nodes; save them with"
            " `kubectl get services,endpointslices,nodes -A -o yaml`"
        )
    return manifests


def objects_in(manifests: "Manifests", config: Config) -> tuple[Cluster, Node]:
    """Return the objects, with the node that the configuration names. Raises ClickException."""
    cluster = Cluster()
    for event in manifests.listed():
        cluster.apply(event)
    return cluster, _node(config, [it for it in manifests.objects if isinstance(it, Node)])


def _node(config: Config, nodes: list[Node]) -> Node:
    if name := config.hostname_override:
        if nodes and all(it.name != name for it in nodes):
            echo_line(
                f"The files have no Node {name}; correct --hostname-override, or add the Node.", err=True
            )
        return next((it for it in nodes if it.name == name), Node(name))
    if len(nodes) > 1:
        names = ", ".join(sorted(node.name for node in nodes))
        raise click.ClickException(f"there are several Nodes: {names}; select one with --hostname-override")
    return nodes[0] if nodes else Node("")


def context_of(
    config: Config,
    node: Node,
    family: Family,
    addresses: tuple[str, ...] = (),
    api_servers: ApiServers = frozenset(),
) -> "RuleContext":
    """Return the rule context of any node, by default with the addresses of its Node, and all kernel features."""
    from pykubeproxy.rules.context import KernelFacts, rule_context

    facts = KernelFacts(addresses=addresses or node.addresses)
    return rule_context(config, node.name, node, facts, family, api_servers)


def agent_objects(objects: "Objects") -> Source:
    """Return the objects of an agent and its Node. Other Nodes are known only by the zone of their endpoints."""
    cluster = Cluster()
    endpoints = (it for slice_ in objects.slices for it in slice_.endpoints)
    zones = {it.node_name: it.zone for it in endpoints if it.zone}
    others = {name: Node(name, zone=zone) for name, zone in zones.items()}
    cluster.apply(Listed(Kind.SERVICE, objects.services))
    cluster.apply(Listed(Kind.ENDPOINT_SLICE, objects.slices))
    cluster.apply(Listed(Kind.NODE, tuple({**others, objects.node.name: objects.node}.values())))
    return Source(cluster, objects.node, objects.api_servers)


def all_objects(config: Config) -> Source:
    """Return all objects of an API server and this node. Raises ClickException."""
    from pykubeproxy.sources import api_watches

    def list_all(client: "Client", name: str) -> Iterable[Listed]:
        return (listed for watch in api_watches(client, name) for listed in watch.once())

    return _from_api_server(config, list_all)


def objects_of(query: ServiceFilter, filename: str | None, config: Config, nodes: Iterable[str]) -> Source:
    """Return at least the objects of a Service and the Nodes `nodes`, and this node. Raises ClickException."""
    if filename is not None:
        return Source(*read_objects(filename, config))
    from pykubeproxy.sources import service_objects

    return _from_api_server(
        config, lambda client, name: service_objects(client, query.name, query.namespace, (name, *nodes))
    )


def open_client(config: Config) -> "Client":
    """Return a client of the configured API server, and send log lines to standard error. Raises SourceError."""
    from pykubeproxy.cli import logs
    from pykubeproxy.sources import Client

    logs.set_up(config.logging.format)
    connection = config.client
    return Client(connection.kubeconfig, connection.master, connection.qps, connection.burst)


def _from_api_server(config: Config, list_objects: Callable[["Client", str], Iterable[Listed]]) -> Source:
    from pykubeproxy.sources import SourceError

    name = config.hostname_override or host_name()
    cluster = Cluster()
    try:
        client = open_client(config)
        for listed in list_objects(client, name):
            cluster.apply(listed)
    except SourceError as error:
        raise click.ClickException(f"{error}; use -f to read objects from files") from None
    node = cluster.node(name)
    if node is None:
        echo_line(
            f"The API server has no Node {name}; use --hostname-override to select another one.", err=True
        )
    return Source(cluster, node or Node(name), client.server_addresses())


def backend_to_read(backend: Literal["auto", "nft", "legacy"]) -> kernel.Backend:
    """Return the backend to read; for "auto", the one whose rules serve this node. Raises KernelError.

    If both backends have service-proxy rules, "auto" is the one that the agent on this node writes, and a note goes to
    standard error.
    """
    kernel.require_linux()
    chosen = kernel.choose_backend(backend, holding=NAT_SERVICES)
    other = kernel.other_backend_with_chain(chosen, NAT_SERVICES)
    if other is None:
        return chosen
    from pykubeproxy.cli.running_agent import agent_backend

    written = agent_backend() if backend == "auto" else ""
    if written == other.value:
        chosen, other = other, chosen
    writer = ", which the agent writes" if written == chosen.value else ""
    echo_line(
        f"Note: this shows the {chosen.value} tables{writer}. The {other.value} tables have service-proxy rules too,"
        " and packets pass both. Run `pykubeproxy check` for advice.",
        err=True,
    )
    return chosen
