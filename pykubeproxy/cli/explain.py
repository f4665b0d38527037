"""`pykubeproxy explain`: why a Service is served as it is."""

from collections.abc import Collection, Mapping, Sequence

import click
import msgspec

from pykubeproxy.agent.observe.object_documents import Objects, decode
from pykubeproxy.cli.asking import DEFAULT_URL, NoAnswer, ask
from pykubeproxy.cli.completing import namespaces, services
from pykubeproxy.cli.flags import CONTEXT_SETTINGS, config_options, load_config
from pykubeproxy.cli.output import echo_json, echo_styled, output_option
from pykubeproxy.cli.present import filename_option, objects_of
from pykubeproxy.config import Config, ConfigError, load
from pykubeproxy.inspect import explain_forms
from pykubeproxy.inspect.explain import Explanation, explain_all
from pykubeproxy.inspect.wanted import Wanted, parse_wanted
from pykubeproxy.objects import Family, Kind, Listed, Node
from pykubeproxy.rules.context import KernelFacts, terms
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.ports import PortName
from pykubeproxy.services.selection import NodeTopology


@click.command(
    context_settings=CONTEXT_SETTINGS, short_help="Say of each endpoint whether it is used, and why."
)
@click.argument("service", metavar="SERVICE[:PORT]", shell_complete=services)
@click.option(
    "-n",
    "--namespace",
    default="",
    shell_complete=namespaces,
    help="The Service's namespace.  [default: all]",
)
@click.option(
    "--family", type=click.Choice([it.value.lower() for it in Family]), help="Only this; else both."
)
@filename_option
@click.option("--node", "node_name", default="", metavar="NAME", help="Explain it for another node.")
@click.option("--zone", metavar="NAME", help="Explain it as if the node were in this zone.")
@click.option(
    "--url",
    metavar="URL",
    help=f"Ask the agent with this metrics address.  [default: {DEFAULT_URL}, without -f and flags of `run`]",
)
@output_option
@config_options
def explain(
    service: str,
    namespace: str,
    family: str | None,
    filename: str | None,
    node_name: str,
    zone: str | None,
    url: str | None,
    output: str,
    flags: dict[str, object],
) -> None:
    """Say of each endpoint of SERVICE whether this node uses it, and why, and how traffic gets there.

    SERVICE is a name or namespace/name; PORT a port's name or number. With --node or --zone it is explained for that
    place, and how this node differs is said at the end. Looks at the objects, not at the live rules (dump-rules does),
    so it needs no root.

    The objects, and the configuration, are those of the agent that runs on this node. With -f they come from files;
    with flags of `run`, or where no agent answers, from the API server.

    \b
    pykubeproxy explain default/web:http
    pykubeproxy explain default/web --config /var/lib/kube-proxy/config.conf
    pykubeproxy explain web -f objects.yaml --hostname-override n1 --zone b
    """
    if url is not None and (filename is not None or flags):
        raise click.UsageError(
            "--url asks an agent, which has objects and configuration: drop -f and other flags"
        )
    config, warnings = load_config(flags)
    for warning in warnings:
        click.echo(warning, err=True)
    wanted = _wanted(service, namespace)
    told = _told(wanted, url) if filename is None and not flags else None
    if filename is not None and node_name and not config.hostname_override:
        # Among manifests no node is "here" unless it is named: then this one is.
        config, node_name = msgspec.structs.replace(config, hostname_override=node_name.lower()), ""
    aside = {}
    if told:
        objects, config = told
        aside = {(it.family, it.name): it.why for it in objects.set_aside}
        cluster, here = _told_objects(objects)
    else:
        cluster, here = objects_of(wanted, filename, config, [node_name] if node_name else [])
    there = _other(cluster, here, node_name, zone)
    families = [it for it in Family if family in (None, it.value.lower())]
    found = _explanations(cluster, config, there or here, wanted, families)
    if not there:
        found = _marked(found, aside)
    unlike = (_explanations(cluster, config, here, wanted, families), _place(here)) if there else None
    if output == "json":
        echo_json(explain_forms.document(found, _place(there or here), unlike))
        return
    echo_styled(explain_forms.text(found, _place(there or here)))
    if unlike is not None:
        echo_styled(explain_forms.comparison(found, *unlike))


def _wanted(service: str, namespace: str) -> Wanted:
    """Which Service and port is asked for. Raises UsageError."""
    try:
        wanted = parse_wanted(service, namespace)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if not wanted.name:
        raise click.UsageError("name the Service to explain")
    return wanted


def _told(wanted: Wanted, url: str | None) -> tuple[Objects, Config] | None:
    """What this node's agent, or the one at a URL, has of a Service, and its configuration.

    None where none answers and no URL was given. Raises ClickException.
    """
    at, service = url or DEFAULT_URL, f"{wanted.namespace}/{wanted.name}".lstrip("/")
    try:
        told = decode(ask(at, "/servicez", service=service))
        config = load(told.config.encode(), {}).config
    except (NoAnswer, ValueError, ConfigError) as error:
        reason = (
            str(error) if isinstance(error, NoAnswer) else f"what answers at {at} cannot be asked: {error}"
        )
        if url is not None:
            raise click.ClickException(reason) from None
        click.echo(f"Asking the API server, for {reason}.", err=True)
        return None
    if not told.objects.services:
        raise click.ClickException(
            f"the agent at {at} has no Service {msgspec.structs.replace(wanted, port='')}. It does not watch headless "
            "Services and those of other proxies; with --config or --kubeconfig the API server is asked for them"
        )
    return told.objects, config


def _told_objects(objects: Objects) -> tuple[Cluster, Node]:
    """The objects of an agent, and its Node; of other Nodes it knows what their endpoints tell."""
    cluster = Cluster()
    endpoints = (it for slice_ in objects.slices for it in slice_.endpoints)
    zones = {it.node_name: it.zone for it in endpoints if it.zone}
    others = {name: Node(name, zone=zone) for name, zone in zones.items()}
    cluster.apply(Listed(Kind.SERVICE, objects.services))
    cluster.apply(Listed(Kind.ENDPOINT_SLICE, objects.slices))
    cluster.apply(Listed(Kind.NODE, tuple({**others, objects.node.name: objects.node}.values())))
    return cluster, objects.node


def _other(cluster: Cluster, here: Node, node_name: str, zone: str | None) -> Node | None:
    """The node that --node and --zone speak of; None without them."""
    if not node_name and zone is None:
        return None
    node = cluster.node(node_name) if node_name else here
    if node is None:
        click.echo(f"There is no Node {node_name}, so its zone is not known.", err=True)
        node = Node(node_name)
    return node if zone is None else msgspec.structs.replace(node, zone=zone)


def _marked(found: Sequence[Explanation], aside: Mapping[tuple[str, PortName], str]) -> Sequence[Explanation]:
    """The explanations, with what an agent says of service ports that are set aside."""
    return [
        msgspec.structs.replace(
            it,
            ports=tuple(
                msgspec.structs.replace(port, set_aside=aside.get((port.family.value, port.name), ""))
                for port in it.ports
            ),
        )
        for it in found
    ]


def _place(node: Node) -> NodeTopology:
    return NodeTopology(node.name, node.zone)


def _explanations(
    cluster: Cluster, config: Config, node: Node, wanted: Wanted, families: Collection[Family]
) -> Sequence[Explanation]:
    """The explanations for a node. Raises ClickException if what is asked for is not there."""
    kernel = KernelFacts(addresses=node.addresses)
    on = {family: terms(config, node.name, node, kernel, family) for family in Family}
    try:
        found = explain_all(cluster, wanted, on)
    except LookupError as error:
        raise click.ClickException(str(error.args[0])) from None
    return [
        msgspec.structs.replace(
            it,
            ports=tuple(port for port in it.ports if port.family in families),
            left_out={left: why for left, why in it.left_out.items() if left in families},
        )
        for it in found
    ]
