"""A cluster as the plugin reads it: the options that name an API server, nodes and pods, and what they open."""

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from pykubeproxy.cli import completion
from pykubeproxy.cli.help import QUESTION, SOURCE, option, with_options
from pykubeproxy.cli.sources import user_client
from pykubeproxy.cli.terminal import echo_line
from pykubeproxy.inspect.limit import TooManyRules
from pykubeproxy.inspect.node import NodeSource, ReadError
from pykubeproxy.objects import Kind, Node

# Commands on a node share modules with those of the plugin, and need none of these.
if TYPE_CHECKING:
    from pykubeproxy.nodes.cluster import NodeAccess
    from pykubeproxy.services.cluster import Cluster
    from pykubeproxy.sources import Client

_Command = Callable[..., Any]


@contextmanager
def cluster_errors() -> Iterator[None]:
    """Raise errors of a cluster and its nodes as ClickException, with the Role if a right is missing."""
    from pykubeproxy.nodes.cluster import GRANTS
    from pykubeproxy.sources import ListForbidden, SourceError

    try:
        yield
    except ListForbidden as error:
        raise click.ClickException(f"{error}; {GRANTS}") from None
    except (SourceError, ReadError, TooManyRules) as error:
        raise click.ClickException(str(error)) from None


class ClusterOptions(NamedTuple):
    """Which API server to ask, as kubectl takes it; which pods to read the rules of nodes in, and how many at once.

    Empty values mean the defaults.
    """

    kubeconfig: str
    context_name: str
    pod_selector: str = ""
    pod_namespace: str = ""
    debug_image: str = ""
    at_once: int = 1

    def client(self) -> "Client":
        """Return a client of the API server, and send log lines to standard error. Raises SourceError."""
        return user_client(self.kubeconfig, self.context_name)

    def namespace(self, given: str) -> str:
        """Return the given namespace, else that of the context, else "default". Raises SourceError."""
        if given:
            return given
        from pykubeproxy.sources.kubeconfig import context_namespace, user_kubeconfigs

        kubeconfigs = user_kubeconfigs(self.kubeconfig, self.context_name, os.environ)
        return (context_namespace(kubeconfigs) if kubeconfigs else "") or "default"


class NodeSelection(NamedTuple):
    """The nodes to read: these, or all."""

    names: tuple[str, ...]
    everywhere: bool


_CLUSTER_OPTIONS = (
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
_NODE_OPTIONS = (
    option(
        "--node",
        "names",
        multiple=True,
        metavar="NAME",
        shell_complete=completion.nodes,
        help="Read this node. Repeatable.",
        group=QUESTION,
    ),
    option("--all-nodes", "everywhere", is_flag=True, help="Read all nodes.", group=QUESTION),
)
namespace_option = option(
    "-n",
    "--namespace",
    default="",
    metavar="NAME",
    shell_complete=completion.namespaces,
    help="Namespace of names without one.  [default: that of the context]",
    group=QUESTION,
)


def cluster_options(command: _Command) -> _Command:
    """Add the options of ClusterOptions. The command gets one argument, `cluster`; its errors are ClickExceptions."""

    @functools.wraps(command)
    def wrapper(**arguments: Any) -> Any:
        options = {name: arguments.pop(name) for name in ClusterOptions._fields}
        with cluster_errors():
            return command(cluster=ClusterOptions(**options), **arguments)

    return with_options(wrapper, _CLUSTER_OPTIONS)


def node_options(command: _Command) -> _Command:
    """Add --node and --all-nodes, of which one is required. The command gets one argument, `nodes`."""

    @functools.wraps(command)
    def wrapper(names: tuple[str, ...], everywhere: bool, **arguments: Any) -> Any:
        if bool(names) == everywhere:
            raise click.UsageError(
                "give either --node NAME or --all-nodes; `kubectl get nodes` lists the names"
            )
        return command(nodes=NodeSelection(names, everywhere), **arguments)

    return with_options(wrapper, _NODE_OPTIONS)


def list_nodes(client: "Client", wanted: NodeSelection) -> Sequence[Node]:
    """Return these Nodes, ordered by name. Raises SourceError, and ClickException if one does not exist."""
    from pykubeproxy.sources.queries import list_kind

    nodes = {node.name: node for node in list_kind(client, Kind.NODE).objects if isinstance(node, Node)}
    if missing := [name for name in wanted.names if name not in nodes]:
        raise click.ClickException(f"there is no node {missing[0]}; run `kubectl get nodes`")
    return [nodes[name] for name in sorted(nodes if wanted.everywhere else set(wanted.names))]


def list_objects(client: "Client") -> "Cluster":
    """Return all Services, EndpointSlices and Nodes. Raises SourceError."""
    from pykubeproxy.services.cluster import Cluster
    from pykubeproxy.sources.queries import all_objects

    cluster = Cluster()
    for found in all_objects(client):
        cluster.apply(found)
    return cluster


@contextmanager
def selected_nodes(
    cluster: ClusterOptions, wanted: NodeSelection
) -> "Iterator[tuple[NodeAccess, Sequence[Node]]]":
    """Provide the access to nodes, and these nodes; remove debug pods at the end. Raises as `list_nodes` does."""
    client = cluster.client()
    nodes = list_nodes(client, wanted)
    with node_access(client, cluster) as access:
        yield access, nodes


@contextmanager
def node_access(client: "Client", cluster: ClusterOptions) -> "Iterator[NodeAccess]":
    """Provide the access to nodes; remove debug pods at the end."""
    from pykubeproxy.nodes.cluster import NodeAccess
    from pykubeproxy.nodes.debug_pods import DebugPods

    with ExitStack() as stack:
        debug_pods = None
        if cluster.debug_image:
            pods = DebugPods(client, cluster.debug_image, lambda line: echo_line(line, err=True))
            debug_pods = stack.enter_context(pods)
        yield NodeAccess(client, cluster.pod_selector, cluster.pod_namespace, debug_pods, cluster.at_once)


def cluster_source(
    access: "NodeAccess", wanted: Sequence[Node], advance: Callable[[], None] = lambda: None
) -> NodeSource:
    """Return the source of the states of these nodes. It calls `advance` after each of them, for a progress bar."""
    from pykubeproxy.nodes.cluster import ClusterNodes

    return ClusterNodes(access, wanted, advance)
