"""`kubectl pykubeproxy diff`: find the nodes whose rules do not follow the objects."""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence

import click

from pykubeproxy import garbage
from pykubeproxy.cli.flags import choice_option
from pykubeproxy.cli.help import DIFFERENT, NOT_ANSWERED, OUTPUT, QUESTION, command, option
from pykubeproxy.cli.kubectl.access import list_nodes, list_objects, node_access, open_client
from pykubeproxy.cli.kubectl.arguments import NodeSelection, PodOptions, ServerOptions
from pykubeproxy.cli.kubectl.notes import echo_notes
from pykubeproxy.cli.kubectl.options import node_options, pod_options, server_options
from pykubeproxy.cli.terminal import click_errors, echo_json, echo_line, echo_styled, progress
from pykubeproxy.inspect.diff import render as text_diff
from pykubeproxy.inspect.diff.model import Changes, compare
from pykubeproxy.inspect.fleet import render
from pykubeproxy.inspect.fleet.model import FleetComparison, NodeResult, NodeVerdict
from pykubeproxy.inspect.fleet.rounds import Clock, UnknownTables, compare_fleet
from pykubeproxy.inspect.node_tables import NodeTables
from pykubeproxy.objects import Key, Node
from pykubeproxy.remote import NodeAccess, ReadNode, UnreadNode, read_nodes
from pykubeproxy.rules.difference import own_part
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.sources import SourceError
from pykubeproxy.sources.changes import last_changes

# The default of kube-proxy's iptables.syncPeriod.
_SYNC_PERIOD = 30.0


class _ApiServer:
    """Objects, and tables of nodes, through the API server. See FleetSource.

    `notes` are those about each node, by name; `complete` is False if a node lacks a family of its addresses.
    """

    def __init__(self, access: NodeAccess, at_once: int) -> None:
        self._access = access
        self._at_once = at_once
        self.notes: dict[str, Sequence[str]] = {}
        self.complete = True

    def objects(self) -> Cluster:
        """List all objects. Raises ClickException."""
        return list_objects(self._access.client)

    def tables(self, nodes: Sequence[Node]) -> Iterator[NodeTables | UnknownTables]:
        """Read nodes side by side, and show a progress bar meanwhile."""
        with progress(len(nodes), "Reading nodes") as advance:
            for one in read_nodes(self._access, nodes, at_once=self._at_once):
                yield self._tables_of(one)
                advance()

    def _tables_of(self, one: ReadNode | UnreadNode) -> NodeTables | UnknownTables:
        if isinstance(one, UnreadNode):
            return UnknownTables(one.node, one.reason, one.other_proxy, one.proxy, one.pod)
        self.notes[one.node.name] = one.notes
        self.complete &= one.complete
        rulesets = {family: it.ruleset for family, it in one.tables.items()}
        return NodeTables(one.node, rulesets, one.proxy, one.pod)

    def last_changes(self, services: Sequence[Key]) -> Mapping[Key, float]:
        """Return when objects of Services last changed, as far as known."""
        return last_changes(self._access.client, services)


@command(
    short_help="Find the nodes whose rules do not follow the objects.",
    exit_codes={
        0: "The rules of all nodes follow the objects.",
        1: "Rules of a node differ, or its agent quarantined a Service.",
        2: "Wrong usage or a failure, or a node could not be read.",
    },
)
@node_options
@option(
    "--sync-period",
    type=click.FloatRange(0, 3600),
    default=_SYNC_PERIOD,
    show_default=True,
    metavar="SECONDS",
    help="How long rules may take to follow; a node differs if they take longer.",
    group=QUESTION,
)
@choice_option(
    "-o",
    "--output",
    choices=("table", "json", "rules"),
    help="Output format; rules is a unified diff of each chain of one node.",
    group=OUTPUT,
)
@server_options
@pod_options
@click_errors(SourceError)
def diff(
    nodes: NodeSelection,
    sync_period: float,
    output: str,
    server: ServerOptions,
    pods: PodOptions,
) -> None:
    """Show for each node whether its rules follow the Services and EndpointSlices, and which Services are wrong there.

    Compare what packets get, for every client and every address and port of a Service: endpoints with their shares,
    masqueraded or not, dropped, rejected, and session affinity. So rules of any version of kube-proxy are no difference if
    they mean the same. The settings of each proxy are inferred from its rules; a node with other settings than most nodes
    is named.

    Objects change while nodes are read. So nodes that differ are read again, with fresh objects: a node differs only if a
    Service stays wrong for --sync-period while its objects stay the same, or if these changed long before.

    \b
    kubectl pykubeproxy diff --all-nodes
    kubectl pykubeproxy diff --all-nodes -o json
    kubectl pykubeproxy diff --node node1 -o rules
    """
    if output == "rules" and len(nodes.names) != 1:
        raise click.UsageError("-o rules shows one node; give one --node NAME")
    garbage.collect_rarely()
    client = open_client(server)
    wanted = list_nodes(client, nodes)
    with node_access(client, pods) as access:
        if output == "rules":
            raise SystemExit(_show_rules(access, wanted[0]))
        source = _ApiServer(access, pods.at_once)
        clock, servers = Clock(time.time, _wait), client.server_addresses()
        results = [*compare_fleet(source, wanted, clock, sync_period, servers)]
    if output == "json":
        echo_json(render.document(results))
    else:
        echo_styled(render.text(results))
    echo_notes(source.notes)
    raise SystemExit(_exit_code(results, complete=source.complete))


def _wait(seconds: float) -> None:
    """Wait before nodes are read again, and say so on a terminal."""
    if sys.stderr.isatty():
        echo_line(f"Some nodes differ; reading them again in {seconds:.0f} s.", err=True)
    time.sleep(seconds)


def _exit_code(results: Sequence[NodeResult], *, complete: bool) -> int:
    if any(it.verdict is NodeVerdict.DIFFERS or it.quarantined for it in results):
        return DIFFERENT
    unread = any(it.verdict is NodeVerdict.NOT_COMPARED and not it.other_proxy for it in results)
    return NOT_ANSWERED if unread or not complete else 0


def _show_rules(access: NodeAccess, node: Node) -> int:
    """Print how the texts of a node's rules differ from those that pykubeproxy would write. Return the exit code."""
    comparison = FleetComparison(list_objects(access.client))
    (one,) = read_nodes(access, [node])
    if not isinstance(one, ReadNode):
        raise click.ClickException(f"node {node.name}: {one.reason}")
    echo_notes({node.name: one.notes})
    found: list[Changes] = []
    for tables in one.tables.values():
        desired = comparison.desired(node, tables.ruleset, one.proxy)
        found.append(compare(own_part(tables.ruleset, desired), desired))
    before, after = f"rules of node {node.name} ({one.proxy})", "objects of the API server"
    echo_styled(text_diff.unified(found, before, after))
    return DIFFERENT if any(it.chains for it in found) else 0
