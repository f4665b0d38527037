"""`pykubeproxy render`: the rules for a set of objects, without touching anything."""

import click

from pykubeproxy.cli.flags import CONTEXT_SETTINGS, config_options, load_config
from pykubeproxy.cli.manifests import plain_addresses, read_objects
from pykubeproxy.config import Config
from pykubeproxy.objects import Family, Node, family_of
from pykubeproxy.rules.render import full_input
from pykubeproxy.rules.render import render as render_rules
from pykubeproxy.rules.terms import Kernel, terms
from pykubeproxy.services.cluster import Cluster


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option(
    "-f", "--filename", required=True, metavar="PATH", help='A YAML or JSON file, a folder, or "-".'
)
@click.option("--family", type=click.Choice(["ipv4", "ipv6"]), help="Only this family.  [default: both]")
@click.option(
    "--node-address",
    "addresses",
    multiple=True,
    callback=plain_addresses,
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
    for line in warnings:
        click.echo(line, err=True)
    cluster, node = read_objects(filename, config)
    for wanted in Family:
        if family in (None, wanted.value.lower()):
            click.echo(_text(config, cluster, node, wanted, addresses), nl=False)


def _text(config: Config, cluster: Cluster, node: Node, family: Family, addresses: tuple[str, ...]) -> str:
    own = tuple(it for it in (addresses or node.addresses) if family_of(it) is family)
    on = terms(config, node.name, node, Kernel(addresses=own), family)
    command = "iptables-restore" if family is Family.IPV4 else "ip6tables-restore"
    return f"# {family.value}, for {command} --noflush\n{full_input(render_rules(cluster, on), on.options)}"
