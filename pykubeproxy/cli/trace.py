"""`pykubeproxy trace`: show where a packet goes, and why."""

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal

import click

from pykubeproxy.cli.bundle_files import bundle_option, opened
from pykubeproxy.cli.completion import destinations, namespaces, sources
from pykubeproxy.cli.flags import (
    CONTEXT_SETTINGS,
    choice_option,
    config_options,
    connection_family_option,
    node_address_option,
    protocol_option,
    read_config,
    rules_option,
)
from pykubeproxy.cli.help import OUTPUT, QUESTION, SOURCE, command, option
from pykubeproxy.cli.inputs import context_of, objects_in, read_manifests
from pykubeproxy.cli.lookup import ManifestObjects, ObjectSource, bundle_source, object_source
from pykubeproxy.cli.node_rules import node_rules, rules_errors
from pykubeproxy.cli.terminal import click_errors, echo_json, echo_line, echo_styled
from pykubeproxy.config import Config, DetectLocalMode
from pykubeproxy.inspect.targets import (
    Directory,
    InvalidTarget,
    LocationKind,
    ResolvedConnection,
    Target,
    TargetKind,
    Unresolved,
    names_of,
    parse_destination,
    parse_source,
    resolve,
)
from pykubeproxy.inspect.trace import render as views
from pykubeproxy.inspect.trace.model import trace_packet
from pykubeproxy.inspect.trace.packet import Host, Packet
from pykubeproxy.objects import Family, Node, Protocol
from pykubeproxy.rules.ruleset import Ruleset
from pykubeproxy.services.cluster import Cluster

# Most traces read live rules, so only the functions that need others import the modules for them.
if TYPE_CHECKING:
    from pykubeproxy.bundle.read import Bundle

_NO_ADDRESSES = (
    "Note: rules match addresses of the node, which a file does not contain. Give each with --node-address."
)
_Origin = Literal["pod", "node", "outside"]
_ForPackets = Callable[[Family], tuple[Ruleset, Host]]


@command(context_settings=CONTEXT_SETTINGS, short_help="Trace a packet through the rules.")
@click.argument("source", metavar="SRC", shell_complete=sources)
@click.argument("destination", metavar="DST", shell_complete=destinations)
@protocol_option(help="Protocol of the packet.  [default: that of the Service's port, else tcp]")
@connection_family_option(
    help="Address family, if names have addresses of both.  [default: that of SRC, else the primary one of DST]"
)
@option(
    "-n",
    "--namespace",
    default="",
    metavar="NAME",
    shell_complete=namespaces,
    help="Namespace of names without one.  [default: default]",
    group=QUESTION,
)
@option(
    "--from",
    "origin",
    type=click.Choice(["pod", "node", "outside"]),
    help="Origin of the packet.  [default: that of a named SRC; the node for its addresses; else outside]",
    group=QUESTION,
)
@option(
    "--in-interface",
    default="",
    metavar="NAME",
    help="Incoming interface.  [default: the one with the route to SRC]",
    group=QUESTION,
)
@option(
    "-f",
    "--filename",
    metavar="PATH",
    help='Use the objects in a YAML or JSON file, a folder or "-" for names and, without --rules or --bundle, for rules.',
    group=SOURCE,
)
@rules_option
@bundle_option
@node_address_option
@choice_option(
    "-o",
    "--output",
    choices=("text", "json", "svg"),
    help="Output format; svg is a picture for a browser.",
    group=OUTPUT,
)
@config_options
@rules_errors()
@click_errors(Unresolved)
def trace(
    source: str,
    destination: str,
    protocol: Protocol | None,
    family: Family | None,
    namespace: str,
    origin: _Origin | None,
    in_interface: str,
    filename: str | None,
    files: tuple[str, ...],
    bundle_file: str | None,
    addresses: tuple[str, ...],
    output: str,
    flags: dict[str, object],
) -> None:
    """Trace the first packet of a connection from SRC to DST through the rules of this node.

    SRC is pod/[NAMESPACE/]NAME, node/NAME or an address. DST is svc/[NAMESPACE/]NAME[:PORT], NAME.NAMESPACE[:PORT],
    pod/[NAMESPACE/]NAME:PORT, node/NAME:PORT or ADDRESS:PORT, with the name or number of a port. Names come from -f,
    from the API server of --kubeconfig, from the agent on this node or of --bundle, or else from comments of the rules,
    which name Services only.

    Show the endpoints it may reach with their probabilities, whether its source address is masqueraded, or which rule
    drops or rejects it. This follows foreign rules too, sends no packet and changes nothing.

    With --bundle, trace through the rules of another node. With --rules too, but name its addresses with --node-address.
    With -f, the flags of `run` define the rules. All these need neither root nor a network.

    \b
    pykubeproxy trace pod/default/client svc/default/web:http
    pykubeproxy trace 10.244.1.5 10.96.0.10:53 --proto udp
    pykubeproxy trace 10.244.1.5 web.default:80 --rules node1.txt
    pykubeproxy trace pod/default/client web.default:80 --bundle node1.tar.gz
    pykubeproxy trace 2001:db8::7 [2001:db8::80]:443 -f objects.yaml -o json
    pykubeproxy trace 10.244.1.5 10.96.0.10:80 -o svg > trace.svg
    """
    config = read_config(flags)
    if origin == "node" and in_interface:
        raise click.UsageError("a packet from the node has no incoming interface; remove --in-interface")
    try:
        start, end = parse_source(source, namespace), parse_destination(destination, namespace)
    except InvalidTarget as error:
        raise click.UsageError(str(error)) from None
    for_packets, objects = _rules_and_objects(config, filename, files, opened(bundle_file), addresses)
    is_named = {start.kind, end.kind} != {TargetKind.ADDRESS}
    directory = objects.directory((start, end)) if is_named or filename is not None else Directory("")
    connection = resolve(
        start,
        end,
        directory,
        family=family,
        protocol=protocol,
        client=_client_kind(start, origin),
        entry=directory.here,
    )
    ruleset, host = for_packets(connection.family)
    packet = _packet(connection, host, config, in_interface, origin)
    # Live chains are read when the packet reaches them.
    walked = trace_packet(ruleset, packet, host)
    names = names_of(connection, directory, (it.address for it in walked.endpoints))
    for note in (*connection.notes, *_notes(connection, directory)):
        echo_line(f"Note: {note}", err=True)
    if files and not addresses and any("-type LOCAL" in it.rule for it in walked.steps):
        echo_line(_NO_ADDRESSES, err=True)
    if output == "json":
        echo_json(views.document(walked, names))
    elif output == "svg":
        from pykubeproxy.inspect.trace.render_svg import svg

        click.echo(svg(walked), nl=False)
    else:
        echo_styled(views.text(walked, names))


def _rules_and_objects(
    config: Config,
    filename: str | None,
    files: tuple[str, ...],
    bundle: "Bundle | None",
    addresses: tuple[str, ...],
) -> tuple[_ForPackets, ObjectSource]:
    """Return what reads the rules of a family, and where names are looked up."""
    if filename is None:
        rules = node_rules(files, bundle, config.iptables_backend.value, addresses)
        if bundle:
            return rules.for_packets, bundle_source(config, rules, bundle)
        return rules.for_packets, object_source(config, rules, is_live=not files)
    if filename == "-" and "-" in files:
        raise click.UsageError('only one of -f and --rules can be "-"')
    manifests = read_manifests(filename)
    if files or bundle:
        rules = node_rules(files, bundle, config.iptables_backend.value, addresses)
        return rules.for_packets, ManifestObjects(filename, manifests, config)
    cluster, node = objects_in(manifests, config)
    objects = ManifestObjects(filename, manifests, config, node.name)
    return functools.partial(_rendered, config, cluster, node, addresses), objects


def _rendered(
    config: Config, cluster: Cluster, node: Node, addresses: tuple[str, ...], family: Family
) -> tuple[Ruleset, Host]:
    from pykubeproxy.rules.difference import installed
    from pykubeproxy.rules.render import render

    context = context_of(config, node, family, addresses)
    host = Host(frozenset((*(addresses or node.addresses), context.options.node_ip)))
    return installed(render(cluster, context), context.options), host


def _client_kind(source: Target, origin: _Origin | None) -> LocationKind | None:
    """Return where --from says that the source is. Raises UsageError if its name says otherwise."""
    if origin and source.kind is not TargetKind.ADDRESS and source.kind.value != origin:
        raise click.UsageError(f"{source} is a {source.kind.value}; remove --from {origin}")
    return LocationKind(origin) if origin else None


def _packet(
    connection: ResolvedConnection, host: Host, config: Config, interface: str, origin: _Origin | None
) -> Packet:
    """Return the packet with the interface by which it comes in, if it does not start on the node."""
    is_named = connection.client.target.kind is not TargetKind.ADDRESS
    kind = LocationKind(origin) if origin else connection.client.kind if is_named else None
    if kind is LocationKind.POD and not host.routes:
        interface = interface or _pod_interface(config)
    if kind in (LocationKind.POD, LocationKind.OUTSIDE):
        starts_here = False
    else:
        # A node's name may be that of another node; without addresses, take it for this one.
        is_here = (is_named and not host.addresses) or host.is_local(connection.source)
        starts_here = bool(origin) or (is_here and not interface)
    return Packet(
        connection.protocol.value.lower(),
        connection.source,
        connection.destination,
        connection.port,
        starts_here=starts_here,
        received_by=interface,
    )


def _notes(connection: ResolvedConnection, directory: Directory) -> Iterator[str]:
    client = connection.client
    if not client.node or client.node == directory.here or not directory.here:
        return
    if directory.nodes and not directory.node(directory.here):
        yield (
            f"packets of {client.target} start on node {client.node}, and there is no Node {directory.here}. If these"
            f" are the rules of {client.node}, add --hostname-override {client.node}."
        )
    else:
        yield (
            f"packets of {client.target} start on node {client.node}, and these are the rules of {directory.here}. Run"
            f" this on {client.node}, or use `kubectl pykubeproxy trace`."
        )


def _pod_interface(config: Config) -> str:
    """Return the incoming interface of pod traffic, if the configuration detects pods by interface."""
    detect = config.detect_local
    match detect.mode:
        case DetectLocalMode.BRIDGE_INTERFACE:
            return detect.bridge_interface
        case DetectLocalMode.INTERFACE_NAME_PREFIX:
            return detect.interface_name_prefix
        case _:
            return ""
