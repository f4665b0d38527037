"""`pykubeproxy completion`: shell completion of commands, options and names of Services."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import click
from click.shell_completion import BashComplete, CompletionItem, get_completion_class

from pykubeproxy.cli.completion_files import (
    KnownNames,
    names_in_objects,
    names_in_rules,
    names_in_texts,
    small_bundle,
)
from pykubeproxy.cli.help import command
from pykubeproxy.inspect.targets.parse import KIND_PREFIXES, TargetKind
from pykubeproxy.objects import Key
from pykubeproxy.services.ports import PortName

# Importing the agent takes a quarter of a second, so only the functions that need it do.
if TYPE_CHECKING:
    from pykubeproxy.agent.observe.object_documents import Objects

_ROOTS = (("nat", "KUBE-SERVICES"), ("filter", "KUBE-SERVICES"), ("filter", "KUBE-EXTERNAL-SERVICES"))
# Shells may run what they complete: accept only DNS labels, for pods and nodes with dots.
_LABEL = re.compile(r"[a-z0-9][-a-z0-9]*")
_SUBDOMAIN = re.compile(r"[a-z0-9][-.a-z0-9]*")
# A service port at the beginning of a rule's comment, which follows the zero byte of an attribute's header.
_TITLE = re.compile(rb"\0([a-z0-9][a-z0-9-]*/[a-z0-9][a-z0-9.-]*(?::[a-z0-9-]+)?)[ \0]")
# In bash a colon ends a word, so bash gets only the part of "ns/name:port" after the last colon.
_BASH = """\
%(complete_func)s() {
    local line=${COMP_LINE:0:COMP_POINT} type value last
    # The letter preserves a trailing space.
    local -a words=(${line}x)
    last=${words[-1]%%x}
    local ahead=""
    if [[ $COMP_WORDBREAKS == *:* && $last == *:* ]]; then
        ahead=${last%%"${last##*:}"}
    fi
    while IFS=, read -r type value; do
        case $type in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            plain) COMPREPLY+=("${value#"$ahead"}") ;;
        esac
    done < <(COMP_WORDS=$line COMP_CWORD=$((${#words[@]} - 1)) %(complete_var)s=bash_complete "$1")
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""


@command(short_help="Print a shell completion script.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a script that makes SHELL complete commands, options and the names of Services, pods and nodes.

    Names come from the files of -f, --rules and --bundle if the command line has them before the name; else from the
    agent on this node, or from the live rules, which requires root. Rules name Services only.

    \b
    pykubeproxy completion bash > /etc/bash_completion.d/pykubeproxy
    pykubeproxy completion zsh > /usr/local/share/zsh/site-functions/_pykubeproxy
    pykubeproxy completion fish > ~/.config/fish/completions/pykubeproxy.fish
    """
    class_ = _Bash if shell == "bash" else get_completion_class(shell)
    assert class_ is not None, "click knows these shells"
    click.echo(class_(ctx.find_root().command, {}, "pykubeproxy", "_PYKUBEPROXY_COMPLETE").source())


class _Bash(BashComplete):
    source_template = _BASH

    @classmethod
    def _check_version(cls) -> None:
        """Skip click's check of the local bash: the script may be for another machine."""


def services(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete a Service with an optional port, in the form that was begun: by default [NAMESPACE/]NAME."""
    return _items(_services(ctx, incomplete))


def sources(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the source of a packet: pod/[NAMESPACE/]NAME or node/NAME."""
    return _items(_pods_and_nodes(ctx, incomplete))


def destinations(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the destination of a packet: svc/[NAMESPACE/]NAME[:PORT], NAME.NAMESPACE[:PORT], a pod or a node."""
    if any(mark in incomplete for mark in "/.") and _begun_kind(incomplete) is None:
        return _items(_services(ctx, incomplete))
    prefixed = {*_services(ctx, incomplete, "svc")} if "svc".startswith(incomplete.partition("/")[0]) else ()
    by_word = _services(ctx, incomplete) if _begun_kind(incomplete) is TargetKind.SERVICE else ()
    return _items({*prefixed, *by_word, *_pods_and_nodes(ctx, incomplete)})


def namespaces(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete a namespace that has Services."""
    return _items(it.namespace for it in _service_ports(ctx) if it.namespace.startswith(incomplete))


def _items(values: Iterable[str]) -> list[CompletionItem]:
    return [CompletionItem(value) for value in sorted(set(values))]


def _begun_kind(incomplete: str) -> TargetKind | None:
    """Return the kind that a prefix such as "svc/" names."""
    prefix, slash, _ = incomplete.partition("/")
    return KIND_PREFIXES.get(prefix) if slash else None


def _services(ctx: click.Context, incomplete: str, prefix: str = "") -> Iterator[str]:
    """Yield Services, or after a colon their ports, in the form that was begun; `prefix` stands before the others."""
    namespace = ctx.params.get("namespace") or ""
    if _begun_kind(incomplete) is TargetKind.SERVICE:
        prefix = incomplete.partition("/")[0]
    before, colon, port = incomplete.partition(":")
    for it in _service_ports(ctx):
        if namespace not in ("", it.namespace):
            continue
        spelled = {f"{it.service}.{it.namespace}"} if "." in before else set()
        path = str(it.service_key)
        if prefix:
            spelled |= {f"{prefix}/{path}", *([f"{prefix}/{it.service}"] if namespace else [])}
        else:
            spelled |= {path} if not namespace or "/" in before else set()
            spelled |= {it.service} if namespace or incomplete else set()
        if not colon:
            yield from (name for name in spelled if name.startswith(before))
        elif before in spelled and it.port.startswith(port) and it.port:
            yield f"{before}:{it.port}"


def _pods_and_nodes(ctx: click.Context, incomplete: str) -> Iterator[str]:
    """Yield pods and nodes in the form that was begun."""
    namespace = ctx.params.get("namespace") or ""
    begun = _begun_kind(incomplete)
    head = incomplete.partition("/")[0]
    kinds = (
        {begun} if "/" in incomplete else {KIND_PREFIXES[it] for it in ("pod", "node") if it.startswith(head)}
    )
    if not kinds & {TargetKind.POD, TargetKind.NODE}:
        return
    known = _known(ctx, with_pods=TargetKind.POD in kinds)
    if TargetKind.POD in kinds:
        word = head if begun else "pod"
        for key in known.pods:
            yield from (
                name
                for name in (f"{word}/{key}", *([f"{word}/{key.name}"] if namespace == key.namespace else []))
                if name.startswith(incomplete)
            )
    if TargetKind.NODE in kinds:
        word = head if begun else "node"
        yield from (name for it in known.nodes if (name := f"{word}/{it}").startswith(incomplete))


def _service_ports(ctx: click.Context) -> Sequence[PortName]:
    return _known(ctx, with_pods=False).ports


def _known(ctx: click.Context, *, with_pods: bool) -> KnownNames:
    """Return valid names from the files of -f, --rules and --bundle, else from the agent, else from the live rules.

    Return none on any failure, as completion must not print errors.
    """
    for read in _places(ctx, with_pods):
        try:
            return _valid(read())
        except Exception:  # noqa: S112
            continue
    return KnownNames()


def _places(ctx: click.Context, with_pods: bool) -> Sequence[Callable[[], KnownNames]]:
    path, rules, bundle = (ctx.params.get(it) for it in ("filename", "files", "bundle_file"))
    if path:
        return (lambda: names_in_objects(path),)
    if rules:
        return (lambda: names_in_rules(rules),)
    if bundle:
        return (lambda: _from_bundle(bundle),)
    return (lambda: _from_agent(with_pods), _from_rules)


def _valid(names: KnownNames) -> KnownNames:
    return KnownNames(
        ports=[it for it in names.ports if _are(_LABEL, it.namespace, it.service, it.port or "0")],
        pods=[it for it in names.pods if _are(_LABEL, it.namespace) and _are(_SUBDOMAIN, it.name)],
        nodes=[it for it in names.nodes if _are(_SUBDOMAIN, it)],
    )


def _are(pattern: re.Pattern[str], *names: str) -> bool:
    return all(map(pattern.fullmatch, names))


def _from_agent(with_pods: bool) -> KnownNames:
    from pykubeproxy.agent.observe.object_documents import decode
    from pykubeproxy.cli.client import DEFAULT_URL, fetch

    return _names_of(
        decode(fetch(DEFAULT_URL, "/servicez", **({"slices": "all"} if with_pods else {}))).objects
    )


def _from_bundle(path: str) -> KnownNames:
    """Return the names of the objects in a bundle; without objects that this version can read, those in its rules."""
    from pykubeproxy.agent.observe.object_documents import decode
    from pykubeproxy.bundle.layout import OBJECTS, TABLES

    bundle = small_bundle(path)
    with suppress(KeyError, ValueError):
        return _names_of(decode(bundle.files[OBJECTS]).objects)
    return names_in_texts(bundle.files[it] for it in TABLES if it in bundle.files)


def _names_of(objects: "Objects") -> KnownNames:
    endpoints = [(slice_.namespace, it) for slice_ in objects.slices for it in slice_.endpoints]
    return KnownNames(
        ports=[
            PortName(service.namespace, service.name, port.name, port.protocol.value)
            for service in objects.services
            for port in service.ports
        ],
        pods=[Key(namespace, it.pod) for namespace, it in endpoints if it.pod],
        nodes=[objects.node.name],
    )


def _from_rules() -> KnownNames:
    return KnownNames(list(_live_ports()))


def _live_ports() -> Iterator[PortName]:
    from pykubeproxy import kernel
    from pykubeproxy.inspect.dump.model import find_ports
    from pykubeproxy.inspect.filter import ServiceFilter, parse_title
    from pykubeproxy.kernel.nftables import texts_below
    from pykubeproxy.objects import Family
    from pykubeproxy.rules.skeleton import NAT_SERVICES

    backend = kernel.choose_backend("auto", holding=NAT_SERVICES)
    for family in Family:
        if backend is kernel.Backend.LEGACY:
            yield from find_ports(kernel.open_iptables(backend, family).save_counted()[0], ServiceFilter())
            continue
        for table, root in _ROOTS:
            for title in texts_below(family, table, root, _TITLE):
                yield parse_title(title, "TCP")
