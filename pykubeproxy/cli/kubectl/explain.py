"""`kubectl pykubeproxy explain`: show which endpoints a Service uses on each node, and why."""

import click

from pykubeproxy.cli.flags import family_option, output_option
from pykubeproxy.cli.help import QUESTION, command, option
from pykubeproxy.cli.kubectl import completion
from pykubeproxy.cli.kubectl.access import namespace_of, node_access, open_client
from pykubeproxy.cli.kubectl.arguments import PodOptions, ServerOptions
from pykubeproxy.cli.kubectl.lookup import contexts_of, look_up
from pykubeproxy.cli.kubectl.notes import echo_notes
from pykubeproxy.cli.kubectl.options import namespace_option, pod_options, server_options
from pykubeproxy.cli.terminal import click_errors, echo_json, echo_styled
from pykubeproxy.inspect.explain.agreement import Agreement, agreement
from pykubeproxy.inspect.explain.nodes import ServiceOnNodes, explain_nodes
from pykubeproxy.inspect.explain.render_nodes import document, text
from pykubeproxy.inspect.filter import ServiceFilter
from pykubeproxy.inspect.targets import InvalidTarget, parse_service
from pykubeproxy.inspect.targets.places import missing
from pykubeproxy.objects import Family, Node
from pykubeproxy.remote import NodeAccess, ReadNode, read_nodes
from pykubeproxy.sources import SourceError


@command(
    short_help="Show which endpoints a Service uses on each node, and why.",
    exit_codes={0: "The answer, also that rules differ from it.", 2: "Wrong usage or a failure."},
)
@click.argument("service", metavar="SVC", shell_complete=completion.services)
@option(
    "--node",
    "name",
    default="",
    metavar="NAME",
    shell_complete=completion.nodes,
    help="Explain for this node, and read its rules.",
    group=QUESTION,
)
@family_option
@output_option
@namespace_option
@server_options
@pod_options
@click_errors(SourceError, InvalidTarget, LookupError)
def explain(
    service: str,
    name: str,
    families: tuple[Family, ...],
    output: str,
    server: ServerOptions,
    namespace: str,
    pods: PodOptions,
) -> None:
    """Explain which endpoints of SVC each node uses, and why not the others. Nodes with the same answer come together.

    SVC is NAME, NAMESPACE/NAME or NAME.NAMESPACE, each with or without :PORT. This reads objects on the API server. With
    --node, it also reads the rules of that node, and says whether they agree.

    \b
    kubectl pykubeproxy explain web -n default
    kubectl pykubeproxy explain default/web:http --node node1
    """
    target = parse_service(service, namespace_of(server, namespace))
    client = open_client(server)
    cluster, directory = look_up(client, (target,))
    if directory.service(target.key) is None:
        raise missing(target, (f"svc/{it.key}" for it in directory.services), directory)
    nodes = [node for node in directory.nodes if name in ("", node.name)]
    if not nodes:
        raise click.ClickException(
            f"there is no node {name}; run `kubectl get nodes`" if name else "the cluster has no nodes"
        )
    found = explain_nodes(
        cluster,
        ServiceFilter(target.namespace, target.name, target.port),
        nodes,
        lambda node: {family: context for family, context in contexts_of(node).items() if family in families},
    )
    compared = None
    if name:
        with node_access(client, pods) as access:
            compared = _compared(access, nodes[0], found)
    if output == "json":
        echo_json(document(found, compared))
    else:
        echo_styled(text(found, len(nodes), compared))


def _compared(access: NodeAccess, node: Node, found: tuple[ServiceOnNodes, ...]) -> Agreement:
    (read,) = read_nodes(access, [node])
    if not isinstance(read, ReadNode):
        return Agreement(node.name, unread=read.reason)
    echo_notes({node.name: read.notes})
    rulesets = {family: tables.ruleset for family, tables in read.tables.items()}
    return agreement(node.name, found, rulesets)
