"""What commands have in common that take objects from files instead of an API server."""

import ipaddress

import click

from pykubeproxy.config import Config
from pykubeproxy.objects import Node
from pykubeproxy.services.cluster import Cluster


def read_objects(path: str, config: Config) -> tuple[Cluster, Node]:
    """The objects in a file, a folder or "-", and the node that --hostname-override names, or the only one.

    Says on standard error what was passed over. Raises ClickException.
    """
    # The Kubernetes client comes along: 0.2 s that those who read live tables need not wait.
    from pykubeproxy.sources import SourceError, load_manifests

    try:
        manifests = load_manifests(path)
    except SourceError as error:
        raise click.ClickException(str(error)) from None
    for line in manifests.complaints:
        click.echo(line, err=True)
    cluster = Cluster()
    for event in manifests.listed():
        cluster.apply(event)
    return cluster, _node(config, [it for it in manifests.objects if isinstance(it, Node)])


def _node(config: Config, nodes: list[Node]) -> Node:
    if config.hostname_override:
        named = [node for node in nodes if node.name == config.hostname_override]
        return named[0] if named else Node(config.hostname_override)
    if len(nodes) > 1:
        names = ", ".join(sorted(node.name for node in nodes))
        raise click.ClickException(f"there are several Nodes; name one with --hostname-override: {names}")
    return nodes[0] if nodes else Node("")


def plain_addresses(_: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    """A callback for options that take addresses, with or without the length of a prefix, which it drops."""
    try:
        return tuple(str(ipaddress.ip_interface(value).ip) for value in values)
    except ValueError as error:
        raise click.BadParameter(f"{error}; give it like 192.168.1.10/24", param=parameter) from None
