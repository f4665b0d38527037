"""`pykubeproxy render`: print the rules for objects in files."""

import click

from pykubeproxy.cli.flags import (
    CONTEXT_SETTINGS,
    choice_option,
    config_options,
    family_option,
    node_address_option,
    read_config,
)
from pykubeproxy.cli.help import OUTPUT, SOURCE, command, option
from pykubeproxy.cli.inputs import context_of, read_objects
from pykubeproxy.cli.terminal import echo_json
from pykubeproxy.inspect.render_json import document
from pykubeproxy.objects import Family
from pykubeproxy.rules.render import full_input
from pykubeproxy.rules.render import render as render_rules


@command(context_settings=CONTEXT_SETTINGS, short_help="Print the rules for objects in files.")
@option(
    "-f",
    "--filename",
    required=True,
    metavar="PATH",
    help='Read objects from a YAML or JSON file, a folder or "-".',
    group=SOURCE,
)
@family_option
@node_address_option
@choice_option(
    "-o",
    "--output",
    choices=("iptables", "json"),
    help="Output format; iptables is input for iptables-restore.",
    group=OUTPUT,
)
@config_options
def render(
    filename: str,
    families: tuple[Family, ...],
    addresses: tuple[str, ...],
    output: str,
    flags: dict[str, object],
) -> None:
    """Print the iptables-restore input for the Services, EndpointSlices and Nodes in PATH.

    Render for the Node named by --hostname-override, or else the only Node in PATH. This needs neither root nor a
    network, and leaves the tables of this machine alone.

    \b
    pykubeproxy render -f objects.yaml --hostname-override node1 -o json
    kubectl get services,endpointslices -A -o yaml | pykubeproxy render -f -
    """
    config = read_config(flags)
    cluster, node = read_objects(filename, config)
    contexts = [context_of(config, node, family, addresses) for family in families]
    rulesets = [render_rules(cluster, context) for context in contexts]
    if output == "json":
        echo_json(document(rulesets, node.name))
        return
    for ruleset, context in zip(rulesets, contexts, strict=True):
        command = "iptables-restore" if ruleset.family is Family.IPV4 else "ip6tables-restore"
        click.echo(f"# {ruleset.family.value}, for {command} --noflush")
        click.echo(full_input(ruleset, context.options), nl=False)
