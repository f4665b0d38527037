"""`dump-rules`: show the services, endpoints and shares in the rules of nodes."""

import sys
import time
from collections.abc import Iterable, Sequence
from typing import Literal

import click
import msgspec

from pykubeproxy.cli import terminal
from pykubeproxy.cli.cluster import (
    ClusterOptions,
    cluster_options,
    cluster_source,
    namespace_option,
    node_option,
    selected_nodes,
)
from pykubeproxy.cli.completion import namespaces, services
from pykubeproxy.cli.emit import columns, emit, emit_rules, report_option
from pykubeproxy.cli.flags import backend_option, family_option, rules_option
from pykubeproxy.cli.help import NOT_ANSWERED, OUTPUT, QUESTION, SOURCE, command, option
from pykubeproxy.cli.sources import bundle_option, node_source, opened, read_errors, service_filter
from pykubeproxy.cli.terminal import echo_line, echo_notes, echo_styled
from pykubeproxy.inspect.dump.model import ServiceView, services_of
from pykubeproxy.inspect.dump.render_rules import node_listing
from pykubeproxy.inspect.dump.report import DumpedNode, DumpReport, dumped, rates, service_blocks
from pykubeproxy.inspect.node import NodeSource, NodeState, Question, UnknownNode
from pykubeproxy.inspect.targets import ServiceFilter, is_service_name
from pykubeproxy.objects import Family
from pykubeproxy.report.text import text
from pykubeproxy.wording import natural, suggestion

_output = report_option(
    "rules", about="wide with bytes and chains, rules in the order in which packets pass them"
)
# Seconds between updates of --watch.
_INTERVAL = 2.0


@command("dump-rules", short_help="Show services, endpoints and shares in the live rules.")
@click.argument("service", default="", shell_complete=services)
@option(
    "-n",
    "--namespace",
    default="",
    shell_complete=namespaces,
    help="Show services of this namespace only.",
    group=QUESTION,
)
@_output
@family_option
@rules_option
@bundle_option
@backend_option(help="The backend to read; auto detects the one in use.", group=SOURCE)
@option("--watch", is_flag=True, help="Show new connections per second until Ctrl-C.", group=OUTPUT)
@read_errors()
def dump_rules(
    service: str,
    namespace: str,
    output: str,
    families: tuple[Family, ...],
    files: tuple[str, ...],
    bundle_file: str | None,
    backend: Literal["auto", "nft", "legacy"],
    watch: bool,
) -> None:
    """Show the frontends and endpoints of SERVICE, or of all services, in the live rules of this node.

    SERVICE has the form [NAMESPACE/]NAME[:PORT], with the name or number of a port, also as svc/[NAMESPACE/]NAME or
    NAME.NAMESPACE. For each endpoint, show its share of new connections. This also reads the rules of kube-proxy, needs no
    running agent and changes nothing. With --rules or --bundle, show the rules of another node; this needs neither root
    nor iptables.

    \b
    pykubeproxy dump-rules
    pykubeproxy dump-rules default/web:http -o rules
    pykubeproxy dump-rules default/web --watch
    ssh node1 sudo iptables-save -c | pykubeproxy dump-rules --rules -
    """
    if watch and output != "text":
        raise click.UsageError("--watch requires -o text")
    if watch and (files or bundle_file):
        raise click.UsageError("--watch requires live rules; remove --rules or --bundle")
    query = service_filter(service, namespace)
    source = node_source(files, opened(bundle_file), backend)
    question = Question(families, query, counters=True, nftables=True)
    if watch:
        _watch(source, question, required=bool(service))
    else:
        _show(source.nodes(question), query, output, required=bool(service))


@command(
    "dump-rules",
    short_help="Show services, endpoints and shares in the rules of nodes.",
    exit_codes={
        0: "The rules are shown.",
        2: "Wrong usage or a failure, also on one node; or no node has rules for SERVICE.",
    },
)
@click.argument("service", default="", shell_complete=services)
@_output
@family_option
@node_option
@namespace_option
@cluster_options
def dump_rules_of_nodes(
    service: str,
    output: str,
    families: tuple[Family, ...],
    nodes: tuple[str, ...],
    namespace: str,
    cluster: ClusterOptions,
) -> None:
    """Show the frontends and endpoints of SERVICE, or of all services, in the rules of nodes.

    SERVICE is [svc/][NAMESPACE/]NAME[:PORT] or NAME.NAMESPACE[:PORT], with the name or number of a port. For each
    endpoint, show its share of new connections. Nodes whose rules cannot be read are named on standard error.

    \b
    kubectl pykubeproxy dump-rules --node node1
    kubectl pykubeproxy dump-rules web:http -n default
    """
    query = service_filter(service, namespace)
    if not query.namespace and is_service_name(service):
        query = msgspec.structs.replace(query, namespace=cluster.namespace(namespace))
    with selected_nodes(cluster, nodes) as (access, wanted):
        found = cluster_source(access, wanted).nodes(Question(families, query, counters=True, nftables=True))
        shown, unread = _show(found, query, output, required=False)
    if any(not node.by_design for node in unread) or (service and not shown):
        raise SystemExit(NOT_ANSWERED)


def _show(
    nodes: Iterable[NodeState | UnknownNode], query: ServiceFilter, output: str, *, required: bool
) -> tuple[bool, Sequence[UnknownNode]]:
    """Print the matching services of nodes, ordered by name; with `-o rules`, as soon as a node has been read.

    Return whether there are any, and the nodes that could not be read; their reasons, and remarks, go to standard error.
    Raises TooManyRules, and ClickException if a `required` service has no rules on a node.
    """
    answers: list[DumpedNode] = []
    unread: list[UnknownNode] = []
    notes: dict[str, Sequence[str]] = {}
    shown = False
    for found in nodes:
        answer = dumped(found, query)
        if isinstance(found, UnknownNode):
            notes[found.name] = (found.reason,)
            unread.append(found)
        else:
            shown |= bool(answer.services)
            none = () if answer.services else (_no_rules(query, found, required=required),)
            notes[found.name if found.origin.pod else ""] = (*found.remarks, *none)
        if output != "rules":
            answers.append(answer)
        elif isinstance(found, NodeState):
            # In the order in which nodes answer: the rules of many nodes are too large to keep.
            _show_rules(found, answer.title, query)
    echo_notes(notes)
    if output != "rules":
        emit(DumpReport(nodes=tuple(sorted(answers, key=lambda node: natural(node.node or "")))), output)
    return shown, unread


def _show_rules(found: NodeState, title: str, query: ServiceFilter) -> None:
    if title:
        echo_line(f"# {title}")
    emit_rules((family.value, node_listing(rules, query)) for family, rules in found.rules.items())
    if title:
        click.echo()


def _watch(source: NodeSource, question: Question, *, required: bool) -> None:
    """Print new connections per second in a loop; on a terminal, overwrite the previous table."""

    def read() -> tuple[Sequence[ServiceView], NodeState]:
        (found,) = source.nodes(question)
        assert isinstance(found, NodeState), "this node is read or an error"
        if found.in_nftables_mode:
            raise click.ClickException(
                "rules of kube-proxy in nftables mode have no counters; remove --watch"
            )
        return dumped(found, question.service).services, found

    views, found = read()
    if not views:
        echo_line(_no_rules(question.service, found, required=required), err=True)
    echo_line(f"Counting for {_INTERVAL:.0f} s at a time; press Ctrl-C to end.", err=True)
    now = time.monotonic()
    try:
        while True:
            time.sleep(_INTERVAL)
            before, earlier, (views, _), now = views, now, read(), time.monotonic()
            shown = text(service_blocks(views, rates(before, now - earlier)), columns(sys.stdout))
            terminal.clear()
            echo_line(f"New connections per second at {time.strftime('%H:%M:%S')}")
            click.echo()
            echo_styled(shown)
            click.echo()
            sys.stdout.flush()
    except KeyboardInterrupt:
        return


def _no_rules(query: ServiceFilter, node: NodeState, *, required: bool) -> str:
    """Say that a node has no such rules, and which Service is meant. Raises ClickException if they are `required`."""
    where = (
        "" if node.origin.pod else f" {node.origin.place}"
    )  # a note about a pod's node begins with its name
    if not query.name:
        of = f" of namespace {query.namespace}" if query.namespace else ""
        return f"there are no rules for services{of}{where}"
    known = sorted(str(service.key) for service in services_of(node.rules.values()))
    advice = suggestion(f"{query.namespace}/{query.name}", known)
    if required:
        advice = advice or "run dump-rules without SERVICE to list the services that have"
        raise click.ClickException(f"there are no rules for {query}{where}; {advice}")
    return f"there are no rules for {query}{where}" + (f"; {advice}" if advice else "")
