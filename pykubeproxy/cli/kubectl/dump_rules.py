"""`kubectl pykubeproxy dump-rules`: show the services, endpoints and shares in the rules of nodes."""

from collections.abc import Sequence

import click
import msgspec
import yaml

from pykubeproxy import API_VERSION
from pykubeproxy.cli.flags import family_option, tables_output_option
from pykubeproxy.cli.help import command
from pykubeproxy.cli.inputs import service_filter
from pykubeproxy.cli.kubectl.access import list_nodes, namespace_of, node_access, open_client
from pykubeproxy.cli.kubectl.arguments import NodeSelection, PodOptions, ServerOptions
from pykubeproxy.cli.kubectl.completion import services
from pykubeproxy.cli.kubectl.notes import echo_notes
from pykubeproxy.cli.kubectl.options import namespace_option, node_options, pod_options, server_options
from pykubeproxy.cli.terminal import click_errors, echo_json, echo_line, echo_styled
from pykubeproxy.inspect.dump import render
from pykubeproxy.inspect.dump.model import ServiceView, in_order, views
from pykubeproxy.inspect.dump.render_rules import listing
from pykubeproxy.inspect.filter import ServiceFilter
from pykubeproxy.inspect.limit import TooManyRules
from pykubeproxy.inspect.targets.parse import is_service_name
from pykubeproxy.objects import Family
from pykubeproxy.remote import ReadNode, UnreadNode, read_nodes
from pykubeproxy.sources import SourceError
from pykubeproxy.wording import styled, text_of


@command(
    "dump-rules",
    short_help="Show services, endpoints and shares in the rules of nodes.",
    exit_codes={0: "The rules are shown.", 2: "Wrong usage or a failure, also on one node."},
)
@click.argument("service", default="", shell_complete=services)
@tables_output_option
@family_option
@node_options
@namespace_option
@server_options
@pod_options
@click_errors(SourceError)
def dump_rules(
    service: str,
    output: str,
    families: tuple[Family, ...],
    server: ServerOptions,
    namespace: str,
    nodes: NodeSelection,
    pods: PodOptions,
) -> None:
    """Show the frontends and endpoints of SERVICE, or of all services, in the rules of nodes.

    SERVICE is [svc/][NAMESPACE/]NAME[:PORT] or NAME.NAMESPACE[:PORT], with the name or number of a port. For each
    endpoint, show its share of new connections. Nodes whose rules cannot be read are named on standard error.

    \b
    kubectl pykubeproxy dump-rules --node node1
    kubectl pykubeproxy dump-rules web:http -n default --all-nodes
    """
    query = _query(service, server, namespace)
    client = open_client(server)
    wanted = list_nodes(client, nodes)
    documents: list[dict[str, object]] = []
    unread: list[UnreadNode] = []
    with node_access(client, pods) as access:
        for node in read_nodes(access, wanted, at_once=pods.at_once):
            if isinstance(node, UnreadNode):
                echo_line(f"{node.node.name}: {node.reason}", err=True)
                unread.append(node)
                continue
            echo_notes({node.node.name: node.notes})
            with click_errors(TooManyRules):
                found = _views(node, families, query)
            if output in ("json", "yaml"):
                documents.append(node_document(node, found))
            else:
                _print(node, found, output, families, query)
    if output in ("json", "yaml"):
        _print_documents(document(documents, unread), output)
    if any(not it.other_proxy for it in unread):
        raise SystemExit(2)


def _query(service: str, server: ServerOptions, namespace: str) -> ServiceFilter:
    """Return the filter; a name without namespace is in that of -n or of the context."""
    query = service_filter(service, namespace)
    if query.namespace or not is_service_name(service):
        return query
    return msgspec.structs.replace(query, namespace=namespace_of(server, namespace))


def _views(node: ReadNode, families: Sequence[Family], query: ServiceFilter) -> Sequence[ServiceView]:
    tables = [node.tables[family] for family in families if family in node.tables]
    return in_order(view for it in tables for view in views(it.ruleset, it.counters, query))


def _print(
    node: ReadNode,
    found: Sequence[ServiceView],
    output: str,
    families: Sequence[Family],
    query: ServiceFilter,
) -> None:
    title = f"# Node {node.node.name}, {node.proxy}, pod {node.pod}"
    echo_styled(text_of([styled(title, "cyan")]))
    match output:
        case "iptables":
            rulesets = [node.tables[family].ruleset for family in families if family in node.tables]
            texts = ((ruleset.family, listing(ruleset, query)) for ruleset in rulesets)
            click.echo("\n".join(f"# {family.value}\n{text}" for family, text in texts if text), nl=False)
        case "wide":
            echo_styled(render.table(found, render.counters, with_chains=True))
        case _:
            echo_styled(render.table(found))
    if not found:
        echo_line(f"Node {node.node.name} has no rules for {query if query.name else 'services'}.", err=True)
    click.echo()


def _print_documents(printed: dict[str, object], output: str) -> None:
    if output == "json":
        echo_json(printed)
    else:
        click.echo(yaml.safe_dump(printed, sort_keys=False), nl=False)


def node_document(node: ReadNode, found: Sequence[ServiceView]) -> dict[str, object]:
    """Return the entry of one node; see `document`."""
    services = render.document(found)["services"]
    return {
        "node": node.node.name,
        "pod": node.pod,
        "proxy": node.proxy,
        "notes": [*node.notes],
        "services": services,
    }


def document(nodes: Sequence[dict[str, object]], unread: Sequence[UnreadNode]) -> dict[str, object]:
    """The services in the rules of nodes as a document for JSON or YAML, of version pykubeproxy/v1.

    {"apiVersion": "pykubeproxy/v1",
     "nodes": [{"node": its name, "pod": NAMESPACE/NAME of the pod that was asked,
                "proxy": such as "kube-proxy v1.35.1",
                "notes": [what the rules do not show, such as a family that could not be read],
                "services": as `pykubeproxy dump-rules` prints them}],
     "unread": [{"node", "reason": why its rules could not be read, and what to do,
                 "otherProxy": true if its proxy does not write iptables rules}]}

    Both lists are ordered by node. Keys may be added.
    """
    return {
        "apiVersion": API_VERSION,
        "nodes": sorted(nodes, key=lambda it: str(it["node"])),
        "unread": [
            {"node": it.node.name, "reason": it.reason, "otherProxy": it.other_proxy}
            for it in sorted(unread, key=lambda it: it.node.name)
        ],
    }
