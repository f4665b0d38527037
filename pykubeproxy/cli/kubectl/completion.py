"""The executable kubectl_complete-pykubeproxy, which kubectl runs to complete arguments of the plugin.

Its arguments are those of the plugin, the last one as far as it is typed. It prints one completion a line, and then a
directive, as for the completion of kubectl itself.
"""

import re
import sys
from collections.abc import Iterable

import click
from click.shell_completion import CompletionItem, ShellComplete

from pykubeproxy.cli.kubectl.arguments import ServerOptions
from pykubeproxy.objects import Key, Kind

# Do not complete names of files, or do.
_NO_FILES, _FILES = ":4", ":0"
# Shells may run what they complete: accept only names that the API accepts.
_NAME = re.compile(r"[a-z0-9][-.a-z0-9]*")


def main() -> None:
    """Print completions for the arguments of this program."""
    *arguments, incomplete = sys.argv[1:] or [""]
    for line in completions(arguments, incomplete):
        sys.stdout.write(f"{line}\n")


def completions(arguments: list[str], incomplete: str) -> list[str]:
    """Return the completions of a word after these arguments, and the directive."""
    from pykubeproxy.cli.kubectl import plugin

    items = ShellComplete(plugin, {}, "kubectl pykubeproxy", "").get_completions(arguments, incomplete)
    plain = [it for it in items if it.type == "plain"]
    described = [f"{it.value}\t{it.help}" if it.help else str(it.value) for it in plain]
    return [*described, _FILES if len(plain) < len(items) else _NO_FILES]


def nodes(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a Node."""
    return _items(incomplete, (it.name for it in _keys(ctx, Kind.NODE)))


def namespaces(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete a namespace that has Services."""
    return _items(incomplete, (it.namespace for it in _keys(ctx, Kind.SERVICE)))


def services(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete a Service: NAME in the namespace of -n, else NAMESPACE/NAME."""
    found = _keys(ctx, Kind.SERVICE)
    if namespace := ctx.params.get("namespace"):
        return _items(incomplete, (it.name for it in found if it.namespace == namespace))
    return _items(incomplete, map(str, found))


def _items(incomplete: str, names: Iterable[str]) -> list[CompletionItem]:
    """Return the names that fit."""
    found = {it for it in names if it.startswith(incomplete)}
    return [CompletionItem(it) for it in sorted(found) if all(map(_NAME.fullmatch, it.split("/")))]


def _keys(ctx: click.Context, kind: Kind) -> list[Key]:
    """Return the keys of all objects of a kind; none on any failure, as completion must not print errors."""
    from pykubeproxy.cli.kubectl.access import open_client
    from pykubeproxy.sources import list_kind

    server = ServerOptions(*(ctx.params.get(name) or "" for name in ("kubeconfig", "context_name")))
    try:
        return [it.key for it in list_kind(open_client(server), kind).objects]
    except Exception:
        return []
