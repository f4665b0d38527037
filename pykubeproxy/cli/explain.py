"""`pykubeproxy explain`: show which endpoints a Service uses on this node, and why."""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import click
import msgspec

from pykubeproxy.cli.bundle_files import bundle_option, opened
from pykubeproxy.cli.completion import namespaces, services
from pykubeproxy.cli.flags import (
    CONTEXT_SETTINGS,
    config_options,
    family_option,
    filename_option,
    output_option,
    read_config,
)
from pykubeproxy.cli.help import QUESTION, command, option
from pykubeproxy.cli.inputs import Source, agent_objects, context_of, objects_of, service_filter
from pykubeproxy.cli.running_agent import AgentState, ask_agent, url_option
from pykubeproxy.cli.terminal import click_errors, echo_json, echo_line, echo_styled
from pykubeproxy.config import Config
from pykubeproxy.inspect.explain import render_json, render_text
from pykubeproxy.inspect.explain.model import Explanation, explain_all
from pykubeproxy.inspect.filter import ServiceFilter
from pykubeproxy.objects import Family, Node
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.ports import PortName
from pykubeproxy.services.selection import NodeTopology

# Most commands read no bundle, so only the function that needs one imports the modules for it.
if TYPE_CHECKING:
    from pykubeproxy.bundle.read import Bundle

# The reasons for which an agent quarantined service ports, by family and port.
_Quarantined = Mapping[tuple[str, PortName], str]


@command(context_settings=CONTEXT_SETTINGS, short_help="Explain which endpoints a Service uses, and why.")
@click.argument("service", metavar="SERVICE[:PORT]", shell_complete=services)
@option(
    "-n",
    "--namespace",
    default="",
    shell_complete=namespaces,
    help="Namespace of the Service.  [default: all]",
    group=QUESTION,
)
@family_option
@filename_option
@option("--node", "node_name", default="", metavar="NAME", help="Explain for another node.", group=QUESTION)
@option("--zone", metavar="NAME", help="Explain as if the node were in this zone.", group=QUESTION)
@url_option(unless="-f and flags of `run`")
@bundle_option
@output_option
@config_options
def explain(
    service: str,
    namespace: str,
    families: tuple[Family, ...],
    filename: str | None,
    node_name: str,
    zone: str | None,
    url: str | None,
    bundle_file: str | None,
    output: str,
    flags: dict[str, object],
) -> None:
    """Explain which endpoints of SERVICE this node uses, why, and how traffic reaches them.

    SERVICE has the form [NAMESPACE/]NAME, svc/[NAMESPACE/]NAME or NAME.NAMESPACE, PORT is the name or number of a port.
    With --node or --zone, explain for that
    node or zone, and list the differences from this node. This reads objects, not live rules (see dump-rules), so it
    needs no root.

    By default, objects and configuration come from the agent on this node. With -f, objects come from files. With flags
    of `run`, or if no agent answers, they come from the API server. With --bundle, they come from a file about another
    node.

    \b
    pykubeproxy explain default/web:http
    pykubeproxy explain default/web --config /var/lib/kube-proxy/config.conf
    pykubeproxy explain web -f objects.yaml --hostname-override n1 --zone b
    """
    config = read_config(flags)
    query = service_filter(service, namespace)
    if not query.name:
        raise click.UsageError("SERVICE has no name; use the form [NAMESPACE/]NAME[:PORT]")
    if bundle_file and (url is not None or filename is not None or flags):
        raise click.UsageError("--bundle cannot be combined with --url, -f or flags of `run`; remove them")
    bundle = opened(bundle_file)
    agent = _of_bundle(query, bundle, config) if bundle else _ask_agent(query, url, flags, filename)
    if filename is not None and node_name and not config.hostname_override:
        # Files tell no current node, so explain for the named node without comparison.
        config, node_name = msgspec.structs.replace(config, hostname_override=node_name.lower()), ""
    quarantined: _Quarantined = {}
    if agent:
        config = agent.config
        quarantined = {(it.family, it.port_name): it.reason for it in agent.objects.quarantined}
        source = agent_objects(agent.objects)
    else:
        source = objects_of(query, filename, config, [node_name] if node_name else [])
    cluster, here, _ = source
    there = _other(cluster, here, node_name, zone)
    found = _explanations(source, config, there or here, query, families, None if there else quarantined)
    compared = (_explanations(source, config, here, query, families), _topology(here)) if there else None
    if output == "json":
        echo_json(render_json.document(found, _topology(there or here), compared))
        return
    echo_styled(render_text.text(found, _topology(there or here)))
    if compared is not None:
        echo_styled(render_text.comparison(found, *compared))


def _ask_agent(
    query: ServiceFilter, url: str | None, flags: Mapping[str, object], filename: str | None
) -> AgentState | None:
    """Return the state of an agent with one Service. Raises ClickException if the agent does not know it."""
    found = ask_agent(url, flags, filename, service=f"{query.namespace}/{query.name}".lstrip("/"))
    if found and not found.objects.services:
        raise click.ClickException(
            f"the agent at {found.url} has no Service {msgspec.structs.replace(query, port='')}; for a headless Service"
            " or one of another proxy, use --config or --kubeconfig to read from the API server"
        )
    return found


def _of_bundle(query: ServiceFilter, bundle: "Bundle", config: Config) -> AgentState:
    """Return the state of the agent in a bundle with one Service; `config` is for a bundle without configuration.

    Raises ClickException if the agent does not know the Service.
    """
    from pykubeproxy.cli.bundle_agent import bundled_agent

    found = bundled_agent(bundle, query)
    if not found.objects.services:
        raise click.ClickException(
            f"{bundle.name} has no Service {msgspec.structs.replace(query, port='')}; a bundle lacks headless Services and"
            " those of another proxy"
        )
    return AgentState(found.objects, found.config or config, bundle.name)


def _other(cluster: Cluster, here: Node, node_name: str, zone: str | None) -> Node | None:
    """Return the node selected by --node and --zone, or None without them."""
    if not node_name and zone is None:
        return None
    node = cluster.node(node_name) if node_name else here
    if node is None:
        echo_line(f"There is no Node {node_name}, so its zone is unknown.", err=True)
        node = Node(node_name)
    return node if zone is None else msgspec.structs.replace(node, zone=zone)


def _topology(node: Node) -> NodeTopology:
    return NodeTopology(node.name, node.zone)


def _explanations(
    source: Source,
    config: Config,
    node: Node,
    query: ServiceFilter,
    families: Collection[Family],
    quarantined: _Quarantined | None = None,
) -> Sequence[Explanation]:
    """Return the explanations for a node. Raises ClickException if there is no such Service or port."""
    contexts = {family: context_of(config, node, family, api_servers=source.api_servers) for family in Family}
    reasons = quarantined or {}
    with click_errors(LookupError):
        found = explain_all(source.cluster, query, contexts)
    return [
        msgspec.structs.replace(
            it,
            ports=tuple(
                msgspec.structs.replace(port, quarantined=reasons.get((port.family.value, port.name), ""))
                for port in it.ports
                if port.family in families
            ),
            skipped={family: reason for family, reason in it.skipped.items() if family in families},
        )
        for it in found
    ]
