"""`pykubeproxy explain`: why a Service is served as it is."""

import os
from collections.abc import Sequence

import click
import msgspec

from pykubeproxy.cli.flags import CONTEXT_SETTINGS, config_options, load_config
from pykubeproxy.cli.present import filename_option, objects_of
from pykubeproxy.config import Config
from pykubeproxy.inspect import explain_forms
from pykubeproxy.inspect.explain import Explanation, explain_all
from pykubeproxy.inspect.wanted import Wanted, parse_wanted
from pykubeproxy.objects import Family, Node
from pykubeproxy.rules.terms import Kernel, terms
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.selection import Place


@click.command(context_settings=CONTEXT_SETTINGS)
@click.argument("service", metavar="SERVICE[:PORT]")
@click.option("-n", "--namespace", default="", help="The Service's namespace.  [default: all]")
@filename_option
@click.option("--node", "node_name", default="", metavar="NAME", help="Explain it for another node.")
@click.option("--zone", metavar="NAME", help="Explain it as if the node were in this zone.")
@click.option(
    "-o", "--output", type=click.Choice(["text", "json"]), default="text", show_default=True, help="The form."
)
@config_options
def explain(
    service: str,
    namespace: str,
    filename: str | None,
    node_name: str,
    zone: str | None,
    output: str,
    flags: dict[str, object],
) -> None:
    """Say of each endpoint of SERVICE whether this node uses it, and why, and how traffic gets there.

    SERVICE is a name or namespace/name; PORT a port's name or number. With --node or --zone it is explained for that
    place, and how this node differs is said at the end. Looks at the objects, not at the live rules (dump-rules does),
    so it needs no root. The flags are those of `run`.

    \b
    pykubeproxy explain default/web:http --config /var/lib/kube-proxy/config.conf
    pykubeproxy explain web -f objects.yaml --hostname-override n1 --zone b
    """
    config, warnings = load_config(flags)
    for warning in warnings:
        click.echo(warning, err=True)
    wanted = _wanted(service, namespace)
    if filename is not None and node_name and not config.hostname_override:
        # Among manifests no node is "here" unless it is named: then this one is.
        config, node_name = msgspec.structs.replace(config, hostname_override=node_name.lower()), ""
    cluster, here = objects_of(wanted, filename, config, [node_name] if node_name else [])
    there = _other(cluster, here, node_name, zone)
    found = _explanations(cluster, config, there or here, wanted)
    unlike = (_explanations(cluster, config, here, wanted), _place(here)) if there else None
    color = False if "NO_COLOR" in os.environ else None
    if output == "json":
        document = explain_forms.document(found, _place(there or here), unlike)
        click.echo(msgspec.json.format(msgspec.json.encode(document)).decode())
        return
    click.echo(explain_forms.text(found, _place(there or here)), nl=False, color=color)
    if unlike is not None:
        click.echo(explain_forms.comparison(found, *unlike), nl=False, color=color)


def _wanted(service: str, namespace: str) -> Wanted:
    """Which Service and port is asked for. Raises UsageError."""
    try:
        wanted = parse_wanted(service, namespace)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if not wanted.name:
        raise click.UsageError("name the Service to explain")
    return wanted


def _other(cluster: Cluster, here: Node, node_name: str, zone: str | None) -> Node | None:
    """The node that --node and --zone speak of; None without them."""
    if not node_name and zone is None:
        return None
    node = cluster.node(node_name) if node_name else here
    if node is None:
        click.echo(f"There is no Node {node_name}, so its zone is not known.", err=True)
        node = Node(node_name)
    return node if zone is None else msgspec.structs.replace(node, zone=zone)


def _place(node: Node) -> Place:
    return Place(node.name, node.zone)


def _explanations(cluster: Cluster, config: Config, node: Node, wanted: Wanted) -> Sequence[Explanation]:
    """The explanations for a node. Raises ClickException if what is asked for is not there."""
    kernel = Kernel(addresses=node.addresses)
    on = {family: terms(config, node.name, node, kernel, family) for family in Family}
    try:
        return explain_all(cluster, wanted, on)
    except LookupError as error:
        raise click.ClickException(str(error.args[0])) from None
