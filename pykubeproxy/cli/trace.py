"""`trace`: show where a connection goes, and why, through the rules of one or several nodes."""

import ipaddress
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import click
import msgspec

from pykubeproxy.cli.cluster import (
    ClusterOptions,
    cluster_options,
    cluster_source,
    namespace_option,
    node_access,
)
from pykubeproxy.cli.completion import destinations, namespaces, nodes, sources
from pykubeproxy.cli.emit import emit, report_option
from pykubeproxy.cli.flags import (
    CONTEXT_SETTINGS,
    config_options,
    connection_family_option,
    node_address_option,
    protocol_option,
    read_config,
    rules_option,
)
from pykubeproxy.cli.help import (
    ACTION,
    NOT_ANSWERED,
    OUTPUT,
    QUESTION,
    SOURCE,
    command,
    option,
    with_options,
)
from pykubeproxy.cli.sources import bundle_option, node_source, opened, read_errors
from pykubeproxy.cli.terminal import click_errors, echo_notes
from pykubeproxy.config import Config, load
from pykubeproxy.inspect.connection import Directory, LocationKind, ResolvedConnection, Unresolved, resolve
from pykubeproxy.inspect.node import NodeSource, NodeState, Question, ReadError, UnknownNode
from pykubeproxy.inspect.targets import (
    InvalidTarget,
    ServiceFilter,
    Target,
    TargetKind,
    parse_destination,
    parse_source,
)
from pykubeproxy.inspect.trace.conclusion import TraceVerdict
from pykubeproxy.inspect.trace.journey import ReadNodes, TracedWay, receivers
from pykubeproxy.inspect.trace.live import LiveTraceReport, compare, exit_code, refusal
from pykubeproxy.inspect.trace.observed import Observations
from pykubeproxy.inspect.trace.question import (
    NowhereToStart,
    misplaced,
    name_at,
    trace_in_cluster,
    trace_on_node,
)
from pykubeproxy.inspect.trace.report import TraceReport
from pykubeproxy.kernel.errors import KernelError
from pykubeproxy.objects import Family, Node, Protocol

# Most traces read live rules, so only the functions that need others import the modules for them.
if TYPE_CHECKING:
    from pykubeproxy.nodes.cluster import NodeAccess

_NO_ADDRESSES = (
    "rules match addresses of the node, which a file does not contain. Give each with --node-address."
)
_Command = Callable[..., Any]
_NO_CONSENT = (
    "to enter the network of SRC, the debug pod on {} gets the host's processes (hostPID), SYS_ADMIN and SYS_PTRACE, which"
    " equals root on the node; add --allow-host to permit that"
)
_conntrack_option = option(
    "--conntrack",
    "with_flows",
    is_flag=True,
    help="Show the connections between SRC and DST that nodes track now, too.",
    group=QUESTION,
)
_Origin = Literal["pod", "node", "outside"]


# The exit codes of a live trace.
_LIVE_CODES = {
    1: "With --live: rules and reality agree that probes do not arrive.",
    3: "With --live: rules and reality differ.",
}


def _live_options(command: _Command) -> _Command:
    """Add the options of a live trace."""
    options = (
        option(
            "--live", is_flag=True, help="Send probes, and compare what happens with the rules.", group=ACTION
        ),
        option(
            "--count",
            type=click.IntRange(1, 1000),
            default=10,
            show_default=True,
            help="Number of probes, with --live.",
            group=ACTION,
        ),
        option(
            "--payload",
            default="",
            metavar="TEXT",
            help="Content of UDP probes.  [default: empty]",
            group=ACTION,
        ),
        option(
            "--size",
            type=click.IntRange(100, 9000),
            metavar="BYTES",
            help="Send so many zero bytes over each TCP connection, to find an MTU that is too small. The endpoint may log"
            " them as an invalid request.  [default: none]",
            group=ACTION,
        ),
        option(
            "--rules-hit",
            is_flag=True,
            help="Have the kernel trace which rules of nftables the probes meet on the node of SRC, too.",
            group=ACTION,
        ),
        option(
            "--allow-affinity",
            is_flag=True,
            help="Probe a Service with session affinity, which renews the entry of the client.",
            group=ACTION,
        ),
    )
    return with_options(command, options)


@command(
    context_settings=CONTEXT_SETTINGS,
    exit_codes={
        0: "The answer, also that a rule drops the packet. With --live: rules and reality agree, and probes arrive.",
        **_LIVE_CODES,
        2: "Wrong usage or a failure. With --live also: the probes do not tell.",
    },
    short_help="Trace a packet through the rules.",
)
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
@_conntrack_option
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
@option("--steps", "with_steps", is_flag=True, help="Show each rule that the packet meets.", group=OUTPUT)
@report_option("svg", about="svg is a picture for a browser")
@_live_options
@config_options
@read_errors()
@click_errors(Unresolved)
def trace(
    source: str,
    destination: str,
    protocol: Protocol | None,
    family: Family | None,
    namespace: str,
    origin: _Origin | None,
    in_interface: str,
    with_flows: bool,
    filename: str | None,
    files: tuple[str, ...],
    bundle_file: str | None,
    addresses: tuple[str, ...],
    with_steps: bool,
    output: str,
    live: bool,
    count: int,
    payload: str,
    size: int | None,
    rules_hit: bool,
    allow_affinity: bool,
    flags: dict[str, object],
) -> None:
    """Trace the first packet of a connection from SRC to DST through the rules of this node.

    SRC is pod/[NAMESPACE/]NAME, node/NAME or an address. DST is svc/[NAMESPACE/]NAME[:PORT], NAME.NAMESPACE[:PORT],
    pod/[NAMESPACE/]NAME:PORT, node/NAME:PORT or ADDRESS:PORT, with the name or number of a port. Names come from -f,
    from the API server of --kubeconfig, from the agent on this node or of --bundle, or else from comments of the rules,
    which name Services only.

    Show the endpoints it may reach with their probabilities, whether its source address is masqueraded, or which rule
    drops or rejects it. This follows foreign rules too, of iptables and of nftables. Without --live, it sends no packet
    and changes nothing.

    With --live, also send probes from SRC, a pod on this node or the node itself, and compare what happens with the
    rules: the results, the entries of conntrack, which are removed at the end, and the counters of rules.

    With --conntrack, also show the connections between both ends that this node tracks now: their state, endpoint and the
    source that it sees, those with an endpoint that no longer serves first; and where session affinity sends the client.

    With --bundle, trace through the rules of another node. With --rules too, but name its addresses with --node-address.
    With -f, the flags of `run` define the rules. All these need neither root nor a network.

    \b
    pykubeproxy trace pod/default/client svc/default/web:http
    pykubeproxy trace 10.244.1.5 10.96.0.10:53 --proto udp
    pykubeproxy trace 10.244.1.5 web.default:80 --rules node1.txt
    pykubeproxy trace pod/default/client web.default:80 --bundle node1.tar.gz
    pykubeproxy trace pod/default/client svc/default/web --conntrack
    pykubeproxy trace 2001:db8::7 [2001:db8::80]:443 -f objects.yaml -o json
    pykubeproxy trace 10.244.1.5 10.96.0.10:80 -o svg > trace.svg
    pykubeproxy trace --live pod/default/client svc/default/web
    """
    config = read_config(flags)
    if live and (filename is not None or files or bundle_file or output == "svg"):
        raise click.UsageError(
            "--live traces through the rules of this node; remove -f, --rules, --bundle or -o svg"
        )
    if origin == "node" and in_interface:
        raise click.UsageError("a packet from the node has no incoming interface; remove --in-interface")
    if with_flows and (files or (filename is not None and bundle_file is None)):
        raise click.UsageError("--conntrack reads this node or a bundle; remove it, or use --bundle")
    try:
        start, end = parse_source(source, namespace), parse_destination(destination, namespace)
    except InvalidTarget as error:
        raise click.UsageError(str(error)) from None
    origin_kind = _client_kind(start, origin)
    rules, directory = _rules_and_names(config, filename, files, bundle_file, addresses, (start, end), live)
    connection = resolve(
        start,
        end,
        directory,
        family=family,
        protocol=protocol,
        client=origin_kind,
        entry=directory.here,
    )
    # Live chains are read when the packet reaches them.
    (state,) = rules.nodes(
        Question((connection.family,), lazily=True, nftables=True, firewalls=True, flows=with_flows)
    )
    assert isinstance(state, NodeState), "these sources yield a node or raise"
    if not (filename or files or bundle_file) and not directory.node(directory.here):
        here = name_at(state.network, directory) or directory.here
        directory = msgspec.structs.replace(directory, here=here)
    client = connection.client
    if live and client.kind is None and _is_pod_here(client.address):
        client = msgspec.structs.replace(client, kind=LocationKind.POD, node=directory.here)
        connection = msgspec.structs.replace(connection, client=client)
    state = msgspec.structs.replace(state, node=Node(directory.here), config=config)
    found = trace_on_node(
        state, connection, directory, origin=origin_kind, interface=in_interface, with_flows=with_flows
    )
    echo_notes({"": (*state.remarks, *connection.notes, *misplaced(connection, directory))})
    steps = (step for way in found.ways for visit in way.visits for step in visit.steps)
    if files and not addresses and any("-type LOCAL" in step.rule for step in steps):
        echo_notes({"": [_NO_ADDRESSES]})
    if not live:
        _emit(found, output, with_steps)
        return
    if elsewhere := next(misplaced(connection, directory), ""):
        raise ReadError(f"no probe is sent: {elsewhere}")
    if reason := refusal(found, directory, allow_affinity=allow_affinity):
        raise ReadError(reason)
    from pykubeproxy.nodes.probing import ThisNode, observe

    first = found.ways[0].node or ""
    question = Question((connection.family,), lazily=True, nftables=True, firewalls=True)
    observed = observe(
        found,
        {first: state},
        ThisNode(rules, question),
        count=count,
        payload=payload.encode(),
        size=size or 0,
        rules_hit=rules_hit,
    )
    _emit_live(compare(found, observed), output, with_steps)


def _is_pod_here(address: str) -> bool:
    """Return whether a process on this node has the address in a network of its own."""
    from pykubeproxy.kernel.network import namespace_of_pod

    if _is_here(address):
        return False
    try:
        return bool(namespace_of_pod(address))
    except KernelError:
        return False


def _emit_live(report: LiveTraceReport, output: str, with_steps: bool) -> None:
    """Print a live trace and end with the exit code of its verdict."""
    emit(report, "wide" if with_steps and output == "text" else output)
    raise SystemExit(exit_code(report.verdict))


def _rules_and_names(
    config: Config,
    filename: str | None,
    files: tuple[str, ...],
    bundle_file: str | None,
    addresses: tuple[str, ...],
    targets: Sequence[Target],
    live: bool,
) -> tuple[NodeSource, Directory]:
    """Return the rules of the node, and where names are looked up; for a live trace, also where addresses are.

    Raises ReadError, UsageError.
    """
    if filename == "-" and "-" in files:
        raise click.UsageError('only one of -f and --rules can be "-"')
    bundle = opened(bundle_file)
    if not live and filename is None and all(target.kind is TargetKind.ADDRESS for target in targets):
        return node_source(files, bundle, config.iptables_backend.value, addresses), Directory("")
    from pykubeproxy.cli import logs
    from pykubeproxy.nodes import directory as names
    from pykubeproxy.nodes.objects import RenderedNode, manifest_objects, read_manifests

    manifests = read_manifests(filename) if filename is not None else None
    if filename is not None and manifests and not (files or bundle):
        known = manifest_objects(filename, manifests, config)
        found = names.manifest_directory(filename, manifests, config, known.node.name)
        return RenderedNode(known, config, addresses), found
    rules = node_source(files, bundle, config.iptables_backend.value, addresses)
    if filename is not None and manifests:
        return rules, names.manifest_directory(filename, manifests, config)
    logs.set_up(config.logging.format)
    live = not (files or bundle)
    return rules, names.node_directory(config, rules, targets, bundle, live=live)


def _client_kind(source: Target, origin: _Origin | None) -> LocationKind | None:
    """Return where --from says that the source is. Raises UsageError if its name says otherwise."""
    if origin and source.kind is not TargetKind.ADDRESS and source.kind.value != origin:
        raise click.UsageError(f"{source} is a {source.kind.value}; remove --from {origin}")
    return LocationKind(origin) if origin else None


def _emit(report: TraceReport, output: str, with_steps: bool) -> None:
    if output == "svg":
        from pykubeproxy.inspect.trace.svg import svg

        click.echo(svg(report, wide=with_steps), nl=False)
    else:
        emit(report, "wide" if with_steps and output == "text" else output)


@command(
    "trace",
    short_help="Show where a connection goes, over all nodes on its way.",
    exit_codes={
        0: "The answer, also that a rule drops it. With --live: rules and reality agree, and probes arrive.",
        **_LIVE_CODES,
        2: "Wrong usage or a failure; or the first node cannot be read. With --live also: the probes do not tell.",
    },
)
@click.argument("source", metavar="SRC", shell_complete=sources)
@click.argument("destination", metavar="DST", shell_complete=destinations)
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
@_conntrack_option
@option("--steps", "with_steps", is_flag=True, help="Show each rule that the packet meets.", group=OUTPUT)
@report_option("svg", about="svg is a picture for a browser")
@_live_options
@option(
    "--allow-host",
    is_flag=True,
    help="Let the debug pod on the node of SRC enter SRC's network: it gets the rights of root on that node.",
    group=ACTION,
)
@option(
    "--dry-run",
    is_flag=True,
    help="Print the debug pods that --live would create, and send nothing.",
    group=ACTION,
)
@namespace_option
@cluster_options
@click_errors(InvalidTarget, Unresolved, NowhereToStart)
def trace_over_nodes(
    source: str,
    destination: str,
    protocol: Protocol | None,
    family: Family | None,
    via: str,
    with_flows: bool,
    with_steps: bool,
    output: str,
    live: bool,
    count: int,
    payload: str,
    size: int | None,
    rules_hit: bool,
    allow_affinity: bool,
    allow_host: bool,
    dry_run: bool,
    namespace: str,
    cluster: ClusterOptions,
) -> None:
    """Follow the first packet of a connection from SRC to DST: to an endpoint, or to the rule that stops it.

    SRC is pod/NAME, node/NAME or an address. DST is svc/NAME[:PORT], NAME.NAMESPACE[:PORT], pod/NAME:PORT,
    node/NAME:PORT or ADDRESS:PORT. A name may include its namespace, as in svc/NAMESPACE/NAME.

    This reads the rules of the nodes on the way only. For a connection from outside, it shows which nodes answer and
    which drop it. With --conntrack, it also shows the connections between both ends that these nodes track now. Without
    --live, it sends no packet and changes nothing.

    With --live, it also sends probes from SRC, a pod, a node or an address of this machine, and compares what happens
    with the rules: the results, the entries of conntrack on each node, which are removed at the end, the counters of
    rules, and whether endpoints listen. The nodes need pykubeproxy in the pods of their proxies or in the --debug-image.
    Pods of proxies see no other pods, so probes from a pod need --debug-image with --allow-host. Add --dry-run to print
    these pods first.

    \b
    kubectl pykubeproxy trace pod/default/client svc/default/web:http
    kubectl pykubeproxy trace 203.0.113.7 svc/default/web --via-node node1
    kubectl pykubeproxy trace node/node1 10.96.0.10:53 --proto udp
    kubectl pykubeproxy trace pod/default/client svc/default/web --conntrack
    kubectl pykubeproxy trace --live pod/default/client svc/default/web
    """
    from pykubeproxy.nodes.directory import cluster_directory

    if dry_run and not live:
        raise click.UsageError("--dry-run is for --live: without it, trace sends nothing; remove --dry-run")
    namespace = cluster.namespace(namespace)
    start = parse_source(source, namespace)
    end = parse_destination(destination, namespace)
    client = cluster.client()
    directory, remarks = cluster_directory(client, (start, end))
    if via and directory.node(via) is None:
        raise click.UsageError(f"--via-node: there is no node {via}; run `kubectl get nodes`")
    ends = resolve(
        start,
        end,
        directory,
        family=family,
        protocol=protocol,
        entry=via,
    )
    echo_notes({"": (*remarks, *ends.notes)})
    if dry_run:
        click.echo(_planned_pods(ends, via, cluster.debug_image))
        return
    with node_access(client, cluster) as access:
        read = _reader(access, directory, with_flows)
        entrances = _entrances(ends, directory)
        found = trace_in_cluster(ends, directory, entrances, read, via=via, with_flows=with_flows)
        if live and found.verdict is not TraceVerdict.UNKNOWN:
            here = found.source.kind is LocationKind.OUTSIDE and _is_here(found.source.address)
            if reason := refusal(found, directory, allow_affinity=allow_affinity, here=here):
                raise click.ClickException(reason)
            if access.debug_pods and found.source.kind is LocationKind.POD and not allow_host:
                raise click.ClickException(_NO_CONSENT.format(found.source.node))
            observed = _observed(found, access, directory, read, count, payload, size, rules_hit, here)
            _emit_live(compare(found, observed), output, with_steps)
    _emit(found, output, with_steps)
    if found.verdict is TraceVerdict.UNKNOWN:
        raise SystemExit(NOT_ANSWERED)


def _reader(access: "NodeAccess", directory: Directory, with_flows: bool) -> ReadNodes:
    """Return a function that reads nodes, each of them once. It raises ReadError."""
    source = cluster_source(access, directory.nodes)
    known: dict[str, NodeState | UnknownNode] = {}

    def read(names: Collection[str]) -> Mapping[str, NodeState | UnknownNode]:
        if wanted := [name for name in names if name not in known]:
            for found in source.nodes(
                Question(nodes=wanted, nftables=True, firewalls=True, flows=with_flows)
            ):
                known[found.name] = found
                echo_notes({found.name: found.remarks} if isinstance(found, NodeState) else {})
        absent = {name: UnknownNode(Node(name), "there is no Node of this name") for name in names}
        return {name: known.get(name, absent[name]) for name in names}

    return read


def _is_here(address: str) -> bool:
    """Return whether this machine has an address."""
    if sys.platform != "linux":
        return False
    from pykubeproxy.kernel.network import is_local

    return is_local(ipaddress.ip_address(address).packed)


def _planned_pods(ends: ResolvedConnection, via: str, image: str) -> str:
    """Return the manifests of the debug pods that a live trace creates."""
    if not image:
        return "# No pod would be created: probes are sent from the pods of proxies."
    from pykubeproxy.nodes.debug_pods import manifest
    from pykubeproxy.report.document import yaml_text

    node, name = ends.client.node or via or "NODE", "pykubeproxy-debug-example"
    pods = {
        "On each node on the way, to read its rules and its conntrack:": manifest(name, node, image),
    }
    if ends.client.kind is LocationKind.POD:
        entering = manifest(f"{name}-enters", node, image, entering=True)
        pods["On the node of SRC, to send probes from the network of SRC:"] = entering
    return "---\n".join(f"# {about}\n{yaml_text(pod)}" for about, pod in pods.items()).rstrip()


def _observed(
    trace: TraceReport,
    access: "NodeAccess",
    directory: Directory,
    read: ReadNodes,
    count: int,
    payload: str,
    size: int | None,
    rules_hit: bool,
    here: bool,
) -> Observations:
    """Send probes over the nodes of a trace. Raises ReadError."""
    from pykubeproxy.nodes.cluster import find_node_pods
    from pykubeproxy.nodes.probing import observe
    from pykubeproxy.nodes.probing_pods import NodesInPods

    names = dict.fromkeys(visit.node for visit in trace.ways[0].visits)
    nodes = tuple(node for node in directory.nodes if node.name in names)
    with NodesInPods(access, find_node_pods(access, nodes), nodes) as in_pods:
        in_pods.open("" if here else trace.ways[0].node or "", entering=trace.source.kind is LocationKind.POD)
        return observe(
            trace,
            read([*names]),
            in_pods,
            count=count,
            payload=payload.encode(),
            size=size or 0,
            rules_hit=rules_hit,
            here=here,
        )


def _entrances(ends: ResolvedConnection, directory: Directory) -> Sequence[TracedWay]:
    """Return the nodes that may receive a connection from outside to a Service."""
    if not (ends.name and ends.destination.kind and directory.nodes):
        return ()
    from pykubeproxy.inspect.explain.model import explain_nodes
    from pykubeproxy.nodes.objects import cluster_with, context_of

    config = load(None, {}).config
    explained = explain_nodes(
        cluster_with(directory.services, directory.slices, directory.nodes),
        ServiceFilter(ends.name.namespace, ends.name.service),
        directory.nodes,
        lambda node: {family: context_of(config, node, family) for family in Family},
    )
    return receivers(explained, ends.name, ends.family, ends.destination.kind)
