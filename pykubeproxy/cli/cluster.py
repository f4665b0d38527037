"""A cluster as the plugin reads it: the options that name an API server, nodes and pods, and what they open."""

import functools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from pykubeproxy.cli import completion
from pykubeproxy.cli.help import CONNECTION, QUESTION, SOURCE, option, with_options
from pykubeproxy.cli.sources import user_client
from pykubeproxy.cli.terminal import echo_line
from pykubeproxy.inspect.limit import TooManyRules
from pykubeproxy.inspect.node import NodeSource, ReadError
from pykubeproxy.objects import Kind, Node
from pykubeproxy.wording import natural, suggestion

# Commands on a node share modules with those of the plugin, and need none of these.
if TYPE_CHECKING:
    from pykubeproxy.nodes.cluster import NodeAccess
    from pykubeproxy.services.cluster import Cluster
    from pykubeproxy.sources import Client
    from pykubeproxy.sources.credentials import Kubeconfigs

_Command = Callable[..., Any]
# The longest wait for an answer of the API server, in seconds.
LONGEST_ANSWER = 60.0
_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?")


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
    server: str = ""
    cluster_name: str = ""
    user_name: str = ""
    token: str = ""
    as_user: str = ""
    as_groups: tuple[str, ...] = ()
    insecure: bool = False
    request_timeout: float = LONGEST_ANSWER
    pod_selector: str = ""
    pod_namespace: str = ""
    debug_image: str = ""
    at_once: int = 1

    def client(self) -> "Client":
        """Return a client of the API server, and send log lines to standard error. Raises SourceError."""
        return user_client(self._kubeconfigs(), self.request_timeout)

    def namespace(self, given: str) -> str:
        """Return the given namespace, else that of the context, else "default". Raises SourceError."""
        if given:
            return given
        from pykubeproxy.sources.kubeconfig import context_namespace

        kubeconfigs = self._kubeconfigs()
        return (context_namespace(kubeconfigs) if kubeconfigs else "") or "default"

    def _kubeconfigs(self) -> "Kubeconfigs | None":
        from pykubeproxy.sources.credentials import Overrides
        from pykubeproxy.sources.kubeconfig import user_kubeconfigs

        overrides = Overrides(
            self.server,
            self.cluster_name,
            self.user_name,
            self.token,
            self.as_user,
            self.as_groups,
            self.insecure,
        )
        return user_kubeconfigs(self.kubeconfig, self.context_name, os.environ, overrides)


def _seconds(_context: click.Context, _option: click.Parameter, value: str) -> float:
    """Parse a duration as kubectl does: "5s", "1m30s", or seconds; 0 means the longest. Raises BadParameter."""
    match = _DURATION.fullmatch(value)
    if match is None or not value:
        raise click.BadParameter(f'"{value}" is not a duration such as 5s or 1m')
    hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return min(float(3600 * hours + 60 * minutes + seconds), LONGEST_ANSWER) or LONGEST_ANSWER


_connection_option = functools.partial(option, group=CONNECTION, default="")
# The names, and what they mean, are those of kubectl.
_CLUSTER_OPTIONS = (
    option(
        "--kubeconfig",
        type=click.Path(),
        default="",
        metavar="PATH",
        help="Kubeconfig of the cluster.  [default: KUBECONFIG, or ~/.kube/config]",
        group=CONNECTION,
    ),
    _connection_option(
        "--context",
        "context_name",
        metavar="NAME",
        help="Context of the kubeconfig.  [default: the current one]",
    ),
    _connection_option("-s", "--server", metavar="URL", help="Address of the API server."),
    _connection_option("--cluster", "cluster_name", metavar="NAME", help="Cluster of the kubeconfig."),
    _connection_option("--user", "user_name", metavar="NAME", help="User of the kubeconfig."),
    _connection_option("--token", metavar="TOKEN", help="Bearer token for the API server."),
    _connection_option("--as", "as_user", metavar="NAME", help="User to impersonate."),
    _connection_option(
        "--as-group",
        "as_groups",
        multiple=True,
        default=None,
        metavar="NAME",
        help="Group to impersonate, with --as. Repeatable.",
    ),
    _connection_option(
        "--insecure-skip-tls-verify",
        "insecure",
        is_flag=True,
        default=False,
        help="Do not verify the certificate of the API server.",
    ),
    _connection_option(
        "--request-timeout",
        default="60s",
        show_default=True,
        callback=_seconds,
        metavar="DURATION",
        help="How long to wait for each answer of the API server.",
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
# The command gets `nodes`: the names of nodes, none for all.
node_option = option(
    "--node",
    "nodes",
    multiple=True,
    metavar="NAME",
    shell_complete=completion.nodes,
    help="Read this node only. Repeatable.  [default: all nodes]",
    group=QUESTION,
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


def list_nodes(client: "Client", wanted: Sequence[str]) -> Sequence[Node]:
    """Return these Nodes, or all, ordered by name. Raises SourceError, and ClickException if one does not exist."""
    from pykubeproxy.sources.queries import list_kind

    nodes = {node.name: node for node in list_kind(client, Kind.NODE).objects if isinstance(node, Node)}
    if missing := [name for name in wanted if name not in nodes]:
        advice = suggestion(missing[0], nodes) or "run `kubectl get nodes`"
        raise click.ClickException(f"there is no node {missing[0]}; {advice}")
    return [nodes[name] for name in sorted(set(wanted) or nodes, key=natural)]


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
    cluster: ClusterOptions, wanted: Sequence[str]
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
