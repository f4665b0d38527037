"""`explain`: show which endpoints a Service uses on nodes, and why."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

import click
import msgspec
from msgspec.structs import replace

from pykubeproxy.cli.cluster import (
    ClusterOptions,
    cluster_options,
    cluster_source,
    namespace_option,
    node_access,
)
from pykubeproxy.cli.completion import namespaces, nodes, services
from pykubeproxy.cli.emit import emit, report_option
from pykubeproxy.cli.flags import (
    CONTEXT_SETTINGS,
    config_options,
    family_option,
    filename_option,
    read_config,
)
from pykubeproxy.cli.help import QUESTION, command, option
from pykubeproxy.cli.sources import (
    INFERRED,
    ask_agent,
    bundle_option,
    node_source,
    objects_in_files,
    objects_on_server,
    opened,
    read_errors,
    service_filter,
    url_option,
)
from pykubeproxy.cli.terminal import click_errors, echo_line, echo_notes
from pykubeproxy.config import Config, load
from pykubeproxy.inspect.explain.model import PortExplanation, RulesAgreement, agreement, explain_nodes
from pykubeproxy.inspect.explain.notes import stale_flow_notes
from pykubeproxy.inspect.explain.report import explain_report
from pykubeproxy.inspect.flows import served_endpoints
from pykubeproxy.inspect.node import NodeState, Question
from pykubeproxy.inspect.targets import InvalidTarget, ServiceFilter, parse_service
from pykubeproxy.nodes.agent import agent_state
from pykubeproxy.nodes.objects import KnownObjects, agent_objects, bundle_objects, cluster_with, context_of
from pykubeproxy.objects import Family, Node
from pykubeproxy.rules.context import RuleContext
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.ports import frontends
from pykubeproxy.services.selection import NodeTopology
from pykubeproxy.wording import suggestion

# Few calls read a bundle.
if TYPE_CHECKING:
    from pykubeproxy.bundle.read import Bundle


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
@report_option()
@config_options
@read_errors()
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
    With --node or --zone, explain for that node or zone and for this node, together if both use the same endpoints. This
    reads objects, not live rules (see dump-rules), so it needs no root. As root, it also names connections of this node
    that stay on endpoints which no longer serve.

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
    if filename is not None and node_name and not config.hostname_override:
        # Files tell no current node, so explain for the named node without comparison.
        config, node_name = msgspec.structs.replace(config, hostname_override=node_name.lower()), ""
    bundle = opened(bundle_file)
    known = _of_bundle(query, bundle) if bundle else _objects(query, url, flags, filename, config, node_name)
    inferred = _inferred(bundle, known.node) if bundle and known.config is None else {}
    config = known.config or config
    here = known.node
    there = _other(known.cluster, here, node_name, zone)
    nodes = (there, here) if there else (here,)
    with click_errors(LookupError):
        found = explain_nodes(
            known.cluster,
            query,
            nodes,
            lambda node: {
                family: replace(inferred[family], node=NodeTopology(node.name, node.zone))
                if family in inferred
                else context_of(config, node, family, api_servers=known.api_servers)
                for family in Family
            },
            families,
        )
    no_node = there is not None or filename is not None or bool(flags)
    emit(
        explain_report(
            found,
            nodes,
            quarantined={} if there else known.quarantined,
            more_notes=(lambda _: ()) if no_node else partial(_stale_flows, known.cluster, bundle),
        ),
        output,
    )


def _stale_flows(cluster: Cluster, bundle: "Bundle | None", port: PortExplanation) -> Iterator[str]:
    """Yield which connections of the node stay on endpoints that no longer serve, if conntrack can be read."""
    from pykubeproxy.nodes.live import live_flows_to
    from pykubeproxy.nodes.saved import bundled_flows

    flows = (
        bundled_flows(bundle).flows
        if bundle
        else live_flows_to(port.family, port.port.protocol, frontends(port.port))
    )
    served = served_endpoints(cluster.slices_of(port.name.service_key, port.family), port.name, port.family)
    return stale_flow_notes(port, served, (flow for flow in flows if flow.family is port.family))


def _inferred(bundle: "Bundle", node: Node) -> Mapping[Family, RuleContext]:
    """Return what the rules in a bundle without a configuration depend on, as these rules show it. Raises ReadError."""
    from pykubeproxy.inspect.diff.comparison import inferred_context

    echo_notes({"": [INFERRED]})
    (state,) = node_source((), bundle, "auto", ()).nodes(Question())
    assert isinstance(state, NodeState), "a bundle yields a node or raises"
    return {
        family: inferred_context(node, rules, state.origin.proxy) for family, rules in state.rules.items()
    }


def _objects(
    query: ServiceFilter,
    url: str | None,
    flags: Mapping[str, object],
    filename: str | None,
    config: Config,
    node_name: str,
) -> KnownObjects:
    agent = ask_agent(url, flags, filename, service=f"{query.namespace}/{query.name}".lstrip("/"))
    if agent:
        if not agent.objects.services:
            known = [str(service.key) for service in agent_state(url).objects.services]
            advice = suggestion(f"{query.namespace}/{query.name}", known) or (
                "for a headless Service or one of another proxy, use --config or --kubeconfig to read from the API server"
            )
            raise click.ClickException(
                f"the agent at {agent.url} has no Service {replace(query, port='')}; {advice}"
            )
        return agent_objects(agent.objects, agent.config)
    if filename is not None:
        found = objects_in_files(filename, config)
    else:
        found = objects_on_server(config, query=query, nodes=[node_name] if node_name else [])
    echo_notes({"": found.remarks})
    return found


def _of_bundle(query: ServiceFilter, bundle: "Bundle") -> KnownObjects:
    found = bundle_objects(bundle, query)
    if not any(found.cluster.services()):
        raise click.ClickException(
            f"{bundle.name} has no Service {msgspec.structs.replace(query, port='')}; a bundle lacks headless Services and"
            " those of another proxy"
        )
    return found


@command(
    "explain",
    short_help="Show which endpoints a Service uses on each node, and why.",
    exit_codes={0: "The answer, also that rules differ from it.", 2: "Wrong usage or a failure."},
)
@click.argument("service", metavar="SVC", shell_complete=services)
@option(
    "--node",
    "name",
    default="",
    metavar="NAME",
    shell_complete=nodes,
    help="Explain for this node, and read its rules.",
    group=QUESTION,
)
@family_option
@report_option()
@namespace_option
@cluster_options
@click_errors(InvalidTarget, LookupError)
def explain_on_nodes(
    service: str,
    name: str,
    families: tuple[Family, ...],
    output: str,
    namespace: str,
    cluster: ClusterOptions,
) -> None:
    """Explain which endpoints of SVC each node uses, and why not the others. Nodes with the same answer come together.

    SVC is NAME, NAMESPACE/NAME or NAME.NAMESPACE, each with or without :PORT. This reads objects on the API server. With
    --node, it also reads the rules of that node, and says whether they agree.

    \b
    kubectl pykubeproxy explain web -n default
    kubectl pykubeproxy explain default/web:http --node node1
    """
    from pykubeproxy.inspect.connection import missing
    from pykubeproxy.nodes.directory import cluster_directory

    target = parse_service(service, cluster.namespace(namespace))
    client = cluster.client()
    directory, remarks = cluster_directory(client, (target,))
    echo_notes({"": remarks})
    if directory.service(target.key) is None:
        raise missing(target, (f"svc/{service.key}" for service in directory.services), directory)
    nodes = [node for node in directory.nodes if name in ("", node.name)]
    if not nodes:
        raise click.ClickException(
            f"there is no node {name}; run `kubectl get nodes`" if name else "the cluster has no nodes"
        )
    # The API server does not know the settings of proxies.
    config = load(None, {}).config
    found = explain_nodes(
        cluster_with(directory.services, directory.slices, directory.nodes),
        ServiceFilter(target.namespace, target.name, target.port),
        nodes,
        lambda node: {family: context_of(config, node, family) for family in Family},
        families,
    )
    rules: list[RulesAgreement] = []
    if name:
        with node_access(client, cluster) as access:
            (read,) = cluster_source(access, nodes[:1]).nodes(Question(nftables=True))
        if isinstance(read, NodeState):
            echo_notes({read.name: read.remarks})
            rules.append(agreement(read.name, found, read.rules))
        else:
            rules.append(RulesAgreement(read.name, None, unread=read.reason))
    emit(explain_report(found, nodes, rules, settings_known=False), output)


def _other(cluster: Cluster, here: Node, node_name: str, zone: str | None) -> Node | None:
    """Return the node selected by --node and --zone, or None without them."""
    if not node_name and zone is None:
        return None
    node = cluster.node(node_name) if node_name else here
    if node is None:
        echo_line(f"There is no Node {node_name}, so its zone is unknown.", err=True)
        node = Node(node_name)
    return node if zone is None else msgspec.structs.replace(node, zone=zone)
