"""`pykubeproxy render`: the rules for a set of objects, without touching anything."""

import click

from pykubeproxy.cli.flags import CONTEXT_SETTINGS, config_options, load_config
from pykubeproxy.cli.manifests import plain_addresses, read_objects
from pykubeproxy.cli.output import echo_json
from pykubeproxy.config import Config
from pykubeproxy.inspect import ruleset_forms
from pykubeproxy.objects import Family, Node, family_of
from pykubeproxy.rules.context import KernelFacts, RuleContext, terms
from pykubeproxy.rules.render import full_input
from pykubeproxy.rules.render import render as render_rules


@click.command(
    context_settings=CONTEXT_SETTINGS, short_help="Print the rules for Services and EndpointSlices in files."
)
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
@click.option(
    "-o",
    "--output",
    type=click.Choice(["iptables", "json"]),
    default="iptables",
    show_default=True,
    help="iptables: input for iptables-restore.",
)
@config_options
def render(
    filename: str, family: str | None, addresses: tuple[str, ...], output: str, flags: dict[str, object]
) -> None:
    """Print the iptables-restore input for the Services, EndpointSlices and Nodes in PATH.

    Nothing is read from or written to this machine's tables; neither root nor a network is needed. The node is the
    one that --hostname-override names, or the only one there is.

    \b
    pykubeproxy render -f objects.yaml --hostname-override node1 -o json
    kubectl get services,endpointslices -A -o yaml | pykubeproxy render -f -
    """
    config, warnings = load_config(flags)
    for line in warnings:
        click.echo(line, err=True)
    cluster, node = read_objects(filename, config)
    families = [it for it in Family if family in (None, it.value.lower())]
    on = [_terms(config, node, it, addresses) for it in families]
    rulesets = [render_rules(cluster, it) for it in on]
    if output == "json":
        echo_json(ruleset_forms.document(rulesets, node.name))
        return
    for ruleset, its in zip(rulesets, on, strict=True):
        command = "iptables-restore" if ruleset.family is Family.IPV4 else "ip6tables-restore"
        click.echo(f"# {ruleset.family.value}, for {command} --noflush")
        click.echo(full_input(ruleset, its.options), nl=False)


def _terms(config: Config, node: Node, family: Family, addresses: tuple[str, ...]) -> RuleContext:
    own = tuple(it for it in (addresses or node.addresses) if family_of(it) is family)
    return terms(config, node.name, node, KernelFacts(addresses=own), family)
