"""Options that the commands of the plugin share."""

import functools
from collections.abc import Callable
from typing import Any

import click

from pykubeproxy.cli.help import QUESTION, SOURCE, option
from pykubeproxy.cli.kubectl import completion
from pykubeproxy.cli.kubectl.arguments import NodeSelection, PodOptions, ServerOptions

_Command = Callable[..., Any]


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
