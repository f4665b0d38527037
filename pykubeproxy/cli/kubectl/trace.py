"""`kubectl pykubeproxy trace`: show where a connection goes, over all nodes on its way."""

from collections.abc import Collection, Mapping, Sequence

import click

from pykubeproxy.cli.flags import choice_option, connection_family_option, protocol_option
from pykubeproxy.cli.help import OUTPUT, QUESTION, command, option
from pykubeproxy.cli.kubectl.access import namespace_of, node_access, open_client
from pykubeproxy.cli.kubectl.arguments import PodOptions, ServerOptions
from pykubeproxy.cli.kubectl.completion import nodes, services
from pykubeproxy.cli.kubectl.lookup import Objects, contexts_of, look_up
from pykubeproxy.cli.kubectl.notes import echo_notes
from pykubeproxy.cli.kubectl.options import namespace_option, pod_options, server_options
from pykubeproxy.cli.terminal import click_errors, echo_json, echo_line, echo_styled
from pykubeproxy.inspect import targets
from pykubeproxy.inspect.explain.nodes import explain_nodes
from pykubeproxy.inspect.filter import ServiceFilter
from pykubeproxy.inspect.hops import render_json, render_text
from pykubeproxy.inspect.hops.answer import Destination, NowhereToStart, answer
from pykubeproxy.inspect.hops.conclusion import Verdict, verdict
from pykubeproxy.inspect.hops.journey import ReadNodes, Unread
from pykubeproxy.inspect.hops.locations import Location, Locations
from pykubeproxy.inspect.hops.receivers import Receivers, receivers
from pykubeproxy.inspect.limit import TooManyRules
from pykubeproxy.inspect.node_tables import NodeTables
from pykubeproxy.inspect.targets import Directory, LocationKind, Target, TargetKind
from pykubeproxy.objects import Family, Protocol, family_of
from pykubeproxy.remote import NodeAccess, ReadNode, read_nodes
from pykubeproxy.services.frontend import ANY_LOCAL, FrontendKind
from pykubeproxy.sources import SourceError


@command(
    short_help="Show where a connection goes, over all nodes on its way.",
    exit_codes={
        0: "The answer, also that a rule drops the connection.",
        2: "Wrong usage or a failure; or the first node cannot be read.",
    },
)
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DST", shell_complete=services)
@protocol_option(help="Protocol.  [default: that of the Service's port, else tcp]")
@connection_family_option(help="Address family.  [default: one that both ends have]")
@option(
    "--via-node",
    "via",
    default="",
    metavar="NAME",
    shell_complete=nodes,
    help="Node that receives a connection from outside.  [default: each that answers otherwise]",
    group=QUESTION,
)
@option("--steps", "with_steps", is_flag=True, help="Show each rule that the packet meets.", group=OUTPUT)
@choice_option("-o", "--output", choices=("text", "json"), help="Output format.", group=OUTPUT)
@namespace_option
@server_options
@pod_options
@click_errors(SourceError, targets.InvalidTarget, targets.Unresolved, NowhereToStart, TooManyRules)
def trace(
    source: str,
    destination: str,
    protocol: Protocol | None,
    family: Family | None,
    via: str,
    with_steps: bool,
    output: str,
    server: ServerOptions,
    namespace: str,
    pods: PodOptions,
) -> None:
    """Follow the first packet of a connection from SRC to DST: to an endpoint, or to the rule that stops it.

    SRC is pod/NAME, node/NAME or an address. DST is svc/NAME[:PORT], NAME.NAMESPACE[:PORT], pod/NAME:PORT,
    node/NAME:PORT or ADDRESS:PORT. A name may include its namespace, as in svc/NAMESPACE/NAME.

    This reads the rules of the nodes on the way only. For a connection from outside, it shows which nodes answer and
    which drop it. It sends no packet and changes nothing.

    \b
    kubectl pykubeproxy trace pod/default/client svc/default/web:http
    kubectl pykubeproxy trace 203.0.113.7 svc/default/web --via-node node1
    kubectl pykubeproxy trace node/node1 10.96.0.10:53 --proto udp
    """
    namespace = namespace_of(server, namespace)
    start = targets.parse_source(source, namespace)
    end = targets.parse_destination(destination, namespace)
    client = open_client(server)
    objects = look_up(client, (start, end))
    directory = objects.directory
    if via and directory.node(via) is None:
        raise click.UsageError(f"--via-node: there is no node {via}; run `kubectl get nodes`")
    locations = Locations(directory.nodes, directory.slices, directory.pods.values())
    ends = targets.resolve(
        start,
        end,
        directory,
        family=family,
        protocol=protocol,
        client=_client_kind(start, locations),
        entry=via or _any_node(directory, start, family),
    )
    for note in ends.notes:
        echo_line(f"Note: {note}", err=True)
    with node_access(client, pods) as access:
        found = answer(
            _source(ends, locations),
            _destination(ends, end, directory, via),
            _entrances(ends, objects, via),
            locations,
            reader(access, directory, pods.at_once),
        )
    if output == "json":
        echo_json(render_json.document(found))
    else:
        echo_styled(render_text.text(found, with_steps=with_steps))
    if verdict(found) is Verdict.UNKNOWN:
        raise SystemExit(2)


def reader(access: NodeAccess, directory: Directory, at_once: int) -> ReadNodes:
    """Return a function that reads nodes, each of them once. It raises SourceError."""
    present = {node.name: node for node in directory.nodes}
    known: dict[str, NodeTables | Unread] = {}

    def read(names: Collection[str]) -> Mapping[str, NodeTables | Unread]:
        wanted = [present[name] for name in names if name in present and name not in known]
        for found in read_nodes(access, wanted, at_once=at_once) if wanted else ():
            if isinstance(found, ReadNode):
                echo_notes({found.node.name: found.notes})
                rulesets = {family: tables.ruleset for family, tables in found.tables.items()}
                known[found.node.name] = NodeTables(found.node, rulesets)
            else:
                known[found.node.name] = Unread(found.reason)
        return {name: known.get(name) or Unread("there is no Node of this name") for name in names}

    return read


def _client_kind(start: Target, locations: Locations) -> LocationKind | None:
    """Return where an address is; an unknown one is outside. Names tell by themselves."""
    return locations.find(start.name).kind if start.kind is TargetKind.ADDRESS else None


def _any_node(directory: Directory, start: Target, family: Family | None) -> str:
    """Return a node that stands for all that receive connections to a node port; "" if there is none."""
    wanted = family_of(start.name) if start.kind is TargetKind.ADDRESS else family
    for node in directory.nodes:
        if any(wanted in (None, family_of(address)) for address in node.addresses):
            return node.name
    return ""


def _source(ends: targets.ResolvedConnection, locations: Locations) -> Location:
    client = ends.client
    if client.target.kind is TargetKind.ADDRESS:
        return locations.find(ends.source)
    kind = LocationKind.NODE if client.kind is LocationKind.NODE else LocationKind.POD
    return Location(kind, ends.source, client.node, str(client.pod.key) if client.pod else "")


def _destination(
    ends: targets.ResolvedConnection, end: Target, directory: Directory, via: str
) -> Destination:
    """Return the destination; a Service's node port is asked at each node, unless `via` names one."""
    kind = ends.frontend.kind if ends.frontend else None
    at_each_node = end.kind is TargetKind.SERVICE and kind is FrontendKind.NODE_PORT and not via
    return Destination(
        ends.protocol.value,
        ANY_LOCAL if at_each_node else ends.destination,
        ends.port,
        str(ends.service or ""),
        kind,
        "" if ends.service else _unserved(ends, directory),
    )


def _unserved(ends: targets.ResolvedConnection, directory: Directory) -> str:
    """Return why the Service with this address has no frontend there; "" if there is no such Service."""
    for service in directory.services:
        if ends.destination in (*service.cluster_ips, *service.external_ips, *service.load_balancer_ips):
            return f"Service {service.key} has no port {ends.port}/{ends.protocol.value}"
    return ""


def _entrances(ends: targets.ResolvedConnection, objects: Objects, via: str) -> Sequence[Receivers]:
    """Return the nodes that may receive a connection from outside to a Service."""
    if via:
        return [Receivers(via)]
    if not (ends.service and ends.frontend and objects.directory.nodes):
        return ()
    query = ServiceFilter(ends.service.namespace, ends.service.service)
    explained = explain_nodes(objects.cluster, query, objects.directory.nodes, contexts_of)
    return receivers(explained, ends.service, ends.family, ends.frontend.kind)
