"""A cluster as the plugin reads it: the options that name an API server, nodes and pods, and what they open."""

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from pykubeproxy.cli import completion
from pykubeproxy.cli.help import QUESTION, SOURCE, option
from pykubeproxy.cli.terminal import echo_line
from pykubeproxy.inspect.node import NodeSource, ReadError
from pykubeproxy.objects import Kind, Node

# Commands on a node share modules with those of the plugin, and need none of these.
if TYPE_CHECKING:
    from pykubeproxy.nodes.cluster import NodeAccess
    from pykubeproxy.services.cluster import Cluster
    from pykubeproxy.sources import Client

_Command = Callable[..., Any]
# Requests per second, as for kubectl.
_QPS, _BURST = 50.0, 300


@contextmanager
def cluster_errors() -> Iterator[None]:
    """Raise errors of a cluster as ClickException, with the Role if a right is missing. Works as a decorator too."""
    from pykubeproxy.nodes.cluster import GRANTS
    from pykubeproxy.sources import ListForbidden, SourceError

    try:
        yield
    except ListForbidden as error:
        raise click.ClickException(f"{error}; {GRANTS}") from None
    except (SourceError, ReadError) as error:
        raise click.ClickException(str(error)) from None


class ServerOptions(NamedTuple):
    """Which API server to ask, as kubectl takes it. Empty values mean kubectl's defaults."""

    kubeconfig: str
    context: str


class PodOptions(NamedTuple):
    """Which pods to read the rules of nodes in, and how many nodes at once."""

    pod_selector: str
    pod_namespace: str
    debug_image: str
    at_once: int


class NodeSelection(NamedTuple):
    """The nodes to read: these, or all."""

    names: tuple[str, ...]
    everywhere: bool


def namespace_option(command: _Command) -> _Command:
    """Add -n. The command gets `namespace` as given; see `access.namespace_of` for the default."""
    return option(
        "-n",
        "--namespace",
        default="",
        metavar="NAME",
        shell_complete=completion.namespaces,
        help="Namespace of names without one.  [default: that of the context]",
        group=QUESTION,
    )(command)


def server_options(command: _Command) -> _Command:
    """Add --kubeconfig and --context. The command gets one argument, `server`."""
    options = (
        option(
            "--kubeconfig",
            type=click.Path(),
            default="",
            metavar="PATH",
            help="Kubeconfig of the cluster.  [default: KUBECONFIG, or ~/.kube/config]",
            group=SOURCE,
        ),
        option(
            "--context",
            "context_name",
            default="",
            metavar="NAME",
            help="Context of the kubeconfig.  [default: the current one]",
            group=SOURCE,
        ),
    )

    @functools.wraps(command)
    def wrapper(*args: Any, context_name: str, kubeconfig: str, **others: Any) -> Any:
        return command(*args, server=ServerOptions(kubeconfig, context_name), **others)

    return _with_options(wrapper, options)


def pod_options(command: _Command) -> _Command:
    """Add --pod-selector, --pod-namespace, --debug-image and --at-once. The command gets one argument, `pods`."""
    options = (
        option(
            "--pod-selector",
            default="",
            metavar="LABELS",
            help="Labels of the proxy's pods.  [default: those of pykubeproxy and kube-proxy]",
            group=SOURCE,
        ),
        option(
            "--pod-namespace",
            default="",
            metavar="NAME",
            help="Namespace of the proxy's pods, in which no tenant may create pods. Only pods on the host network"
            " count.  [default: kube-system]",
            group=SOURCE,
        ),
        option(
            "--debug-image",
            default="",
            metavar="IMAGE",
            help="On nodes without a usable pod of a proxy, run a pod with this image in kube-system, and remove it"
            " again. The image needs iptables-save and sleep; that of pykubeproxy has them.",
            group=SOURCE,
        ),
        option(
            "--at-once",
            type=click.IntRange(1, 256),
            default=16,
            show_default=True,
            metavar="NUMBER",
            help="Read at most NUMBER nodes at the same time.",
            group=SOURCE,
        ),
    )

    @functools.wraps(command)
    def wrapper(
        *args: Any, pod_selector: str, pod_namespace: str, debug_image: str, at_once: int, **others: Any
    ) -> Any:
        pods = PodOptions(pod_selector, pod_namespace, debug_image, at_once)
        return command(*args, pods=pods, **others)

    return _with_options(wrapper, options)


def node_options(command: _Command) -> _Command:
    """Add --node and --all-nodes, of which one is required. The command gets one argument, `nodes`."""
    node = option(
        "--node",
        "names",
        multiple=True,
        metavar="NAME",
        shell_complete=completion.nodes,
        help="Read this node. Repeatable.",
        group=QUESTION,
    )
    all_nodes = option("--all-nodes", "everywhere", is_flag=True, help="Read all nodes.", group=QUESTION)

    @functools.wraps(command)
    def wrapper(*args: Any, names: tuple[str, ...], everywhere: bool, **others: Any) -> Any:
        if bool(names) == everywhere:
            raise click.UsageError(
                "give either --node NAME or --all-nodes; `kubectl get nodes` lists the names"
            )
        return command(*args, nodes=NodeSelection(names, everywhere), **others)

    return _with_options(wrapper, (node, all_nodes))


def _with_options(command: _Command, options: tuple[Callable[[_Command], _Command], ...]) -> _Command:
    for add in reversed(options):
        command = add(command)
    return command


@cluster_errors()
def open_client(server: ServerOptions) -> "Client":
    """Return a client of the API server, and send log lines to standard error. Raises ClickException."""
    from pykubeproxy.cli import logs
    from pykubeproxy.config import LogFormat
    from pykubeproxy.sources import Client
    from pykubeproxy.sources.kubeconfig import user_kubeconfigs

    logs.set_up(LogFormat.TEXT)
    kubeconfigs = user_kubeconfigs(server.kubeconfig, server.context, os.environ)
    return Client(kubeconfigs or "", qps=_QPS, burst=_BURST)


@cluster_errors()
def namespace_of(server: ServerOptions, namespace: str) -> str:
    """Return `namespace`, else the namespace of the context, else "default". Raises ClickException."""
    if namespace:
        return namespace
    from pykubeproxy.sources.kubeconfig import context_namespace, user_kubeconfigs

    kubeconfigs = user_kubeconfigs(server.kubeconfig, server.context, os.environ)
    return (context_namespace(kubeconfigs) if kubeconfigs else "") or "default"


@cluster_errors()
def list_nodes(client: "Client", wanted: NodeSelection) -> Sequence[Node]:
    """Return these Nodes, ordered by name. Raises ClickException if one does not exist."""
    from pykubeproxy.sources.queries import list_kind

    nodes = {node.name: node for node in list_kind(client, Kind.NODE).objects if isinstance(node, Node)}
    if missing := [name for name in wanted.names if name not in nodes]:
        raise click.ClickException(f"there is no node {missing[0]}; run `kubectl get nodes`")
    return [nodes[name] for name in sorted(nodes if wanted.everywhere else set(wanted.names))]


@cluster_errors()
def list_objects(client: "Client") -> "Cluster":
    """Return all Services, EndpointSlices and Nodes. Raises ClickException."""
    from pykubeproxy.services.cluster import Cluster
    from pykubeproxy.sources.queries import all_objects

    cluster = Cluster()
    for found in all_objects(client):
        cluster.apply(found)
    return cluster


@contextmanager
def node_access(client: "Client", pods: PodOptions) -> "Iterator[NodeAccess]":
    """Provide the access to nodes; remove debug pods at the end."""
    from pykubeproxy.nodes.cluster import NodeAccess
    from pykubeproxy.nodes.debug_pods import DebugPods

    if not pods.debug_image:
        yield NodeAccess(client, pods.pod_selector, pods.pod_namespace, None, pods.at_once)
        return
    with DebugPods(client, pods.debug_image, lambda line: echo_line(line, err=True)) as debug_pods:
        yield NodeAccess(client, pods.pod_selector, pods.pod_namespace, debug_pods, pods.at_once)


def cluster_source(
    access: "NodeAccess", wanted: Sequence[Node], advance: Callable[[], None] = lambda: None
) -> NodeSource:
    """Return the source of the states of these nodes. It calls `advance` after each of them, for a progress bar."""
    from pykubeproxy.nodes.cluster import ClusterNodes

    return ClusterNodes(access, wanted, advance)
