"""`diff`: compare rules with the desired rules: on a node, or of the nodes of a cluster.

On a node, rules of other objects or settings take the place of live rules on request.
"""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import click
import msgspec

from pykubeproxy import garbage
from pykubeproxy.cli.cluster import (
    ClusterOptions,
    cluster_options,
    cluster_source,
    list_objects,
    node_option,
    selected_nodes,
)
from pykubeproxy.cli.emit import emit, report_option
from pykubeproxy.cli.flags import (
    CONTEXT_SETTINGS,
    config_options,
    family_option,
    filename_option,
    node_address_option,
    read_config,
    rules_option,
)
from pykubeproxy.cli.help import DIFFERENT, NOT_ANSWERED, QUESTION, command, option
from pykubeproxy.cli.sources import (
    INFERRED,
    ask_agent,
    bundle_option,
    node_source,
    objects_in_files,
    objects_on_server,
    opened,
    read_errors,
    url_option,
)
from pykubeproxy.cli.terminal import echo_line, echo_notes, echo_styled, progress
from pykubeproxy.config import Config
from pykubeproxy.inspect.diff.by_rules import unified
from pykubeproxy.inspect.diff.report import (
    NodeResult,
    NodeVerdict,
    diff_report,
    rule_changes,
    rules_result,
)
from pykubeproxy.inspect.node import NodeSource, NodeState, Question, UnknownNode
from pykubeproxy.nodes import host_name
from pykubeproxy.nodes.objects import (
    KnownObjects,
    NoObjects,
    RenderedNode,
    agent_objects,
    bundle_objects,
    desired_rules,
    titled,
)
from pykubeproxy.objects import Family, Key, Node
from pykubeproxy.rules.ruleset import Ruleset

# Most commands on a node need none of these.
if TYPE_CHECKING:
    from pykubeproxy.bundle.read import Bundle
    from pykubeproxy.nodes.cluster import NodeAccess
    from pykubeproxy.services.cluster import Cluster

# Flags that say where objects come from, not how rules are made.
_SOURCE_FLAGS = frozenset(("kubeconfig", "master", "hostname-override"))
# The default of kube-proxy's iptables.syncPeriod.
_SYNC_PERIOD = 30.0


@command(
    context_settings=CONTEXT_SETTINGS,
    exit_codes={0: "No differences.", 1: "Differences.", 2: "Not compared: wrong usage or a failure."},
    short_help="Compare live rules with desired rules.",
)
@filename_option
@option(
    "--against",
    metavar="PATH",
    help="Compare with the rules for the objects in PATH instead of the live rules.",
    group=QUESTION,
)
@option(
    "--against-config",
    metavar="FILE",
    help="Compare with the rules for this configuration instead of the live rules.",
    group=QUESTION,
)
@rules_option
@bundle_option
@node_address_option
@family_option
@report_option("rules", about="rules is a unified diff of each chain")
@option(
    "--meaning",
    is_flag=True,
    help="Compare effects on packets, not rule text: for proxies of other versions.",
    group=QUESTION,
)
@url_option(unless="-f and flags of `run`")
@config_options
@read_errors()
def diff(
    filename: str | None,
    against: str | None,
    against_config: str | None,
    files: tuple[str, ...],
    bundle_file: str | None,
    addresses: tuple[str, ...],
    families: tuple[Family, ...],
    url: str | None,
    output: str,
    meaning: bool,
    flags: dict[str, object],
) -> None:
    """Show how the live rules of this node differ from the desired rules.

    By default, the desired rules follow from objects and configuration of the agent on this node. With -f, objects come
    from files. With flags of `run`, or if no agent answers, they come from the API server. The output says which.

    With --rules, compare the rules of another node, from files; --hostname-override names the node. Without -f, objects
    come from the API server, or from the agent at --url, and flags of `run` say how its proxy is configured.

    With --bundle, compare the rules of another node with the objects and the configuration in the same file. With -f,
    objects come from files, with --kubeconfig from the API server; other flags of `run` replace the configuration. A
    bundle of kube-proxy may lack its configuration: then settings are inferred from the rules.

    With --against or --against-config, compare the desired rules with the rules for other objects or another
    configuration instead of the live rules; this needs no root. Only the proxy's own chains and jumps are compared, and
    nothing changes. In chains that services share, an order of rules that means nothing to a packet is no difference:
    kube-proxy's order varies.

    With --meaning, compare what the first packet of a connection gets, for every client and every address and port of a
    service: endpoints with their shares, masqueraded or not, dropped, rejected, and session affinity. Rules of another
    form, such as those of another version of kube-proxy, are no difference if they mean the same. Rules of kube-proxy in
    nftables mode are always compared so; what that mode does otherwise by design is no difference.

    \b
    sudo pykubeproxy diff
    sudo pykubeproxy diff --config /var/lib/kube-proxy/config.conf
    sudo pykubeproxy diff -f objects.yaml --hostname-override node1 -o rules
    pykubeproxy diff --bundle node1.tar.gz
    pykubeproxy diff --rules node1.txt -f objects.yaml --hostname-override node1
    pykubeproxy diff -f new.yaml --against old.yaml --hostname-override node1
    """
    if meaning and output == "rules":
        raise click.UsageError("--meaning compares no text of rules; remove it, or -o rules")
    if [filename, against, bundle_file, *files].count("-") > 1:
        raise click.UsageError('only one of -f, --against, --rules and --bundle can be "-" (standard input)')
    of_node = against is None and against_config is None
    if (files or bundle_file) and not of_node:
        name = "--rules" if files else "--bundle"
        raise click.UsageError(
            f"{name} cannot be combined with --against or --against-config; remove one of them"
        )
    if bundle_file and url is not None:
        raise click.UsageError("--bundle cannot be combined with --url; remove one of them")
    garbage.collect_rarely()
    config = read_config(flags)
    bundle = opened(bundle_file)
    if bundle:
        known = _of_bundle(bundle, filename, config, flags)
    # The agent on this machine knows nothing about the node of a file.
    elif (not files or url is not None) and (agent := ask_agent(url, flags, filename, slices="all")):
        known = agent_objects(agent.objects, agent.config)
    elif files:
        known = _of_named_node(filename, config, _settings_title(flags))
    elif of_node:
        config = msgspec.structs.replace(config, hostname_override=config.hostname_override or host_name())
        known = _objects(filename, config, _settings_title(flags))
    else:
        # Titles name the configurations only if they differ.
        known = _objects(filename, config, _settings_title(flags) if against_config is not None else "")
    source: NodeSource
    if of_node:
        settings = known.config or config
        source = node_source(files, bundle, settings.iptables_backend.value, addresses)
        question = Question(families, facts=True, addresses=bool(settings.node_port_addresses), nftables=True)
    else:
        source = _other(known, config, against, against_config, flags, addresses)
        question = Question(families)
    (state,) = source.nodes(question)
    assert isinstance(state, NodeState), "these sources yield a node or raise"
    echo_notes({"": (*state.remarks, *known.remarks)})
    for what, reason in state.unread.items():
        echo_line(f"{what} are not compared: {reason}.", err=True)
    if output == "rules":
        _refuse_texts(state)
    meaning = meaning or state.in_nftables_mode
    result = _compared(known.of(state), desired_rules(known, state, addresses), known, meaning, output)
    if output in ("text", "wide") and result.verdict is NodeVerdict.FOLLOWS:
        echo_line(f"No differences: {state.origin.title}, {known.title}.", err=True)
    raise SystemExit(DIFFERENT if result.verdict is NodeVerdict.DIFFERS or result.quarantined else 0)


def _refuse_texts(state: NodeState) -> None:
    """Raise ClickException for a node in nftables mode."""
    if state.in_nftables_mode:
        raise click.ClickException(
            f"node {state.name} runs kube-proxy in nftables mode, whose rules have no text to compare with; leave out"
            " -o rules"
        )


def _settings_title(flags: Mapping[str, object]) -> str:
    """Return where the configuration comes from: the file of --config, nothing but flags (""), or defaults."""
    return str(flags.get("config", "" if flags else "default settings"))


def _objects(filename: str | None, config: Config, settings: str) -> KnownObjects:
    if filename is None:
        return objects_on_server(config, settings)
    return objects_in_files(filename, config, settings)


def _of_named_node(filename: str | None, config: Config, settings: str) -> KnownObjects:
    """Return the objects for the node that the configuration or the objects name. Raises ReadError, ClickException."""
    if config.hostname_override or filename is not None:
        found = _objects(filename, config, settings)
        if found.node.name:
            return found
    raise click.ClickException("--rules does not tell the name of the node; give it with --hostname-override")


def _of_bundle(
    bundle: "Bundle", filename: str | None, config: Config, flags: Mapping[str, object]
) -> KnownObjects:
    """Return the objects for the node of a bundle: options come before what the bundle has. Raises ReadError.

    If neither has the configuration of the proxy, it is None, so that settings are inferred from its rules.
    """
    elsewhere = filename is not None or any(name in flags for name in ("kubeconfig", "master"))
    try:
        bundled = bundle_objects(bundle)
    except NoObjects:
        if not elsewhere:
            raise
        bundled = None
    given = flags.keys() - _SOURCE_FLAGS
    known = bundled.config if bundled and not given else None
    inferred = known is None and not given
    settings = str(flags.get("config", ""))
    node = config.hostname_override or bundle.manifest.node
    if known:
        config = msgspec.structs.replace(known, client=config.client)
        settings = f"the configuration in {bundle.name}"
    elif inferred:
        echo_notes(
            {"": [f"{INFERRED} To compare with other settings, add --config or other flags of `run`."]}
        )
        settings = "settings inferred from the rules"
    config = msgspec.structs.replace(config, hostname_override=node)
    if elsewhere or bundled is None:
        found = _objects(filename, config, settings)
    elif known:
        found = bundled
    else:
        title = titled(f"objects in {bundle.name}", settings)
        found = msgspec.structs.replace(bundled, title=title, config=config)
    return msgspec.structs.replace(found, config=None) if inferred else found


def _other(
    known: KnownObjects,
    config: Config,
    against: str | None,
    against_config: str | None,
    flags: Mapping[str, object],
    addresses: tuple[str, ...],
) -> RenderedNode:
    """Return the side to compare with: its objects are those of --against, or its configuration that of --against-config.

    Raises ReadError, ClickException.
    """
    theirs = known.config or config
    if against_config is not None:
        read = read_config({**flags, "config": against_config}, "--against-config")
        name = read.hostname_override or theirs.hostname_override
        theirs = msgspec.structs.replace(read, hostname_override=name)
    if against is not None:
        found = objects_in_files(against, theirs, against_config or "")
    else:
        title = titled("the same objects", against_config or "")
        found = msgspec.structs.replace(known, title=title, config=theirs)
    return RenderedNode(found, theirs, addresses)


def _compared(
    state: NodeState, desired: Mapping[Family, Ruleset], known: KnownObjects, meaning: bool, output: str
) -> NodeResult:
    before, after = state.origin.title, known.title
    if meaning:
        from pykubeproxy.inspect.diff.comparison import NodeComparison

        compared = NodeComparison(known.cluster, with_clients=True).compare(state, desired)
        result = msgspec.structs.replace(compared, before=before, after=after)
    else:
        changes = rule_changes(state, desired)
        result = rules_result(state, changes, before, after)
        if output == "rules":
            echo_styled(unified(changes, before, after))
            return result
    emit(diff_report([result]), output)
    return result


class _ClusterSource:
    """Objects and nodes through the API server. See RepeatedSource.

    `notes` are those about each node, by name; `complete` is False if a node lacks a family of its addresses.
    """

    def __init__(self, access: "NodeAccess") -> None:
        self._access = access
        self.notes: dict[str, Sequence[str]] = {}
        self.complete = True

    def objects(self) -> "Cluster":
        """List all objects. Raises SourceError."""
        return list_objects(self._access.client)

    def nodes(self, wanted: Sequence[Node]) -> Iterator[NodeState | UnknownNode]:
        """Read nodes side by side, and show a progress bar meanwhile."""
        with progress(len(wanted), "Reading nodes") as advance:
            for found in cluster_source(self._access, wanted, advance).nodes(Question(nftables=True)):
                if isinstance(found, NodeState):
                    self.notes[found.name] = found.remarks
                    self.complete &= found.complete
                yield found

    def last_changes(self, services: Sequence[Key]) -> Mapping[Key, float]:
        """Return when objects of Services last changed, as far as known."""
        from pykubeproxy.sources.queries import last_changes

        return last_changes(self._access.client, services)


@command(
    "diff",
    short_help="Find the nodes whose rules do not follow the objects.",
    exit_codes={
        0: "The rules of all nodes follow the objects.",
        1: "Rules of a node differ, or its agent quarantined a Service.",
        2: "Wrong usage or a failure, or a node could not be read.",
    },
)
@node_option
@option(
    "--sync-period",
    type=click.FloatRange(0, 3600),
    default=_SYNC_PERIOD,
    show_default=True,
    metavar="SECONDS",
    help="How long rules may take to follow; a node differs if they take longer.",
    group=QUESTION,
)
@report_option("rules", about="rules is a unified diff of each chain of one node")
@cluster_options
def diff_of_nodes(
    nodes: tuple[str, ...],
    sync_period: float,
    output: str,
    cluster: ClusterOptions,
) -> None:
    """Show for each node whether its rules follow the Services and EndpointSlices, and which Services are wrong there.

    Compare what packets get, for every client and every address and port of a Service: endpoints with their shares,
    masqueraded or not, dropped, rejected, and session affinity. So rules of any version of kube-proxy, in iptables or in
    nftables mode, are no difference if they mean the same. The settings of each proxy are inferred from its rules; a node
    with other settings than most nodes is named.

    Objects change while nodes are read. So nodes that differ are read again, with fresh objects: a node differs only if a
    Service stays wrong for --sync-period while its objects stay the same, or if these changed long before.

    \b
    kubectl pykubeproxy diff
    kubectl pykubeproxy diff -o json
    kubectl pykubeproxy diff --node node1 -o rules
    """
    if output == "rules" and len(nodes) != 1:
        raise click.UsageError("-o rules shows one node; give one --node NAME")
    from pykubeproxy.inspect.diff.rounds import Clock, compare_nodes

    garbage.collect_rarely()
    with selected_nodes(cluster, nodes) as (access, wanted):
        if output == "rules":
            raise SystemExit(_show_rules(access, wanted[0]))
        source = _ClusterSource(access)
        clock, servers = Clock(time.time, _wait), access.client.server_addresses()
        in_detail = len(wanted) == 1 or output == "wide"
        results = [*compare_nodes(source, wanted, clock, sync_period, servers, with_clients=in_detail)]
    emit(diff_report(results), output)
    echo_notes(source.notes)
    raise SystemExit(_exit_code(results, complete=source.complete))


def _wait(seconds: float) -> None:
    """Wait before nodes are read again, and say so on a terminal."""
    if sys.stderr.isatty():
        echo_line(f"Some nodes differ; reading them again in {seconds:.0f} s.", err=True)
    time.sleep(seconds)


def _exit_code(results: Sequence[NodeResult], *, complete: bool) -> int:
    if any(result.verdict is NodeVerdict.DIFFERS or result.quarantined for result in results):
        return DIFFERENT
    unread = any(result.verdict is NodeVerdict.NOT_COMPARED and not result.other_proxy for result in results)
    return NOT_ANSWERED if unread or not complete else 0


def _show_rules(access: "NodeAccess", node: Node) -> int:
    """Print how the texts of a node's rules differ from those that pykubeproxy would write. Return the exit code."""
    known = KnownObjects("objects of the API server", list_objects(access.client), node)
    (state,) = cluster_source(access, [node]).nodes(Question(nftables=True))
    if isinstance(state, UnknownNode):
        raise click.ClickException(f"node {node.name}: {state.reason}")
    _refuse_texts(state)
    echo_notes({node.name: state.remarks})
    changes = rule_changes(state, desired_rules(known, state))
    echo_styled(unified(changes, f"{state.origin.title} ({state.origin.proxy})", known.title))
    return DIFFERENT if any(change.chains for change in changes) else 0
