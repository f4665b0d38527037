"""`pykubeproxy bundle`: save rules, settings and objects of this node in one file."""

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

import click

import pykubeproxy
from pykubeproxy.agent.observe import status
from pykubeproxy.bundle.layout import Manifest, folder_name, missing, timestamp
from pykubeproxy.bundle.sections import agent_sections, node_sections
from pykubeproxy.bundle.write import Member, Section, collected, new_file, write_bundle
from pykubeproxy.cli.client import DEFAULT_URL, NoAgent, fetch
from pykubeproxy.cli.help import OUTPUT, SOURCE, command, option
from pykubeproxy.cli.inputs import host_name
from pykubeproxy.cli.running_agent import fetch_patiently
from pykubeproxy.cli.terminal import click_errors, echo_line
from pykubeproxy.kernel import NotANode, require_linux


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
@click_errors(NotANode)
def bundle(output: str | None, url: str) -> None:
    """Save rules, settings and objects of this node in one tar.gz, for others to inspect.

    It has the rules of both address families and backends with counters, addresses, routes, kernel settings, counts of
    tracked connections, versions, and the agent's status, metrics, configuration and objects. It has no tokens, no
    Secrets, no contents of a kubeconfig, no annotations, and no addresses of tracked clients. It names Services, pods and
    nodes with their addresses.

    Other commands read it with --bundle, on any machine. Run this as root: without root, rules are missing. A part that
    cannot be collected is left out, and standard error and the file manifest.json say why. Nothing on the node changes.

    \b
    sudo pykubeproxy bundle
    sudo pykubeproxy bundle -o node1.tar.gz
    ssh node1 sudo pykubeproxy bundle -o - > node1.tar.gz
    pykubeproxy trace 10.244.1.5 10.96.0.10:80 --bundle node1.tar.gz
    """
    require_linux("")
    if output == "-" and sys.stdout.isatty():
        raise click.UsageError(
            "a bundle is not text, so it cannot go to a terminal; redirect standard output, or use -o FILE"
        )
    time = timestamp(datetime.now(UTC))
    manifest = Manifest(version=pykubeproxy.__version__, node=_node_name(url), time=time)
    path = None if output == "-" else target(output, manifest)
    sections = [
        *node_sections(),
        *agent_sections(url, lambda page, query: fetch_patiently(url, page, **query)),
    ]
    members = list(_shown(sections))
    save(path, manifest, members)
    report_missing(manifest.node, members)


def target(output: str | None, manifest: Manifest) -> Path:
    """Return the file to write, in the current folder or another one if `output` names no file.

    Raises ClickException if it exists, before anything is collected.
    """
    path = Path(output or "")
    if output is None or path.is_dir():
        path /= f"{folder_name(manifest.node, manifest.time)}.tar.gz"
    if os.path.lexists(path):
        raise click.ClickException(f"{path} exists; remove it, or choose another name with -o")
    return path


def save(path: Path | None, manifest: Manifest, members: Iterable[Member]) -> None:
    """Write a bundle, and print the name of its file; without `path` write to standard output. Raises ClickException."""
    try:
        with _opened(path) as file:
            write_bundle(file, manifest, members)
    except OSError as error:
        raise click.ClickException(
            f"cannot write {path or 'the bundle'}: {error.strerror or error}"
        ) from None
    if path:
        echo_line(str(path))


def report_missing(node: str, members: Iterable[Member]) -> None:
    """Print to standard error what a bundle lacks, and why."""
    for file in missing(it.file for it in members):
        echo_line(f"{node}: no {file.name}: {file.error}", err=True)


@contextlib.contextmanager
def _opened(path: Path | None) -> Iterator[IO[bytes]]:
    if path:
        with new_file(path) as file:
            yield file
    else:
        with click.open_file("-", "wb") as out:
            yield out


def _on_terminal() -> bool:
    return sys.stderr.isatty()


def _node_name(url: str) -> str:
    """Return the name of the agent's node, or that of this machine."""
    try:
        return status.decode(fetch(url, "/statusz", limit="0")).node
    except (NoAgent, ValueError):
        return host_name()


def _shown(sections: list[Section]) -> Iterator[Member]:
    """Collect the sections; on a terminal, print each one before it is collected."""
    terminal = _on_terminal()
    found = collected(sections)
    for number, section in enumerate(sections, 1):
        if terminal:
            echo_line(f"[{number:>2}/{len(sections)}] {section.name}", err=True)
        yield next(found)
