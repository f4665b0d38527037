"""`bundle`: save rules, settings and objects of nodes, each in one file."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import TYPE_CHECKING

import click

import pykubeproxy
from pykubeproxy.bundle.layout import (
    NFT_RULESET,
    TABLES,
    BundledFile,
    Manifest,
    folder_name,
    missing,
    timestamp,
)
from pykubeproxy.bundle.sections import agent_sections, node_sections
from pykubeproxy.bundle.write import BundleSection, Member, collected, new_file, write_bundle
from pykubeproxy.cli.cluster import (
    ClusterOptions,
    cluster_options,
    list_objects,
    node_option,
    selected_nodes,
)
from pykubeproxy.cli.help import NOT_ANSWERED, OUTPUT, SOURCE, command, option
from pykubeproxy.cli.terminal import click_errors, echo_line, progress
from pykubeproxy.kernel import NotANode, require_linux
from pykubeproxy.nodes import host_name
from pykubeproxy.nodes.agent import DEFAULT_URL, NoAgent, fetch, fetch_patiently
from pykubeproxy.objects import Node
from pykubeproxy.pages import statusz
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.wording import natural

# Only the plugin needs them.
if TYPE_CHECKING:
    from pykubeproxy.nodes.cluster import NodePods
    from pykubeproxy.nodes.saving import WrittenBundle


_flows_option = option(
    "--flows",
    "with_flows",
    is_flag=True,
    help="Save the tracked connections too, with addresses of clients.",
    group=SOURCE,
)


@command(short_help="Save rules, settings and objects of this node in one file.")
@option(
    "-o",
    "--output",
    metavar="FILE",
    help='File or folder to write, or "-" for standard output.  [default: a new file in the current folder, named for'
    " node and time]",
    group=OUTPUT,
)
@option(
    "--url",
    default=DEFAULT_URL,
    show_default=True,
    metavar="URL",
    help="Metrics address of the agent, on loopback.",
    group=SOURCE,
)
@_flows_option
@click_errors(NotANode)
def bundle(output: str | None, url: str, with_flows: bool) -> None:
    """Save rules, settings and objects of this node in one tar.gz, for others to inspect.

    It has the rules of both address families and backends with counters, addresses, routes, kernel settings, counts of
    tracked connections, versions, and the agent's status, metrics, configuration and objects. It has no tokens, no
    Secrets, no contents of a kubeconfig, no annotations, and without --flows no addresses of tracked clients. It names
    Services, pods and nodes with their addresses.

    Other commands read it with --bundle, on any machine. Run this as root: without any rules there is no bundle. Any other
    part that cannot be collected is left out, and standard error and the file manifest.json say why. Nothing on the node
    changes.

    \b
    sudo pykubeproxy bundle
    sudo pykubeproxy bundle -o node1.tar.gz
    ssh node1 sudo pykubeproxy bundle -o - > node1.tar.gz
    pykubeproxy trace 10.244.1.5 10.96.0.10:80 --bundle node1.tar.gz
    sudo pykubeproxy bundle --flows
    """
    require_linux("")
    if output == "-" and sys.stdout.isatty():
        raise click.UsageError(
            "a bundle is not text, so it cannot go to a terminal; redirect standard output, or use -o FILE"
        )
    time = timestamp(datetime.now(UTC))
    manifest = Manifest(version=pykubeproxy.__version__, node=_node_name(url), time=time)
    path = None if output == "-" else _target(output, manifest)
    sections = [
        *node_sections(with_flows=with_flows),
        *agent_sections(url, lambda page, query: fetch_patiently(url, page, **query)),
    ]
    members = list(_shown(sections))
    rules = [entry.file for entry in members if entry.file.name in (*TABLES, NFT_RULESET)]
    if (unread := missing(rules)) and not any(file.size for file in rules):
        raise click.ClickException(f"no rules can be read, so there is no bundle: {unread[0].error}")
    _save(path, manifest, members)
    _report_missing(manifest.node, missing(entry.file for entry in members))


@command(
    "bundle",
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
@node_option
@_flows_option
@cluster_options
def bundle_of_nodes(output: Path, nodes: tuple[str, ...], with_flows: bool, cluster: ClusterOptions) -> None:
    """Save rules, settings and objects of nodes, each in one tar.gz, for others to inspect.

    A pod of pykubeproxy makes the same bundle as `pykubeproxy bundle` on its node. With a pod of kube-proxy, a bundle has
    the rules of the node. Where no agent knows the objects, the bundle has those of the API server: the Node, and the
    Services and EndpointSlices of the cluster. Other commands read bundles with --bundle, without access to the cluster.
    Standard output names the files.

    A bundle has no tokens, Secrets, annotations or contents of a kubeconfig, and without --flows no addresses of clients.
    A node that cannot be read is named on
    standard error.

    \b
    kubectl pykubeproxy bundle --node node1
    kubectl pykubeproxy bundle -o bundles
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
        results = _save_nodes(Path(unfinished), output, nodes, with_flows, cluster)
    for saved in sorted(results, key=lambda result: natural(result.node.name)):
        _report_saved(saved)
    if any(result.failure and not result.other_proxy for result in results):
        raise SystemExit(NOT_ANSWERED)


def _save_nodes(
    unfinished: Path, output: Path, nodes: tuple[str, ...], with_flows: bool, cluster: ClusterOptions
) -> "Sequence[WrittenBundle]":
    """Write bundles in one folder, and move each to the other one when it is complete."""
    from pykubeproxy.nodes.cluster import on_each_node
    from pykubeproxy.nodes.saving import save_node

    with (
        selected_nodes(cluster, nodes) as (access, wanted),
        progress(len(wanted), "Saving nodes") as advance,
    ):
        # Our pods know the objects themselves, so list them on demand.
        objects = _once(partial(list_objects, access.client))

        def save(node: Node, proxies: "NodePods") -> "WrittenBundle":
            saved = save_node(
                access,
                proxies,
                objects,
                lambda name: unfinished / f"{name}.tar.gz",
                node,
                with_flows=with_flows,
            )
            return _moved(saved, output)

        return [*on_each_node(access, save, wanted, advance)]


def _moved(saved: "WrittenBundle", folder: Path) -> "WrittenBundle":
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


def _report_saved(saved: "WrittenBundle") -> None:
    name = saved.node.name
    if saved.failure:
        echo_line(f"{name}: {saved.failure}", err=True)
    _report_missing(name, saved.missing)
    if saved.path:
        echo_line(str(saved.path))


def _target(output: str | None, manifest: Manifest) -> Path:
    """Return the file to write, in the current folder or another one if `output` names no file.

    Raises ClickException if it exists, before anything is collected.
    """
    path = Path(output or "")
    if output is None or path.is_dir():
        path /= f"{folder_name(manifest.node, manifest.time)}.tar.gz"
    if os.path.lexists(path):
        raise click.ClickException(f"{path} exists; remove it, or choose another name with -o")
    return path


def _save(path: Path | None, manifest: Manifest, members: Iterable[Member]) -> None:
    """Write a bundle, and print the name of its file; without `path` write to standard output. Raises ClickException."""
    try:
        with new_file(path) if path else click.open_file("-", "wb") as file:
            write_bundle(file, manifest, members)
    except OSError as error:
        raise click.ClickException(
            f"cannot write {path or 'the bundle'}: {error.strerror or error}"
        ) from None
    if path:
        echo_line(str(path))


def _report_missing(node: str, files: Iterable[BundledFile]) -> None:
    for file in files:
        echo_line(f"{node}: no {file.name}: {file.error}", err=True)


def _on_terminal() -> bool:
    return sys.stderr.isatty()


def _node_name(url: str) -> str:
    try:
        return statusz.decode(fetch(url, "/statusz", limit="0")).node
    except (NoAgent, ValueError):
        return host_name()


def _shown(sections: list[BundleSection]) -> Iterator[Member]:
    """Collect the sections; on a terminal, print each one before it is collected."""
    terminal = _on_terminal()
    found = collected(sections)
    for number, section in enumerate(sections, 1):
        if terminal:
            echo_line(f"[{number:>2}/{len(sections)}] {section.name}", err=True)
        yield next(found)
