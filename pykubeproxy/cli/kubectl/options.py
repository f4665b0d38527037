"""Options that the commands of the plugin share."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import click

from pykubeproxy.cli.help import QUESTION, SOURCE, option
from pykubeproxy.cli.kubectl import completion

_Command = Callable[..., Any]


class Connection(NamedTuple):
    """Which API server to ask, as kubectl takes it. Empty values mean kubectl's defaults.

    `namespace` is -n as given; see `access.namespace_of` for the default.
    """

    kubeconfig: str
    context: str
    namespace: str


class Reading(NamedTuple):
    """How to read the rules of nodes: from which pods, and from how many at once."""

    pod_selector: str
    debug_image: str
    at_once: int


class NodeNames(NamedTuple):
    """The nodes to read: these, or all."""

    names: tuple[str, ...]
    everywhere: bool


def connection_options(command: _Command) -> _Command:
    """Add -n, --context and --kubeconfig. The command gets one argument, `connection`."""
    options = (
        option(
            "-n",
            "--namespace",
            default="",
            metavar="NAME",
            shell_complete=completion.namespaces,
            help="Namespace of names without one.  [default: that of the context]",
            group=QUESTION,
        ),
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
    def wrapper(*args: Any, namespace: str, context_name: str, kubeconfig: str, **others: Any) -> Any:
        return command(*args, connection=Connection(kubeconfig, context_name, namespace), **others)

    return _with_options(wrapper, options)


def reading_options(command: _Command) -> _Command:
    """Add --pod-selector, --debug-image and --at-once. The command gets one argument, `reading`."""
    options = (
        option(
            "--pod-selector",
            default="",
            metavar="LABELS",
            help="Labels of the proxy's pods.  [default: those of pykubeproxy and kube-proxy]",
            group=SOURCE,
        ),
        option(
            "--debug-image",
            default="",
            metavar="IMAGE",
            help="On nodes where no pod of a proxy can serve, run a pod with this image, and remove it again. The image"
            " needs iptables-save and sleep; that of pykubeproxy has them.",
            group=SOURCE,
        ),
        option(
            "--at-once",
            type=click.IntRange(1, 256),
            default=16,
            show_default=True,
            help="Read so many nodes side by side.",
            group=SOURCE,
        ),
    )

    @functools.wraps(command)
    def wrapper(*args: Any, pod_selector: str, debug_image: str, at_once: int, **others: Any) -> Any:
        return command(*args, reading=Reading(pod_selector, debug_image, at_once), **others)

    return _with_options(wrapper, options)


def node_options(command: _Command) -> _Command:
    """Add --node and --all-nodes, of which one is required. The command gets one argument, `nodes`."""
    all_nodes = option("--all-nodes", "everywhere", is_flag=True, help="Read all nodes.", group=QUESTION)

    @functools.wraps(command)
    def wrapper(*args: Any, names: tuple[str, ...], everywhere: bool, **others: Any) -> Any:
        if bool(names) == everywhere:
            raise click.UsageError(
                "give either --node NAME or --all-nodes; `kubectl get nodes` lists the names"
            )
        return command(*args, nodes=NodeNames(names, everywhere), **others)

    return _with_options(wrapper, (_node_option("Read this node. Repeatable."), all_nodes))


def optional_node_options(command: _Command) -> _Command:
    """Add --node; without it, the command is about all nodes. The command gets one argument, `nodes`."""

    @functools.wraps(command)
    def wrapper(*args: Any, names: tuple[str, ...], **others: Any) -> Any:
        return command(*args, nodes=NodeNames(names, everywhere=not names), **others)

    return _with_options(wrapper, (_node_option("Only this node. Repeatable.  [default: all nodes]"),))


def _node_option(text: str) -> Callable[[_Command], _Command]:
    return option(
        "--node",
        "names",
        multiple=True,
        metavar="NAME",
        shell_complete=completion.nodes,
        help=text,
        group=QUESTION,
    )


def _with_options(command: _Command, options: tuple[Callable[[_Command], _Command], ...]) -> _Command:
    for add in reversed(options):
        command = add(command)
    return command
