"""`pykubeproxy render`: the rules for a set of objects, without touching anything."""

import ipaddress

import click

from pykubeproxy.cli.flags import CONTEXT_SETTINGS, config_options, load_config
from pykubeproxy.config import Config
from pykubeproxy.objects import Family, Node, family_of
from pykubeproxy.rules.render import full_input
from pykubeproxy.rules.render import render as render_rules
from pykubeproxy.rules.terms import Kernel, terms
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.sources import SourceError, load_manifests


def _addresses(_: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    try:
        return tuple(str(ipaddress.ip_interface(value).ip) for value in values)
    except ValueError as error:
        raise click.BadParameter(f"{error}; give it like 192.168.1.10/24", param=parameter) from None


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option(
    "-f", "--filename", required=True, metavar="PATH", help='A YAML or JSON file, a folder, or "-".'
)
@click.option("--family", type=click.Choice(["ipv4", "ipv6"]), help="Only this family.  [default: both]")
@click.option(
    "--node-address",
    "addresses",
    multiple=True,
    callback=_addresses,
    metavar="CIDR",
    help="An address of the node, for nodePortAddresses; may be given several times.  [default: the Node's own]",
)
@config_options
def render(filename: str, family: str | None, addresses: tuple[str, ...], flags: dict[str, object]) -> None:
    """Print the iptables-restore input for the Services, EndpointSlices and Nodes in PATH.

    Nothing is read from or written to this machine's tables; neither root nor a network is needed. The node is the
    one that --hostname-override names, or the only one there is.

    \b
    pykubeproxy render -f objects.yaml --hostname-override node1 --cluster-cidr 10.244.0.0/16
    kubectl get services,endpointslices,nodes -A -o yaml | pykubeproxy render -f - --family ipv4
    """
    config, warnings = load_config(flags)
    try:
        manifests = load_manifests(filename)
    except SourceError as error:
        raise click.ClickException(str(error)) from None
    for line in (*warnings, *manifests.complaints):
        click.echo(line, err=True)
    cluster = Cluster()
    for event in manifests.listed():
        cluster.apply(event)
    node = _node(config, [it for it in manifests.objects if isinstance(it, Node)])
    for wanted in Family:
        if family in (None, wanted.value.lower()):
            click.echo(_text(config, cluster, node, wanted, addresses), nl=False)


def _node(config: Config, nodes: list[Node]) -> Node:
    if config.hostname_override:
        named = [node for node in nodes if node.name == config.hostname_override]
        return named[0] if named else Node(config.hostname_override)
    if len(nodes) > 1:
        names = ", ".join(sorted(node.name for node in nodes))
        raise click.ClickException(f"there are several Nodes; name one with --hostname-override: {names}")
    return nodes[0] if nodes else Node("")


def _text(config: Config, cluster: Cluster, node: Node, family: Family, addresses: tuple[str, ...]) -> str:
    own = tuple(it for it in (addresses or node.addresses) if family_of(it) is family)
    on = terms(config, node.name, node, Kernel(addresses=own), family)
    command = "iptables-restore" if family is Family.IPV4 else "ip6tables-restore"
    return f"# {family.value}, for {command} --noflush\n{full_input(render_rules(cluster, on), on.options)}"
