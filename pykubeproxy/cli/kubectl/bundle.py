"""`kubectl pykubeproxy bundle`: save nodes in files."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock

import click

from pykubeproxy.cli.help import NOT_ANSWERED, OUTPUT, command, option
from pykubeproxy.cli.kubectl.access import list_nodes, list_objects, node_access, on_each_node, open_client
from pykubeproxy.cli.kubectl.arguments import NodeSelection, PodOptions, ServerOptions
from pykubeproxy.cli.kubectl.node_bundles import SavedNode, save_node
from pykubeproxy.cli.kubectl.options import node_options, pod_options, server_options
from pykubeproxy.cli.terminal import click_errors, echo_line
from pykubeproxy.remote import find_node_pods
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.sources import SourceError


@command(
    short_help="Save rules, settings and objects of nodes in files.",
    exit_codes={0: "All nodes are saved.", 2: "A node is not saved: wrong usage or a failure."},
)
@option(
    "-o",
    "--output",
    default=".",
    metavar="FOLDER",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for the files; it is created if needed.  [default: the current one]",
    group=OUTPUT,
)
@node_options
@server_options
@pod_options
@click_errors(SourceError)
def bundle(output: Path, server: ServerOptions, nodes: NodeSelection, pods: PodOptions) -> None:
    """Save rules, settings and objects of nodes, each in one tar.gz, for others to inspect.

    A pod of pykubeproxy makes the same bundle as `pykubeproxy bundle` on its node. With a pod of kube-proxy, a bundle has
    the rules of the node. Where no agent knows the objects, the bundle has those of the API server: the Node, and the
    Services and EndpointSlices of the cluster. Other commands read bundles with --bundle, without access to the cluster.
    Standard output names the files.

    A bundle has no tokens, Secrets, annotations or contents of a kubeconfig. A node that cannot be read is named on
    standard error.

    \b
    kubectl pykubeproxy bundle --node node1
    kubectl pykubeproxy bundle --all-nodes -o bundles
    pykubeproxy explain default/web --bundle bundles/NAME.tar.gz
    """
    try:
        output.mkdir(exist_ok=True)
        # Its files go away on Ctrl-C, too, when threads that write them are abandoned.
        temporary = TemporaryDirectory(prefix=".pykubeproxy-", dir=output, ignore_cleanup_errors=True)
    except OSError as error:
        raise click.ClickException(
            f"cannot write to folder {output}: {error.strerror}; give another one with -o"
        ) from None
    with temporary as unfinished:
        results = _save(Path(unfinished), output, server, nodes, pods)
    for saved in sorted(results, key=lambda it: it.node.name):
        _report(saved)
    if any(it.failure and not it.other_proxy for it in results):
        raise SystemExit(NOT_ANSWERED)


def _save(
    unfinished: Path, output: Path, server: ServerOptions, nodes: NodeSelection, pods: PodOptions
) -> Sequence[SavedNode]:
    """Write bundles in one folder, and move each to the other one when it is complete."""
    client = open_client(server)
    wanted = list_nodes(client, nodes)
    with node_access(client, pods) as access:
        proxies = find_node_pods(access, wanted)
        # Our pods know the objects themselves, so list them on demand.
        objects = _once(partial(list_objects, client))
        save = partial(save_node, access, proxies, objects, lambda name: unfinished / f"{name}.tar.gz")
        return on_each_node(lambda node: _moved(save(node), output), wanted, pods, "Saving nodes")


def _moved(saved: SavedNode, folder: Path) -> SavedNode:
    """Move the bundle of a node, if there is one, to a folder."""
    return saved._replace(path=saved.path.rename(folder / saved.path.name)) if saved.path else saved


def _once(read: Callable[[], Cluster]) -> Callable[[], Cluster]:
    """Return a function that reads when it is called first; threads may call it."""
    lock = Lock()
    found: list[Cluster] = []

    def first() -> Cluster:
        with lock:
            if not found:
                found.append(read())
        return found[0]

    return first


def _report(saved: SavedNode) -> None:
    """Print where a bundle is, and what it lacks."""
    name = saved.node.name
    if saved.failure:
        echo_line(f"{name}: {saved.failure}", err=True)
    for file in saved.missing:
        echo_line(f"{name}: no {file.name}: {file.error}", err=True)
    if saved.path:
        echo_line(str(saved.path))
